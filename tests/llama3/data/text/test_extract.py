from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from herd.llama3.data.readers.files import Fault
from herd.llama3.data.text import extract
from herd.llama3.data.text.extract import exceeds_limits, html_text, plain_text

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


BOMBS = {
    "div": "<div>" * 200_000,
    "math": "<math>" * 8_000 + "x",
    "attributes": "<p " + " ".join(f"a{n}=1" for n in range(300_000)) + ">x",
    "quoted attributes": '<p a=">" ' + " ".join(f"a{n}" for n in range(300_000)) + ">x",
    "hidden attributes": "<p " + " ".join(f"a{n}<b" for n in range(300_000)) + ">x",
    "siblings far down": "<div>" * 500 + "<i>x</i>" * 200_000,
    "fonts": "".join(f"<p><font x={n}></p>" for n in range(2_000)) + "<p>x" * 100_000,
    "after a comment": "<!--><!-- x -->" + "<div>" * 100_000 + "-->",
    "in a drawing": "<svg>" + "<g>" * 100_000,
    "slashes": "<svg>" + "<div/>" * 100_000,
    "in script": "<script>'</script><div>'" + "<b x=1><i>" * 100_000,
}


def test_markup_that_takes_a_parser_minutes_is_told_apart_by_its_text() -> None:
    for name in BOMBS:
        began = time.process_time()
        found = plain_text(BOMBS[name], "html", "resiliparse")
        assert isinstance(found, Fault)
        assert found.reason == "too_deep"
        assert time.process_time() - began < 5


def test_pages_as_people_write_them_are_not_deep() -> None:
    for page in [
        PAGE,
        "<table>" + "<tr><td>cell<td>other" * 5_000,
        "<ul>" + "<li>point<p>text" * 5_000,
        "<a name=x>anchor" * 5_000,
        "<svg>" + '<path d="M 0 0"/><circle r=1 />' * 5_000 + "</svg>",
        "<script>" + "document.write('<div><div>');" * 5_000 + "</script>text",
        "<!-- " + "<div>" * 5_000 + " --> text",
        "<p>" + "words in a long paragraph " * 5_000,
        f"<div data-state='{'{a: 1}, ' * 5_000}'>text</div>",
        "<div><span>x</span></div>" * 20_000,
    ]:
        assert not exceeds_limits(page)


@pytest.mark.slow
def test_a_long_document_is_read_by_a_child_and_one_that_takes_too_long_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = PAGE.replace("</article>", "<p>Another paragraph é.</p>" * 3_000 + "</article>")
    assert len(page) > extract.IN_PROCESS
    assert plain_text(page, "html", "resiliparse") == html_text(page)
    first = extract._local.child.pid
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: plain_text(f"{page}{number}", "html", "resiliparse"), range(8)))
    assert found == [html_text(f"{page}{number}") for number in range(8)]
    monkeypatch.setattr(extract, "LIMIT_S", 1)
    monkeypatch.setattr(extract, "CHARS_PER_S", 10**9)
    slow = "> " * 1_000_000
    fault = plain_text(slow, "md", "resiliparse")
    assert isinstance(fault, Fault)
    assert (fault.reason, fault.message.startswith("took more than 1 s")) == ("too_slow", True)
    assert plain_text(page, "html", "resiliparse") == html_text(page)  # by another child
    assert extract._local.child.pid != first


def test_a_child_that_dies_of_the_machine_is_no_fault_of_the_document() -> None:
    page = "<p>word</p>" * 10_000
    assert "word" in str(plain_text(page, "html", "resiliparse"))
    extract._local.child.kill()
    assert "word" in str(plain_text(page, "html", "resiliparse"))
