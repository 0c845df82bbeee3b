"""HTML to text: the main content with its code, its formulas and the alternative texts of its images.

resiliparse finds the main content (about 40 MB/s per core, a little less precise); where its heuristics keep less than
half of what a page says outside menus, they have mistaken the page and everything outside menus is kept: losing a
document costs more than keeping a footer. trafilatura, on request, is ten to twenty times slower and surer of what is
boilerplate. Formulas are written back as the TeX that the page carries, because what the parsers make of MathML (`x2`
for x squared) is wrong. trafilatura drops blank lines in code and all alternative texts, so both are put where it keeps
them.
"""

from __future__ import annotations

import re
from typing import Any

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

_FRAME = ["nav", "footer", "aside", "form", "script", "style", "template", "[role=navigation]", "[role=banner]"]
_BULLET = re.compile(r"^(\s*)- ", re.MULTILINE)
_HELD = re.compile(r"codeblock(\d+)held")


def html_text(html: str, extractor: str = "resiliparse") -> str:
    """Return the readable text of `html`: paragraphs apart, preformatted text as it stands, no markup.

    `extractor` is resiliparse or trafilatura.
    """
    if extractor == "trafilatura" and (found := _by_trafilatura(_parsed(html))):
        return found
    tree = _parsed(html)
    main = str(extract_plain_text(tree, main_content=True, alt_texts=True, list_bullets=False))
    whole = str(extract_plain_text(tree, alt_texts=True, list_bullets=False, skip_elements=_FRAME))
    return main if 2 * len(main) >= len(whole) else whole


def _parsed(html: str) -> Any:
    """Return the tree of `html` with its formulas as TeX."""
    tree = HTMLTree.parse(html)
    if "<math" in html or "math/tex" in html:
        _write_formulas(tree)
    return tree


def _by_trafilatura(tree: Any) -> str:
    """Return what trafilatura finds, "" if nothing; changes `tree`."""
    from trafilatura import extract  # 0.5 s, and an extra of the project

    for image in list(tree.document.query_selector_all("img[alt]")):
        _replace(tree, image, "span", image.get_attribute("alt"))
    blocks: list[str] = []
    for block in list(tree.document.query_selector_all("pre")):
        blocks.append(str(block.text).strip("\n"))
        _replace(tree, block, "pre", f"codeblock{len(blocks) - 1}held")
    found = extract(str(tree.document.html), include_comments=False, include_tables=True, favor_precision=True) or ""
    text = _BULLET.sub(r"\1", found).replace("\n", "\n\n")
    return _HELD.sub(lambda held: blocks[int(held[1])] if int(held[1]) < len(blocks) else held[0], text)


def _write_formulas(tree: Any) -> None:
    """Replace each formula by its TeX: MathML's `alttext` or TeX annotation, MathJax's script."""
    for formula in list(tree.document.query_selector_all("math, script[type^='math/tex']")):
        _replace(tree, formula, "span", formula.get_attribute("alttext") or _annotation(formula))


def _replace(tree: Any, element: Any, name: str, text: str | None) -> None:
    """Put an element `name` with `text` where `element` is, unless the text is empty."""
    if text and element.parent_node is not None:
        written = tree.create_element(name)
        written.text = text.strip()
        element.parent_node.replace_child(written, element)


def _annotation(formula: Any) -> str:
    if formula.local_name == "script":
        return str(formula.text or "")
    found = formula.query_selector("annotation[encoding='application/x-tex']")
    return str(found.text or "") if found is not None else ""
