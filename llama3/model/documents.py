"""Which keys a query may read: the same document, not later, wherever both stand.

Documents share a sequence, and attention never crosses from one to the next (Llama 3, section 3.2). Each way of
computing attention wants that in a form of its own, so it is brought into one form per batch, for all layers:
nothing, if each sequence is one document and keys are in order; lengths of documents, where the processor takes one
after another; their starts on the device, for the kernel that packs them; a map of blocks, for keys that context
parallelism has put in another order; and a mask of every query and key, which any device can use and which costs most.

Lengths and starts are counted on the host. Documents that are given on the CPU cost no wait; on a device they do, once
per batch, so a trainer leaves them on the host.

Shapes: B batch, S sequence, Q queries held here, T keys held here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

SHORTEST = 4
"""Mean tokens of a document below which one mask costs less than a call for each."""
PACKED = (torch.bfloat16, torch.float16)
"""What the kernel for packed documents takes."""


class Visible(NamedTuple):
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
) -> Visible:
    """Return what the queries at positions `queries_Q` may read of the keys at `keys_T`, both on the model's device.

    `documents_BS` numbers the document of every token of the whole sequences, best on the CPU; None says that each
    sequence is one. `dtype` is that of queries and keys; `compiled` layers get no lengths, which differ in each batch.
    """
    in_order = queries_Q is keys_T
    if documents_BS is None and in_order:
        return Visible()
    if queries_Q.device.type == "cuda":
        if documents_BS is not None and in_order and dtype in PACKED:
            return Visible(starts=_starts(document_lengths(documents_BS)).to(queries_Q.device, non_blocking=True))
        return Visible(blocks=_blocks(documents_BS, queries_Q, keys_T))
    if documents_BS is not None and in_order and not compiled:
        lengths = document_lengths(documents_BS)
        if len(lengths) * SHORTEST <= documents_BS.numel():
            return Visible(lengths=lengths)
    return Visible(mask=readable(documents_BS, queries_Q, keys_T))


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
