"""Held-out documents as rows of tokens, written by the process that starts a trainer, which scores them between steps.

Does not import torch: the supervising process works without it.

Shapes: N rows, S sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from llama3.evaluate.held_out import ValidationDocument
from llama3.recipe.base import DOMAINS, Domain

FILE = "held-out.safetensors"
BYTES = "bytes"
COLUMNS = ("tokens_BS", "targets_BS", "documents_BS", "domains_BS")
NO_TARGET = -100
"""llama3.model.loss.NO_TARGET, torch's own choice."""


class RowTokenizer(Protocol):
    """The part of a tokenizer that is used here."""

    @property
    def begin(self) -> int: ...
    @property
    def base(self) -> Sequence[bytes]: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class HeldOut:
    """Documents as the rows of a batch."""

    columns: dict[str, np.ndarray]
    """The fields of a Batch, int64[N, S] each."""
    bytes: dict[Domain, int]
    """UTF-8 bytes of the scored tokens of each domain."""

    def write(self, folder: Path) -> None:
        """Write one file into `folder`."""
        save_file(self.columns, folder / FILE, {BYTES: json.dumps(self.bytes)})

    @classmethod
    def read(cls, folder: Path) -> HeldOut | None:
        """Return the documents in `folder`, or None if there is no file."""
        if not (folder / FILE).is_file():
            return None
        with safe_open(folder / FILE, framework="np") as file:
            counts = json.loads(file.metadata()[BYTES])
            return cls({name: file.get_tensor(name) for name in COLUMNS}, counts)


def pack(documents: Iterable[ValidationDocument], coder: RowTokenizer, seq: int) -> HeldOut:
    """Pack `documents` into rows of `seq` tokens, each document truncated to a row and whole in one row."""
    rows: list[list[tuple[list[int], int]]] = []
    room = 0
    counts: dict[Domain, int] = {}
    for document in documents:
        ids = [coder.begin, *coder.encode(document.text)][: seq + 1]
        domain = next(name for name in DOMAINS if name == document.domain)
        counts[domain] = counts.get(domain, 0) + sum(len(coder.base[token]) for token in ids[1:])
        if len(ids) - 1 > room:
            rows.append([])
            room = seq
        rows[-1].append((ids, DOMAINS.index(domain)))
        room -= len(ids) - 1
    packed = np.array([_columns(row, seq) for row in rows], np.int64)
    return HeldOut({name: np.ascontiguousarray(packed[:, n]) for n, name in enumerate(COLUMNS)}, counts)


def _columns(pieces: Sequence[tuple[list[int], int]], seq: int) -> list[list[int]]:
    """Return tokens, targets, document numbers and domains of one row; the padding is a document without targets."""
    columns: list[list[int]] = [[], [], [], []]
    for number, (ids, domain) in enumerate(pieces):
        size = len(ids) - 1
        for column, values in zip(columns, (ids[:-1], ids[1:], [number] * size, [domain] * size), strict=True):
            column += values
    for column, filler in zip(columns, (0, NO_TARGET, len(pieces), 0), strict=True):
        column += [filler] * (seq - len(column))
    return columns
