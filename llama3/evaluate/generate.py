"""Generate text: a stream of one continuation, or the answers to many prompts in batches.

Prompts are read one after another, sharing their common beginning in the KV cache; their answers are then decoded
together, and finished ones leave the batch. Each text has its own random generator, so no text depends on the others
beyond rounding. `engine` decodes texts that come and go while it runs.

Shapes: B texts, S tokens, C of a chunk, K likeliest tokens, D model, V vocabulary.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from herd.llama3.evaluate.generation_settings import GenerationSettings, check_generation_settings, check_sampling
from herd.llama3.evaluate.task import Prompt
from herd.llama3.model.kv_cache import BatchCache, Cache, PaddedCache, with_cache
from herd.llama3.model.transformer import Transformer
from herd.llama3.parallel.memory import CACHED, DECODED
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.tokenizer import Tokenizer

LOGITS = 2**26
"""Most logits of positions that are not the last, computed at a time: 256 MiB of fp32."""


class Dice(Protocol):
    """A random generator, such as `random.Random`."""

    def random(self) -> float:
        """Return a number of [0, 1)."""
        ...


@dataclass(frozen=True)
class Sampler:
    """Chooses tokens for the texts of one tokenizer. Raises ValueError for invalid settings."""

    base: int
    """Stop of the ids of text; the rows after them are special tokens and padding, which are never written."""
    end: int
    """The special token that may be chosen."""
    temperature: float = 0.0
    """0 takes the likeliest token, the first of equals."""
    top_p: float = 1.0
    """Nucleus sampling, arXiv 1904.09751."""
    top_k: int = 0
    """Draws from this many of the likeliest tokens and from equals of the last one, arXiv 1805.04833; 0: from all."""
    repetition_penalty: float = 1.0
    """Divides the logit of each token of prompt and text, or multiplies it if it is negative, arXiv 1909.05858."""
    stop_token_ids: tuple[int, ...] = ()
    """More special tokens that may be chosen, such as `<|eot_id|>`."""
    silent: tuple[int, ...] = ()
    """Ids below `base` that are no text."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p, self.top_k, self.repetition_penalty)

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: Tokenizer,
        temperature: float,
        top_p: float,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> Sampler:
        """Return the sampler for texts of `tokenizer`, which those of a chat model end as turns too."""
        stops = tuple(dict.fromkeys((*tokenizer.ends[1:], *stop_token_ids)))
        settings = (temperature, top_p, top_k, repetition_penalty, stops)
        return cls(len(tokenizer.tokens), tokenizer.end, *settings, tokenizer.silent)

    def pick(self, logits_BV: Tensor, dice: Sequence[Dice], tokens: Sequence[Sequence[int]] = ()) -> list[int]:
        """Return the next token of each text; `tokens`, of prompt and text so far, are read for `repetition_penalty`.

        Unless temperature is 0 this uses one number of each text's own generator in `dice`, so that a text does not
        depend on the others in the batch.
        """
        logits_BV = logits_BV.float()
        if self.repetition_penalty != 1:
            logits_BV = logits_BV.clone()
            for logits_V, read in zip(logits_BV, tokens, strict=True):
                repeated = torch.tensor(read, device=logits_V.device)
                logit = logits_V[repeated]
                logits_V[repeated] = torch.where(
                    logit < 0, logit * self.repetition_penalty, logit / self.repetition_penalty
                )
        ends = (self.end, *self.stop_token_ids)
        if self.temperature == 0:
            text_BV = logits_BV[:, : self.base]
            if self.silent:
                text_BV = text_BV.clone()
                text_BV[:, list(self.silent)] = float("-inf")
            largest_B, likeliest_B = text_BV.max(-1)
            for end in ends:
                likeliest_B = torch.where(logits_BV[:, end] > largest_B, end, likeliest_B)
                largest_B = largest_B.maximum(logits_BV[:, end])
            greedy: list[int] = likeliest_B.tolist()
            return greedy
        allowed_BV = logits_BV.clone()
        allowed_BV[:, self.base :] = float("-inf")
        allowed_BV[:, list(self.silent)] = float("-inf")
        for end in ends:
            allowed_BV[:, end] = logits_BV[:, end]
        drawn_B1 = torch.tensor([[each.random()] for each in dice], dtype=torch.float64, device=logits_BV.device)
        largest_B1 = allowed_BV.amax(-1, keepdim=True)
        if self.top_k:
            least_B1 = allowed_BV.topk(min(self.top_k, allowed_BV.shape[-1])).values[:, -1:]
            allowed_BV = allowed_BV.masked_fill(allowed_BV < least_B1, float("-inf"))
        # subtract first: a tiny temperature makes large logits infinite
        shares_BV = ((allowed_BV - largest_B1) / self.temperature).softmax(-1).double()
        if self.top_p == 1:
            picked_B = _index_at(shares_BV, drawn_B1)
        else:
            shares_BV, order_BV = shares_BV.sort(dim=-1, descending=True, stable=True)
            before_BV = shares_BV.cumsum(-1) - shares_BV
            rank_B = _index_at(shares_BV * (before_BV < self.top_p), drawn_B1)
            picked_B = order_BV.gather(-1, rank_B.unsqueeze(-1)).squeeze(-1)
        # The logits of a broken model may not be finite: its scores fail the gate, its evaluation must not crash.
        finite_B = largest_B1.squeeze(-1).isfinite()
        picked: list[int] = torch.where(finite_B, picked_B, allowed_BV.argmax(-1)).tolist()
        return picked


def _index_at(shares_BV: Tensor, drawn_B1: Tensor) -> Tensor:
    """Return the index at which each number of [0, 1) falls in the cumulated shares, which need not sum to 1.

    `shares_BV` is fp64: an fp32 sum over 128,000 tokens rounds rare ones away.
    """
    sums_BV = shares_BV.cumsum(-1)
    at_B1 = torch.searchsorted(sums_BV, drawn_B1 * sums_BV[:, -1:], right=True)
    return at_B1.squeeze(-1).clamp(max=shares_BV.shape[-1] - 1)  # beyond the end only if shares are not finite


def generate(
    model: Transformer | Runner,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    until: Sequence[str] = (),
    top_k: int = 0,
    repetition_penalty: float = 1.0,
) -> str:
    """Return what the model writes after `prompt` (without the prompt), at most `max_tokens` tokens.

    Rules and errors are those of `stream`.
    """
    options = (temperature, top_p, seed, until, top_k, repetition_penalty)
    return "".join(stream(model, tokenizer, prompt, max_tokens, *options))


def stream(
    model: Transformer | Runner,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    until: Sequence[str] = (),
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    stop_token_ids: tuple[int, ...] = (),
) -> Iterator[str]:
    """Yield what the model writes after `prompt`: a piece of text per token, empty while the text is not certain.

    A prompt of ids, such as a conversation, is taken as it is. Stops before the first of the texts `until`, at the end
    token or one of `stop_token_ids`, or after `max_tokens` tokens. Temperature 0 takes the
    likeliest token; above 0 tokens are drawn (see `Sampler`). Special tokens are never written. A text that exceeds
    the model's longest sequence continues from its last half, which is read again. Invalid UTF-8, and a character
    that is cut off at the end, become U+FFFD.
    Raises ValueError, before anything is written, if a setting is invalid or the tokenizer is not the model's.
    """
    check_fit(model, tokenizer)
    if max_tokens < 0:
        raise ValueError(f"max_tokens {max_tokens} must be 0 or more")
    if "" in until:
        raise ValueError("stop has an empty text, at which every text ends; take it out")
    sampler = Sampler.for_tokenizer(tokenizer, temperature, top_p, top_k, repetition_penalty, stop_token_ids)
    ids = tokenizer.prompt(prompt) if isinstance(prompt, str) else list(prompt)
    text = GeneratedText(tokenizer, ids, max_tokens, Random(str(seed)), TextStream(until))
    return _stream(as_runner(model), sampler, text)


@torch.inference_mode()
def _stream(runner: Runner, sampler: Sampler, text: GeneratedText) -> Iterator[str]:
    """The generator of `stream`: apart, because the checks must run before the first `next()`."""
    longest, tokens, known = runner.config.max_seq_len, list(text.tokens), 0
    capacity = min(longest, len(tokens) + text.left)
    while text.left:
        if len(tokens) > longest:
            tokens, known = tokens[-(longest // 2) :], 0
        runner.read(tokens[known:], known, capacity)
        (token,) = runner.pick(sampler, [0], [text.dice], [text.tokens])
        known, capacity = len(tokens), 0
        tokens.append(token)
        yield text.add(token)


@torch.inference_mode()
def generate_batch(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Prompt], writing: GenerationSettings, seed: int
) -> list[tuple[str, ...]]:
    """Return `writing.samples` answers to each prompt, in the order of `prompts`.

    Random numbers depend only on `seed`, the prompt's task and document, and the number of the sample.
    Raises ValueError for invalid settings, a tokenizer that is not the model's, and a prompt that leaves no room for
    `writing.max_tokens`.
    """
    check_fit(model, tokenizer)
    check_generation_settings(writing)
    longest = model.config.max_seq_len
    encoded = [tokenizer.prompt(prompt.context) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if len(tokens) + writing.max_tokens > longest:
            raise ValueError(
                f"{prompt.task}: prompt {prompt.document} of {len(tokens)} tokens and writing.max_tokens "
                f"{writing.max_tokens} exceed the model's {longest} positions; give fewer solved examples, or leave "
                "the prompt out"
            )
    rows, positions = DECODED[_device_kind(model)], cached_positions(model)
    sampler = Sampler.for_tokenizer(
        tokenizer, writing.temperature, writing.top_p, writing.top_k, writing.repetition_penalty
    )
    decoder = IncrementalDecoder(model, max(map(len, encoded), default=0))
    answers: list[tuple[str, ...]] = [()] * len(prompts)
    for batch in _batches(encoded, writing, rows, positions):
        texts = []
        for index in batch:
            source = f"{seed}/{prompts[index].task}/{prompts[index].document}"
            texts.append(
                [
                    GeneratedText(
                        tokenizer,
                        list(encoded[index]),
                        writing.max_tokens,
                        Random(f"{source}/{sample}"),
                        TextStream(writing.until),
                    )
                    for sample in range(writing.samples)
                ]
            )
        _decode(model, decoder, sampler, [encoded[index] for index in batch], texts, writing)
        for index, group in zip(batch, texts, strict=True):
            answers[index] = tuple("".join(text.written) for text in group)
    return answers


def cached_positions(model: Transformer) -> int:
    """Return the most positions whose keys and values a batch may hold on the device of `model`."""
    keys = [weight for name, weight in model.named_parameters() if name.endswith("attention.k.weight")]
    position_bytes = sum(2 * len(weight) * weight.element_size() for weight in keys)  # of this process's heads, layers
    # a pipeline stage with only the embedding or the output holds none
    return CACHED[_device_kind(model)] // max(1, position_bytes)


def _device_kind(model: Transformer) -> str:
    return "cpu" if next(model.parameters()).device.type == "cpu" else "cuda"


def check_fit(model: Transformer | Runner, tokenizer: Tokenizer) -> None:
    """Raise ValueError unless the model has a row for each token of `tokenizer`."""
    if model.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"the model has vocab_size {model.vocab_size}, the tokenizer {tokenizer.vocab_size}: "
            "give the tokenizer that the model was trained with"
        )


def _batches(
    encoded: Sequence[Sequence[int]], writing: GenerationSettings, rows: int, positions: int
) -> Iterator[list[int]]:
    """Group prompts of similar length, by index: at most `rows` answers and `positions` of keys, at least one prompt.

    The longest come first, so that too large a batch fails at once.
    """
    batch: list[int] = []
    for index in sorted(range(len(encoded)), key=lambda index: (-len(encoded[index]), encoded[index])):
        answers = (len(batch) + 1) * writing.samples
        size = len(encoded[batch[0] if batch else index]) + writing.max_tokens
        if batch and (answers > rows or answers * size > positions):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _decode(
    model: Transformer,
    decoder: IncrementalDecoder,
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[GeneratedText]],
    writing: GenerationSettings,
) -> None:
    """Write all `texts` of each of `prompts` to their ends; a prompt is read once for all of its texts."""
    longest, samples = max(map(len, prompts)), writing.samples
    cache = PaddedCache(longest + writing.max_tokens, len(prompts) * samples, longest)
    logits = []
    for index, prompt in enumerate(prompts):
        logits.append(decoder.read(prompt))
        cache.put(slice(index * samples, (index + 1) * samples), decoder.cache)
    logits_BV = torch.cat(logits).repeat_interleave(samples, 0)
    batched, active = with_cache(model, cache), [text for group in texts for text in group]
    while True:
        picked = sampler.pick(logits_BV, [text.dice for text in active], [text.tokens for text in active])
        for text, token in zip(active, picked, strict=True):
            text.add(token)
        unfinished = [row for row, text in enumerate(active) if text.left]
        if not unfinished:
            return
        if len(unfinished) < len(active):
            cache.keep(torch.tensor(unfinished, device=decoder.device))
            active = [active[row] for row in unfinished]
        tokens_BS = torch.tensor([[picked[row]] for row in unfinished], device=decoder.device)
        logits_BV = next_logits(batched, cache, tokens_BS)


@dataclass
class GeneratedText:
    """One text while it is written."""

    tokenizer: Tokenizer
    tokens: list[int]
    """Of the prompt, then of the text, the end included."""
    left: int
    """Tokens that may still be written; 0 once it is finished."""
    dice: Random
    pieces: TextStream
    written: list[str] = field(default_factory=list)
    finish_reason: Literal["", "stop", "length"] = ""
    """Empty while the text is unfinished."""

    def add(self, token: int) -> str:
        """Append the next token; return the text that has become certain. A special token ends the text."""
        self.tokens.append(token)
        text = self.tokenizer.text_of(token)
        end = not text
        piece = "" if end else self.pieces.add(text)
        self.left = 0 if end or self.pieces.ended else self.left - 1
        if not self.left:
            piece += self.pieces.finish()
            self.finish_reason = "stop" if end or self.pieces.ended else "length"
        self.written.append(piece)
        return piece


class IncrementalDecoder:
    """Reads one sequence at a time and keeps its keys and values.

    A sequence that begins like the one before is read only from where they differ. Two texts that alternate on one
    decoder share only their common beginning, so give each its own; the weights are shared.
    """

    def __init__(self, model: Transformer, capacity: int) -> None:
        """Make a decoder for sequences of at most `capacity` tokens; `model` itself is not changed."""
        self.cache = Cache(capacity)
        """Of the sequence that was read last."""
        self.device = next(model.parameters()).device
        self._model = with_cache(model, self.cache)
        self.tokens: list[int] = []
        """The sequence that was read last."""

    def score(self, tokens: Sequence[int], known: int, top: int) -> list[TokenLikelihood]:
        """Return the likelihoods of `tokens` after the first `known` + 1, and read all but the last.

        The first `known` tokens are those of the sequence that was read last.
        """
        self.cache.cut(known)
        self.tokens = list(tokens[:-1])
        new_S, next_S = (torch.tensor(part, device=self.device) for part in (tokens[known:-1], tokens[known + 1 :]))
        comms, top = self._model.comms, min(top, self._model.vocab_size)

        def every_position(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
            size = max(1, LOGITS // self._model.vocab_size)
            chunks = zip(torch.split(hidden_BSD[0], size), torch.split(next_S, size), strict=True)
            return torch.cat(
                [_ranked(comms.all_gather_logits(F.linear(h_CD, weight_VD)), n_C, top) for h_CD, n_C in chunks]
            )

        mask = self.cache.visible(len(new_S), self.device)
        output: Tensor = self._model(new_S.unsqueeze(0), mask, head=every_position)
        return _likelihoods(
            comms.from_last_stage(output, (len(new_S), 1 + 2 * top), torch.float64), tokens[known + 1 :]
        )

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [1, V] of the token after `tokens`, which are one or more."""
        known = min(common_prefix(self.tokens, tokens), len(tokens) - 1)
        self.cache.cut(known)
        self.tokens = list(tokens)
        return next_logits(self._model, self.cache, torch.tensor([self.tokens[known:]], device=self.device))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences of one type begin with in common: slices compare faster than a loop."""
    lengths = range(1, min(len(a), len(b)) + 1)
    return bisect_left(lengths, True, key=lambda length: a[:length] != b[:length])


class TokenLikelihood(NamedTuple):
    """How likely a token was after those before it, among all tokens and at temperature 1."""

    token: int
    logprob: float
    """Nats, 0 or less."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and theirs, the likeliest first."""


def _ranked(logits_SV: Tensor, tokens_S: Tensor, top: int) -> Tensor:
    """Return [S, 1 + 2K] in fp64: the log-probability of each token, those of the K likeliest, and their ids."""
    wide = torch.promote_types(logits_SV.dtype, torch.float32)  # as the loss
    logprobs_SV = logits_SV.to(wide).log_softmax(-1)
    own_S1 = logprobs_SV.gather(1, tokens_S.unsqueeze(1))
    top_SK, ids_SK = logprobs_SV.topk(top)
    return torch.cat([own_S1.double(), top_SK.double(), ids_SK.double()], 1)


def _likelihoods(ranked: Tensor, tokens: Sequence[int]) -> list[TokenLikelihood]:
    """Return the rows of `_ranked`."""
    top = ranked.shape[1] // 2
    return [
        TokenLikelihood(token, own, tuple(zip(map(int, rest[top:]), rest[:top], strict=True)))
        for token, (own, *rest) in zip(tokens, ranked.tolist(), strict=True)
    ]


def next_logits(model: Transformer, cache: Cache, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, V] after `tokens_BS`, which follow what `cache` holds; `model` reads with that cache."""

    def last_position(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        # logits of all positions of a long prompt with 128,000 rows would be gigabytes
        return model.comms.all_gather_logits(F.linear(hidden_BSD[:, -1], weight_VD))

    mask = cache.visible(tokens_BS.shape[1], tokens_BS.device)
    output: Tensor = model(tokens_BS, mask, head=last_position)
    return model.comms.from_last_stage(output, (len(tokens_BS), model.vocab_size))


class Runner(Protocol):
    """Runs a model for `stream` or a `BatchEngine`: reads prompts one after another, and decodes a batch of texts.

    `ModelRunner` does it in this process, `distributed.SplitRunner` in several.
    """

    config: Model
    vocab_size: int
    """Ids of the embedding, base and special."""
    dtype: torch.dtype
    """Of the weights."""
    positions: int
    """Most positions whose keys and values a batch may hold."""
    processes: int
    """That hold the model."""

    def read(self, tokens: Sequence[int], known: int, capacity: int) -> None:
        """Read `tokens` after the first `known` tokens of what was read before.

        `capacity` above 0 makes a new cache for that many; then `known` is 0.
        """
        ...

    def score(self, tokens: Sequence[int], known: int, capacity: int, top: int) -> list[TokenLikelihood]:
        """Read all of `tokens` but the last, as `read` does; return the likelihoods of all but the first.

        Each with the `top` likeliest tokens in its place.
        """
        ...

    def join(self, capacity: int, rows: int) -> None:
        """Add what was read to the batch, whose cache grows as `BatchCache.join` says."""
        ...

    def leave(self, row: int) -> None:
        """Remove a row of the batch; the last one takes its place."""
        ...

    def decode(self, tokens: Sequence[int]) -> None:
        """Add a token to each row of the batch."""
        ...

    def pick(
        self, sampler: Sampler, rows: Sequence[int], dice: Sequence[Dice], tokens: Sequence[Sequence[int]]
    ) -> list[int]:
        """Return the next token of each of `rows`, as `Sampler.pick` does, after the last `read` or `decode`."""
        ...

    def likelihoods(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLikelihood]:
        """Return those of the tokens that `pick` has returned for `rows`."""
        ...

    def clear(self) -> None:
        """Forget all keys and values."""
        ...

    def failure(self) -> Exception | None:
        """Return why the model is lost; None if it is not."""
        ...


class ModelRunner:
    """Runs a model of this process, which may be its part of a model that is split."""

    processes = 1

    def __init__(self, model: Transformer) -> None:
        self.model, self.config, self.vocab_size = model, model.config, model.vocab_size
        self.dtype = next(model.parameters()).dtype
        self.positions = cached_positions(model)
        self._decoder: IncrementalDecoder | None = None
        self._empty_batch()

    def read(self, tokens: Sequence[int], known: int, capacity: int) -> None:
        decoder = self._decoder_for(capacity)
        self._logits_BV = decoder.read([*decoder.tokens[:known], *tokens])

    def score(self, tokens: Sequence[int], known: int, capacity: int, top: int) -> list[TokenLikelihood]:
        decoder = self._decoder_for(capacity)
        return decoder.score([*decoder.tokens[:known], *tokens], known, top)

    def join(self, capacity: int, rows: int) -> None:
        assert self._decoder is not None
        self.batch.join(self._decoder.cache, capacity, rows)

    def leave(self, row: int) -> None:
        self.batch.leave(row)
        if not len(self.batch):
            self._empty_batch()

    def decode(self, tokens: Sequence[int]) -> None:
        device = next(self.model.parameters()).device
        tokens_BS = torch.tensor(tokens, device=device).unsqueeze(1)
        self._logits_BV = next_logits(self._batched, self.batch, tokens_BS)

    def pick(
        self, sampler: Sampler, rows: Sequence[int], dice: Sequence[Dice], tokens: Sequence[Sequence[int]]
    ) -> list[int]:
        return sampler.pick(self._logits_of(rows), dice, tokens)

    def likelihoods(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLikelihood]:
        logits_BV = self._logits_of(rows)
        picked_B = torch.tensor(tokens, device=logits_BV.device)
        return _likelihoods(_ranked(logits_BV, picked_B, min(top, self.vocab_size)), tokens)

    def clear(self) -> None:
        self._decoder = None
        self._empty_batch()

    def failure(self) -> Exception | None:
        return None

    def _decoder_for(self, capacity: int) -> IncrementalDecoder:
        if capacity:
            self._decoder = IncrementalDecoder(self.model, capacity)
        assert self._decoder is not None
        return self._decoder

    def _logits_of(self, rows: Sequence[int]) -> Tensor:
        return self._logits_BV if len(rows) == len(self._logits_BV) else self._logits_BV[list(rows)]

    def _empty_batch(self) -> None:
        self.batch = BatchCache()
        self._batched = with_cache(self.model, self.batch)


def as_runner(model: Transformer | Runner) -> Runner:
    """Return a runner of a model of this process, or the given one."""
    return ModelRunner(model) if isinstance(model, Transformer) else model


class TextStream:
    """Text that grows token by token, given out in pieces that are never taken back.

    A token may end inside a character, and a stop text may span tokens. So uncertain text is held back: the first bytes
    of a character, and an end of the text with which a stop text begins.
    """

    def __init__(self, until: Sequence[str] = ()) -> None:
        """Start an empty text that ends at the first complete stop text of `until`; no stop text is empty."""
        self.ended = False
        """Whether a stop text was found; nothing is added after it."""
        self._until = tuple(until)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def add(self, data: bytes) -> str:
        """Add bytes; return the text that has become certain, often nothing. Invalid UTF-8 becomes U+FFFD."""
        return "" if self.ended else self._certain(self._decoder.decode(data))

    def finish(self) -> str:
        """Return the text that was held back: no more bytes follow. A character that was cut off becomes U+FFFD."""
        if self.ended:
            return ""
        text = self._certain(self._decoder.decode(b"", final=True)) + self._pending
        self._pending = ""
        return text

    def _certain(self, new: str) -> str:
        text = self._pending + new
        stops = [(at + len(stop), at) for stop in self._until if (at := text.find(stop)) >= 0]
        if stops:
            self.ended, self._pending = True, ""
            return text[: min(stops)[1]]
        partial = 0  # characters at the end of `text` that are the beginning of a stop text
        for stop in self._until:
            sizes = range(min(len(text), len(stop) - 1), 0, -1)
            partial = max(partial, next((size for size in sizes if text.endswith(stop[:size])), 0))
        certain = len(text) - partial
        self._pending = text[certain:]
        return text[:certain]
