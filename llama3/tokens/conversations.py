"""Conversations as sequences of tokens: encode, split, pack, and read them as the stream of a stage of kind `sft`.

Conversations are packed whole into sequences of fixed length, the longest first, each into the sequence with the least
room that is left (best-fit decreasing); one that is longer than a sequence is cut at its end. Attention stays inside a
conversation. The sequence at each position of a stage is a pure function of (recipe, artifacts, position).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from herd.llama3.data.mapreduce import held_out_bound
from herd.llama3.data.readers.files import SourceError
from herd.llama3.recipe.base import CONVERSATIONS, DOMAINS
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Tokens
from herd.llama3.tokens.chat import PADDING, encode_conversation
from herd.llama3.tokens.interleave import MixtureInterleaver
from herd.llama3.tokens.kernels import IGNORED, Ints
from herd.llama3.tokens.shards import token_dtype
from herd.llama3.tokens.source_stream import shuffled_order
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.storage.filesystem import write_atomic

NAME = "conversations.json"
HELD_OUT = "held-out.jsonl"
"""Held-out conversations as text, for models with any tokenizer."""
COLUMNS = ("tokens", "targets", "segments")
"""Files `<column>-<seq_len>.npy`, [sequences, seq_len] each: ids, whether the token is a target, and the number of the
conversation inside its sequence; padding is a separate segment without targets."""


def prepare_conversations(recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Encode the conversations of `recipe`, hold some of them out, and write the packed rest into `folder`.

    `curate.validation_fraction` of them, or the minimum, is held out by a hash of roles and contents; repeated ones are
    dropped. The sources are read twice, first to choose what is held out. Memory holds the tokens of all conversations.
    Returns counts: `conversations` and `held_out`, and of the training conversations `turns` (messages of the
    assistant), `tokens`, `target_tokens`, `dropped` by reason, `sources`, `licenses`, and by sequence length `packing`:
    sequences, padding, cut and dropped conversations. Raises SourceError for a broken row and sources without a
    training conversation, ValueError for a tokenizer without the special tokens.
    """
    from herd.llama3.data.readers.conversations import read_conversations  # a trainer reads no source
    from herd.llama3.data.readers.sources import source_names

    ids, mask, lengths = array("I"), bytearray(), array("q")
    seen: set[bytes] = set()
    bound = _held_out_bound(recipe)
    counts = {"conversations": 0, "held_out": 0, "turns": 0, "tokens": 0, "target_tokens": 0, "duplicates": 0}
    sources: dict[str, dict[str, int]] = {}
    licenses: dict[str, int] = {}
    with (folder / HELD_OUT).open("w", encoding="utf-8") as held_out:
        for name, source in zip(source_names(recipe.conversations), recipe.conversations, strict=True):
            own = sources.setdefault(name, {"conversations": 0, "tokens": 0, "target_tokens": 0})
            for row in read_conversations(source, recipe.documents_seed):
                digest = conversation_digest(row.messages)
                if digest in seen:
                    counts["duplicates"] += 1
                    continue
                seen.add(digest)
                if _draw(digest) < bound:
                    counts["held_out"] += 1
                    held_out.write(
                        json.dumps({"id": digest.hex(), "messages": row.messages}, ensure_ascii=False) + "\n"
                    )
                    continue
                tokens, targets = encode_conversation(tokenizer, row.messages)
                ids.extend(tokens)
                mask.extend(targets)
                lengths.append(len(tokens))
                counts["turns"] += sum(message["role"] == "assistant" for message in row.messages)
                for total in (counts, own):
                    total["conversations"] += 1
                    total["tokens"] += len(tokens)
                    total["target_tokens"] += sum(targets)
                licenses[row.license] = licenses.get(row.license, 0) + len(tokens)
    if not counts["conversations"]:
        raise SourceError(
            f"conversations: none is left to train on, {counts['held_out']} are held out; add some, or lower "
            "curate.validation_fraction"
        )
    columns = np.frombuffer(ids, np.uint32), np.frombuffer(mask, np.bool_), np.frombuffer(lengths, np.int64)
    dtype = token_dtype(recipe, tokenizer.vocab_size)
    padding = tokenizer.specials.get(PADDING, tokenizer.end)
    packing = {
        str(seq_len): write_sequences(folder, seq_len, *columns, dtype, padding) for seq_len in recipe.sft_lengths
    }
    write_atomic(folder / NAME, json.dumps({"tokenizer": tokenizer.digest, "packing": packing}, indent=1) + "\n")
    dropped = {"duplicate": counts.pop("duplicates")}
    return {**counts, "dropped": dropped, "sources": sources, "licenses": licenses, "packing": packing}


def _held_out_bound(recipe: Recipe) -> int:
    """Return the draw below which a conversation is held out."""
    from herd.llama3.data.readers.conversations import read_conversations

    rows = chain.from_iterable(read_conversations(source, recipe.documents_seed) for source in recipe.conversations)
    draws = sorted({_draw(conversation_digest(row.messages)) for row in rows})
    share = Fraction(recipe.curate.validation_fraction)
    # no minimum of bytes: answers are often so short that it would be a large share of them
    return held_out_bound(share, ((draw, 1, 0, 0) for draw in draws), len(draws), 0, least=0)


def _draw(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def conversation_digest(messages: Sequence[Mapping[str, str]]) -> bytes:
    """Return a digest of roles and stripped contents: equal for conversations that are trained on as the same ids."""
    plain = [[message["role"], message["content"].strip()] for message in messages]
    return blake2b(json.dumps(plain).encode(), digest_size=16, person=b"conversation").digest()


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return which of `lengths`, each at most `room`, share a sequence of `room` tokens: best-fit decreasing."""
    sequences: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(room + 1)]  # sequences by the room that is left in them
    free = 0  # bit r: there is a sequence with room r
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if fitting := free >> length:
            left = length + (fitting & -fitting).bit_length() - 1
            number = by_room[left].pop()
            if not by_room[left]:
                free ^= 1 << left
        else:
            left, number = room, len(sequences)
            sequences.append([])
        sequences[number].append(index)
        by_room[left - length].append(number)
        free |= 1 << left - length
    return sequences


def write_sequences(
    folder: Path,
    seq_len: int,
    ids: NDArray[np.uint32],
    mask: NDArray[np.bool_],
    lengths: Ints,
    dtype: np.dtype[Any],
    padding: int,
) -> dict[str, int]:
    """Pack conversations into the files of `seq_len`; return sequences, padding, cut and dropped conversations.

    `ids` and `mask` are those of all conversations, one after another. Dropped are those without a target in their
    first `seq_len` tokens. Raises SourceError if all are.
    """
    starts = np.cumsum(lengths) - lengths
    kept = np.array([mask[first : first + seq_len].any() for first in starts], np.bool_)
    sizes = np.minimum(lengths, seq_len)
    chosen = np.flatnonzero(kept)
    if not len(chosen):
        raise SourceError(
            f"conversations: no conversation has a token of the assistant in its first {seq_len}; raise seq_len of the "
            "stage of kind sft"
        )
    sequences = pack(sizes[chosen].tolist(), seq_len)
    shape = (len(sequences), seq_len)
    kinds = {"tokens": dtype, "targets": np.dtype(np.bool_), "segments": np.dtype(np.int32)}
    tokens, targets, segments = (
        np.lib.format.open_memmap(folder / f"{column}-{seq_len}.npy", "w+", kind, shape)
        for column, kind in kinds.items()
    )
    tokens[:] = padding
    for row, members in enumerate(sequences):
        at = 0
        for number, member in enumerate(members):
            index = chosen[member]
            first, size = starts[index], sizes[index]
            tokens[row, at : at + size] = ids[first : first + size]
            targets[row, at : at + size] = mask[first : first + size]
            segments[row, at : at + size] = number
            at += size
        segments[row, at:] = len(members)
    for column in (tokens, targets, segments):
        column.flush()
    used = int(sizes[chosen].sum())
    return {
        "sequences": len(sequences),
        "padding": len(sequences) * seq_len - used,
        "target_tokens": int(targets.sum()),
        "cut": int((lengths[chosen] > seq_len).sum()),
        "dropped": int((~kept).sum()),
    }


class ConversationStream:
    """The tokens of one stage of kind `sft`: sequences of conversations, and sequences replayed from the mix.

    Both are spread evenly over the stage. Conversations are shuffled again in each epoch. `folder` is what
    `prepare_conversations` wrote, `replay` the token stream of the recipe. Raises ValueError if the folder does not
    have the stage's sequence length.
    """

    def __init__(self, folder: Path, replay: TokenStream, span: StageSpan) -> None:
        self.recipe, self.replay, self.span = replay.recipe, replay, span
        self.seq_len = span.segments[0].seq_len
        try:
            self.packing: dict[str, int] = json.loads((folder / NAME).read_text())["packing"][str(self.seq_len)]
        except (OSError, KeyError) as error:
            raise ValueError(
                f"conversations: {folder} has no sequences of {self.seq_len} tokens ({error!r}); prepare them "
                "with this recipe"
            ) from error
        self._columns = [np.load(folder / f"{column}-{self.seq_len}.npy", mmap_mode="r") for column in COLUMNS]
        self.sequences_per_epoch = self.packing["sequences"]
        share = Fraction(span.stage.replay)
        self._interleaver = MixtureInterleaver((1 - share, share), span.tokens // self.seq_len, 1)
        self._order: Callable[[int], Ints] = lru_cache(2)(
            lambda epoch: shuffled_order(
                self.sequences_per_epoch, self.recipe.seed, f"{CONVERSATIONS}/{span.name}", epoch
            )
        )
        spans = self.recipe.schedule.spans
        self.replay_start = sum(other.mix_tokens for other in spans if other.start < span.start)
        """Position of the first replayed token in `replay`."""
        assert int(self._interleaver.totals[1]) * self.seq_len == span.mix_tokens

    @property
    def block_bytes(self) -> int:
        """As `TokenStream.block_bytes`."""
        return self.replay.block_bytes if self.span.mix_tokens else 0

    def sequences(self, begin: int, seq_len: int, count: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return tokens, targets, segments and domains of the sequences at positions [begin, begin + count x seq_len).

        int64[count, seq_len] each, as `TokenStream.sequences`; the domain of conversations is len(DOMAINS).
        """
        first, odd = divmod(begin - self.span.start, self.seq_len)
        if odd or seq_len != self.seq_len or not 0 <= first <= first + count <= self._interleaver.tokens:
            raise ValueError(f"positions from {begin} in sequences of {seq_len} are not in stage {self.span.name}")
        result = tuple(np.empty((count, seq_len), np.int64) for _ in range(4))
        tokens, targets, segments, domains = result
        units = self._interleaver.units(first, first + count)
        own = units.dataset == 0
        if own.any():
            draws = (divmod(draw, self.sequences_per_epoch) for draw in units.first[own].tolist())
            sequences = np.array([self._order(epoch)[index] for epoch, index in draws])
            ids, is_target, numbers = (np.asarray(column[sequences], np.int64) for column in self._columns)
            tokens[own], segments[own], domains[own] = ids, numbers, len(DOMAINS)
            # the target of a token is the next one; no conversation begins with a target, so none crosses to another
            targets[own] = IGNORED
            targets[own, :-1] = np.where(is_target[:, 1:], ids[:, 1:], IGNORED)
        if not own.all():
            start = self.replay_start + int(units.first[~own][0]) * seq_len
            replayed = self.replay.sequences(start, seq_len, int((~own).sum()))
            for column, values in zip(result, replayed, strict=True):
                column[~own] = values
        return tokens, targets, segments, domains

    def consumed(self, position: int) -> tuple[int, int]:
        """Return the sequences of conversations and the replayed ones before `position`, which ends a sequence."""
        own, replayed = self._interleaver.consumed((position - self.span.start) // self.seq_len).tolist()
        return own, replayed

    def realized(self, position: int) -> dict[str, int]:
        """Return the tokens of each domain and of conversations in the run before `position` of the stage."""
        own, replayed = self.consumed(position)
        before = self.replay.realized(self.replay_start + replayed * self.seq_len)
        return {**before, CONVERSATIONS: own * self.seq_len}

    def planned(self, start: int, stop: int) -> dict[str, Fraction]:
        """Return the exact number of tokens of each domain and of conversations that the recipe plans."""
        planned: dict[str, Fraction] = {domain: share * (stop - start) for domain, share in self.span.shares.items()}
        return {**planned, CONVERSATIONS: (1 - Fraction(self.span.stage.replay)) * (stop - start)}

    def epochs(self, position: int) -> dict[str, float]:
        """Return the epochs of conversations in the stage, and of each replayed dataset in the run, at `position`."""
        own, replayed = self.consumed(position)
        before = self.replay.epochs(self.replay_start + replayed * self.seq_len) if self.span.mix_tokens else {}
        return {**before, CONVERSATIONS: own / self.sequences_per_epoch}

    def sources(self, start: int, stop: int) -> dict[str, int]:
        """Return no source: sequences mix the conversations of all."""
        return {}

    def planned_sources(self, start: int, stop: int) -> dict[str, Fraction]:
        """Return no source, as `sources`."""
        return {}

    def identity(self, start: int, stop: int) -> dict[str, Any]:
        """Return, as plain data, everything but the artifacts that determines the tokens at positions [start, stop)."""
        replayed = [self.replay_start + self.consumed(position)[1] * self.seq_len for position in (start, stop)]
        identity = {"seed": self.recipe.seed, "stage": self.span.name, "sequences": self._interleaver.tokens}
        return {**identity, "replay": self.replay.identity(*replayed) if self.span.mix_tokens else None}

    def check(self) -> None:
        """Raise ValueError if the stage's length contradicts its `epochs`, or exceeds `tokens.max_epochs`."""
        own, stage, per_epoch = int(self._interleaver.totals[0]), self.span.stage, self.sequences_per_epoch
        epochs, batch, limit = own / per_epoch, self.span.segments[0].batch, self.recipe.tokens.max_epochs
        sequences = Fraction(str(stage.epochs or limit)) * per_epoch / (1 - Fraction(stage.replay))
        due, has = Tokens(max(1, round(sequences * self.seq_len / batch)) * batch), Tokens(self.span.tokens)
        amount = f"passes over {per_epoch:,} sequences of {self.seq_len} tokens"
        if stage.epochs and due != has:
            raise ValueError(
                f"stages.{stage.name}.epochs: {stage.epochs:g} {amount} are {due} tokens, replay included, but the "
                f"stage has {has}, {epochs:.3g} passes; write for: {due}"
            )
        if not stage.epochs and epochs > limit:
            raise ValueError(
                f"stages.{stage.name}.for: {has} tokens are {epochs:.3g} {amount}, at most tokens.max_epochs "
                f"{limit:g}; write for: {due}, add conversations, or write epochs: {epochs:.3g}"
            )
