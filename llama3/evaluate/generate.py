"""Text from a model: one continuation as it is written, or the answers to many prompts.

Keys and values of what was read are kept, so that a token costs one step (see `reader`). Prompts are read one after
another, which shares solved examples and computes no padding; their answers are then written together, those that are
finished leaving the batch. Every text has dice of its own: no text, greedy or sampled, depends on those beside it, but
for rounding where two tokens are equally likely. There is no chat template: base models continue text. What this
gives up: a batch waits for its longest answer before the next prompts are read, and one process holds the whole model;
a server such as vLLM does neither.

Shapes: B texts, V vocabulary rows.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from llama3.evaluate.answer_extraction import check_writing
from llama3.evaluate.sampling import Sampler
from llama3.evaluate.task import Prompt, Writing
from llama3.model.kv_cache import Cache, Padded, reading
from llama3.model.transformer import Transformer
from llama3.tokens.tokenizer import Tokenizer

# Text that grows token by token, given out in pieces that never have to be taken back.
#
# A token may end within a character, and a stop text may begin in one token and end in another. So what is not
# certain yet is held: the first bytes of a character, and an end of the text with which a stop text begins. The
# pieces joined are what the whole text would be; how it was cut into tokens makes no difference.


class Pieces:
    """One text on its way."""

    def __init__(self, until: Sequence[str] = ()) -> None:
        """Make an empty text that ends where the first of `until` to be complete begins; none of them is empty."""
        self.ended = False
        """Whether a stop text was found; nothing is added after it."""
        self._until = tuple(until)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, data: bytes) -> str:
        """Add bytes; return what has become certain, often nothing. What is not UTF-8 becomes U+FFFD."""
        return "" if self.ended else self._certain(self._decoder.decode(data))

    def finish(self) -> str:
        """Return what was held: no more will come. A character that was cut off becomes U+FFFD."""
        if self.ended:
            return ""
        text = self._certain(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _certain(self, new: str) -> str:
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._until if (at := text.find(stop)) >= 0]
        if found:
            self.ended, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - max((_begun(text, stop) for stop in self._until), default=0)
        self._held = text[certain:]
        return text[:certain]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


# Reading tokens up to the next one's logits: what was read before is kept, and only what is new is computed.
#
# A sequence that begins as the one before it is read from where they differ: the next step of a text costs one
# token, and the second question behind the same solved examples costs the question. What this gives up: two texts
# that take turns on one reader share only their beginning, so each wants a reader of its own; weights are shared.
#
# Shapes: B sequences, S tokens, D model, V vocabulary rows.


class IncrementalDecoder:
    """Reads one sequence at a time."""

    def __init__(self, model: Transformer, room: int) -> None:
        """Make a reader for sequences of at most `room` tokens; `model` stays free for others."""
        self.cache = Cache(room)
        """Of the sequence that was read last."""
        self.device = next(model.parameters()).device
        self._model = reading(model, self.cache)
        self._read: list[int] = []

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [1, V] of what follows `tokens`, which are one or more."""
        known = min(_shared(self._read, tokens), len(tokens) - 1)
        self.cache.cut(known)
        self._read = list(tokens)
        return next_logits(self._model, self.cache, torch.tensor([self._read[known:]], device=self.device))


def next_logits(model: Transformer, cache: Cache, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, V] after `tokens_BS`, which follow what `cache` holds; `model` reads with that cache."""
    seen = cache.visible(tokens_BS.shape[1], tokens_BS.device)
    logits_BV: Tensor = model(tokens_BS, seen, head=_of_last)
    return logits_BV


def _of_last(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the logits of the last position alone: of a long prompt with 128,000 rows all would be gigabytes."""
    return F.linear(hidden_BSD[:, -1], weight_VD)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


ROWS = {"cpu": 64}
"""Most answers written at once, by kind of device."""
ROWS_ELSEWHERE = 256
HELD = {"cpu": 2**30}
"""Most bytes of keys and values of a batch, by kind of device."""
HELD_ELSEWHERE = 2**34


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Return what the model writes after `prompt` (not the prompt itself), at most `max_tokens` tokens.

    Rules and errors are those of `stream`.
    """
    return "".join(stream(model, tokenizer, prompt, max_tokens, temperature, top_p, seed))


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    until: Sequence[str] = (),
) -> Iterator[str]:
    """Yield what the model writes after `prompt`: a piece of text for each token, empty while it is not certain.

    Ends before the first of the texts `until`, at the end token, or after `max_tokens` tokens. Temperature 0 takes the
    likeliest token; above, tokens are drawn (see `sampling`). Special tokens are never written. A text that outgrows
    the model's longest sequence goes on from the last half of it, which is read again. Bytes that are no character,
    or a part of one at the end, appear as U+FFFD.
    Raises ValueError, before anything is written, if a setting has no meaning or the tokenizer is not the model's.
    """
    _check_fit(model, tokenizer)
    if max_tokens < 0 or "" in until:
        raise ValueError(f"max_tokens {max_tokens} must be 0 or more, and no text in until {list(until)} empty")
    sampler = Sampler.of(tokenizer, temperature, top_p)
    text = _Text(tokenizer, max_tokens, Random(str(seed)), Pieces(until))
    return _stream(model, [tokenizer.begin, *tokenizer.encode(prompt)], sampler, text)


@torch.inference_mode()
def _stream(model: Transformer, tokens: list[int], sampler: Sampler, text: _Text) -> Iterator[str]:
    longest = model.spec.max_seq
    reader = IncrementalDecoder(model, min(longest, len(tokens) + text.left))
    while text.left:
        if len(tokens) > longest:
            tokens = tokens[-(longest // 2) :]
        (token,) = sampler.pick(reader.read(tokens), [text.dice])
        tokens.append(token)
        yield text.add(token)


@torch.inference_mode()
def answer(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Prompt], writing: Writing, seed: int
) -> list[tuple[str, ...]]:
    """Return `writing.samples` answers to each prompt, in the order of `prompts`.

    What is drawn follows from `seed`, the prompt's task and document and the number of the sample alone.
    Raises ValueError for settings without meaning, a tokenizer that is not the model's, and a prompt that leaves no
    room for `writing.max_tokens`.
    """
    _check_fit(model, tokenizer)
    check_writing(writing)
    read = [[tokenizer.begin, *tokenizer.encode(prompt.context)] for prompt in prompts]
    for prompt, tokens in zip(prompts, read, strict=True):
        _check_room(model, prompt, len(tokens), writing)
    sampler = Sampler.of(tokenizer, writing.temperature, writing.top_p)
    reader = IncrementalDecoder(model, max(map(len, read), default=0))
    answers: list[tuple[str, ...]] = [()] * len(prompts)
    for batch in _batches(read, writing, *_limits(model)):
        texts = {index: _texts(tokenizer, prompts[index], writing, seed) for index in batch}
        _write(model, reader, sampler, [read[index] for index in batch], list(texts.values()), writing)
        for index, some in texts.items():
            answers[index] = tuple(text.so_far for text in some)
    return answers


@dataclass
class _Text:
    """One text while it is written."""

    tokenizer: Tokenizer
    left: int
    """Tokens that may still come; 0 once it is finished."""
    dice: Random
    pieces: Pieces
    written: list[str] = field(default_factory=list)

    def add(self, token: int) -> str:
        """Take the next token; return what of the text has become certain."""
        end = token == self.tokenizer.end
        piece = "" if end else self.pieces.add(self.tokenizer.base[token])
        self.left = 0 if end or self.pieces.ended else self.left - 1
        if not self.left:
            piece += self.pieces.finish()
        self.written.append(piece)
        return piece

    @property
    def so_far(self) -> str:
        return "".join(self.written)


def _texts(tokenizer: Tokenizer, prompt: Prompt, writing: Writing, seed: int) -> list[_Text]:
    of = f"{seed}/{prompt.task}/{prompt.document}"
    return [
        _Text(tokenizer, writing.max_tokens, Random(f"{of}/{sample}"), Pieces(writing.until))
        for sample in range(writing.samples)
    ]


def _write(
    model: Transformer,
    reader: IncrementalDecoder,
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[_Text]],
    writing: Writing,
) -> None:
    """Write all `texts` of each of `prompts` to their ends; a prompt is read once for all of its texts."""
    longest, samples = max(map(len, prompts)), writing.samples
    cache = Padded(longest + writing.max_tokens, len(prompts) * samples, longest)
    logits = []
    for row, prompt in enumerate(prompts):
        logits.append(reader.read(prompt))
        cache.put(slice(row * samples, (row + 1) * samples), reader.cache)
    logits_BV = torch.cat(logits).repeat_interleave(samples, 0)
    together, writers = reading(model, cache), [text for some in texts for text in some]
    while True:
        picked = sampler.pick(logits_BV, [text.dice for text in writers])
        for text, token in zip(writers, picked, strict=True):
            text.add(token)
        going = [row for row, text in enumerate(writers) if text.left]
        if not going:
            return
        if len(going) < len(writers):
            cache.keep(torch.tensor(going, device=reader.device))
            writers = [writers[row] for row in going]
        logits_BV = next_logits(together, cache, torch.tensor([[picked[row]] for row in going], device=reader.device))


def _batches(read: Sequence[Sequence[int]], writing: Writing, rows: int, positions: int) -> Iterator[list[int]]:
    """Group prompts, by index, of similar length: at most `rows` answers and `positions` of keys, one prompt at least.

    The longest come first, so that too large a batch fails at once.
    """
    batch: list[int] = []
    for index in sorted(range(len(read)), key=lambda index: (-len(read[index]), read[index])):
        answers = (len(batch) + 1) * writing.samples
        size = len(read[batch[0] if batch else index]) + writing.max_tokens
        if batch and (answers > rows or answers * size > positions):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _limits(model: Transformer) -> tuple[int, int]:
    """Return the most answers of a batch, and the most positions of keys and values."""
    weight, spec = next(model.parameters()), model.spec
    kind = weight.device.type
    position = 2 * spec.layers * spec.kv_heads * (spec.dim // spec.heads) * weight.element_size()
    return ROWS.get(kind, ROWS_ELSEWHERE), HELD.get(kind, HELD_ELSEWHERE) // position


def _check_fit(model: Transformer, tokenizer: Tokenizer) -> None:
    if model.rows != tokenizer.rows:
        raise ValueError(
            f"the model has {model.rows} embedding rows, the tokenizer {tokenizer.rows}: "
            "give the tokenizer that the model was trained with"
        )


def _check_room(model: Transformer, prompt: Prompt, tokens: int, writing: Writing) -> None:
    longest = model.spec.max_seq
    if tokens + writing.max_tokens > longest:
        raise ValueError(
            f"{prompt.task}: prompt {prompt.document} of {tokens} tokens and writing.max_tokens {writing.max_tokens} "
            f"exceed the model's {longest} positions; give fewer solved examples, or leave the prompt out"
        )
