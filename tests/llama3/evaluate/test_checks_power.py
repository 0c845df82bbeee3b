"""What promotion rules can show is known before a run: margins that no model or hardly any passes are told."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from herd.llama3.evaluate.checks import (
    DISCORDANT,
    RulePower,
    check_evaluation,
    expected_sizes,
    gate_powers,
    joint_chance,
    rule_powers,
)
from herd.llama3.recipe.load import load_recipe
from herd.llama3.statistics.estimates import paired_proportions
from herd.llama3.statistics.significance import USUAL, questions_pass

LIBRARY = Path("llama3/evaluate/library/tasks")
SHIPPED = sorted(path for path in Path("recipes").glob("*.yaml"))


def powers(path: Path, *overrides: str, look: bool = False) -> dict[str, RulePower]:
    return {power.metric: power for power in gate_powers(load_recipe(path, list(overrides)), look)}


@pytest.mark.parametrize("n", [1, 7, 32, 38, 100])
@pytest.mark.parametrize("margin", [0.02, 0.05, 0.15, 0.6])
@pytest.mark.parametrize(("drop", "discordant"), [(0.0, 0.1), (0.02, 0.1), (-0.05, 0.3), (0.2, 0.1), (0.0, 0.0)])
def test_the_chance_to_pass_is_the_sum_over_all_tables(n: int, margin: float, drop: float, discordant: float) -> None:
    share = max(discordant, abs(drop))
    lost, gained = (share + drop) / 2, (share - drop) / 2
    chance = 0.0
    for more, fewer in product(range(n + 1), repeat=2):
        if more + fewer <= n and -paired_proportions(more, fewer, n).low <= margin:
            ways = math.comb(n, more) * math.comb(n - more, fewer)
            chance += ways * gained**more * lost**fewer * (1 - share) ** (n - more - fewer)
    assert questions_pass(margin, n, drop, discordant) == pytest.approx(chance, abs=1e-9)


def test_a_large_set_is_as_simulated() -> None:
    rng, n, tries = np.random.default_rng(1), 1172, 4000
    drawn = rng.multinomial(n, [0.04, 0.06, 0.9], tries)  # two points worse
    passed = np.mean([-paired_proportions(int(gained), int(lost), n).low <= 0.03 for gained, lost, _ in drawn])
    assert questions_pass(0.03, n, 0.02, DISCORDANT) == pytest.approx(passed, abs=0.03)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_rules_of_our_recipes_let_good_models_pass(path: Path) -> None:
    if not (found := powers(path)):  # a base of other recipes
        pytest.skip("no rule compares")
    assert [power.warning() for power in found.values() if power.warning()] == []
    assert joint_chance(list(found.values()), 0) >= 0.9
    assert joint_chance(list(found.values()), -1) >= 0.95


@pytest.mark.parametrize("name", ["gpt2-24gb", "llama3-1b-100b", "llama3-8b-200b", "llama3-8b", "domain-adaptation"])
def test_a_model_that_is_two_points_worse_on_every_task_is_refused(name: str) -> None:
    found = [power for power in powers(Path(f"recipes/{name}.yaml")).values() if "bpb" not in power.metric]
    assert joint_chance(found, 1) <= 0.05


def test_a_margin_that_no_answers_meet_is_refused_before_the_run() -> None:
    rules = "promote.when={eval/bpb: better, eval/*: no drop over 5 points}"
    recipe = load_recipe(Path("recipes/llama3-1b-100b.yaml"), [rules])
    with pytest.raises(
        ValueError, match=r"repeat_copy_logic: no drop over 5 points: its 32 questions refuse even the s"
    ):
        check_evaluation(recipe, look=False)
    found = powers(Path("recipes/llama3-1b-100b.yaml"), rules)
    warned = {metric: power.warning() for metric, power in found.items() if power.warning()}
    assert warned.keys() == {
        f"eval/{task}"
        for task in ("agi_eval_lsat_ar", "bigbench_operators", "bigbench_repeat_copy_logic", "copa", "winograd")
    }
    assert warned["eval/copa"].startswith(
        "promote.when: eval/copa: no drop over 5 points: 100 questions pass an equal model in 35%; write eval/copa: no "
        "drop over 10 points, or "
    )
    for metric, power in found.items():  # the remedy works
        if power.warning():
            rule = power.warning().split(f"write {metric}: ")[1].partition(",")[0]
            mended = f"promote.when={{{metric}: {rule}}}"
            assert powers(Path("recipes/llama3-1b-100b.yaml"), mended)[metric].chance() >= USUAL


def test_more_questions_are_advised_only_where_there_are_more() -> None:
    rules = "promote.when={eval/arithmetic: no drop over 5 points, eval/copa: no drop over 5 points}"
    found = powers(Path("recipes/llama3-1b-100b.yaml"), rules, "evaluate.questions=100")
    assert "raise evaluate.questions to about" in found["eval/arithmetic"].warning()
    assert "evaluate.questions" not in found["eval/copa"].warning()
    number = int(found["eval/arithmetic"].warning().split("to about ")[1].replace(",", ""))
    more = powers(Path("recipes/llama3-1b-100b.yaml"), rules, f"evaluate.questions={number}")["eval/arithmetic"]
    assert more.chance() == pytest.approx(USUAL, abs=0.03)
    limited = powers(
        Path("recipes/llama3-1b-100b.yaml"), "promote.when={eval/piqa: no drop over 3 points}", "evaluate.limit=90"
    )
    assert "raise evaluate.limit to about" in limited["eval/piqa"].warning()


def test_no_margin_at_all_is_warned_of() -> None:
    rules = "promote.when={eval/arithmetic: no drop over 0 points, eval/bpb/code: no worse than 0%}"
    found = powers(Path("recipes/llama3-1b-100b.yaml"), rules)
    told = "its 1,000 questions refuse even the same answers; write eval/arithmetic: no drop over 3 points"
    assert told in found["eval/arithmetic"].warning()
    assert "1,000 documents pass an equal model in 3%; write eval/bpb/code: no worse than 0.5%" in (
        found["eval/bpb/code"].warning()
    )


def test_questions_are_counted_in_files_that_are_here(tmp_path: Path) -> None:
    (tmp_path / "commonsense_reasoning").mkdir()
    row = '{"query": "A", "choices": ["B", "C"], "gold": 0}\n'
    (tmp_path / "commonsense_reasoning/copa.jsonl").write_text(row * 12)
    words = [
        f"evaluate.data={tmp_path}",
        "promote.when={eval/copa: no drop over 5 points, eval/piqa: no drop over 5 points}",
    ]
    path = Path("recipes/llama3-1b-100b.yaml")
    assert {metric: power.size.n for metric, power in powers(path, *words, look=True).items()} == {
        "eval/copa": 12,
        "eval/piqa": 1838,
    }
    assert powers(path, *words)["eval/copa"].size.n == 100, "nothing is looked at"


def test_documents_that_are_not_there_show_nothing() -> None:
    recipe = load_recipe(Path("recipes/llama3-1b-100b.yaml"), [])
    few = expected_sizes(recipe, look=False, held_out={"math": 0, "code": 9})
    assert "eval/bpb/math" not in few
    assert (few["eval/bpb/code"].n, few["eval/bpb/general"].n, few["eval/bpb"].n) == (9, 1000, 2009)
    weak = {power.metric: power.warning() for power in rule_powers(recipe, few)}
    assert weak["eval/bpb/code"].startswith(
        "promote.when: eval/bpb/code: no worse than 0.5%: 9 documents pass an equal model"
    )
    assert "raise evaluate.documents, or curate.validation_fraction, to about 71" in weak["eval/bpb/code"]
