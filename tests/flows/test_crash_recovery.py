from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prefect.client.schemas.objects import State, StateType
from prefect.context import TagsContext

from herd.flows.cli.errors import with_retries
from herd.flows.crash_recovery import COUNT, FOUND, count_fruitless, progress_of_run, progress_of_study, was_resumed
from herd.llama3.recipe.load import load_recipe
from herd.storage.root import Root
from herd.tasks.operate.owners import process_tag
from herd.tasks.operate.recovery import FRUITLESS, RESUMED
from herd.tasks.runs.records import Runs, StepRecord


def attempts(amounts: list[str], resumed: list[bool]) -> list[int]:
    """Return the count that each attempt notes, one after the other."""
    labels: dict[str, object] = {}
    counts = []
    for amount, by_machine in zip(amounts, resumed, strict=True):
        counts.append(count_fruitless(labels, amount, by_machine))
        labels = {FOUND: amount, COUNT: counts[-1]}
    return counts


def test_attempts_that_find_nothing_new_are_counted_and_the_sixth_is_one_too_many() -> None:
    counts = attempts(["5:100"] * 7, [False] + [True] * 6)
    assert counts == [0, 1, 2, 3, 4, 5, 6]
    assert counts[-1] > FRUITLESS


def test_a_new_step_or_a_longer_journal_starts_the_count_again() -> None:
    assert attempts(["0:0", "0:0", "0:0", "0:90", "0:90", "5:0"], [False] + [True] * 5) == [0, 1, 2, 0, 1, 0]


def test_a_retry_by_a_person_starts_the_count_again() -> None:
    assert attempts(["5:100"] * 4, [False, True, True, False]) == [0, 1, 2, 0]


def test_who_started_an_attempt_is_told_from_its_states() -> None:
    def state(name: str, minute: int, message: str = "") -> State[None]:
        at = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
        return State(type=StateType.SCHEDULED, name=name, timestamp=at, message=message)

    first, resumed = state("Scheduled", 1), state("AwaitingRetry", 2, RESUMED)
    assert not was_resumed([first])
    assert was_resumed([resumed, first])
    assert was_resumed([first, resumed, state("AwaitingConcurrencySlot", 3), state("Late", 4)])
    assert not was_resumed([first, resumed, state("AwaitingRetry", 5)])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**9)), min_size=8, unique=True))
def test_a_run_that_always_gets_further_is_resumed_for_ever(amounts: list[tuple[int, int]]) -> None:
    texts = [f"{steps}:{journals}" for steps, journals in sorted(amounts)]
    assert set(attempts(texts, [False] + [True] * (len(texts) - 1))) == {0}


def test_what_is_found_are_the_steps_of_the_flow_runs_own_run_and_the_journals(tmp_path: Path) -> None:
    root, recipe = Root.parse(tmp_path), load_recipe(Path("recipes/quickstart.yaml"))
    assert progress_of_run(root, recipe, "one") == "0:0"
    record = Runs(root).begin(recipe, "code")
    record.prefect_run = "one"
    record.steps["collect"] = StepRecord(artifact="collected/quickstart-1a2b3c4d", outcome="created")
    Runs(root).save(record)
    (tmp_path / "work" / "main-1a2b3c4d").mkdir(parents=True)
    (tmp_path / "work" / "main-1a2b3c4d" / "journal.jsonl").write_bytes(b"12345")
    assert progress_of_run(root, recipe, "one") == "1:5"
    assert progress_of_run(root, recipe, "another") == "0:5"
    other = Runs(root).begin(recipe, "code")
    other.steps["collect"] = other.steps["annotate"] = record.steps["collect"]
    Runs(root).save(other)
    assert progress_of_study(root, recipe.name) == "3:5"


def test_a_command_creates_its_flow_run_with_the_name_of_its_process() -> None:
    """Written later, it would be missing on a flow run whose process dies in between."""
    assert process_tag() in with_retries(lambda: TagsContext.get().current_tags)
