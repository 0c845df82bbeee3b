"""The model card and manifest of an exported folder: what the model is, what it was trained on, how it scores.

The card is a README.md in the form that Hugging Face shows: a YAML head, then tables. It says what is recorded and
leaves out the rest, so a folder of weights that came from elsewhere gets a short one. `SHA256SUMS` holds the digest of
every file, and `manifest.json` where they came from; `sha256sum -c SHA256SUMS` checks both. What this gives up: no
sentence about use or bias is made up; people who know write them into the folder, and sign again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from llama3.evaluate.scores import Score
from llama3.model.files import parameter_shapes
from llama3.recipe.sections import Model
from llama3.recipe.units import tokens
from storage.digests import digest_folder
from storage.filesystem import write_atomic

README, MANIFEST, RECIPE, SUMS = "README.md", "manifest.json", "recipe.yaml", "SHA256SUMS"
ROWS = 20
"""Lines of a table of sources or licences; the rest is summed up in one."""
UNKNOWN = "unknown"
KINDS = {
    "hf": "Hugging Face transformers",
    "meta": "Meta's own files, model-parallel",
    "meta-safetensors": "Meta's own names, in safetensors",
    "gguf": "GGUF, for llama.cpp",
    "mlflow": "an MLflow pyfunc model",
}


@dataclass(frozen=True)
class StageLine:
    """One stage of the training."""

    name: str
    start: int
    end: int
    seq: str
    batch: int
    mix: str
    last_loss: float


@dataclass(frozen=True)
class MixLine:
    """One domain: planned share, and what was trained on."""

    domain: str
    planned: float
    tokens: int
    share: float


@dataclass(frozen=True)
class Origin:
    """Tokens of one source or one licence."""

    name: str
    tokens: int
    share: float
    documents: int


@dataclass(frozen=True)
class Training:
    """What a run recorded of the model."""

    run: str
    tokens: int
    stages: Sequence[StageLine]
    mix: Sequence[MixLine]
    sources: Sequence[Origin]
    licences: Sequence[Origin]
    languages: Sequence[str]
    """ISO 639 codes of the training text, most tokens first."""
    scores: Mapping[str, Score]
    curve: str
    """Name of the picture of the training loss in the folder; empty: there is none."""
    recipe: str
    """The resolved recipe as YAML."""


@dataclass(frozen=True)
class Card:
    """What a card says."""

    name: str
    spec: Model
    rows: int
    form: str
    """Format of the folder: a key of `KINDS`."""
    dtype: str
    licence: str = ""
    """SPDX identifier, or Hugging Face's, of the weights' licence; empty: none was given."""
    training: Training | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    """What -> digest or commit: `weights`, `tokenizer`, `recipe`, `data mix`, `code`, ..."""

    @property
    def parameters(self) -> int:
        """Numbers in the model; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in parameter_shapes(self.spec, self.rows).values())

    @property
    def notice(self) -> str:
        """What is known of the licences, in one sentence each for weights and text."""
        weights = f"The weights are under {self.licence}." if self.licence else "No licence was given for the weights."
        return f"{weights} {_text_notice(self.training.licences if self.training else [])}"


def _text_notice(licences: Sequence[Origin]) -> str:
    """Return what is known of the licences of the training text, in a sentence."""
    if not licences:
        return "The licences of the training text are not recorded here."
    missing = sum(line.share for line in licences if line.name == UNKNOWN)
    named = sum(line.name != UNKNOWN for line in licences)
    if not named:
        return "The licences of the training text are unknown."
    rest = f"; for {missing:.1%} of its tokens none is known" if missing else ""
    return f"The training text is under {named} licence{'s' if named > 1 else ''}, listed below{rest}."


def write_card(folder: Path, card: Card) -> None:
    """Write README.md, recipe.yaml, manifest.json and SHA256SUMS into `folder`, which holds all other files already."""
    write_atomic(folder / README, render(card))
    if card.training is not None:
        write_atomic(folder / RECIPE, card.training.recipe)
    write_atomic(folder / MANIFEST, json.dumps(manifest(card), indent=1) + "\n")
    sign(folder)


def sign(folder: Path) -> None:
    """Write SHA256SUMS: the digest of every other file in `folder`."""
    (folder / SUMS).unlink(missing_ok=True)
    files = digest_folder(folder)
    write_atomic(folder / SUMS, "".join(f"{files[name].sha256}  {name}\n" for name in sorted(files)))


def manifest(card: Card) -> dict[str, Any]:
    """Return where the model came from, as JSON: format, numbers, digests, run, tokens and licences."""
    training = card.training
    known = {} if training is None else {"run": training.run, "tokens": training.tokens}
    licences = {} if training is None else {line.name: line.tokens for line in training.licences}
    return {
        "name": card.name,
        "format": card.form,
        "dtype": card.dtype,
        "parameters": card.parameters,
        **known,
        "digests": dict(card.digests),
        "licence": card.licence or None,
        "licence_notice": card.notice,
        "tokens_by_licence": licences,
    }


def render(card: Card) -> str:
    """Return the card as markdown."""
    page = Environment(
        loader=PackageLoader("llama3.export"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page.filters["tokens"] = tokens
    page.filters["cell"] = _cell
    page.filters["shortened"] = shortened
    return page.get_template("card.md").render(card=card, head=_head(card), kind=KINDS[card.form])


def shortened(lines: Sequence[Origin]) -> list[Origin]:
    """Return the first lines of a table, and one more for all that do not fit."""
    if len(lines) <= ROWS:
        return list(lines)
    rest = lines[ROWS - 1 :]
    name = f"{len(rest)} more"
    numbers = sum(line.tokens for line in rest), sum(line.share for line in rest), sum(line.documents for line in rest)
    return [*lines[: ROWS - 1], Origin(name, *numbers)]


def _head(card: Card) -> str:
    """Return the YAML that Hugging Face reads; keys without a value are left out."""
    values = {
        "license": card.licence.lower(),
        "language": list(card.training.languages) if card.training else [],
        "library_name": {"hf": "transformers", "gguf": "gguf", "mlflow": "mlflow"}.get(card.form, ""),
        "pipeline_tag": "text-generation",
        "tags": ["llama", "base-model", "pretrained"],
    }
    return yaml.safe_dump({key: value for key, value in values.items() if value}, sort_keys=False).rstrip()


def _cell(text: object) -> str:
    """Return text that cannot end a table cell or begin a tag."""
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
