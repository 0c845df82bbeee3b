"""Parameters of the flows: one model per deployment, from which Prefect draws a form and a schema.

All fields have defaults: Quick Run is one click. Every form of a run becomes `PipelineParameters`, which the command
line fills in too. A drop-down of stages lists those of the shipped recipes; a text field beside it takes any other.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Annotated, Any, Literal, Self, cast

import yaml
from coolname.data import config  # the word list of Prefect's flow run names
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema

from herd.flows.local_server import refusal
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.load import RECIPES, parse_recipe, resolved
from herd.llama3.recipe.schema import Recipe
from herd.storage.root import DEFAULT_ROOT, Root
from herd.tasks.cluster import Cluster
from herd.tasks.pipeline_steps import common_kinds
from herd.tasks.runs.records import Runs, StudyPart

# The form's section "Change the recipe". Each field becomes an override like `--set`. Prefect checks the patterns
# before a run exists; the recipe's own checks find the rest within a second of the start.

_NUMBER = r"[0-9][0-9_]*(\.[0-9]+)?"
_TOKENS = rf"{_NUMBER}\s*((K|M|B|T|Ki|Mi|Gi|Ti)(\s*tokens)?|tokens)"
_STEPS = rf"{_NUMBER}\s*(K|M|B|T)?\s*steps"
_TIME = rf"{_NUMBER}\s*(s|min|h|d)"
_RATE = r"[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?"


def _or_empty(*forms: str) -> str:
    """Return a pattern of an empty text or one of `forms`, with optional space around."""
    return rf"^\s*(({'|'.join(forms)})\s*)?$"


TOKENS = _or_empty(_TOKENS)
SPAN = _or_empty(_TOKENS, _STEPS)
CADENCE = _or_empty(_TIME, _TOKENS)
SHARE = _or_empty(rf"{_NUMBER}\s*%")
RATE = _or_empty(_RATE)
STAGE_RATE = _or_empty(rf"constant(\s+at\s+{_RATE})?", rf"linear(\s+from\s+{_RATE})?\s+to\s+{_RATE}", _RATE)
RATIO = _or_empty(r"0?\.[0-9]+", r"1(\.0*)?", rf"{_NUMBER}\s*%")
WHOLE = _or_empty(r"[0-9]+")
NAME = r"^[a-z0-9][a-z0-9.-]{0,62}$"


def field_at(position: int, title: str, default: Any, description: str, **constraints: Any) -> Any:
    """Return a field at `position` of the form; `constraints` are pydantic's (`pattern`, `ge`)."""
    extra: JsonDict = {"position": position}
    return Field(default=default, title=title, description=description, json_schema_extra=extra, **constraints)


def _field(position: int, title: str, pattern: str, description: str, default: str = "") -> Any:
    """Return a text field of this `pattern`, which the server checks; `FormSection` says what is wrong in words."""
    extra: JsonDict = {"position": position, "pattern": pattern}
    return Field(default=default, title=title, description=description, json_schema_extra=extra)


class FormSection(BaseModel):
    """Fields with patterns. A number is taken as its text."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _fits(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        pattern = field.json_schema_extra.get("pattern") if isinstance(field.json_schema_extra, dict) else None
        if pattern is None:
            return value
        text = f"{value:.10g}" if isinstance(value, float) else str(value) if type(value) is int else value
        if isinstance(text, str) and not re.search(str(pattern), text):
            raise ValueError(refusal(str(field.title), value, str(field.description)))
        return text


class StageChange(FormSection):
    """Changes of one stage."""

    model_config = ConfigDict(title="Stage")

    name: str = _field(0, "Stage", NAME, "Name of a stage of the recipe, such as main.", "main")
    until: str = _field(1, "Ends at", TOKENS, "Position in tokens from the start of the run: 840K, 4Mi.")
    length: str = _field(2, "Or trains for", TOKENS, "Tokens of this stage alone: 160K. Not both.")
    batch: str = _field(3, "Batch", TOKENS, "Tokens per optimizer step: 4Mi, 512 tokens.")
    seq_len: str = _field(4, "Sequence length", WHOLE, "Tokens per sequence: 512.")
    lr: str = _field(5, "Learning rate", STAGE_RATE, "1e-3 (constant at that rate), constant, or linear to 0.")

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.until.strip() and self.length.strip():
            raise ValueError(f"stage {self.name}: fill in either 'Ends at' or 'Or trains for'")
        return self

    def overrides(self) -> list[str]:
        """Return the stage's overrides; a new end replaces both `until` and `for` of the recipe."""
        fields = {"until": self.until, "for": self.length, "batch": self.batch, "seq_len": self.seq_len, "lr": self.lr}
        given = {field: " ".join(text.split()) for field, text in fields.items() if text.strip()}
        if "until" in given or "for" in given:
            given = {"until": "null", "for": "null", **given}
        return [f"stages.{self.name}.{field}={text}" for field, text in given.items()]


class MixChange(FormSection):
    """New shares of one mix; with the unchanged shares they must sum to 100%."""

    model_config = ConfigDict(title="Mix")

    name: str = _field(0, "Mix", NAME, "Name of a mix of the recipe, such as base or annealing.", "base")
    general: str = _field(1, "General", SHARE, "Share of general text: 50%.")
    math: str = _field(2, "Math", SHARE, "Share of mathematics: 25%.")
    code: str = _field(3, "Code", SHARE, "Share of code: 17%.")
    multilingual: str = _field(4, "Multilingual", SHARE, "Share of other languages: 8%.")

    def overrides(self) -> list[str]:
        given = {domain: str(getattr(self, domain)).strip() for domain in DOMAINS}
        return [f"mix.{self.name}.{domain}={share}" for domain, share in given.items() if share]


class RecipeChange(FormSection):
    """Changes of the recipe. Empty fields change nothing."""

    model_config = ConfigDict(title="Change the recipe")

    stages: list[StageChange] = field_at(
        0, "Stages", [], "End, batch, sequence length or learning rate of a stage; one entry per stage."
    )
    mixes: list[MixChange] = field_at(1, "Mix", [], "Shares of the domains in a mix; one entry per mix.")
    peak: str = _field(2, "Peak learning rate", RATE, "The highest rate, after the warm-up: 2e-3.")
    warmup: str = _field(3, "Warm-up", SPAN, "Length of the warm-up: 80 steps, 8B.")
    jaccard: str = _field(4, "Deduplication threshold", RATIO, "Documents that overlap so much are one: 0.7, 70%.")
    validation_fraction: str = _field(
        5, "Validation fraction", SHARE, "Share of the documents kept for evaluation: 5%."
    )
    every: str = _field(6, "Checkpoint every", CADENCE, "A time or a number of tokens: 10 min, 100M.")
    seed: str = _field(7, "Seed", WHOLE, "Of initial weights, document order and generated problems: 1.")

    def overrides(self) -> list[str]:
        """Return the filled-in fields as overrides (`curate.dedup.jaccard=0.7`)."""
        jaccard = self.jaccard.strip()
        if jaccard.endswith("%"):  # the recipe takes a plain number; people type both
            jaccard = f"{float(jaccard.removesuffix('%')) / 100:.10g}"
        fields = {
            "lr.peak": self.peak,
            "lr.warmup": self.warmup,
            "curate.dedup.jaccard": jaccard,
            "curate.validation_fraction": self.validation_fraction,
            "checkpoint.every": self.every,
            "seed": self.seed,
        }
        flat = [f"{path}={text.strip()}" for path, text in fields.items() if text.strip()]
        changes: list[StageChange | MixChange] = [*self.stages, *self.mixes]
        return [*(line for change in changes for line in change.overrides()), *flat]


LATEST = "latest"
CHECKPOINT = "checkpoint/quickstart-main-1a2b3c4d, a run (its last), quickstart@champion, or latest."
NOTHING = "nothing: reuse what is there"
RESTART = "Train a stage again from its start if all of its checkpoints are damaged; else the run stops and names them."
Schema = dict[str, Any]
DRAWN = {
    "processes": "Processes",
    "threads": "Threads",
    "micro_batch": "Sequences per pass",
    "device": "Device",
    "launcher": "Launcher",
    "memory": "Memory for data",
}
"""Fields of a cluster in the form, with their titles."""


def default_root() -> str:
    """Return `HERD_ROOT`, or `herd-data` in the current folder."""
    return os.environ.get("HERD_ROOT") or DEFAULT_ROOT


def shipped_stages() -> list[str]:
    """Return the distinct stage names of the shipped recipes, in the order of training; a base ships with them."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    recipes = [yaml.load(path.read_text(), Loader=loader) for path in sorted(RECIPES.glob("*.yaml"))]
    return list(dict.fromkeys(str(stage["name"]) for recipe in recipes for stage in recipe.get("stages", [])))


def _draw_steps(schema: Schema) -> None:
    """Add the drop-down of steps to a schema; recipes are read only when a form is drawn."""
    kinds = common_kinds()
    after = kinds.index("pretrain") + 1
    schema |= {"position": 1, "enum": [NOTHING, *kinds[:after], *shipped_stages(), *kinds[after:]]}


class FewFields:
    """Draws only the `DRAWN` fields of a cluster but accepts all 60, which the flow checks when it starts."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        drawn = handler(core)
        section = handler.resolve_ref_schema(drawn)
        section["properties"] = {
            name: section["properties"][name] | {"title": title, "position": position}
            for position, (name, title) in enumerate(DRAWN.items())
        }
        section["properties"]["threads"]["description"] += " Empty: all."
        section["additionalProperties"] = True
        return drawn


class RootParameters(BaseModel):
    """Where artifacts and runs are."""

    model_config = ConfigDict(extra="forbid")

    root: str = field_at(90, "Root", "", "Folder or s3://bucket/prefix; empty: HERD_ROOT of the worker, or herd-data.")

    @property
    def root_at(self) -> Root:
        """Return the root, local or remote."""
        return Root.parse(self.root or default_root())


class PlaceParameters(RootParameters):
    """Where a flow runs."""

    cluster: Annotated[Cluster, FewFields()] = Field(
        default_factory=Cluster,
        title="Cluster",
        description="Where it runs; the results are the same. Layout, Slurm, Kubernetes: as JSON (menu).",
        json_schema_extra={"position": 91},
    )

    @field_serializer("cluster")
    def _few(self, cluster: Cluster) -> dict[str, Any]:
        """Write the fields that differ from the default, for the form and for the page of a flow run."""
        usual, written = Cluster().model_dump(mode="json"), cluster.model_dump(mode="json")
        return {name: value for name, value in written.items() if value != usual[name]}


class PipelineParameters(PlaceParameters):
    """A recipe from raw text to a promoted model."""

    recipe: str = field_at(
        0, "Recipe", "quickstart", "A shipped recipe's name, or a YAML file (relative to the worker's folder)."
    )
    change: RecipeChange = field_at(1, "Change the recipe", RecipeChange(), "Fields to fill in; the rest stays.")
    overrides: list[str] = field_at(
        2, "Other changes", [], "Any recipe field: stages.main.until=3M, curate.lines.max_copies=4."
    )
    until: str = field_at(
        3, "Stop after", "", "Step to stop after: curate, tokenize, pretrain, a stage, ...; empty: do all."
    )
    fresh: bool = field_at(4, "New run", False, "Begin a new run even if the last run of this recipe did not finish.")
    restart_damaged: bool = field_at(5, "Restart damaged stages", False, RESTART)
    rerun_of: SkipJsonSchema[str] = Field(default="", exclude=True)
    """Earlier run whose recipe replaces the file; set by the deployment `rerun`. Excluded from the form's defaults too:
    the form sends them all back, and the schema does not know this field."""
    from_step: SkipJsonSchema[str] = Field(default="", exclude=True)
    """Step from which everything is made again."""
    study: SkipJsonSchema[StudyPart | None] = Field(default=None, exclude=True)
    """Study and variant of the run; set by the deployment `study`."""

    def resolved_parameters(self) -> PipelineParameters:
        """Return the parameters of the run, with the form's section converted to overrides."""
        overrides = [*self.change.overrides(), *self.overrides]
        return self.model_copy(update={"change": RecipeChange(), "overrides": overrides, "until": self.until.strip()})


class RerunParameters(PlaceParameters):
    """An earlier run again, from a step on or with changes; artifacts upstream of them are reused."""

    run: str = field_at(0, "Run", LATEST, "Name of an earlier run, such as quickstart-7; latest: the newest.")
    from_step: str = Field(
        default=NOTHING,
        title="Redo from",
        description="Step from which everything is made again, even if nothing changed; pretrain is the first stage.",
        json_schema_extra=_draw_steps,
    )
    stage: str = field_at(
        2, "Or redo from", "", "The same for a step that is not in the list: a stage of your own recipe."
    )
    change: RecipeChange = field_at(3, "Change the recipe", RecipeChange(), "Fields to fill in; the rest stays.")
    overrides: list[str] = field_at(4, "Other changes", [], "Any recipe field: stages.anneal.weight_averaging=2.")
    until: str = field_at(5, "Stop after", "", "Step to stop after: tokenize, a stage, ...; empty: do all.")
    restart_damaged: bool = field_at(6, "Restart damaged stages", False, RESTART)

    def resolved_parameters(self, run: str) -> PipelineParameters:
        """Return the parameters to run `run` again. Raises ValueError if two steps are named to redo from."""
        named = "" if self.from_step == NOTHING else self.from_step
        if named and self.stage.strip():
            raise ValueError(f"stage: 'Redo from' says {named} and 'Or redo from' {self.stage}; fill in one of them")
        return PipelineParameters(
            rerun_of=run,
            from_step=named or self.stage.strip(),
            overrides=[*self.change.overrides(), *self.overrides],
            until=self.until.strip(),
            restart_damaged=self.restart_damaged,
            root=self.root,
            cluster=self.cluster,
        )


class EvaluationParameters(PlaceParameters):
    """A checkpoint to evaluate, by the recipe of the run that made it."""

    checkpoint: str = field_at(0, "Checkpoint", LATEST, CHECKPOINT)
    suite: str = field_at(
        1, "Suite", "", "quick, core, full, or a YAML file; empty: evaluate.deferred_suite of the recipe, or its suite."
    )


class StageInProgressParameters(PlaceParameters):
    """A stage in progress whose waiting checkpoints are scored."""

    run: str = field_at(0, "Run", LATEST, "Name of the run, or latest.")
    stage: str = field_at(1, "Stage", "", "Empty: the one that the run trains.")
    folder: str = field_at(2, "Checkpoints", "", "Folder or URI of the stage's checkpoints; empty: that of the root.")


class PromotionParameters(PlaceParameters):
    """A decision on a checkpoint, by the recipe of the run that made it."""

    checkpoint: str = field_at(
        0, "Checkpoint", LATEST, f"{CHECKPOINT} Roll back: the family, such as quickstart, or quickstart@champion."
    )
    action: Literal["promote", "reject", "roll back"] = field_at(
        1,
        "Action",
        "promote",
        "promote: the gate judges it. reject: a challenger that waits for a person stays a candidate. roll back: its "
        "family goes back to a model that was champion before.",
    )
    to: str = field_at(
        2, "Back to", "", "For roll back: label of a former champion, or its number in the log; empty: the one before."
    )
    by: str = field_at(3, "Your name", "", "Kept with the decision.")
    comment: str = field_at(4, "Comment", "", "Why; kept with the decision.")
    override: str = field_at(
        5, "Override", "", "For promote: why to promote it though the gate rejects it; integrity holds all the same."
    )


class ReportParameters(RootParameters):
    """A run whose report is written again."""

    run: str = field_at(0, "Run", LATEST, "Name of a run, such as quickstart-7; latest: the newest.")


@cache
def _name_words() -> frozenset[str]:
    lists = cast(dict[str, dict[str, Any]], config).values()
    return frozenset(word for entry in lists for word in entry.get("words", []))


def is_made_up(name: str) -> bool:
    """Return whether Prefect chose a flow run's name: `calm-otter`, or `Licensed-Krait` in the form of its V2 UI."""
    # Such a flow run is renamed to its run (`quickstart-7`); a name that a person typed stays.
    words = name.split("-")
    listed = len(words) == 2 and all(word in _name_words() for word in words)
    return listed or re.fullmatch(r"[A-Z][a-z]+-[A-Z][a-z]+", name) is not None


def chosen_recipe(config: PipelineParameters) -> Recipe:
    """Return the recipe of a file, or of an earlier run. Raises RecipeError."""
    if not config.rerun_of:
        from herd.tasks.models.start import load_recipe  # only here: the forms are made without its tokenizers

        return load_recipe(config.root_at, config.recipe, config.overrides)
    recipe = Runs(config.root_at).recipe(config.rerun_of)
    return parse_recipe(resolved(recipe), config.rerun_of, config.overrides)
