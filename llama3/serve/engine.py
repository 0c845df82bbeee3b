"""Decode texts that come and go while it runs: continuous batching (Orca, OSDI 2022, section 3.1).

One thread owns the model. Between two tokens of the batch, waiting texts join and finished or canceled ones leave. Long
prompts are read in chunks between tokens (chunked prefill, arXiv 2403.02310), so that no text waits long for another.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from herd.llama3.evaluate.generate import (
    GeneratedText,
    Runner,
    Sampler,
    TokenLikelihood,
    as_runner,
    check_fit,
    common_prefix,
)
from herd.llama3.model.transformer import Transformer
from herd.llama3.tokens.tokenizer import Tokenizer

PREFILL_TOKENS = 512
"""Most tokens of prompts that are read between two tokens of the batch."""
ERROR = "error"
"""Finish reason of a text that the engine could not finish."""
logger = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """Batch and queue have no place for a text."""


@dataclass(eq=False)
class Generation:
    """One text that an engine decodes."""

    text: GeneratedText
    sampler: Sampler
    deliver: Callable[[str, str], None]
    """Called by the engine's thread after each token with the certain text and the finish reason (empty: unfinished).

    It must not wait. The reason of the last call is `stop`, `length` or `error`.
    """
    top: int | None = None
    """How many of the likeliest tokens `likelihoods` names beside each token; None: no likelihoods."""
    echo: bool = False
    """Whether `likelihoods` begins with those of the prompt."""
    likelihoods: list[TokenLikelihood] = field(default_factory=list, init=False)
    """Of the prompt's tokens after the first, with `echo`, then of those of the text."""
    canceled: bool = field(default=False, init=False)

    @property
    def unscored(self) -> bool:
        """Whether likelihoods of the prompt are wanted and not there yet."""
        return self.echo and self.top is not None and not self.likelihoods and len(self.text.tokens) > 1


class BatchEngine:
    """Decodes `Generation`s of one model in a thread until it is stopped."""

    def __init__(self, model: Transformer | Runner, tokenizer: Tokenizer, max_batch: int = 16, queue: int = 64) -> None:
        """Start the thread. `max_batch` texts are decoded together, and `queue` more may wait.

        Raises ValueError if the tokenizer is not the model's, or for a number below 1 or 0.
        """
        check_fit(model, tokenizer)
        for name, value, least in (("max_batch", max_batch, 1), ("queue", queue, 0)):
            if value < least:
                raise ValueError(f"{name} {value} must be {least} or more")
        self.runner, self.tokenizer = as_runner(model), tokenizer
        self.max_batch, self.queue = max_batch, queue
        self._changed = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._crowd: deque[Generation] = deque()
        """Of one submission of more texts than batch and queue hold; others may pass it."""
        self._active: list[Generation] = []
        self._stopped = False
        self._clear()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    @property
    def window(self) -> int:
        """The longest sequence, prompt included."""
        return self.runner.config.max_seq_len

    @property
    def running(self) -> int:
        """Texts in the batch."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Texts in the queue."""
        return len(self._waiting) + len(self._crowd)

    @property
    def alive(self) -> bool:
        """Whether texts are decoded."""
        return self._thread.is_alive()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue texts that are not begun, all or none. One of no tokens only has its prompt scored.

        Of more than batch and queue hold, one submission is taken at a time, and later ones pass it. Raises ValueError
        for a text that exceeds the model's window, and QueueFull.
        """
        for generation in generations:
            prompt, new = len(generation.text.tokens), generation.text.left
            if prompt < 1 or new < 0 or prompt + new > self.window:
                raise ValueError(
                    f"a prompt of {prompt} tokens and max_tokens {new} must be at least 1 and 0, and together at "
                    f"most the model's {self.window} positions; shorten the prompt or change max_tokens"
                )
        places = self.max_batch + self.queue
        with self._changed:
            crowd = len(generations) > places
            full = bool(self._crowd) if crowd else len(self._waiting) + len(self._active) + len(generations) > places
            if self._stopped or full:
                raise QueueFull(f"{len(self._active)} texts are decoded and {self.waiting} wait; try again later")
            (self._crowd if crowd else self._waiting).extend(generations)
            self._changed.notify()

    def cancel(self, generation: Generation) -> None:
        """Have a text leave queue or batch; no call of `deliver` begins after the next token."""
        generation.canceled = True
        with self._changed:
            for queue in (self._waiting, self._crowd):
                if generation in queue:
                    queue.remove(generation)

    def stop(self) -> None:
        """End the thread; unfinished texts end with an error."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _clear(self) -> None:
        """Forget all keys and values."""
        self._active.clear()
        self._reading: list[Generation] = []
        """The text whose prompt is being read, if any."""
        self._read: list[int] = []
        """Tokens of prompts that the runner has read last, into a cache for `_read_room`."""
        self._read_room = 0
        self._scored: list[TokenLikelihood] = []
        """Of the tokens of the prompt that was scored last, after the first."""
        self._scored_for: tuple[int | None, int] = None, -1
        """Their number of likeliest tokens, and the first token of that prompt."""
        self._batch_capacity = 0
        """Positions of a row of the batch."""
        self.runner.clear()

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._crowd or self._active or self._stopped)
                if self._stopped:
                    failed = [*self._active, *self._waiting, *self._crowd]
                    self._waiting.clear()
                    self._crowd.clear()
                    break
            try:
                self._admit()
                self._decode()
            except Exception:  # such as too little memory: the texts in the batch are lost, the server is not
                lost = self.runner.failure() is not None  # which the owner of the model reports
                if not lost:
                    logger.exception("decoding failed")
                failed = list(dict.fromkeys([*self._active, *self._reading]))
                with self._changed:
                    self._waiting = deque(each for each in self._waiting if each not in self._reading)
                    self._crowd = deque(each for each in self._crowd if each not in self._reading)
                    self._stopped = self._stopped or lost
                self._clear()
                self._fail(failed)
        self._fail(failed)

    def _fail(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            if not generation.canceled and not generation.text.finish_reason:
                generation.deliver("", ERROR)

    def _admit(self) -> None:
        """Read prompts of waiting texts, in chunks if the batch is not empty, and add those that are read to it."""
        budget = PREFILL_TOKENS
        while budget > 0:
            self._remove_finished()
            with self._changed:
                queue = self._waiting or self._crowd
                if not queue:
                    return
                generation = queue[0]
            capacity = len(generation.text.tokens) + generation.text.left
            if not self._active:
                self._batch_capacity = 0
            rows = min(self.max_batch, max(1, self.runner.positions // max(capacity, self._batch_capacity)))
            if len(self._active) >= rows:
                return
            if generation.unscored or generation.text.left:
                budget -= self._read_prompt(generation, budget)
                if self._reading:
                    continue
            with self._changed:
                if generation.canceled:  # and taken out of the queue
                    continue
                queue.remove(generation)  # the first, unless others have passed it
                if generation.text.left:
                    self._active.append(generation)
            if not generation.text.left:
                generation.text.finish_reason = "length"
                generation.deliver("", "length")
                continue
            self._batch_capacity = max(self._batch_capacity, capacity)
            self.runner.join(capacity, rows)
            self._add_tokens([generation])

    def _read_prompt(self, generation: Generation, budget: int) -> int:
        """Read some of a prompt and return how many tokens; `_reading` is empty after the last.

        The last token of a prompt whose likelihoods are wanted is read apart: nothing follows it yet.
        """
        tokens, top, scoring = generation.text.tokens, generation.top, generation.unscored
        known = common_prefix(self._read, tokens)  # the decoder keeps these
        if scoring:
            if self._scored_for != (top, tokens[0]):
                self._scored_for, self._scored = (top, tokens[0]), []
            known = min(known, common_prefix([each.token for each in self._scored], tokens[1:]))
        # after a short common beginning the rest needs a mask, which costs more than reading it all
        fresh = self._reading != [generation] and 4 * known < len(tokens)
        self._reading = [generation]
        new_room = 0
        if self._read_room < len(tokens) or fresh:
            self._read_room = new_room = min(self.window, 2 * len(tokens))
            known = 0
        last = len(tokens) - scoring
        # in one piece, which is faster, if no text would wait for it
        end = min(last, known + budget) if self._active else last
        if scoring and top is not None:
            new = self.runner.score(tokens[known : end + 1], known, new_room, top) if end > known else []
            self._scored = [*self._scored[:known], *new]
        else:
            self.runner.read(tokens[known:end], known, new_room)
        self._read = tokens[:end]
        if scoring and end == last:
            generation.likelihoods += self._scored
        if end == last and not (scoring and generation.text.left):
            self._reading = []
        return max(1, end - known)

    def _decode(self) -> None:
        """Add a token to each text of the batch."""
        self._remove_finished()
        if not self._active:
            return
        self.runner.decode([generation.text.tokens[-1] for generation in self._active])
        self._add_tokens(self._active)

    def _remove_finished(self) -> None:
        """Have finished and canceled texts leave the batch."""
        for row in reversed(range(len(self._active))):
            if self._active[row].canceled or not self._active[row].text.left:
                self.runner.leave(row)
                self._active[row] = self._active[-1]
                self._active.pop()

    def _add_tokens(self, generations: Sequence[Generation]) -> None:
        """Choose the next token of each text that was just read or decoded, and deliver what has become certain."""
        by_sampler: dict[Sampler, list[int]] = {}
        for row, generation in enumerate(generations):
            by_sampler.setdefault(generation.sampler, []).append(row)
        for sampler, rows in by_sampler.items():
            texts = [generations[row].text for row in rows]
            dice, tokens = [text.dice for text in texts], [text.tokens for text in texts]
            picked = self.runner.pick(sampler, rows, dice, tokens)
            self._add_likelihoods(generations, rows, picked)
            for row, token in zip(rows, picked, strict=True):
                generation = generations[row]
                piece = generation.text.add(token)
                if not generation.canceled:
                    generation.deliver(piece, generation.text.finish_reason)

    def _add_likelihoods(self, generations: Sequence[Generation], rows: Sequence[int], picked: Sequence[int]) -> None:
        """Add those of the tokens that were picked for `rows`, where they are wanted."""
        by_top: dict[int, list[tuple[int, int]]] = {}
        for row, token in zip(rows, picked, strict=True):
            if (top := generations[row].top) is not None:
                by_top.setdefault(top, []).append((row, token))
        for top, pairs in by_top.items():
            some_rows, tokens = zip(*pairs, strict=True)
            for row, likelihood in zip(some_rows, self.runner.likelihoods(some_rows, tokens, top), strict=True):
                generations[row].likelihoods.append(likelihood)
