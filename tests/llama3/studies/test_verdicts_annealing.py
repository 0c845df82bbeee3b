"""Annealing as a judge: what is said of a source, and how seldom it is said of none."""

from __future__ import annotations

import pytest

from benchmarks.simulated_studies import PlantedEffects, false_findings, outcomes
from herd.llama3.studies.verdicts import annealing_verdict, source_effect

DOMAINS = dict.fromkeys(("general", "math", "code", "multilingual"), 64)
SOURCES = {"gsm": "gsm", "web": "more-web"}


def made(gsm: dict[str, float], repeats: int = 4, seed: int = 0) -> PlantedEffects:
    return PlantedEffects(DOMAINS, {"arithmetic": 100}, {"default": {}, "gsm": gsm, "web": {}}, repeats=repeats)


def test_a_source_that_helps_is_said_to_where_it_does() -> None:
    verdict = annealing_verdict(outcomes(made({"math": 0.1}), 1), "default", SOURCES)
    assert verdict.headline[0].startswith("gsm: helps +0.")
    assert "bpb on math, 95 % 0.0" in verdict.headline[0]
    assert source_effect(verdict, "gsm") == "helps"
    assert verdict.change == []
    assert verdict.flags == []


def test_a_source_that_does_nothing_gets_its_largest_difference() -> None:
    verdict = annealing_verdict(outcomes(made({"math": 0.1}), 1), "default", SOURCES)
    assert verdict.headline[1].startswith("more-web: no significant difference (largest: ")
    assert source_effect(verdict, "web") == "no significant difference"


def test_a_difference_that_correction_takes_away_is_said_to_be_one() -> None:
    truth = PlantedEffects(DOMAINS, {}, {"default": {}, "gsm": {"math": 0.03}}, repeats=4)
    lines = [annealing_verdict(outcomes(truth, seed), "default", {"gsm": "gsm"}).headline[0] for seed in range(20)]
    taken = [line for line in lines if "before correction" in line]
    assert taken
    assert all(line.startswith("gsm: no significant difference (largest: +") for line in taken)


def test_a_source_may_help_and_hurt() -> None:
    verdict = annealing_verdict(outcomes(made({"math": 0.1, "general": -0.1}), 1), "default", SOURCES)
    helps, hurts = verdict.headline[0].split("; ")
    assert "helps" in helps
    assert "on math" in helps
    assert hurts.startswith("hurts -0.")
    assert "on general" in hurts
    assert source_effect(verdict, "gsm") == "mixed"
    worse = annealing_verdict(outcomes(made({"general": -0.1}), 1), "default", SOURCES)
    assert source_effect(worse, "gsm") == "hurts"


def test_one_repeat_judges_nothing() -> None:
    verdict = annealing_verdict(outcomes(made({"math": 1.0}, repeats=1), 0), "default", SOURCES)
    assert "no significant difference can be detected with one repeat (largest: +" in verdict.headline[0]
    assert source_effect(verdict, "gsm") == "no significant difference"
    assert sum("add seeds" in flag for flag in verdict.flags) == 2


def test_a_source_without_common_repeats_is_not_judged() -> None:
    runs = [
        one
        for one in outcomes(made({}), 0)
        if (one.variant != "gsm" or one.repeat == 1) and (one.variant, one.repeat) != ("default", 1)
    ]
    verdict = annealing_verdict(runs, "default", SOURCES)
    assert verdict.headline[0] == "gsm: not judged, as nothing can be compared with default"
    with pytest.raises(ValueError, match="gsm: the study does not judge it"):
        source_effect(verdict, "gsm")


def test_chosen_scores_are_the_only_ones() -> None:
    verdict = annealing_verdict(outcomes(made({}), 0), "default", SOURCES, ["eval/bpb/math"])
    assert {one.score for one in verdict.findings} == {"eval/bpb/math"}


@pytest.mark.slow
def test_two_controls_seldom_differ() -> None:
    for repeats, documents, sources in [(2, 32, 1), (4, 64, 1), (3, 128, 3)]:
        assert false_findings(100, repeats, documents, sources) <= 5


def test_a_control_that_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="control: 'plain' has no finished run"):
        annealing_verdict(outcomes(made({}), 0), "plain", SOURCES)
