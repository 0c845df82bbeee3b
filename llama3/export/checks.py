"""Whether a model folder is a whole model that others can be given: it loads, and exports carry the same model.

Every parameter is written as Hugging Face's and as Meta's files, read back through our readers, and compared bit by
bit, one at a time; then the model is built anew from what was read, shape included, and must give the same logits on a
fixed batch. So a swapped, unpermuted or dropped piece is found by its bits or, like a wrong scaling or epsilon, by the
logits. What this gives up: a model of more than `LOGITS_BYTES` is compared by its parameters and shape alone, and an
export takes as much disk as the model while it is looked at.
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

from llama3.evaluate.gate import Check, Unfinished
from llama3.export.convert import Format, Target, convert, open_source
from llama3.export.meta import meta_settings
from llama3.export.names import WeightReader, names
from llama3.model.files import open_model
from llama3.model.init import empty
from llama3.model.rounding import keep_rounding
from llama3.recipe.sections import Model
from llama3.tokens.tokenizer import Tokenizer

# Whether two folders hold the same model: the largest difference of their logits.
#
# Both are computed by our transformer in fp32, from weights and settings that each format's own reader gives, so a
# folder that was exported without a fault gives exactly the same bits, and the smallest fault (a row out of place,
# a rotary setting or an epsilon that did not go along) gives others. A bf16 comparison would hide a wrong rotary
# setting. What this gives up: a fault that writer and reader share stays unseen, which is why tests compare with
# transformers; and one whole model in fp32 must fit in memory.

COMPARED_POSITIONS = 512
"""Positions that are compared: dropping the scaling of Llama 3.1 changes logits by 10 % there."""


def logits_difference(
    one: Path, one_format: Format, other: Path, other_format: Format, positions: int = COMPARED_POSITIONS
) -> float:
    """Return the largest difference of the logits of two model folders, relative to the largest logit of `other`.

    At most `positions` positions of random tokens are computed, the same each time. 0.0: the same model, bit for bit;
    NaN: one of them gives NaN. Raises ValueError if a folder is no Llama 3, or their vocabularies differ.
    """
    first, second = open_source(one, one_format), open_source(other, other_format)
    if first.rows != second.rows:
        raise ValueError(f"{one} has {first.rows} embedding rows, {other} {second.rows}; name two forms of one model")
    count = min(positions, first.spec.max_seq, second.spec.max_seq)
    tokens_1S = torch.randint(0, first.rows, (1, count), generator=torch.Generator().manual_seed(0))
    found, due = logits(first, tokens_1S), logits(second, tokens_1S)
    return float((found - due).abs().max() / due.abs().max())


@torch.inference_mode()
def logits(source: WeightReader, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of a model for `tokens_BS`, in fp32 on the CPU."""
    keep_rounding()
    model = empty(source.spec, source.rows)
    state = {name.ours: source.tensor(name.ours).to(torch.float32, copy=True) for name in names(source.spec)}
    model.load_state_dict(state, assign=True)
    return model.eval()(tokens_BS, None)  # type: ignore[no-any-return]


RELOAD, EXPORT, TOKENIZER = "integrity/reload", "integrity/export", "integrity/tokenizer"
LOGITS_BYTES = 4 * 10**9
"""Parameters of a model, in fp32, up to which it is held in memory twice to compare logits."""
LOGITS = 1e-5
"""Largest difference of two logits, relative to the largest logit, in fp32."""
POSITIONS = 64
FORMATS: tuple[tuple[Target, Format, str], ...] = (
    ("hf", "hf", "Hugging Face"),
    ("meta-safetensors", "meta", "Meta"),
)
"""How each is written, how it is read, and its name."""
BROKEN = (ValueError, OSError, RuntimeError, SafetensorError, MemoryError)
"""What a damaged file or a model that does not fit its shape raises, or a machine that cannot look at it."""
ABSENT = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR)
"""Numbers of an OSError that say something of the folder, and not of disk, network or memory."""
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)


def vet_model(folder: Path, scratch: Path) -> list[Check]:
    """Return what is to be said of reading the model in `folder` and of its exports, which are written to `scratch`."""
    return [checked(RELOAD, lambda: _reload(folder)), checked(EXPORT, lambda: _export(folder, scratch))]


def vet_tokenizer(folder: Path, digest: str) -> Check:
    """Return whether the tokenizer in `folder` is that with the digest `digest`."""

    def compare() -> str:
        found = Tokenizer.load(folder).digest
        if found != digest:
            raise ValueError(f"the tokenizer beside the model is {found[:12]}, its tokens were made with {digest[:12]}")
        return f"the tokenizer is {digest[:12]}, as when its tokens were made"

    return checked(TOKENIZER, compare)


def is_of_the_machine(error: BaseException) -> bool:
    """Return whether `error` says nothing of the model: memory, a full disk or a network was missing."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno not in ABSENT
    said = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
    if said is not None:
        return int(said[1]) not in ABSENT
    if isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)):
        return True
    return error.__cause__ is not None and is_of_the_machine(error.__cause__)


def checked(metric: str, work: Callable[[], str]) -> Check:
    """Return the check `metric`: passed with what `work` returns, failed with what it raises (one of `BROKEN`).

    Raises Unfinished where that is the machine's fault: the decision stays open then.
    """
    try:
        return Check(metric=metric, passed=True, reason=work())
    except Unfinished:
        raise
    except BROKEN as error:
        if is_of_the_machine(error):
            words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise Unfinished(f"{metric}: the check did not come to its end ({words[:400]})") from error
        return Check(metric=metric, passed=False, reason=" ".join(str(error).split())[:400])


def _reload(folder: Path) -> str:
    """Say how many parameters were read. Raises ValueError if one, or a logit, is not finite."""
    stored, count = open_model(folder), 0
    for name, tensor in stored:
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds numbers that are not finite; train again from an earlier checkpoint")
        count += tensor.numel()
    if _fits(stored) and not bool(torch.isfinite(logits(stored, _tokens(stored.rows))).all()):
        raise ValueError("its logits are not finite; train again from an earlier checkpoint")
    return f"loads: {count:,} parameters, all finite"


def _export(folder: Path, scratch: Path) -> str:
    """Say which exports hold the same model. Raises ValueError naming the one that does not."""
    scratch.mkdir(parents=True, exist_ok=True)
    stored, said = open_model(folder), []
    fits = _fits(stored)
    for target, form, name in FORMATS:
        if form == "meta" and (why := _inexpressible(stored.spec, stored.rows)):
            said.append(f"{name} has no form for it ({why})")
            continue
        with tempfile.TemporaryDirectory(dir=scratch, prefix="export-") as place:
            made = Path(place) / target
            convert(folder, "herd", made, target)
            _compare(stored, open_source(made, form), name)
            distance = logits_difference(made, form, folder, "herd") if fits else 0.0
        if not distance <= LOGITS:
            raise ValueError(f"the export to {name} gives logits that differ by {distance:.1e}; allowed {LOGITS:.0e}")
        logits = f", logits differ by at most {distance:.0e}" if distance else ", logits equal"
        said.append(f"{name} equal" + (logits if fits else ""))
    return "; ".join(said) + ("" if fits else "; too large to compare logits here")


def _inexpressible(spec: Model, rows: int) -> str:
    """Return why Meta's params.json cannot say this shape, empty if it can."""
    try:
        meta_settings(spec, rows)
    except ValueError as error:
        return str(error)
    return ""


def _compare(stored: WeightReader, read: WeightReader, name: str) -> None:
    """Raise ValueError unless both hold the same bits."""
    for parameter in names(stored.spec):
        ours, theirs = stored.tensor(parameter.ours), read.tensor(parameter.ours)
        if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
            raise ValueError(f"the export to {name} changes {parameter.ours}")


def _tokens(rows: int) -> Tensor:
    """Return a batch [1, POSITIONS] of ids, always the same."""
    place = torch.arange(POSITIONS)
    return ((place * place * 7 + place * 3) % rows)[None]


def _fits(stored: WeightReader) -> bool:
    shapes = empty(stored.spec, stored.rows).parameters()
    return 4 * sum(parameter.numel() for parameter in shapes) <= LOGITS_BYTES
