"""Ablations: a variant is taken only where it is better on what decides and worse on nothing."""

from __future__ import annotations

import pytest

from benchmarks.simulated_studies import PlantedEffects, outcomes
from herd.llama3.studies.verdicts import ablation_verdict

DOMAINS = dict.fromkeys(("general", "math", "code"), 64)
CHANGES = {"ramp": ["stages=[...]"], "long-warmup": ["lr.warmup=80 steps"]}
WEIGHTS = {"general": 0.5, "math": 0.3, "code": 0.2}


def study(repeats: int = 4, **effects: float) -> PlantedEffects:
    """Return a study whose variant `ramp` has these effects, of which `all` is for every domain."""
    ramp = {name: effects.get(name, effects.get("all", 0.0)) for name in DOMAINS}
    return PlantedEffects(
        DOMAINS, {"arithmetic": 100}, {"steady": {}, "ramp": ramp, "long-warmup": {}}, repeats=repeats
    )


def test_a_variant_that_is_better_everywhere_is_taken() -> None:
    verdict = ablation_verdict(outcomes(study(all=0.06), 0), "steady", CHANGES, weights=WEIGHTS)
    assert verdict.headline[0].startswith("take ramp: helps +0.0")
    assert verdict.headline[1].startswith("long-warmup: no significant difference")
    assert verdict.change == CHANGES["ramp"]


def test_variants_that_do_not_differ_keep_the_control() -> None:
    taken = [ablation_verdict(outcomes(study(), seed), "steady", CHANGES, weights=WEIGHTS).change for seed in range(60)]
    assert sum(bool(change) for change in taken) <= 3
    verdict = ablation_verdict(outcomes(study(), 0), "steady", CHANGES, weights=WEIGHTS)
    assert verdict.headline[0] == "no significant difference: keep steady"
    assert verdict.change == []


def test_a_variant_that_harms_elsewhere_is_not_taken() -> None:
    made = outcomes(study(general=0.3, math=0.0, code=-0.1), 0)
    verdict = ablation_verdict(made, "steady", CHANGES, weights=WEIGHTS)
    assert verdict.headline[0] == "keep steady: no variant is better without harm"
    assert "hurts -0." in verdict.headline[1]
    assert "on code" in verdict.headline[1]
    assert verdict.change == []


def test_a_variant_that_is_worse_is_said_to_be() -> None:
    verdict = ablation_verdict(outcomes(study(all=-0.1), 0), "steady", CHANGES, weights=WEIGHTS)
    assert verdict.headline[1].startswith("ramp: hurts -0.1")
    assert verdict.change == []


def test_the_better_of_two_is_taken() -> None:
    effects = {"steady": {}, "last-2": dict.fromkeys(DOMAINS, 0.06), "last-8": dict.fromkeys(DOMAINS, 0.12)}
    made = outcomes(PlantedEffects(DOMAINS, {}, effects, repeats=4), 0)
    changes = {name: [f"stages.main.weight_averaging={name}"] for name in ("last-2", "last-8")}
    verdict = ablation_verdict(made, "steady", changes, weights=WEIGHTS)
    assert verdict.change == changes["last-8"]
    assert verdict.headline[1].startswith("last-2: helps")


def test_another_score_may_decide() -> None:
    verdict = ablation_verdict(outcomes(study(math=0.2), 0), "steady", CHANGES, score="eval/bpb/math")
    assert verdict.change == CHANGES["ramp"]
    assert len({(one.variant, one.score) for one in verdict.findings}) == len(verdict.findings)


def test_one_repeat_takes_nothing() -> None:
    verdict = ablation_verdict(outcomes(study(repeats=1, all=1.0), 0), "steady", CHANGES, weights=WEIGHTS)
    assert verdict.change == []
    assert any("one repeat" in flag for flag in verdict.flags)


def test_a_score_that_nobody_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="score: no variant can be compared with steady on 'eval/core'"):
        ablation_verdict(outcomes(study(), 0), "steady", CHANGES, score="eval/core")
