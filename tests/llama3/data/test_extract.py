from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from llama3.data.extract import html_text
from llama3.data.language import detect, primary
from llama3.data.normalise import normalise
from llama3.data.words import words

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


@given(st.text(st.characters(codec=None)))
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    assert once.encode().decode() == once  # no lone surrogate is left
    assert unicodedata.is_normalized("NFC", once)
    assert not any(c != "\n" and c != "\t" and unicodedata.category(c) == "Cc" for c in once)


def test_normalising_keeps_what_means_something() -> None:
    assert normalise("\ufeffa\r\n\tb  \rc\x00\n\n\n\n\n\nx²\n") == "a\n\tb\nc\n\n\nx²"
    assert normalise("e\u0301") == "é"


def test_languages_are_told_and_tags_reduced() -> None:
    assert detect("Der schnelle braune Fuchs springt über den faulen Hund und läuft in den Wald hinein.") == "de"
    assert (
        detect("これは日本語の文章です。\n```\ngit commit --amend --no-edit\n```\n言語を判定するために十分な長さです。")
        == "ja"
    )
    assert detect("在 Git 中整合来自不同分支的修改主要有两种方法：`merge` 以及 `rebase`。") == "zh"
    assert detect("Если вы хотите начать работать с Git, прочитав всего одну главу, то эта глава для вас.") == "ru"
    assert detect("# gwhich\n\n> यह आदेश which का उपनाम है। मूल आदेश के लिए दस्तावेज़ देखें") == "hi"
    assert detect("The Greek letters α and β name the angles, and γ names the third one of them all.") == "en"
    assert [primary(tag) for tag in ("pt_BR.UTF-8", "zh-TW", "nb", "sr@latin", "")] == ["pt", "zh", "no", "sr", "und"]


def test_words_of_every_script() -> None:
    assert words("Don't x_1, Straße!") == ["don", "t", "x_1", "straße"]
    assert words("Привет, мир") == ["привет", "мир"]
    assert words("模型abc") == ["模", "型", "abc"]
    assert words("हिन्दी") == ["हिन्दी"]
