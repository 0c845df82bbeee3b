"""Grouped-query attention within documents, by the fastest kernel of each device, with rotary positions.

All ways equal the masked one. CPU: one causal call per document. CUDA: cuDNN or flash attention for whole sequences,
the packed flash kernel for documents (version 3 on Hopper where it is installed, else 2), FlexAttention for keys in
another order (context parallelism). On a GPU each is within 0.5 % of fp64 in bf16, gradients included (`python -m
benchmarks train --only gpu/attention`).

Shapes: B batch, S sequence, Q queries and T keys of this process, D model, H query heads, K key/value heads,
E features of a head, L tokens of a document.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from herd.llama3.model.comms import Comms
from herd.llama3.model.linear import Linear
from herd.llama3.model.recompute import recomputed
from herd.llama3.recipe.sections import Model, RopeScaling

SHORTEST = 4
"""Mean tokens of a document below which one mask is cheaper than a call per document."""
PACKED = (torch.bfloat16, torch.float16)
"""Types that the packed kernel accepts."""
HOPPER = (9, 0)
"""Compute capability of the H100 and H200, for which FlashAttention 3 is written."""
FLASH_3 = "flash_attn_interface"
"""Module of FlashAttention 3 (package flash-attn-3)."""
PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class AttentionMask(NamedTuple):
    """Which keys each query may read: earlier or equal ones of its document (Llama 3, section 3.2).

    Made once per batch, for all layers, in the form that a kernel needs; at most one field is set. None: causal over
    queries and keys in order, or a single query that is last and reads all keys.
    """

    mask: Tensor | None = None
    """bool [B or 1, 1, Q, T]: any device, the most expensive form."""
    lengths: tuple[int, ...] | None = None
    """Lengths of the documents of all sequences, one sequence after another; they sum to B S."""
    starts: Tensor | None = None
    """int32: start of each document among the B S tokens, then B S repeated up to a power of two."""
    blocks: Any = None
    """torch's BlockMask."""


def attention_mask(
    documents_BS: Tensor | None,
    queries_Q: Tensor,
    keys_T: Tensor,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
) -> AttentionMask:
    """Return which of the keys at positions `keys_T` the queries at `queries_Q` may read; both on the model's device.

    `documents_BS` is the document number of each token of the whole sequences; None: each sequence is one document.
    Keep it on the CPU: lengths are counted on the host, and a device tensor would cost a synchronization.
    `dtype` is that of queries and keys. `compiled` layers get no lengths, which differ between batches.
    """
    in_order = queries_Q is keys_T
    if documents_BS is None and in_order:
        return AttentionMask()
    if queries_Q.device.type == "cuda":
        if documents_BS is not None and in_order and dtype in PACKED:
            starts = _starts(document_lengths(documents_BS)).pin_memory()  # else the copy may wait for the device
            return AttentionMask(starts=starts.to(queries_Q.device, non_blocking=True))
        return AttentionMask(blocks=_blocks(documents_BS, queries_Q, keys_T))
    if documents_BS is not None and in_order and not compiled:
        lengths = document_lengths(documents_BS)
        if len(lengths) * SHORTEST <= documents_BS.numel():
            return AttentionMask(lengths=lengths)
    return AttentionMask(mask=can_attend(documents_BS, queries_Q, keys_T))


def can_attend(documents_BS: Tensor | None, queries_Q: Tensor, keys_T: Tensor) -> Tensor:
    """Return bool [B or 1, 1, Q, T]: whether a query may read a key. The reference for all other forms."""
    mask = (queries_Q.unsqueeze(1) >= keys_T.unsqueeze(0)).unsqueeze(0)
    if documents_BS is not None:
        documents_BS = documents_BS.to(queries_Q.device)
        mask = mask & (documents_BS[:, queries_Q].unsqueeze(2) == documents_BS[:, keys_T].unsqueeze(1))
    return mask.unsqueeze(1)


def document_lengths(documents_BS: Tensor) -> tuple[int, ...]:
    """Return the length of each document; a document ends with its sequence. Synchronizes with a device."""
    new_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    torch.ne(documents_BS[:, 1:], documents_BS[:, :-1], out=new_BS[:, 1:])
    starts = new_BS.flatten().nonzero().flatten().tolist()
    return tuple(end - start for start, end in zip(starts, [*starts[1:], new_BS.numel()], strict=True))


def _starts(lengths: tuple[int, ...]) -> Tensor:
    """Return the starts, padded to a power of two so that a compiled layer meets few different shapes."""
    capacity = 2 ** len(lengths).bit_length()
    padded = torch.tensor([0, *lengths, *[0] * (capacity - len(lengths))], dtype=torch.int64)
    return padded.cumsum(0).to(torch.int32)


def _blocks(documents_BS: Tensor | None, queries_Q: Tensor, keys_T: Tensor) -> Any:
    """Return the BlockMask of 128 x 128 blocks."""
    on_device_BS = None if documents_BS is None else documents_BS.to(queries_Q.device, non_blocking=True)

    def may_read(b: Tensor, h: Tensor, q: Tensor, t: Tensor) -> Tensor:
        query, key = queries_Q[q], keys_T[t]
        causal = query >= key
        return causal if on_device_BS is None else causal & (on_device_BS[b, query] == on_device_BS[b, key])

    batch = None if on_device_BS is None else len(on_device_BS)
    return _create_block_mask()(may_read, batch, None, len(queries_Q), len(keys_T), device=queries_Q.device)


def use_flash(version: Literal["auto", 2, 3], device: torch.device) -> int:
    """Choose the flash attention of this process, for packed documents above all; return its version.

    auto: FlashAttention 3 on Hopper if it is installed, for deterministic operations torch's own 2. Raises ValueError
    if 3 is asked for and cannot run. Call it before a block is compiled.
    """
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    restore_flash_attention_impl(_raise_warn=False)
    if version == 2 or (version == "auto" and torch.are_deterministic_algorithms_enabled()):
        return 2
    if device.type != "cuda":
        if version == "auto":
            return 2
        raise ValueError("cluster.layout.flash: 3 needs GPUs; leave it out on processors")
    if (capability := torch.cuda.get_device_capability(device)) != HOPPER:
        if version == "auto":
            return 2
        name, number = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise ValueError(
            f"cluster.layout.flash: 3 needs an H100 or H200 (compute capability 9.0), {name} has {number}; write auto"
        )
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError) as error:
        if version == 3:
            raise ValueError(
                f"cluster.layout.flash: 3 needs the package flash-attn-3 ({error}); install it or write auto"
            ) from error
        if not (isinstance(error, ModuleNotFoundError) and error.name == FLASH_3):  # installed, and cannot be loaded
            warnings.warn(f"{FLASH_3}: {error}; documents take FlashAttention 2, which is slower", stacklevel=2)
        return 2
    return 3


def flash_version() -> int:
    """Return the version of the flash attention that this process takes."""
    from torch.nn.attention import current_flash_attention_impl

    return 3 if current_flash_attention_impl() == "FA3" else 2


def attend(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, visible: AttentionMask) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v over the visible keys, [B, S, H, E]."""
    if visible.starts is not None:
        return _packed(q_BSHE, k_BTKE, v_BTKE, visible.starts)
    if visible.blocks is not None:
        return _flex(q_BSHE, k_BTKE, v_BTKE, visible.blocks)
    if q_BSHE.is_cuda:
        with sdpa_kernel(PRIORITY, set_priority=True):
            return _sdpa(q_BSHE, k_BTKE, v_BTKE, visible.mask)
    if visible.lengths is None:
        return _sdpa(q_BSHE, k_BTKE, v_BTKE, visible.mask)
    # One call per document: sum of L^2 / 2 scores instead of B S^2.
    lengths = list(visible.lengths)
    by_document = zip(*(torch.split(x.flatten(0, 1), lengths) for x in (q_BSHE, k_BTKE, v_BTKE)), strict=True)
    out = [_sdpa(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None).squeeze(0) for q, k, v in by_document]
    return torch.cat(out).view_as(q_BSHE)


def _sdpa(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Tensor | None) -> Tensor:
    q_BHSE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in (q_BSHE, k_BTKE, v_BTKE))
    if q_BSHE.shape[1] == 1 and (mask is None or mask.shape[1] == 1):
        # Decoding: the query heads that share a key head become queries of one head, so keys are read once and not
        # once per head; half the time or less from a thousand keys on.
        grouped_BKGE = q_BHSE.view(len(q_BHSE), k_BKTE.shape[1], -1, q_BHSE.shape[-1])
        out_BKGE = F.scaled_dot_product_attention(grouped_BKGE, k_BKTE, v_BKTE, attn_mask=mask)
        return out_BKGE.reshape(q_BHSE.shape).transpose(1, 2)  # kernels of GPUs return other strides
    out_BHSE = F.scaled_dot_product_attention(
        q_BHSE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out_BHSE.transpose(1, 2)


def _packed(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, starts: Tensor) -> Tensor:
    """Return attention over packed documents by flash attention (see `use_flash`); CUDA only."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, 1 s or more

    longest = q_BSHE.shape[1]  # an upper bound: the true maximum would be a new shape in each batch
    q, k, v = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
    out: Any = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), enable_gqa=True)
    packed: Tensor = out.view_as(q_BSHE)
    return packed


def _flex(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, blocks: Any) -> Tensor:
    """Return attention over arbitrary positions; CUDA only (torch's CPU version has no backward pass)."""
    from torch.nn.attention.flex_attention import flex_attention  # imports torch's compiler

    q_BHSE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in (q_BSHE, k_BTKE, v_BTKE))
    kernel = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    out_BHSE: Tensor = kernel(q_BHSE, k_BKTE, v_BKTE, block_mask=blocks, enable_gqa=True)
    return out_BHSE.transpose(1, 2)


@cache
def _create_block_mask() -> Any:
    """Return torch's function, compiled on CUDA: without compilation all Q x T values would be in memory."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask) if torch.cuda.is_available() else create_block_mask


@cache
def _compiled_flex_attention() -> Any:
    """Return FlexAttention, compiled on CUDA: without compilation it materializes all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if torch.cuda.is_available() else flex_attention


class Attention(nn.Module):
    """Attention with its projections, without biases."""

    def __init__(self, config: Model, comms: Comms) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.comms = comms
        self.q = Linear(config.dim, config.dim)
        self.k = Linear(config.dim, config.kv_dim)
        self.v = Linear(config.dim, config.kv_dim)
        self.o = Linear(config.dim, config.dim)

    def forward(
        self, x_BSD: Tensor, table: tuple[Tensor, Tensor], visible: AttentionMask, spare: bool = False
    ) -> Tensor:
        """Return [B, S, D], a partial sum under tensor parallelism; `table` is the rotary one of these queries.

        `spare` saves memory: backward keeps only this process's keys and values and gathers the others again.
        """
        q_BSHE, k_BSKE, v_BSKE = (
            project(x_BSD).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v)
        )
        q_BSHE, k_BSKE = rotate(q_BSHE, table), rotate(k_BSKE, table)
        k_BTKE, v_BTKE = self.comms.all_gather_kv(k_BSKE, v_BSKE)
        gathered = k_BTKE is not k_BSKE

        def gather_again(k: Tensor, v: Tensor) -> Tensor:
            return self.comms.all_gather_kv(k, v)[0]  # the keys; the values share their memory

        with recomputed(k_BTKE, gather_again, k_BSKE, v_BSKE, enabled=spare and gathered):
            out_BSHE = attend(q_BSHE, k_BTKE, v_BTKE, visible)
        mixed: Tensor = self.o(out_BSHE.flatten(2))
        return mixed


# Rotary position embedding (RoFormer, arXiv 2104.09864; base frequency 500,000 as in Llama 3, section 3.2). Features i
# and i + E/2 of a head form a rotated pair, as in Hugging Face checkpoints; Meta's files interleave the pairs, so a
# writer of that format permutes the rows of q and k. Positions count from the start of the sequence, not of the
# document: scores depend on differences only. Llama 3.1 slows low frequencies to reach 131,072 tokens (`RopeScaling`).


def rotation(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [S, 1, E/2] of the angles position x frequency, in `dtype`, on the device of `positions`.

    `positions` is int64 [S], not necessarily consecutive (context parallelism). If they differ between sequences they
    are [B, S], and the result is [B, S, 1, E/2].
    """
    # Computed in float64 in each forward pass: a stored table would be a buffer to move, shard and keep out of files.
    turns = frequencies(head_dim, theta, scaling, positions.device)
    angles = (positions.double().unsqueeze(-1) * turns).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | str = "cpu") -> Tensor:
    """Return the angle per position of each pair of features in radians [E/2], float64.

    Plain: f = theta^(-2i/E). Scaled, as in Llama 3.1: f (s + (1 - s) / factor), where s (`smooth`) interpolates the
    turns within the original length, original x f / 2 pi, from low_freq_factor (s = 0) to high_freq_factor (s = 1).
    Linear: f / factor.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    plain = theta**-exponents
    if scaling is None:
        return plain
    if scaling.type == "linear":
        return plain / scaling.factor
    turns = scaling.original * plain / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return plain * (smooth + (1 - smooth) / scaling.factor)


def rotate(x_BSNE: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys rotated by the angles in `table`, computed in the table's precision."""
    if not torch.is_grad_enabled():
        return _rotate(x_BSNE, *table)
    apply: Any = _Rotated.apply  # torch leaves it untyped
    rotated: Tensor = apply(x_BSNE, *table)
    return rotated


class _Rotated(torch.autograd.Function):
    """Backward is the inverse rotation, so no products are saved."""

    @staticmethod
    def forward(ctx: Any, x_BSNE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x_BSNE, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(gradients[0], cosine, -sine), None, None


def _rotate(x_BSNE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x_BSNE.chunk(2, dim=-1)
    if x_BSNE.dtype != cosine.dtype or torch.compiler.is_compiling():
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x_BSNE.dtype)
    rotated = torch.empty_like(x_BSNE)
    first_out, second_out = rotated.chunk(2, dim=-1)  # written in place: no copy to concatenate the halves
    torch.mul(first, cosine, out=first_out).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=second_out).addcmul_(first, sine)
    return rotated
