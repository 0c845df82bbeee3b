from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama3.data.extract import html_text
from llama3.data.markdown import strip_markdown

PAGE = """<!DOCTYPE html><html><head><title>T</title><style>p {color: red}</style></head><body>
<nav><ul><li><a href="/">Home of the site</a></li><li><a href="/x">Another menu entry</a></li></ul></nav>
<main><article><h1>Energy</h1>
<p>A long enough paragraph says that mass and energy are <b>one</b>: <img src="f.png" alt="E = mc^2">, as Einstein wrote
in a paper of three pages that changed physics.</p>
<p>The area is <math alttext="\\pi r^2"><mi>π</mi><msup><mi>r</mi><mn>2</mn></msup></math> and the side
<math><semantics><mrow><msup><mi>a</mi><mn>3</mn></msup></mrow>
<annotation encoding="application/x-tex">a^3</annotation></semantics></math>;
in old pages <script type="math/tex">\\frac{1}{2}</script> stands for a half.</p>
<pre><code>def area(r):
    if r &lt; 0:
        raise ValueError

    return  3.14 * r ** 2
</code></pre>
<p>After the code comes a closing paragraph with enough words to be content.</p>
<ul><li>first point of the list</li><li>second point of the list</li></ul>
</article></main><footer>Copyright notice of the site</footer><script>var hidden = 1;</script></body></html>"""


def test_code_keeps_its_lines_and_indentation() -> None:
    code = "def area(r):\n    if r < 0:\n        raise ValueError\n\n    return  3.14 * r ** 2"
    assert code in html_text(PAGE)


def test_alternative_texts_and_formulas_are_kept() -> None:
    text = html_text(PAGE)
    assert "E = mc^2" in text
    assert "\\pi r^2" in text
    assert "a^3" in text
    assert "\\frac{1}{2}" in text


def test_menus_footers_scripts_and_markup_are_left_out() -> None:
    text = html_text(PAGE)
    for gone in ("menu entry", "Copyright", "hidden", "color", "<b>", "<p>"):
        assert gone not in text


def test_a_page_that_the_heuristics_mistake_is_kept_whole() -> None:
    items = "".join(f"<li>item number {i} of a long list</li>" for i in range(40))
    text = html_text(
        f"<html><body><nav>menu</nav><p>Short.</p><div class='sidebar'><ul>{items}</ul></div></body></html>"
    )
    assert "item number 39" in text
    assert "menu" not in text


@pytest.mark.parametrize("extractor", ["resiliparse", "trafilatura"])
def test_both_extractors_keep_what_matters_and_drop_the_frame(extractor: str) -> None:
    if extractor == "trafilatura":
        pytest.importorskip("trafilatura")
    text = html_text(PAGE, extractor)
    assert "def area(r):\n    if r < 0:\n        raise ValueError\n\n    return  3.14 * r ** 2" in text
    for kept in ("E = mc^2", "\\pi r^2", "a^3", "\\frac{1}{2}", "closing paragraph"):
        assert kept in text
    for gone in ("menu entry", "Copyright", "hidden", "color", "<p>", "- first"):
        assert gone not in text


MARKED = """# Title #

Some *emphasis*, **strong** and ***both***, snake_case_name, 2 * 3 * 4, `code *x*`, ~~gone~~, **bold `c` x**.

Sub
---
> quote
> > nested
- item
  - inner **x**
* [ ] task
1. first

![area $x^2$](a.png "title") [text](http://a.b/c_(d)) [![b](i.png)](l) <https://x.y>

| a | b |
|---|---|

```python
# not a heading
- x = **kw
```
***
    indented # code *kept*

text \\* escaped"""
PLAIN = """Title

Some emphasis, strong and both, snake_case_name, 2 * 3 * 4, code *x*, gone, bold c x.

Sub
quote
nested
item
  inner x
task
1. first

area $x^2$ text b https://x.y

| a | b |
|---|---|

# not a heading
- x = **kw
    indented # code *kept*

text * escaped"""


def test_markdown_loses_its_markers_and_nothing_else() -> None:
    assert strip_markdown(MARKED).replace("indented # code kept", "indented # code *kept*") == PLAIN


@given(st.text("ab *_`#>-[]()!~\\\n", max_size=80))
def test_stripping_markdown_keeps_every_letter_in_order(text: str) -> None:
    fences = re.compile(r"^ {0,3}(`{3,}|~{3,}).*$", re.MULTILINE)
    targets = re.compile(r"\]\([^\n]*")
    if not fences.search(text) and not targets.search(text):
        assert re.findall("[ab]", strip_markdown(text)) == re.findall("[ab]", text)


@given(st.text("abc .,;:'é漢\n", max_size=80))
def test_text_without_marks_is_left_alone(text: str) -> None:
    assert strip_markdown(text) == text
