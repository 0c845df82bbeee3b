"""From a study to its runs: one resolved recipe for every arm and repeat, checked before any work starts.

A run of an arm is an ordinary run: the recipe is all there is to it, so whoever has the file can repeat it without the
study. Runs are told apart by the digest of their recipe and by nothing else, which is why a study that is given again,
or that shares arms with its former self, finds what is finished. What this gives up: an arm cannot change where it
runs, since that is no part of a recipe.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from llama3.model.flops import embedding_rows, parameter_count, trained_flops
from llama3.recipe.load import RecipeError, digest, fault_lines, parse_recipe, resolved
from llama3.recipe.plain import read_plain
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.scaling.arm import ANNEAL, Arm
from llama3.scaling.arms import arms_of, control_of
from llama3.scaling.study import Study
from storage.artifact import flatten
from storage.secrets import refuse_secrets


@dataclass(frozen=True)
class ArmRun:
    """One repeat of an arm."""

    arm: Arm
    repeat: int
    """Counted from 1."""
    recipe: Recipe

    @property
    def name(self) -> str:
        """How people call it: `math-30 2`."""
        return f"{self.arm.name} {self.repeat}"

    @cached_property
    def digest(self) -> str:
        return digest(resolved(self.recipe))

    @cached_property
    def tokens(self) -> int:
        return Schedule(self.recipe).tokens

    @cached_property
    def parameters(self) -> int:
        return parameter_count(self.recipe.model, embedding_rows(self.recipe))

    @cached_property
    def flops(self) -> float:
        """Training operations, causal attention counted."""
        return trained_flops(self.recipe, self.recipe.model, embedding_rows(self.recipe), self.tokens)


class Posed:
    """A study with its base recipe: all that decides its runs."""

    def __init__(self, study: Study, data: dict[str, Any], place: str) -> None:
        self.study, self.data, self.place = study, data, place
        self.base = self.recipe([])

    def recipe(self, overrides: Iterable[str]) -> Recipe:
        """Return the base recipe with the study's changes and `overrides`, under its own name. Raises RecipeError."""
        return parse_recipe(copy.deepcopy(self.data), self.place, [*self.study.set, *overrides])

    @cached_property
    def digest(self) -> str:
        """Of the question and the base recipe, every default filled in."""
        asked = self.study.model_dump(mode="json", by_alias=True, exclude={"recipe"})
        return digest([asked, resolved(self.base)])

    @cached_property
    def control(self) -> str:
        """Name of the arm that the others are compared with; nothing for a ladder."""
        return control_of(self.study)

    @cached_property
    def runs(self) -> list[ArmRun]:
        """All runs, arm by arm. Raises ValueError."""
        return list(arm_runs(self))


ARMS = {"compare": "arms", "mix": "others"}
"""Kinds of study to which arms can be added, and the field that lists them."""


def load_study(path: Path, changes: Sequence[str] = (), further: Mapping[str, list[str]] | None = None) -> Posed:
    """Return the study in the YAML file `path`, `changes` of its base recipe and `further` arms added to its own.

    Raises RecipeError naming the file and each faulty field.
    """
    data = _read(path)
    data["set"] = [*(data.get("set") or []), *changes]
    if further:
        kind, field = next(
            ((kind, field) for kind, field in ARMS.items() if isinstance(data.get(kind), dict)), ("", "")
        )
        if not kind:
            raise RecipeError(f"{path}: takes no further arms; only a comparison or a mix search does")
        data[kind][field] = {**(data[kind].get(field) or {}), **further}
    try:
        refuse_secrets(data, str(path))
        study = Study.model_validate(data)
    except ValidationError as error:
        raise RecipeError(fault_lines(error, Study, str(path))) from None
    base = path.parent / study.recipe
    return Posed(study, _read(base), str(base))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_plain(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: must be a mapping, not {type(data).__name__}")
    return data


def arm_runs(posed: Posed) -> Iterator[ArmRun]:
    """Yield every run of the study. Raises ValueError naming what is wrong with its arms."""
    study, base = posed.study, posed.base
    seeds = study.seeds or [base.seed]
    common = [f"name={study.name}", f"data_seed={base.seed if base.data_seed is None else base.data_seed}"]
    helpings = study.annealing.draws if study.annealing else 1
    for arm in arms_of(study, base):
        for index, (seed, draw) in enumerate((seed, draw) for seed in seeds for draw in range(1, helpings + 1)):
            overrides = [*arm.overrides, *common, f"seed={seed}", *_helping(study, draw)]
            yield ArmRun(arm, index + 1, posed.recipe(overrides))


def _helping(study: Study, draw: int) -> list[str]:
    """Return the override that makes arms of an annealing study read other documents in each repeat.

    Counted from 1: helping 0 would go on with the mix of the stage before, whose last units would then be dealt
    otherwise in the control than in the arms, and the checkpoint that all begin from would be trained twice.
    """
    return [f"stages.{ANNEAL}.draw={draw}"] if study.annealing else []


def changed(one: Recipe, other: Recipe) -> list[str]:
    """Return the fields in which two recipes differ, stages by name: `stages.main.until`, `lr.peak`."""
    plain = [flatten(_by_name(resolved(recipe))) for recipe in (one, other)]
    keys = sorted(set(plain[0]) | set(plain[1]))
    return [key for key in keys if plain[0].get(key) != plain[1].get(key)]


def _by_name(plain: dict[str, Any]) -> dict[str, Any]:
    return {**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}}
