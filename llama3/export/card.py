"""Write the model card and manifest of an exported folder: the model, its training data and its scores.

README.md is a Hugging Face model card. It says only what is recorded, nothing about use or bias; who adds such a text
must `write_sha256sums` the folder again. `sha256sum -c SHA256SUMS` checks every file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from herd.llama3.evaluate.scores import Score
from herd.llama3.export.formats import EXPORT_FORMATS, Form
from herd.llama3.model.flops import parameter_count
from herd.llama3.recipe.sections import Model
from herd.llama3.recipe.units import Tokens, tokens
from herd.storage.digests import digest_folder
from herd.storage.filesystem import write_atomic

README, MANIFEST, RECIPE, SUMS = "README.md", "manifest.json", "recipe.yaml", "SHA256SUMS"
ROWS = 20
"""Lines of a table of sources or licenses; the last one sums up the rest."""
UNKNOWN = "unknown"


@dataclass(frozen=True)
class StageLine:
    """One stage of the training."""

    name: str
    start: int
    end: int
    seq_len: str
    batch: int
    mix: str
    last_loss: float


@dataclass(frozen=True)
class MixLine:
    """Planned and actual share of one domain."""

    domain: str
    planned: float
    tokens: int
    share: float


@dataclass(frozen=True)
class SourceRow:
    """Tokens of one source or one license."""

    name: str
    tokens: int
    share: float
    documents: int


@dataclass(frozen=True)
class Training:
    """The records of a run."""

    run: str
    tokens: int
    stages: Sequence[StageLine]
    mix: Sequence[MixLine]
    sources: Sequence[SourceRow]
    licenses: Sequence[SourceRow]
    languages: Sequence[str]
    """ISO 639 codes of the training text, most tokens first."""
    scores: Mapping[str, Score]
    curve: str
    """File name of the plot of the training loss; empty: none."""
    recipe: str
    """The resolved recipe as YAML."""
    merged: Mapping[str, float] = field(default_factory=dict)
    """Checkpoint -> its share of the weights, if they are the mean of several."""


@dataclass(frozen=True)
class Card:
    """Contents of a card."""

    name: str
    config: Model
    vocab_size: int
    form: Form
    """Format of the folder."""
    dtype: str
    license: str = ""
    """License of the weights: identifier of SPDX or Hugging Face; empty: none was given."""
    training: Training | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests and commits of `weights`, `tokenizer`, `recipe`, `data mix`, `code`, ..."""
    chat: bool = False
    """Whether the model was trained on conversations."""

    @property
    def parameters(self) -> int:
        """Parameter count; a tied embedding counts once."""
        return parameter_count(self.config, self.vocab_size)

    @property
    def notice(self) -> str:
        """What is known of the licenses of weights and training text, a sentence each."""
        weights = f"The weights are under {self.license}." if self.license else "No license was given for the weights."
        licenses = self.training.licenses if self.training else []
        count = sum(line.name != UNKNOWN for line in licenses)
        if not licenses:
            return f"{weights} The licenses of the training text are not recorded here."
        if not count:
            return f"{weights} The licenses of the training text are unknown."
        missing = sum(line.share for line in licenses if line.name == UNKNOWN)
        rest = f"; for {missing:.1%} of its tokens none is known" if missing else ""
        named = f"{count} license{'s' if count > 1 else ''}, counted by spelling"
        return f"{weights} The sources of the training text name {named} and listed below{rest}."


def write_card(folder: Path, card: Card) -> None:
    """Write README.md, recipe.yaml, manifest.json and SHA256SUMS into `folder`, after all other files."""
    write_atomic(folder / README, render(card))
    if card.training is not None:
        write_atomic(folder / RECIPE, card.training.recipe)
    write_atomic(folder / MANIFEST, json.dumps(manifest(card), indent=1) + "\n")
    write_sha256sums(folder)


def write_sha256sums(folder: Path) -> None:
    """Write SHA256SUMS: the digest of every other file in `folder`."""
    (folder / SUMS).unlink(missing_ok=True)
    files = digest_folder(folder)
    write_atomic(folder / SUMS, "".join(f"{files[name].sha256}  {name}\n" for name in sorted(files)))


def manifest(card: Card) -> dict[str, Any]:
    """Return the origin of the model as JSON."""
    training = card.training
    return {
        "name": card.name,
        "format": card.form,
        "dtype": card.dtype,
        "parameters": card.parameters,
        **({"run": training.run, "tokens": training.tokens} if training else {}),
        "digests": dict(card.digests),
        "license": card.license or None,
        "license_notice": card.notice,
        "tokens_by_license": {line.name: line.tokens for line in training.licenses} if training else {},
    }


def render(card: Card) -> str:
    """Return the card as markdown."""
    page = Environment(
        loader=PackageLoader("herd.llama3.export"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page.filters["tokens"] = tokens
    page.filters["size"] = Tokens
    # a cell must not end its table or begin an HTML tag
    page.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    page.filters["shortened"] = truncate
    form = EXPORT_FORMATS[card.form]
    metadata = {
        "license": card.license.lower(),
        "language": list(card.training.languages) if card.training else [],
        "library_name": form.library,
        "pipeline_tag": "text-generation",
        "tags": ["llama", *(["conversational"] if card.chat else ["base-model", "pretrained"])],
    }
    head = yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False).rstrip()
    use = page.from_string(form.use).render(card=card)
    return page.get_template("card.md").render(card=card, head=head, kind=form.title, use=use)


def truncate(lines: Sequence[SourceRow]) -> list[SourceRow]:
    """Return the first lines of a table and, if it has more than `ROWS`, one line for the rest."""
    if len(lines) <= ROWS:
        return list(lines)
    rest = lines[ROWS - 1 :]
    name = f"{len(rest)} more"
    numbers = sum(line.tokens for line in rest), sum(line.share for line in rest), sum(line.documents for line in rest)
    return [*lines[: ROWS - 1], SourceRow(name, *numbers)]
