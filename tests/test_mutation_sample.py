"""The random sample of mutants: what is drawn, which tests run, what is counted, and that it continues."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from scipy.stats import binomtest

from tests import line_tests, mutation_sample
from tests.line_tests import Place, Record, choose, records
from tests.mutation_sample import Change, Mutant, draw, equivalents, judge, main, rates
from tests.mutations import ROOT, copy_checkout

UNITS = "llama3/recipe/units.py"
ESTIMATES = "llama3/statistics/estimates.py"


def test_each_equivalent_mutant_has_its_text_and_a_reason() -> None:
    """Correct tests/equivalent.yaml after a change of the code."""
    assert all(len(change.reason) > 10 for change in equivalents())


def test_an_equivalent_mutant_whose_text_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps([{"file": UNITS, "old": "no such text", "new": "", "reason": "none"}]))
    with pytest.raises(SystemExit, match="has the old text 0 times: no such text"):
        equivalents(tmp_path / "file")


def test_a_seed_draws_the_same_mutants_and_each_is_as_likely() -> None:
    mutants = [Mutant("file", number, number, "") for number in range(20)]
    many = mutants * 100
    assert draw(many, 100, 3) == draw(many, 600, 3)[:100]
    assert draw(mutants, 5, 3) != draw(mutants, 5, 4)
    assert sorted(draw(mutants, 99, 3)) == mutants
    drawn = [mutant.start for seed in range(800) for mutant in draw(mutants, 5, seed)]
    assert all(150 < drawn.count(number) < 250 for number in range(20))  # 200, standard deviation 12


def test_a_change_has_whole_lines_that_are_in_the_file_once() -> None:
    source = (ROOT / UNITS).read_text()
    repeated = source.index("    @classmethod\n", source.index("    @classmethod\n") + 1)
    for start in (repeated + 4, *range(source.index("\n\n\n"), len(source), 997)):
        change = Change.of(Mutant(UNITS, start, start + 1, "<new>"))
        assert source.count(change.old) == 1
        assert change.applied() == (UNITS, source[:start] + "<new>" + source[start + 1 :])


SOURCE = """\
LIMIT = 3
class Rate(Base):
    peak: float = (
        8e-5
    )
    @cached(1)
    def at(self, step=0):
        if (
            step > LIMIT
        ):
            return 1
        return sum(
            step,
        )
register(Rate)
try:
    start()
except OSError:
    stop()
"""


@pytest.mark.parametrize(
    ("line", "lines", "at_import", "names"),
    [
        (1, {1}, True, ["LIMIT"]),
        (4, {3, 4, 5}, True, ["Rate", "peak"]),
        (6, {6, 7}, True, ["Rate", "at"]),
        (9, {8, 9, 10}, False, ["Rate", "at"]),
        (11, {11}, False, ["Rate", "at"]),
        (15, {15}, True, []),
        (18, {18}, True, []),
        (13, {12, 13, 14}, False, ["Rate", "at"]),
    ],
)
def test_lines_that_run_together(line: int, lines: set[int], at_import: bool, names: list[str]) -> None:
    assert Place.of(SOURCE, line) == (lines, at_import, names)


def recorded(tests: dict[str, float], lines: dict[str, dict[str, list[int]]]) -> Record:
    return Record({}, list(tests.items()), lines)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one file of SOURCE, and one that uses it."""
    monkeypatch.setattr(line_tests, "ROOT", tmp_path)
    monkeypatch.setattr(line_tests, "population", lambda: ["llama3/recipe/lr.py", "llama3/train/step.py"])
    (tmp_path / "llama3/recipe").mkdir(parents=True)
    (tmp_path / "llama3/train").mkdir()
    (tmp_path / "llama3/recipe/lr.py").write_text(SOURCE)
    (tmp_path / "llama3/train/step.py").write_text("from lr import Rate\n\ndef step(rate):\n    rate.peak\n")
    return tmp_path


def test_the_closest_tests_of_a_line_run_first_and_the_rest_of_their_file_last(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        "tests/e2e/test_run.py": recorded({"run": 0.1}, {"llama3/recipe/lr.py": {"12": [0]}}),
        "tests/llama3/train/test_step.py": recorded({"step": 9.0}, {"llama3/recipe/lr.py": {"12": [0]}}),
        "tests/llama3/recipe/test_load.py": recorded({"load": 0.1}, {"llama3/recipe/lr.py": {"12": [0]}}),
        "tests/llama3/recipe/test_lr.py": recorded(
            {"rest": 0.1, "slow": 3.0, "fast": 2.0}, {"llama3/recipe/lr.py": {"12": [1, 2], "11": [0]}}
        ),
        "tests/llama3/recipe/test_keys.py": recorded({"keys": 0.1}, {"llama3/recipe/lr.py": {"11": [0]}}),
    }
    near, far = choose("llama3/recipe/lr.py", 13, known)
    assert near.names == ["fast", "slow", "rest", "load"]
    assert near.seconds == pytest.approx(5.2)
    assert far.names == ["step", "run"]
    assert choose("llama3/recipe/lr.py", 10, known) == []
    monkeypatch.setattr(line_tests, "FAR_S", 9.05)
    assert choose("llama3/recipe/lr.py", 13, known)[1].names == ["step"]


def test_a_line_that_runs_at_import_belongs_to_the_mirrored_folder_and_to_its_users(source: Path) -> None:
    known = {
        "tests/llama3/recipe/test_keys.py": recorded({"keys": 0.1}, {}),
        "tests/llama3/train/test_step.py": recorded({"step": 9.0}, {"llama3/train/step.py": {"4": [0]}}),
        "tests/llama3/train/test_other.py": recorded({"other": 9.0}, {"llama3/train/step.py": {"3": [0]}}),
    }
    assert [tests.names for tests in choose("llama3/recipe/lr.py", 4, known)] == [["keys"], ["step"]]
    assert [tests.names for tests in choose("llama3/recipe/lr.py", 1, known)] == [["keys"]]


@pytest.mark.parametrize(("caught", "survived"), [(0, 3), (9, 1), (34, 0), (255, 45)])
def test_the_interval_is_that_of_scipy(caught: int, survived: int) -> None:
    judged = [(UNITS, "caught")] * caught + [(UNITS, "survived")] * survived
    low, high = binomtest(caught, caught + survived).proportion_ci(0.95, "wilson")
    table, enough = rates([*judged, (UNITS, "broken"), (UNITS, "equivalent")])
    assert f"| llama3/recipe | {caught} | {caught + survived} | {caught / (caught + survived):.0%} " in table
    assert f"| {low:.0%} to {high:.0%} | 1 | 1 |" in table
    assert enough == (low >= 0.9)


def test_timeouts_are_caught_and_what_no_test_covers_survives() -> None:
    table, enough = rates([(UNITS, "timeout"), (UNITS, "uncovered"), ("tasks/step.py", "caught")])
    assert "| all | 2 | 3 | 67% |" in table
    assert "| llama3/recipe | 1 | 2 | 50% |" in table
    assert not enough


def test_a_sample_continues_leaves_out_equivalents_and_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / UNITS).read_text()
    starts = [text.index(line) for line in ("_DECIMAL = {", "def ", "return ", "class ")]
    mutants = [Mutant(UNITS, start, start + 1, "#") for start in starts]
    same = Change.of(mutants[1])
    for name, value in {
        "BUILD": tmp_path,
        "PAGE": tmp_path / "page.md",
        "EQUIVALENT": tmp_path / "equivalent.yaml",
        "all_mutants": lambda files: mutants,
        "records": lambda paths: {},
        "tree": lambda *left_out: "tree",
        "commit": lambda *left_out: "abc",
    }.items():
        monkeypatch.setattr(mutation_sample, name, value)
    (tmp_path / "equivalent.yaml").write_text(json.dumps([{**same._asdict(), "reason": "because"}]))
    monkeypatch.setattr(mutation_sample, "equivalents", lambda: equivalents(tmp_path / "equivalent.yaml"))
    judged: list[Mutant] = []

    def judge_all(left: list[Mutant], file: Path, known: object) -> None:
        judged.extend(left)
        rows = [{"mutant": one, "verdict": "survived" if one == mutants[2] else "caught"} for one in left]
        with file.open("a") as lines:
            lines.writelines(f"{json.dumps(row)}\n" for row in rows)

    monkeypatch.setattr(mutation_sample, "judge_all", judge_all)
    (tmp_path / "page.md").write_text("# Random samples of mutants\n\n## Seed 1\n\nOld.\n\n## Seed 7\n\nKept.\n")
    page = tmp_path / "page.md"
    for shard, status in (("1/2", 0), ("1/2", 0), ("2/2", 1), ("2/2", 1)):
        monkeypatch.setattr("sys.argv", ["sample", "--shard", shard])
        assert main() == status
        assert ("Old." in page.read_text()) == (shard == "1/2")
    assert sorted(judged) == sorted(set(mutants) - {mutants[1]})
    assert "## Seed 7\n\nKept.\n" in page.read_text()
    assert "- Drawn: 4 of 4 mutants\n" in page.read_text()
    assert "| all | 2 | 3 | 67% |" in page.read_text()
    assert page.read_text().count("```diff") == 1


def test_a_record_is_read_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_tests, "RECORDS", tmp_path)
    known = Record({UNITS: line_tests.digest(UNITS)}, [("test", 0.1)], {})
    (tmp_path / "test_a.py.json").write_text(json.dumps(known._asdict()))
    assert Record.read("test_a.py") is not None
    (tmp_path / "test_a.py.json").write_text(json.dumps(known._replace(digests={UNITS: "other"})._asdict()))
    assert Record.read("test_a.py") is None
    assert Record.read("test_b.py") is None


@pytest.mark.slow
def test_real_mutants_are_judged_by_the_tests_that_run_their_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a test notices, one that changes nothing, and one that does not import."""
    monkeypatch.setattr(line_tests, "RECORDS", tmp_path / "records")
    file = "tests/llama3/statistics/test_estimates.py"
    known = records([file])
    text = (ROOT / ESTIMATES).read_text()
    copy = copy_checkout(tmp_path / "herd")
    faults = [
        ("share * (1 - share) / n)", "share * (2 - share) / n)"),
        ("successes < n else", "n > successes else"),
        ("import math", "import mth"),
    ]
    verdicts = []
    for number, (old, new) in enumerate(faults, 1):
        start = text.index(old)
        steps = choose(ESTIMATES, text.count("\n", 0, start) + 1, known)
        change = Change.of(Mutant(ESTIMATES, start, start + len(old), new))
        verdicts.append(judge(copy, change, steps, number))
    assert verdicts[0][0] == "caught"
    assert verdicts[0][1].startswith(file)
    assert [verdict for verdict, _ in verdicts[1:]] == ["survived", "broken"]


@pytest.mark.slow
def test_mutants_change_code_and_no_text_for_people(tmp_path: Path) -> None:
    if not Path(mutation_sample.MAKER[0]).exists():
        pytest.skip("no .venv/mutate; give: make mutate-sample N=0")
    (tmp_path / "code.py").write_text('''"""Text."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT = 5
__all__ = ["area"]

@cached(7)
def area(width: Literal["a"], height: float | None = 2) -> float:
    "Text."
    if width:
        raise ValueError(f"width {width + 1}")
    print("area", 3)
    return units(width, [
        height,
    ]) + table["key"]["there is no such key"]
''')
    made = subprocess.run([*mutation_sample.MAKER, str(tmp_path / "code.py")], cwd=ROOT, capture_output=True, text=True)
    text = (tmp_path / "code.py").read_text()
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    call = "units(width, [\n        height,\n    ])"
    assert [(text[start:end], new) for _, start, end, new in rows] == [
        ("2", "3"),
        (text[text.index(call) : -1], text[text.index(call) : -1].replace("+", "-")),
        (call, call.replace("width", "None")),
        (call, "units(width, None)"),
        (call, call.replace("width, ", "")),
        (call, "units(width, )"),
        ('"key"', '"XXkeyXX"'),
    ]
