"""What a recipe asks of its evaluations is checked before a run: suites, files, and the names in the gate's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.evaluate.checks import check_evaluation, check_rules, possible_scores
from herd.llama3.evaluate.suite import stage_suite_name
from herd.llama3.recipe.load import load_recipe


@pytest.mark.parametrize("name", ["quickstart", "llama3-8b", "llama3-70b", "llama3-405b", "domain-adaptation"])
def test_the_rules_of_our_recipes_judge_scores_that_they_will_have(checkout: Path, name: str) -> None:
    recipe = load_recipe(checkout / f"recipes/{name}.yaml", [])
    check_rules(recipe)
    assert {"eval/bpb", "eval/core", "eval/bpb/general", "eval/arithmetic"} <= possible_scores(recipe)


@pytest.mark.parametrize(
    "rule", ["eval/aritmetic: better", "eval/mmlu: no significant drop", "eval/arc_*: at least 0.3"]
)
def test_a_rule_for_a_task_that_is_not_asked_is_refused_before_the_run(checkout: Path, rule: str) -> None:
    recipe = load_recipe(checkout / "recipes/quickstart.yaml", [f"promote.when={{eval/bpb: better, {rule}}}"])
    metric = rule.partition(":")[0]
    with pytest.raises(
        ValueError, match=r"promote\.when: \S+ is not among the scores of suite quick \(eval/"
    ) as caught:
        check_rules(recipe)
    assert str(caught.value).startswith(f"promote.when: {metric} is not")
    assert "eval/bpb " not in str(caught.value)


def test_scores_that_only_data_decide_are_possible(checkout: Path) -> None:
    rules = "{eval/bpb_language/de: no worse than 2%, eval/needle: at least 0.5, eval/bpb_macro: better}"
    check_rules(load_recipe(checkout / "recipes/quickstart.yaml", [f"promote.when={rules}"]))


def test_a_domain_without_a_source_has_no_bits_per_byte(checkout: Path) -> None:
    words = ["sources.code=[]", "mix.base={general: 60%, math: 40%}", "mix.annealing={general: 60%, math: 40%}"]
    recipe = load_recipe(checkout / "recipes/quickstart.yaml", [*words, "promote.when={eval/bpb/code: better}"])
    with pytest.raises(ValueError, match=r"promote\.when: eval/bpb/code is not among the scores"):
        check_rules(recipe)


def test_every_suite_of_a_recipe_is_looked_at(checkout: Path) -> None:
    """The one for the final model and the one for later may ask for files that the one for every stage does not."""
    quickstart = checkout / "recipes/quickstart.yaml"
    assert check_evaluation(load_recipe(quickstart, [])) == []
    for field in ("suite", "final", "deferred_suite"):
        asked = load_recipe(quickstart, [f"evaluate.{field}=core"])
        with pytest.raises(ValueError, match=r"evaluate\.data: is not set, and suite core reads files of it for hell"):
            check_evaluation(asked)
        check_evaluation(asked, look=False)
        left_out = check_evaluation(
            load_recipe(quickstart, [f"evaluate.{field}=core", "evaluate.on_missing_data=skip"])
        )
        assert len(left_out) == 20
        assert left_out[0].startswith("hellaswag_zeroshot: evaluate.data: is not set")


def test_the_gate_judges_the_final_suite(checkout: Path) -> None:
    words = ["evaluate.final=full", "promote.when={eval/mmlu: no significant drop}"]
    recipe = load_recipe(checkout / "recipes/quickstart.yaml", words)
    check_evaluation(recipe, look=False)
    assert [stage_suite_name(recipe, name) for name in ("main", "anneal", "champion")] == ["quick", "full", "full"]
    other = load_recipe(checkout / "recipes/quickstart.yaml", ["evaluate.suite=full", "evaluate.final=quick", words[1]])
    with pytest.raises(ValueError, match="is not among the scores of suite quick"):
        check_evaluation(other, look=False)
