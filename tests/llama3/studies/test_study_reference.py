from __future__ import annotations

import re
from pathlib import Path

from herd.llama3.studies.study import study_reference

PAGE = Path("docs/reference")
QUOTED = [("choose-a-size", "ladder-cpu"), ("choose-a-mix", "mix-cpu"), ("judge-a-data-set", "judge-smollm2")]


def test_the_committed_reference_is_the_schema_s() -> None:
    written = (PAGE / "study.md").read_text()
    assert written == study_reference(), "write it again: herd schema --study > docs/reference/study.md"


def test_every_section_that_is_named_is_described_on_the_page_that_is_linked() -> None:
    links = re.findall(r"\]\(([a-z.]*)#([a-z]+)\)", study_reference())
    assert ("recipe.md", "model") in links
    for page, section in links:
        text = (PAGE / page).read_text() if page else study_reference()
        assert f"\n## {section}\n" in text.lower()


def test_tutorials_quote_the_studies_that_are_shipped() -> None:
    for page, study in QUOTED:
        shipped = Path("recipes/experiments", f"{study}.yaml").read_text().rstrip()
        assert f"```yaml\n{shipped}\n```" in Path("docs/tutorials", f"{page}.md").read_text()
