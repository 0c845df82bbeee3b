"""Memory of a process that exports or checks a model: a shard and a few tensors, however large the model is."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from herd.llama3.model.files import save_model
from herd.llama3.model.param_table import param_table
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.tokenizer import Tokenizer

SHAPE = {"layers": 10, "dim": 768, "ffn": 2688, "heads": 12, "kv_heads": 4, "max_seq_len": 128}
VOCAB_SIZE = 8192
SHARD = 3 * 10**7
LARGEST = 4 * VOCAB_SIZE * SHAPE["dim"]
"""Bytes of the embedding in fp32."""
PROGRAM = """
import sys
from pathlib import Path
import herd.llama3.export.checks as checks, herd.llama3.model.files as files
from herd.llama3.export.convert import convert
folder, shard, job = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
files.SHARD_BYTES, checks.LOGITS_BYTES = shard, 0  # as for a model of 405B parameters

def work(model):
    if job == "check":
        assert all(check.passed for check in checks.check_model(folder / model, folder / "scratch"))
    else:
        convert(folder / model, "herd", folder / f"{model}-{job}", job, "bf16")

work("tiny")  # what it imports is no part of the model
print("ready", flush=True)
sys.stdin.readline()
work("model")
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of 330 MB and a tiny one."""
    folder = tmp_path_factory.mktemp("models")
    pairs = (bytes([first, second]) for first in range(256) for second in range(256))
    coder = Tokenizer([*(bytes([byte]) for byte in range(256)), *islice(pairs, VOCAB_SIZE - 512)])
    for name, config in (("model", Model(**SHAPE)), ("tiny", Model(**{**SHAPE, "layers": 1, "dim": 24, "ffn": 48}))):
        table = enumerate(param_table(config, VOCAB_SIZE), start=1)  # other numbers in each, or they are tied
        weights = ((param.name, torch.full(param.shape, 0.001 * number)) for number, param in table)
        save_model(folder / name, config, VOCAB_SIZE, weights)
        coder.save(folder / name)
    return folder


def anonymous(pid: int) -> int:
    """Return the resident bytes of a process that are not pages of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def growth(folder: Path, job: str) -> int:
    """Return by how many bytes the process that does `job` grows over what it had before."""
    words = [sys.executable, "-c", PROGRAM, str(folder), str(SHARD), job]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before = peak = anonymous(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        output = select.poll()
        output.register(process.stdout, select.POLLIN)
        while not output.poll(0):
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.001)
        assert process.stdout.readline() == "done\n"
        process.stdin.write("\n")
    return peak - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("job", ["hf", "meta-safetensors", "gguf", "check"])
def test_memory_does_not_grow_with_the_model(folder: Path, job: str) -> None:
    if job == "gguf":
        pytest.importorskip("gguf")
    size = sum(path.stat().st_size for path in (folder / "model").iterdir())
    assert size > 3e8
    assert growth(folder, job) < SHARD + 3 * LARGEST < size / 2.5
