"""The two kernels of the loss as torch compiles them for an H100: how often they pass over the logits, and values.

Triton's interpreter runs the generated code on processor tensors, in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda import null_device

null_device.require(null=True)

from herd.llama3.model import loss  # noqa: E402

TOKENS, VOCABULARY = 6, 5000
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
INTERPRETED = """
import sys, torch, triton, triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
from types import SimpleNamespace

folder, tokens, vocabulary = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
logits, index, target = torch.load(f"{folder}/inputs.pt")
exec(compile(open(f"{folder}/kernels.py").read(), f"{folder}/kernels.py", "exec"))
libdevice = SimpleNamespace(exp=exp)  # the interpreter knows no function of CUDA's library
triton_helpers.libdevice = libdevice
wide = torch.promote_types(logits.dtype, torch.float32)
largest, sums, at_index = (torch.empty(tokens, 1, dtype=wide) for _ in range(3))
red[(tokens,)](logits, largest, sums, tokens, vocabulary, XBLOCK=1, R0_BLOCK=512)
gathered[(1,)](index, logits, at_index, tokens, XBLOCK=8)
replaced = logits.clone()
count = tokens * vocabulary
replace[(triton.cdiv(count, 512),)](index, replaced, largest, target, replaced, count, XBLOCK=512)
torch.save((largest, sums, at_index, replaced), f"{folder}/outputs.pt")
"""


def kernels(dtype: torch.dtype) -> dict[str, str]:
    """Return the source of each kernel, by the beginning of its name."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    logits_CV = torch.zeros(TOKENS, VOCABULARY, device="cuda", dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    index_C1 = torch.zeros(TOKENS, 1, device="cuda", dtype=torch.int64)
    largest_C1, target_C1 = (torch.zeros(TOKENS, 1, device="cuda", dtype=wide) for _ in range(2))
    _, read = run_and_get_code(torch.compile(loss._read_logits), logits_CV, index_C1)
    _, write = run_and_get_code(torch.compile(loss._replace_logits), logits_CV, largest_C1, index_C1, target_C1)
    found = re.findall(r"@triton\.jit\ndef (triton_\w+?)(\(.*?)''', device_str", "".join(read + write), re.DOTALL)
    return dict(found)


def source(name: str, kernel: str) -> str:
    return f"@triton.jit\ndef {name}{kernel}\n"


def named(found: dict[str, str]) -> tuple[str, str, str]:
    """Return the source of what reads all logits, of what gathers those of the targets, and of what replaces them."""
    (red,) = (source("red", text) for name, text in found.items() if name.startswith("triton_red"))
    (gathered,) = (
        source("gathered", text) for name, text in found.items() if name.startswith("triton_poi") and "gather" in name
    )
    (replaced,) = (source("replace", text) for name, text in found.items() if "where" in name)
    assert len(found) == 3, list(found)
    return red, gathered, replaced


@pytest.mark.parametrize("name", TYPES)
def test_the_logits_are_read_twice_and_written_once(name: str) -> None:
    red, _, replaced = named(kernels(TYPES[name]))
    assert red.count("tl.load(") == red.count("for r0_offset") == 1  # an online softmax
    assert re.findall(r"tl\.(?:load|store)\(\w+ \+ \(x2\)", replaced) == [
        "tl.load(in_ptr1 + (x2)",
        "tl.store(out_ptr1 + (x2)",
    ]


@pytest.mark.parametrize("name", TYPES)
def test_generated_kernels_give_the_values_of_the_formula(name: str, tmp_path: Path) -> None:
    dtype, random = TYPES[name], torch.Generator().manual_seed(1)
    logits_CV = (4 * torch.randn(TOKENS, VOCABULARY, generator=random, dtype=torch.float64)).to(dtype)
    logits_CV[3, 500] = torch.nan
    index_C1 = torch.randint(0, VOCABULARY, (TOKENS, 1), generator=random)
    wide = torch.promote_types(dtype, torch.float32)
    target_C1 = torch.rand(TOKENS, 1, generator=random, dtype=wide)
    exp = source("exp", "(x):\n    return tl.exp(x)")
    (tmp_path / "kernels.py").write_text("".join((exp, *named(kernels(dtype)))))
    torch.save((logits_CV, index_C1, target_C1), tmp_path / "inputs.pt")
    command = [sys.executable, "-c", INTERPRETED, str(tmp_path), str(TOKENS), str(VOCABULARY)]
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    largest_C1, sums_C1, at_index_C1, replaced_CV = torch.load(tmp_path / "outputs.pt")
    expected = loss._read_logits(logits_CV, index_C1)
    for one, other in zip((largest_C1, sums_C1, at_index_C1), expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    gradient_CV = loss._replace_logits(logits_CV.clone(), expected[0], index_C1, target_C1)
    torch.testing.assert_close(replaced_CV, gradient_CV, equal_nan=True)
