"""Parameters of the deployment `study`: which study, which arms, and how many runs at the same time.

The form offers arms as a list, so that a comparison can be tried without a YAML file: each has a name and the fields
that people change most, drawn as in the form of a run.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from flows.change import NAME, RecipeChange
from flows.parameters import PlaceParameters, field_at
from llama3.scaling.posed import ArmRun, Posed, load_study


class ArmForm(BaseModel):
    """One more arm."""

    model_config = ConfigDict(extra="forbid", title="Arm")

    name: str = Field(
        default="my-arm",
        title="Name",
        pattern=NAME,
        description="Of the arm; an arm of the study that has it is replaced.",
        json_schema_extra={"position": 0},
    )
    change: RecipeChange = field_at(1, "Change the recipe", RecipeChange(), "Fields to fill in; the rest stays.")
    overrides: list[str] = field_at(2, "Other changes", [], "Any recipe field: lr.warmup=40 steps.")

    @property
    def lines(self) -> list[str]:
        return [*self.change.overrides(), *self.overrides]


class StudyParameters(PlaceParameters):
    """A study: several runs of a changed recipe that answer one question."""

    study: str = field_at(0, "Study", "recipes/experiments/ramp-cpu.yaml", "A YAML file, relative to the checkout.")
    arms: list[ArmForm] = field_at(
        1, "Further arms", [], "Of a comparison or a mix search: tried beside the study's own."
    )
    only: list[str] = field_at(2, "Only these arms", [], "Names; empty: all. The control is run in any case.")
    overrides: list[str] = field_at(3, "Changes for all arms", [], "Any recipe field: stages.main.until=3M.")
    at_once: int = Field(
        default=1,
        ge=1,
        title="At the same time",
        description="Runs side by side, each a process of its own; they share the processor's threads.",
        json_schema_extra={"position": 4},
    )

    def posed(self) -> Posed:
        """Return the study as it is asked. Raises RecipeError."""
        return load_study(Path(self.study), self.overrides, {arm.name: arm.lines for arm in self.arms})

    def chosen(self, posed: Posed) -> list[ArmRun]:
        """Return the runs of the arms that are asked for. Raises ValueError naming the arms that exist."""
        wanted = {name.strip() for name in self.only if name.strip()}
        known = list(dict.fromkeys(run.arm.name for run in posed.runs))
        if unknown := sorted(wanted - set(known)):
            raise ValueError(f"only: {unknown[0]!r} is no arm of {posed.study.name}; the arms are {', '.join(known)}")
        return [run for run in posed.runs if not wanted or run.arm.name in {*wanted, posed.control}]
