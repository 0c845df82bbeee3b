"""Markdown to text: each construct of CommonMark, and what sites add to it, as a reader would say it aloud."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.text.markdown import strip_markdown


def test_code_of_jekyll_keeps_its_lines() -> None:
    text = "So:\n\n{% highlight ruby %}\n# a *b*\nclass A\n  def b\n```\n{% endhighlight %}\n\nOne\nparagraph."
    assert strip_markdown(text) == "So:\n\n# a *b*\nclass A\n  def b\n```\n\nOne paragraph."
    inside = "```\n{% highlight ruby %}\n{% endhighlight %}\n```"
    assert strip_markdown(inside) == "{% highlight ruby %}\n{% endhighlight %}"


def test_front_matter_goes() -> None:
    for front in [
        '---\nlayout: news_post\ntitle: "Ruby 3.4"\nlang: de\n---\n',
        "\ufeff---\r\n# comment\r\ntags:\r\n  - a\r\n...\r\n",
        "+++\ntitle = 'x'\n[extra]\ntoc = true\n+++\n",
    ]:
        assert strip_markdown(f"{front}\n# Title\n\nText: more.").strip() == "Title\n\nText: more."


def test_text_between_rules_stays() -> None:
    for text in ["A rule\n\nand text", "\nFirst words: all of a text.\n\nkey: value"]:
        assert strip_markdown(f"---\n\n{text}\n\n---\n\nend").split() == [*text.split(), "end"]
        assert strip_markdown("---\nkey: value\nwithout an end").split() == ["key:", "value", "without", "an", "end"]


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
| --- | --- |

# not a heading
- x = **kw
indented # code *kept*

text * escaped"""


def test_markdown_loses_its_markers_and_nothing_else() -> None:
    assert strip_markdown(MARKED) == PLAIN


@given(st.text("ab *_`#>-[]()!~\\\n", max_size=80))
def test_stripping_markdown_keeps_every_letter_in_order(text: str) -> None:
    fences = re.compile(r"^ {0,3}(`{3,}|~{3,}).*$", re.MULTILINE)  # a word after the marks names a language
    if not fences.search(text) and "](" not in text and "]:" not in text:
        assert re.findall("[ab]", strip_markdown(text)) == re.findall("[ab]", text)


@given(st.lists(st.text("abc .,;'é漢", min_size=1, max_size=40).filter(str.strip), max_size=6), st.integers(1, 2))
def test_text_without_marks_keeps_its_words_and_paragraphs(paragraphs: list[str], ends: int) -> None:
    text = ("\n" * ends).join(line.strip() for line in paragraphs)
    found = strip_markdown(text)
    assert re.sub(r"\s", "", found) == re.sub(r"\s", "", text)
    assert found.count("\n") == (text.count("\n") if ends == 2 else 0)


@pytest.mark.parametrize(
    ("marked", "plain"),
    [
        ("one\ntwo **bold\nbold** `code\ncode` [text\nmore](https://x.y)", "one two bold bold code code text more"),
        ("- an item\n  that goes on\nand lazily on", "an item that goes on and lazily on"),
        ("line  \nbreak\\\nand", "line\nbreak\nand"),
        ("漢字\n漢字 word\n漢字", "漢字漢字 word 漢字"),
        ("[the docs][1] and [this][]\n\n[1]: https://x.y\n[this]: https://z", "the docs and this"),
        ("a <b>bold</b> x<sub>2</sub> <!-- gone --> &amp; &nbsp;&lt;", "a bold x2  & \xa0<"),
        ('<p align="center">\n <img src="a" alt="Logo">\n</p>\n\nText', "Logo\n\nText"),
        ("<script>\nvar a = 1;\n</script>\n\n<div>kept<br>and</div>", "kept\nand"),
        ("# Title { #id .class }\n\n[a](b){ .internal target=_blank } c\n{: .note }", "Title\n\na c"),
        ("/// tip | Be careful\n\nInside.\n\n///\n\nAfter", "Be careful\n\nInside.\n\nAfter"),
        (":::note Mind\nInside.\n:::\nAfter", "Inside.\n\nAfter"),
        ('!!! note "Mind"\n    Inside\n    it.\n\nAfter', "Mind\n\nInside it.\n\nAfter"),
        ('=== "One"\n\n    ```py\n    x = 1\n    ```\n\nAfter', "One\n\nx = 1\n\nAfter"),
        ("> [!NOTE]\n> Inside", "Inside"),
        ("**粗体**字和**强调。**字，*斜体*和`**kw**`", "粗体字和强调。字，斜体和**kw**"),
        ("**adı**na 2 ** 3 ** 4 日本", "adına 2 ** 3 ** 4 日本"),
        ("| **a** | `b\\|c` |\n|---|:-:|\n| 1 | [x](y) |", "| a | b|c |\n| --- | --- |\n| 1 | x |"),
        ("7) seven\n8) eight\n   - inner", "7) seven\n8) eight\n  inner"),
        ("Term\n:   Definition", "Term\nDefinition"),
        ("costs $5 and $6, $a_1 * b_2 * c$", "costs $5 and $6, $a_1 * b_2 * c$"),
        ("text[^1]\n\n[^1]: A note.", "text\n\nA note."),
        ("```\n/// not a block\n!!! x\n    y\n///\n```", "/// not a block\n!!! x\n    y\n///"),
        ("a == b, x /// y\n\n/// no end", "a == b, x /// y\n\n/// no end"),
    ],
)
def test_each_construct(marked: str, plain: str) -> None:
    assert strip_markdown(marked) == plain


def test_code_keeps_every_character() -> None:
    code = "def f(*a, **kw):\n\treturn a  # [x](y) &amp;\n\n\n    <b>*x*</b>"
    assert strip_markdown(f"Before\n\n```py\n{code}\n```\nAfter") == f"Before\n\n{code}\nAfter"


def test_markdown_takes_time_by_its_length() -> None:
    for text in [
        "> " * 300_000,
        "* " * 300_000 + "x",
        "# a" + " " * 300_000 + "b",
        "#" + " #" * 200_000,
        "`a``b" * 100_000,
        "**漢" * 200_000,
        "///x\n" * 100_000 + "///",
        "!!! a\n" * 50_000,
        "<!--" * 100_000,
        "| a " * 50_000 + "\n" + "|---" * 50_000,
    ]:
        began = time.process_time()
        strip_markdown(text)
        assert time.process_time() - began < 5


def test_code_in_the_target_of_a_link_goes_with_it() -> None:
    assert strip_markdown('`x` [a `b`](`c` "`d`") ![`e`](`f`) `g`') == "x a b e g"


def test_closing_signs_of_headings() -> None:
    for heading, plain in [
        ("# a ##", "a"),
        ("# a#", "a#"),
        ("## # #", "#"),
        ("#", ""),
        ("# #", ""),
        ("### a ## b ##  ", "a ## b"),
        ("# ", ""),
    ]:
        assert strip_markdown(heading) == plain
