"""Every parser of what comes from outside, on damaged bytes: an error that names the file, or a result; never slow.

A case is a number: `damaged(sample, number)` flips, deletes, repeats and splices bytes of a good sample.
`make test-all` tries 10,000 of each parser, or as many as HERD_FUZZ_CASES says: 100,000 before a release.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from pydantic import ValidationError
from safetensors.torch import save

from herd.llama3.data.readers.conversations import read_conversations
from herd.llama3.data.readers.files import ReadErrors, source_files
from herd.llama3.data.readers.records import read_files
from herd.llama3.evaluate.task_yaml import parse_task
from herd.llama3.model.files import Weights
from herd.llama3.recipe.base import read_yaml
from herd.llama3.recipe.data_schema import ConversationSource, Source
from herd.llama3.recipe.load import load_recipe
from herd.llama3.tokens.megatron import encode_index, open_pair
from herd.llama3.tokens.shards import read_index
from herd.llama3.train.journal import read_journal
from herd.storage.artifact import ArtifactSpec, Manifest
from herd.storage.digests import digest_bytes
from herd.storage.lease import LeaseRecord
from herd.tasks.cluster import load_cluster
from herd.tasks.models.openai_api import ChatRequest, CompletionRequest

CASES, MANY_CASES = 100, int(os.environ.get("HERD_FUZZ_CASES", "10000"))
SECONDS_A_MB, LEAST_S, PARQUET_S = 1.0, 1.0, 6.0
"""Arrow allocates what the header of a Parquet page claims, up to 2 GiB: 0.8 GB took 0.2 to 2.2 s."""
RECIPE = (Path(__file__).parents[1] / "recipes" / "quickstart.yaml").read_bytes()
SPLICES = (
    b"\0",
    b"\xff\xfe",
    b"{",
    b"[" * 200,
    b"- ",
    b": ",
    b'"',
    b"\n",
    b"1e999",
    b"-1",
    b"null",
    b"&a *a",
    b"<div>" * 50,
)
"""What confuses parsers."""


def damaged(sample: bytes, number: int) -> bytes:
    """Return `sample` with one to four changes."""
    random = Random(number)
    data = bytearray(sample)
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(data) + 1)
        end = min(len(data), start + random.choice((1, 1, 4, 32, len(data))))
        match random.randrange(5):
            case 0 if start < len(data):
                data[start] ^= 1 << random.randrange(8)
            case 1:
                del data[start:end]
            case 2:
                data[start:start] = data[start:end]
            case 3:
                data[start:start] = random.choice(SPLICES)
            case _:
                data[start:end] = random.randbytes(end - start if end - start < 64 else 8)
    return bytes(data)


def documents(path: Path) -> None:
    """Read `path` as a source, once failing and once skipping what is damaged."""
    source = Source(uri=str(path))
    for fail in (False, True):
        for _ in read_files(source_files(source), source, ReadErrors(fail)):
            pass


def conversations(path: Path) -> None:
    list(read_conversations(ConversationSource(uri=str(path)), 0))


def pair(path: Path) -> None:
    """Open a token shard whose index is `path`."""
    path.with_suffix(".bin").write_bytes(bytes(40))
    open_pair(path.with_suffix(""))


def body(path: Path) -> None:
    """Read a request to the server, of both kinds."""
    for kind in (ChatRequest, CompletionRequest):
        try:
            kind.model_validate_json(path.read_bytes())
        except ValidationError as error:
            json.dumps(error.errors(include_url=False, include_context=False), default=str)


def manifest(path: Path) -> None:
    Manifest.parse(path.read_bytes(), path.name, moved=True)


def table() -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.table({"text": ["One sentence.", "Another one."] * 5, "url": ["a"] * 10}), out)
    return out.getvalue()


CHAT = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n' * 3
DESIGN = ArtifactSpec(kind="tokens", name="x", version=1, parameters={"a": 1}, inputs={"b": "c"})
TASK = b"""name: capitals
kind: choice
data: [capitals.jsonl]
context: "Question: {{ question }}"
choices: "options"
gold: "label"
"""
PARSERS: dict[str, tuple[str, bytes, Callable[[Path], object]]] = {
    "manifest": ("m.json", DESIGN.manifest({"f": digest_bytes(b"x")}, {}, "me", "", 1.0).text().encode(), manifest),
    "lease": ("l.json", LeaseRecord.here("me").text().encode(), lambda path: LeaseRecord.parse(path.read_bytes())),
    "recipe": ("r.yaml", RECIPE, load_recipe),
    "cluster": ("c.yaml", b"processes: 8\nlayout: {tp: 2}\nlauncher: slurm\nslurm: {partition: x}\n", load_cluster),
    "task": ("t.yaml", TASK, lambda path: parse_task(read_yaml(path), path.name)),
    "journal": ("journal.jsonl", b'{"time": 1.5, "position": 256, "metrics": {"train/loss": 2.5}}\n' * 4, read_journal),
    "token index": ("tokens.json", b'{"datasets": {"x": {"tokens": 5}}}', lambda path: read_index(path.parent, ["x"])),
    "token shard": ("s.idx", encode_index(np.array([4, 6], np.int64), np.dtype(np.int32)), pair),
    "safetensors": ("w.safetensors", save({"a": torch.ones(2, 3)}), lambda path: list(Weights({"a": path}))),
    "HTML": ("d.html", b"<html><body><p>One <b>word</b></p><table><tr><td>x</table></body></html>", documents),
    "Markdown": ("d.md", b"# Title\n\n* a [link](http://x) `code` **bold**\n\n```\nx\n```\n", documents),
    "JSON lines": ("d.jsonl", b'{"text": "One sentence.", "url": "http://x", "date": "2024-05-01"}\n' * 3, documents),
    "Parquet": ("d.parquet", table(), documents),
    "chat rows": ("c.jsonl", CHAT, conversations),
    "HTTP body": ("b.json", b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 1}', body),
}  # fmt: skip
"""Name -> file, good bytes, and what reads it."""


def names(error: Exception, path: Path) -> bool:
    """Return whether the error names the file or its folder."""
    return path.name in str(error) or path.parent.name in str(error)


def fault(read: Callable[[Path], object], path: Path) -> str:
    """Return what is wrong with the way in which `read` takes the file, empty if nothing is."""
    began = time.process_time()
    try:
        read(path)
    except (ValueError, OSError) as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) or not names(error, path):
            return f"an error without a name: {error!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    allowed = max(PARQUET_S if path.suffix == ".parquet" else LEAST_S, SECONDS_A_MB * path.stat().st_size / 1e6)
    return f"{seconds:.1f} s" if seconds > allowed else ""


def try_cases(name: str, count: int) -> None:
    """Read damaged bytes `count` times."""
    file, sample, read = PARSERS[name]
    with tempfile.TemporaryDirectory(prefix="herd-fuzz-") as folder:
        path = Path(folder) / file
        path.write_bytes(sample)
        read(path)
        for number in range(count):
            path.write_bytes(damaged(sample, number))
            if why := fault(read, path):
                pytest.fail(f"{name}, case {number}: {why}\n{path.read_bytes()[:500]!r}", pytrace=False)


@pytest.mark.parametrize("name", PARSERS)
def test_damaged_bytes_give_a_result_or_an_error_with_a_name(name: str) -> None:
    try_cases(name, CASES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARSERS)
def test_many_damaged_files_give_a_result_or_an_error_with_a_name(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    try_cases(name, MANY_CASES)
    record_property("summary", f"{name}: {MANY_CASES:,} damaged files")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARSERS)
def test_bytes_that_reach_new_branches_give_a_result_or_an_error_with_a_name(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    pytest.importorskip("atheris")
    count = MANY_CASES // 5
    command = [sys.executable, "-m", "tests.fuzz", name, str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    record_property("summary", f"{name}: {count:,} files by coverage")
