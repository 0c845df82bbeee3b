"""How scores and the gate's table are shown: in the report, on Prefect's page and at the end of a run."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herd.llama3.evaluate.gate import Check, Decision, MeasuredScore, decide
from herd.llama3.evaluate.scores import Score, Scores, write_scores
from herd.llama3.recipe.gates import GateRule
from herd.llama3.recipe.load import load_recipe, to_yaml
from herd.llama3.statistics.estimates import Estimate, normal
from herd.llama3.statistics.significance import DOCUMENTS, Difference
from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.storage.root import Root
from herd.tasks.operate.status import _scores
from herd.tasks.report.data import ReportData, StageRow, _links, _notes
from herd.tasks.report.run import _smooth, render_report, summarize
from herd.tasks.runs.records import RunRecord, StepRecord
from herd.tasks.tracking.prefect_artifacts import _score_row

SCORES = {
    score.key: score
    for score in (
        Score.from_estimate("eval/bpb", normal(2.5, 0.02, 128), "bits per byte", "lower", "c0ffee" * 10, None),
        Score.from_estimate("eval/bpb/code", normal(2.75, 0.05, 32), "bits per byte", "lower", "decade" * 10, None),
        Score.from_estimate(
            "eval/mmlu", Estimate(0.3, 0.0458, 0.219, 0.396, 100), "accuracy", "higher", "facade" * 10, 0.25
        ),
        Score.from_estimate(
            "eval/mmlu/law", Estimate(0.5, 0.1, 0.3, 0.7, 20), "accuracy", "higher", "facade" * 10, 0.25
        ),
        Score.from_estimate("eval/odd", normal(1.0, math.nan, 1), "bits per byte", "lower", "beef" * 16, None),
    )
}


def decision() -> Decision:
    difference = Difference(value=-0.0125, low=-0.02, high=-0.005, p=0.0004, n=128, method=DOCUMENTS, better="lower")
    champion = {"eval/bpb": MeasuredScore(value=2.5125, better="lower", requests="c0ffee")}
    fact = Check(metric="integrity/digests", passed=True, reason="4 files as their manifest says")
    rules = {"eval/bpb": GateRule.parse("better"), "eval/mmlu": GateRule.parse("at least 0.4")}
    return decide(rules, SCORES, champion, {"eval/bpb": difference}, [fact])


def measured() -> ReportData:
    recipe = load_recipe(Path("recipes/quickstart.yaml"), [])
    record = RunRecord(name="quickstart-1", family="quickstart", recipe_digest="d" * 64, code="c0de", started="")
    return ReportData(
        record=record,
        recipe=recipe,
        recipe_yaml=to_yaml(recipe),
        stages=[],
        series={},
        mix=[],
        ledger={},
        page=None,
        evaluations={"anneal": SCORES},
        baseline={"eval/bpb": 9.0},
        notes=["anneal: copa was left out: no such file"],
        samples=[],
        decision=decision(),
        mlflow={},
    )


def report(name: str, **changes: Any) -> str:
    return render_report(name, Root.parse("herd-data"), replace(measured(), **changes), None)


def section(html: str, anchor: str) -> str:
    """Return a page from the heading `anchor` to the next."""
    return html[html.index(f'<h2 id="{anchor}"') :].partition("<h2")[2].partition("<h2")[0]


def cells(text: str, first: str) -> list[str]:
    """Return the cells of the row whose first two cells begin with `first`, of HTML or markdown."""
    text = re.sub(" <small>[↓↑][^<]*</small>", "", text)
    if "<tr>" in text:
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in text.splitlines() if line.startswith("<tr><td")]
    else:
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    (found,) = [row for row in rows if first in (row[0], f"{row[0]} {row[1]}")]
    return [re.sub(r"<[^>]+>", "", cell) for cell in found]


def test_the_gate_s_table_shows_difference_interval_and_p() -> None:
    folded, markdown = section(report("report.html"), "gate"), report("report.md")
    numbers = ["eval/bpb", "better", "2.500", "2.513", "-0.0125", "-0.0200 .. -0.00500", "0.00040"]
    assert cells(folded, "eval/bpb") == numbers
    assert cells(markdown, "eval/bpb")[:-1] == numbers
    reason = (
        "eval/bpb 2.500 is 0.498% better than champion 2.513 (95% 0.2% to 0.8%, 128 documents); "
        "it must be better at the 95% bound"
    )
    assert f'<span class="good">pass</span> {reason}' in folded
    assert f"pass: {reason}" in markdown
    assert cells(folded, "integrity/digests")[-1].endswith("4 files as their manifest says")
    assert '<span class="bad">fail</span> eval/mmlu 0.3000 is not at least 0.4' in folded
    assert re.search(r"<summary>.*1 of 4 rows fail</span>: eval/mmlu</summary>", folded)


def test_the_first_screen_says_whether_it_is_better_where_and_why_not() -> None:
    html, markdown = report("report.html"), report("report.md")
    for text in (html, markdown):
        assert text.index("Not promoted: it stays a candidate.") < text.index("eval/mmlu 0.3000 is not at least 0.4")
    assert cells(html, "bits per byte") == [
        "bits per byte", "2.500", "2.513", "-0.5 %", "better; better than a 5-gram: 9.000",
    ]  # fmt: skip
    assert '<span class="good">better</span>; better than a <span class="unbroken">5-gram</span>' in html
    assert "A 5-gram is a table" in html
    assert "| · code | 2.750 |  |  |" in markdown, "no champion's score, and no rule"
    assert "| mmlu (accuracy) | 0.3000 |  |  | no better than guessing: 0.25 |" in markdown, "from 0.219 on"
    assert "<td>mmlu <small>↑ accuracy</small></td>" in html


def test_what_the_champion_wrote_stands_beside_it_above_the_gate() -> None:
    sample = {"of": "conversation", "id": "1", "prompt": "What is <b>?", "text": "after", "champion": "bef<re"}
    data = replace(measured(), samples=[sample, {**sample, "of": "code", "champion": ""}])
    html = render_report("report.html", Root.parse("herd-data"), data, None)
    shown = html[html.index("Before and after") : html.index('id="gate"')]
    assert re.search("bef&lt;re.*after", shown, re.DOTALL)
    assert shown.count("<blockquote>") == 2
    assert "What is &lt;b&gt;?" in shown
    assert "Before and after" not in report("report.html")


def test_a_smoothed_curve_is_the_mean_of_the_steps_around_each() -> None:
    values = np.random.default_rng(0).standard_normal(30)
    smooth = _smooth([(100 * place, value) for place, value in enumerate(values)])
    ones = np.ones(9)
    expected = np.convolve(values, ones, "same") / np.convolve(np.ones(30), ones, "same")
    assert [position for position, _ in smooth] == [100 * place for place in range(30)]
    assert [value for _, value in smooth] == pytest.approx(expected)


def test_each_score_is_a_row_with_a_column_for_each_stage() -> None:
    before = {"eval/bpb": replace(SCORES["eval/bpb"], value=2.6, requests="abcdef" * 10, shots=5)}
    html = report("report.html", evaluations={"main": before, "anneal": SCORES})
    assert cells(html, "bits per byte")[1:5] == ["2.600", "2.500", "2.513", "-0.5 %"]
    assert '<td title="asked abcdefab, version 1, 5 shots">2.600</td>' in html
    alone = {"evaluations": {"main": before, "anneal": SCORES}, "decision": None, "baseline": {}}
    assert cells(report("report.html", **alone), "bits per byte")[1:4] == ["2.600", "2.500", "-3.8 %"]
    assert "Change: anneal from main." in report("report.html", **alone)
    folded = section(html, "scores")
    assert cells(folded, "eval/bpb")[1:3] == ["2.6002.461 .. 2.539", "2.5002.461 .. 2.539"]
    assert cells(folded, "eval/mmlu") == ["eval/mmlu", "", "0.30000.2190 .. 0.3960", "100", "0.250"]
    for part in ("gate", "scores"):
        assert section(html, part).count("<details") == 1, "folded"


def test_a_change_has_digits_enough_to_have_a_sign() -> None:
    same = replace(SCORES["eval/bpb"], value=2.5124)
    assert cells(report("report.html", evaluations={"anneal": {same.key: same}}), "bits per byte")[3] == "-0.0040 %"
    same = replace(same, value=2.5125)
    assert cells(report("report.html", evaluations={"anneal": {same.key: same}}), "bits per byte")[3] == "no change"


def test_a_promoted_model_that_is_worse_than_a_5_gram_says_so() -> None:
    promoted = Decision(accepted=True, rows=decision().rows[:2])
    for name in ("report.html", "report.md"):
        text = report(name, decision=promoted, baseline={"eval/bpb": 2.063})
        assert "It is worse than a 5-gram" in text
        assert "2.500 against 2.063 bits per byte" in text
        assert "worse than a 5-gram" not in report(name, decision=promoted)
    data = replace(measured(), decision=promoted, baseline={"eval/bpb": 2.063})
    assert summarize(Root.parse("herd-data"), data).tone == "open", "no green bar"


def test_a_rerun_names_what_it_made_again_and_what_differs() -> None:
    record = measured().record.model_copy(update={"rerun_of": "quickstart-7"})
    record.steps = {
        name: StepRecord(artifact=f"{name}/x", outcome=outcome)
        for name, outcome in (("collect", "reused"), ("main", "reused"), ("anneal", "created"))
    }
    changed = {"other": "quickstart-7", "differs": {"stages.anneal.lr": ["linear to 0", "constant"]}}
    for name in ("report.html", "report.md"):
        text = report(name, record=record, **changed)
        assert "rerun of quickstart-7 from anneal, 2 of 3 steps reused" in text
        assert cells(text, "stages.anneal.lr") == ["stages.anneal.lr", "linear to 0", "constant"]
        assert text.index("stages.anneal.lr") < text.index("integrity/digests")


def test_a_page_s_commands_name_the_root_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERD_ROOT", str(tmp_path))
    (line, _), *_ = summarize(Root.parse(tmp_path), measured()).next
    assert line.endswith(f"status quickstart-1 --root {tmp_path}")


def test_it_leads_to_the_servers_and_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    root = Root.parse(tmp_path)
    html = report("report.html", links=[("MLflow", "http://127.0.0.1:5000/#/x")], model="/root/checkpoint/x/model")
    assert '<a href="http://127.0.0.1:5000/#/x">MLflow</a>' in html
    assert "<code>/root/checkpoint/x/model</code>" in html
    record = measured().record.model_copy(update={"mlflow_run": "0a", "mlflow_experiment": "7"})
    ((name, address),) = _links(root, record, "0a", "javascript:alert(1)")
    assert (name, address.partition("#")[2]) == (
        "MLflow, while herd up runs",
        "/experiments/7/runs/0a?workflowType=machine_learning",
    )
    assert _links(root, record, "", "https://prefect/1") == [("Prefect", "https://prefect/1")]


def test_the_cost_is_what_this_run_did(tmp_path: Path) -> None:
    first = StageRow("main", 0, 1_000_000, 9, "512", 2048, 8.0, 5.0, None, 9e3, 1.0, 600.0, "reused")
    last = replace(first, name="anneal", start=1_000_000, end=1_240_000, seconds=60.0, outcome="created")
    record = measured().record
    record.steps = {
        "main": StepRecord(artifact="checkpoint/main", outcome="reused"),
        "anneal": StepRecord(artifact="checkpoint/anneal", outcome="created", cost={"gpu_hours": 0.02}),
    }

    def cost(*stages: StageRow) -> dict[str, tuple[str, str]]:
        summary = summarize(Root.parse(tmp_path), replace(measured(), record=record, stages=list(stages)))
        return {name: (value, meaning) for name, value, meaning in summary.tiles}

    assert [*cost(first, last)][:3] == ["loss", "bits per byte", "tokens"]
    assert (cost(first, last)["loss"][0], cost(first, last)["bits per byte"][0]) == ("5.000", "2.500")
    assert cost(first, last)["tokens"] == ("1.24M", "of which 240K in this run")
    assert cost(first, last)["device time"][0] == "1:12 min"
    assert cost(replace(first, outcome="resumed at 1K"), last)["tokens"] == ("1.24M", "trained on")
    del record.steps["anneal"]
    assert cost(first)["tokens"] == ("1M", "none of them in this run")
    assert "device time" not in cost(first)


def test_every_score_has_size_interval_chance_shots_version_and_digest() -> None:
    row = cells(report("report.md"), "anneal eval/mmlu")
    assert row[2:10] == ["0.3000", "0.090", "0.2190 .. 0.3960", "100", "0.250", "0", "1", "facadefa"]
    assert cells(report("report.md"), "anneal eval/odd")[3:5] == ["", ""], "one document has no spread"


def test_prefect_s_page_of_a_run_shows_intervals() -> None:
    row = _score_row(SCORES["eval/mmlu"])
    assert row == {
        "score": "mmlu",
        "value": 0.3,
        "95 %": "0.219 to 0.396",
        "n": "100",
        "chance": 0.25,
        "shots": 0,
        "version": 1,
    }
    assert _score_row(SCORES["eval/bpb"])["chance"] == ""
    assert _score_row(SCORES["eval/odd"])["95 %"] == "", "one document has no spread"


def test_the_last_lines_of_a_run_show_intervals(tmp_path: Path) -> None:
    assert _scores(evaluation(tmp_path)) == [
        "  scores    bpb 2.500 (2.461 to 2.539)  bpb/code 2.750 (2.652 to 2.848)  mmlu 0.300 (0.219 to 0.396)",
        "            odd 1.000",
    ]


def test_questions_that_were_not_judged_are_shown(tmp_path: Path) -> None:
    scores = {"eval/mmlu": replace(SCORES["eval/mmlu"], unjudged=3)}
    found = evaluation(tmp_path, scores, {"unjudged": {"eval/mmlu": 3}})
    (line,) = _scores(found)
    assert line.endswith("mmlu 0.300 (0.219 to 0.396) [yellow]3 questions not judged[/]")
    assert _score_row(scores["eval/mmlu"])["n"] == "100, 3 not judged"
    assert _notes({}, {"anneal": found}) == [
        "anneal: 3 questions of eval/mmlu were not judged: they count neither as right nor as wrong, and the gate "
        "decides nothing on them"
    ]


def test_a_domain_that_is_scored_on_little_or_not_at_all_is_noted(tmp_path: Path) -> None:
    held_out = {"general": 10, "math": 1, "code": 0, "multilingual": 0}
    curated = {
        "documents": {"general": 90, "math": 12, "code": 3, "multilingual": 0},
        "held_out": held_out,
        "held_out_bytes": {domain: 2000 * count for domain, count in held_out.items()},
    }
    assert _notes({}, {}, curated) == []
    scores = {
        key: replace(SCORES["eval/bpb"], key=key, n=n, bytes=size)
        for key, n, size in (("eval/bpb", 3, 1), ("eval/bpb/code", 9, 50_000), ("eval/bpb/math", 64, 19_999))
    }
    few, remedy = "too little to judge a model by (10 with 20 kB are the least)", "raise curate.validation_fraction"
    both = "raise evaluate.documents or curate.validation_fraction, or add text"
    assert _notes({}, {"anneal": evaluation(tmp_path, scores)}, curated) == [
        f"math: 1 held-out document with 2.0 kB, {few}; add text or {remedy}",
        f"code: no held-out document, so it is not scored; add text or {remedy}",
        f"anneal: eval/bpb/code: 9 held-out documents with 50.0 kB, {few}; {both}",
        f"anneal: eval/bpb/math: 64 held-out documents with 20.0 kB, {few}; {both}",
    ]


def evaluation(root: Path, scores: Scores = SCORES, facts: dict[str, object] | None = None) -> Artifact:
    store = Store(root)
    with store.staging() as folder:
        write_scores(scores, folder)
        return store.commit(ArtifactSpec("evaluation", "tiny", 1, {}, {}), folder, facts or {}, "test", "none", 0.0)


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_what_was_left_out_is_said(name: str) -> None:
    assert "anneal: copa was left out: no such file" in report(name)
