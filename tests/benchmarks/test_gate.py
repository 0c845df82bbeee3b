"""`python -m benchmarks gate`: made-up models are judged as real ones, in the sizes of the recipes' suites."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.gate import EACH_TASK, MEASURES, MadeUpPairs
from benchmarks.rows import GATE_POLICIES, GATE_TARGETS
from herd.llama3.evaluate.checks import joint_chance, rule_powers
from herd.llama3.recipe.gates import GateRule


def test_every_row_has_a_target_and_a_measure() -> None:
    assert list(MEASURES) == list(GATE_TARGETS)


@pytest.mark.parametrize("policy", GATE_POLICIES)
def test_the_rules_are_those_of_the_recipe(policy: str) -> None:
    pairs = MadeUpPairs(policy)
    assert pairs.rules
    assert pairs.sizes["eval/core"].n > 100
    assert (pairs.rules == {pattern: GateRule.parse(rule) for pattern, rule in EACH_TASK.items()}) == (
        policy == "each-task"
    )


def test_the_simulation_agrees_with_what_a_plan_says() -> None:
    result = CliRunner().invoke(bench, ["gate", "--tries", "200", "--only", "quickstart", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"].partition("/")[2]: row["value"] for row in json.loads(result.stdout)["rows"]}
    pairs = MadeUpPairs("quickstart")
    planned = rule_powers(pairs.recipe, pairs.sizes)
    for name, sign in (("equal", 0), ("better", -1), ("worse", 1)):
        assert rows[name] == pytest.approx(100 * joint_chance(planned, sign), abs=6), name
    (better,) = [power for power in planned if power.metric == "eval/bpb"]
    for name, gain in (("power-0.2", 0.002), ("power-0.5", 0.005), ("power-1", 0.01), ("false", 0.0)):
        assert rows[name] == pytest.approx(100 * better.chance(-gain), abs=15), name
