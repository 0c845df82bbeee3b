"""Grouped-query attention that never crosses a document boundary, by the fastest kernel that a device has for it.

All ways equal the masked one, which any device takes. On the CPU each document is a causal call of its own, which
computes half of a square per document instead of the whole square of the sequence. On CUDA whole sequences go to cuDNN
or flash attention, documents to the packed flash kernel, and keys in another order (context parallelism) to a compiled
FlexAttention. The CUDA ways follow torch's documented signatures of 2.11 and 2.13 and were not run on a GPU.

Shapes: B batch, S sequence, T keys, D model, H query heads, K key/value heads, E features of a head, L tokens of a
document.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from llama3.model.comms import Comms
from llama3.model.linear import Linear
from llama3.model.recompute import made_again
from llama3.model.rope import rotate

# Which keys a query may read: the same document, not later, wherever both stand.
#
# Documents share a sequence, and attention never crosses from one to the next (Llama 3, section 3.2). Each way of
# computing attention wants that in a form of its own, so it is brought into one form per batch, for all layers:
# nothing, if each sequence is one document and keys are in order; lengths of documents, where the processor takes
# one after another; their starts on the device, for the kernel that packs them; a map of blocks, for keys that
# context parallelism has put in another order; and a mask of every query and key, which any device can use and
# which costs most.
#
# Lengths and starts are counted on the host. Documents that are given on the CPU cost no wait; on a device they do,
# once per batch, so a trainer leaves them on the host.
#
# Shapes: B batch, S sequence, Q queries held here, T keys held here.

SHORTEST = 4
"""Mean tokens of a document below which one mask costs less than a call for each."""
PACKED = (torch.bfloat16, torch.float16)
"""What the kernel for packed documents takes."""


class AttentionMask(NamedTuple):
    """What attention needs to know of a batch, made once for all layers; at most one of these is set.

    None is: plain causal over queries and keys in order; a single query stands last and reads all keys.
    """

    mask: Tensor | None = None
    """bool [B or 1, 1, Q, T]."""
    lengths: tuple[int, ...] | None = None
    """Of the documents of all sequences, one sequence after another; they sum to B S."""
    starts: Tensor | None = None
    """int32: where each document begins among the B S tokens, then B S, again and again up to a power of two."""
    blocks: Any = None
    """torch's BlockMask."""


def visible(
    documents_BS: Tensor | None,
    queries_Q: Tensor,
    keys_T: Tensor,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
) -> AttentionMask:
    """Return what the queries at positions `queries_Q` may read of the keys at `keys_T`, both on the model's device.

    `documents_BS` numbers the document of every token of the whole sequences, best on the CPU; None says that each
    sequence is one. `dtype` is that of queries and keys; `compiled` layers get no lengths, which differ in each batch.
    """
    in_order = queries_Q is keys_T
    if documents_BS is None and in_order:
        return AttentionMask()
    if queries_Q.device.type == "cuda":
        if documents_BS is not None and in_order and dtype in PACKED:
            return AttentionMask(starts=_starts(document_lengths(documents_BS)).to(queries_Q.device, non_blocking=True))
        return AttentionMask(blocks=_blocks(documents_BS, queries_Q, keys_T))
    if documents_BS is not None and in_order and not compiled:
        lengths = document_lengths(documents_BS)
        if len(lengths) * SHORTEST <= documents_BS.numel():
            return AttentionMask(lengths=lengths)
    return AttentionMask(mask=readable(documents_BS, queries_Q, keys_T))


def readable(documents_BS: Tensor | None, queries_Q: Tensor, keys_T: Tensor) -> Tensor:
    """Return bool [B or 1, 1, Q, T]: whether a query may read a key. The reference for every other form."""
    mask = (queries_Q.unsqueeze(1) >= keys_T.unsqueeze(0)).unsqueeze(0)
    if documents_BS is not None:
        documents_BS = documents_BS.to(queries_Q.device)
        mask = mask & (documents_BS[:, queries_Q].unsqueeze(2) == documents_BS[:, keys_T].unsqueeze(1))
    return mask.unsqueeze(1)


def document_lengths(documents_BS: Tensor) -> tuple[int, ...]:
    """Return the tokens of each document, where a document ends with its sequence; waits for a device."""
    new_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    torch.ne(documents_BS[:, 1:], documents_BS[:, :-1], out=new_BS[:, 1:])
    starts = new_BS.flatten().nonzero().flatten().tolist()
    return tuple(end - start for start, end in zip(starts, [*starts[1:], new_BS.numel()], strict=True))


def _starts(lengths: tuple[int, ...]) -> Tensor:
    """Return the starts, their number rounded up so that a compiled layer meets few different ones."""
    room = 2 ** len(lengths).bit_length()
    padded = torch.tensor([0, *lengths, *[0] * (room - len(lengths))], dtype=torch.int64)
    return padded.cumsum(0).to(torch.int32)


def _blocks(documents_BS: Tensor | None, queries_Q: Tensor, keys_T: Tensor) -> Any:
    """Return the map of 128 x 128 blocks; made by a compiled kernel, or Q x T of them would stand in memory."""
    from torch.nn.attention.flex_attention import create_block_mask

    held_BS = None if documents_BS is None else documents_BS.to(queries_Q.device, non_blocking=True)

    def may_read(b: Tensor, h: Tensor, q: Tensor, t: Tensor) -> Tensor:
        asking, asked = queries_Q[q], keys_T[t]
        causal = asking >= asked
        return causal if held_BS is None else causal & (held_BS[b, asking] == held_BS[b, asked])

    batch = None if held_BS is None else len(held_BS)
    return create_block_mask(
        may_read, batch, None, len(queries_Q), len(keys_T), device=queries_Q.device, _compile=queries_Q.is_cuda
    )


PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
TOLD_OF_GROUPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether varlen_attn wants to be told of grouped heads: 2.13 does, 2.11 has no such argument and just takes them."""


def attend(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, visible: AttentionMask) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v over what is visible, [B, S, H, E]."""
    if visible.starts is not None:
        return _packed(q_BSHE, k_BTKE, v_BTKE, visible.starts)
    if visible.blocks is not None:
        return _flex(q_BSHE, k_BTKE, v_BTKE, visible.blocks)
    if q_BSHE.is_cuda:
        with sdpa_kernel(PRIORITY, set_priority=True):
            return _sdpa(q_BSHE, k_BTKE, v_BTKE, visible.mask)
    if visible.lengths is not None:
        return _each_document(q_BSHE, k_BTKE, v_BTKE, visible.lengths)
    return _sdpa(q_BSHE, k_BTKE, v_BTKE, visible.mask)


def _sdpa(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Tensor | None) -> Tensor:
    q_BHSE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in (q_BSHE, k_BTKE, v_BTKE))
    if q_BSHE.shape[1] == 1 and (mask is None or mask.shape[1] == 1):
        return _one_query(q_BHSE, k_BKTE, v_BKTE, mask).transpose(1, 2)
    out_BHSE = F.scaled_dot_product_attention(
        q_BHSE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out_BHSE.transpose(1, 2)


def _one_query(q_BH1E: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None) -> Tensor:
    """Return attention of the last token alone: the heads that share keys are as many queries of one head.

    So keys are read once and not once for each head: half the time or less from a thousand keys on.
    """
    grouped_BKGE = q_BH1E.view(len(q_BH1E), k_BKTE.shape[1], -1, q_BH1E.shape[-1])
    return F.scaled_dot_product_attention(grouped_BKGE, k_BKTE, v_BKTE, attn_mask=mask).view_as(q_BH1E)


def _each_document(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Return attention one document after another: sum of L^2 / 2 scores instead of B S^2."""
    by_document = zip(*(torch.split(x.flatten(0, 1), list(lengths)) for x in (q_BSHE, k_BSKE, v_BSKE)), strict=True)
    out = [_sdpa(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None).squeeze(0) for q, k, v in by_document]
    return torch.cat(out).view_as(q_BSHE)


def _packed(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, starts: Tensor) -> Tensor:
    """Return attention by the kernel for documents one after another (flash attention 2 in plain torch); CUDA."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, 1 s or more

    most = q_BSHE.shape[1]  # no document is longer; the true maximum would be another number in each batch
    more: dict[str, Any] = {"enable_gqa": True} if TOLD_OF_GROUPS else {}
    q, k, v = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
    out: Any = varlen_attn(q, k, v, starts, starts, most, most, window_size=(-1, 0), **more)
    packed: Tensor = out.view_as(q_BSHE)
    return packed


def _flex(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, blocks: Any) -> Tensor:
    """Return attention over any positions; CUDA (torch's CPU version has no backward pass)."""
    q_BHSE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in (q_BSHE, k_BTKE, v_BTKE))
    kernel = _flex_attention() if torch.compiler.is_compiling() else _compiled_flex_attention()
    out_BHSE: Tensor = kernel(q_BHSE, k_BKTE, v_BKTE, block_mask=blocks, enable_gqa=True)
    return out_BHSE.transpose(1, 2)


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex_attention() -> Any:
    """Return FlexAttention, compiled where it can be: without, it would make every score."""
    return torch.compile(_flex_attention(), dynamic=False) if torch.cuda.is_available() else _flex_attention()


class Attention(nn.Module):
    """Projections without biases around scaled dot-product attention."""

    def __init__(self, dim: int, heads: int, kv_heads: int, exchange: Comms) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.exchange = exchange
        self.q = Linear(dim, heads * self.head_dim)
        self.k = Linear(dim, kv_heads * self.head_dim)
        self.v = Linear(dim, kv_heads * self.head_dim)
        self.o = Linear(heads * self.head_dim, dim)

    def forward(
        self, x_BSD: Tensor, table: tuple[Tensor, Tensor], visible: AttentionMask, spare: bool = False
    ) -> Tensor:
        """Return [B, S, D], a partial sum if heads are cut; `table` is the rotary one of the queries here.

        With `spare` only the keys and values of this process are kept, and those of its peers gathered again.
        """
        q_BSHE, k_BSKE, v_BSKE = (
            project(x_BSD).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v)
        )
        q_BSHE, k_BSKE = rotate(q_BSHE, table), rotate(k_BSKE, table)
        k_BTKE, v_BTKE = self.exchange.keys(k_BSKE, v_BSKE)
        gathered = k_BTKE is not k_BSKE
        with made_again(k_BTKE, self._keys, k_BSKE, v_BSKE, wanted=spare and gathered):
            out_BSHE = attend(q_BSHE, k_BTKE, v_BTKE, visible)
        mixed: Tensor = self.o(out_BSHE.flatten(2))
        return mixed

    def _keys(self, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        """Return keys [B, T, K, E], in one piece of memory with the values."""
        return self.exchange.keys(k_BSKE, v_BSKE)[0]
