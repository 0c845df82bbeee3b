"""Check that a model folder loads and that its exports hold the same model.

Each parameter of an export, read back, must have the same bits, and the exported model the same logits in fp32. A fault
that writer and reader share stays unseen, so tests compare with transformers. An export needs the model's disk space.
"""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from herd.llama3.evaluate.gate import Check, CheckUnfinished
from herd.llama3.export.convert import convert, open_source
from herd.llama3.export.formats import EXPORT_FORMATS, Format
from herd.llama3.export.meta import NotExpressible
from herd.llama3.model.files import WeightReader, open_model, os_error_number
from herd.llama3.model.flops import parameter_count
from herd.llama3.model.linear import use_reproducible_matmul
from herd.llama3.model.param_table import param_table
from herd.llama3.model.transformer import empty_model
from herd.llama3.tokens.tokenizer import Tokenizer

COMPARED_POSITIONS = 512
"""Dropping the scaling of Llama 3.1 changes logits by 10 % within so few positions."""


def logits_difference(
    one: Path, one_format: Format, other: Path, other_format: Format, positions: int = COMPARED_POSITIONS
) -> float:
    """Return the largest difference of the logits of two model folders, relative to the largest logit of `other`.

    At most `positions` positions of fixed random tokens are computed. 0.0: the same model, bit for bit; NaN: one of
    them gives NaN. Raises ValueError if a folder is not a Llama 3, or their vocabularies differ.
    """
    first, second = open_source(one, one_format), open_source(other, other_format)
    if first.vocab_size != second.vocab_size:
        raise ValueError(
            f"{one} has vocab_size {first.vocab_size}, {other} {second.vocab_size}; name two forms of one model"
        )
    count = min(positions, first.config.max_seq_len, second.config.max_seq_len)
    tokens_1S = torch.randint(0, first.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    actual, expected = logits(first, tokens_1S), logits(second, tokens_1S)
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
def logits(source: WeightReader, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of a model for `tokens_BS`, in fp32 on the CPU: bf16 would hide a wrong setting."""
    use_reproducible_matmul()
    model = empty_model(source.config, source.vocab_size)
    names = [param.name for param in param_table(source.config, source.vocab_size)]
    state = {name: source.tensor(name).to(torch.float32, copy=True) for name in names}
    model.load_state_dict(state, assign=True)
    return model.eval()(tokens_BS, None)  # type: ignore[no-any-return]


RELOAD, EXPORT, TOKENIZER = "integrity/reload", "integrity/export", "integrity/tokenizer"
LOGITS_BYTES = 4 * 10**9
"""Largest model, in fp32, that is loaded twice to compare logits."""
LOGITS = 1e-5
"""Largest difference of two logits, relative to the largest logit, in fp32."""
POSITIONS = 64
BROKEN = (ValueError, OSError, RuntimeError, SafetensorError, MemoryError)
"""Errors of damaged files, of a model that does not fit its shape, and of a machine without memory or disk."""
ABSENT = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR)
"""Values of errno that are faults of the folder, not of disk, network or memory."""
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)


def check_model(folder: Path, scratch: Path) -> list[Check]:
    """Return the checks of the model in `folder`: it loads, and exports, written to `scratch`, are equal."""
    return [checked(RELOAD, lambda: _reload(folder)), checked(EXPORT, lambda: _export(folder, scratch))]


def check_tokenizer(folder: Path, digest: str) -> Check:
    """Return the check that the tokenizer in `folder` has the digest `digest`."""

    def compare() -> str:
        actual = Tokenizer.load(folder).digest
        if actual != digest:
            raise ValueError(
                f"the tokenizer beside the model is {actual[:12]}, its tokens were made with {digest[:12]}"
            )
        return f"the tokenizer is {digest[:12]}, as when its tokens were made"

    return checked(TOKENIZER, compare)


def is_machine_error(error: BaseException) -> bool:
    """Return whether `error` is a fault of the machine (memory, a full disk, network) and not of the model."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno not in ABSENT
    if isinstance(error, SafetensorError) and (number := os_error_number(error)) is not None:
        return number not in ABSENT
    if isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)):
        return True
    return error.__cause__ is not None and is_machine_error(error.__cause__)


def checked(metric: str, work: Callable[[], str]) -> Check:
    """Return the check `metric`: passed with the result of `work`, failed with its error (one of `BROKEN`).

    Raises Unfinished if the error is a fault of the machine: the decision stays open.
    """
    try:
        return Check(metric=metric, passed=True, reason=work())
    except CheckUnfinished:
        raise
    except BROKEN as error:
        if is_machine_error(error):
            message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise CheckUnfinished(f"{metric}: the check did not come to its end ({message[:400]})") from error
        return Check(metric=metric, passed=False, reason=" ".join(str(error).split())[:400])


def _fits(model: WeightReader) -> bool:
    return 4 * parameter_count(model.config, model.vocab_size) <= LOGITS_BYTES


def _reload(folder: Path) -> str:
    """Return the number of parameters read. Raises ValueError if one, or a logit, is not finite."""
    stored, count = open_model(folder), 0
    for name, tensor in stored:
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds numbers that are not finite; train again from an earlier checkpoint")
        count += tensor.numel()
    position = torch.arange(POSITIONS)
    tokens_1S = ((position * position * 7 + position * 3) % stored.vocab_size)[None]
    if _fits(stored) and not bool(torch.isfinite(logits(stored, tokens_1S)).all()):
        raise ValueError("its logits are not finite; train again from an earlier checkpoint")
    return f"loads: {count:,} parameters, all finite"


def _export(folder: Path, scratch: Path) -> str:
    """Return which exports hold the same model. Raises ValueError naming the one that does not."""
    scratch.mkdir(parents=True, exist_ok=True)
    stored, results = open_model(folder), []
    fits = _fits(stored)
    for target, (name, *_, form) in EXPORT_FORMATS.items():
        if form is None:
            continue
        with tempfile.TemporaryDirectory(dir=scratch, prefix="export-") as temporary:
            export = Path(temporary) / target
            try:
                convert(folder, "herd", export, target)
            except NotExpressible as error:
                results.append(f"{name} has no form for it ({error})")
                continue
            source = open_source(export, form)
            for param in param_table(stored.config, stored.vocab_size):
                ours, theirs = stored.tensor(param.name), source.tensor(param.name)
                if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
                    raise ValueError(f"the export to {name} changes {param.name}")
            distance = logits_difference(export, form, folder, "herd") if fits else 0.0
        if not distance <= LOGITS:
            raise ValueError(f"the export to {name} gives logits that differ by {distance:.1e}; allowed {LOGITS:.0e}")
        logits = f", logits differ by at most {distance:.0e}" if distance else ", logits equal"
        results.append(f"{name} equal" + (logits if fits else ""))
    return "; ".join(results) + ("" if fits else "; too large to compare logits here")
