"""Bits per byte of the answers in held-out conversations, each given the conversation before it in the chat format.

It falls while a model learns to answer; bits per byte of documents tells what it forgets.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from llama3.evaluate.distributed import EvalRanks
from llama3.evaluate.scores import BITS, Sample, Score
from llama3.evaluate.scoring import LanguageModel, Scorable, score_sequences
from llama3.evaluate.statistics import ratio
from llama3.evaluate.suite import RESPONSES
from llama3.tokens.chat import encode_chat
from llama3.tokens.tokenizer import Tokenizer


def score_responses(
    model: LanguageModel, tokenizer: Tokenizer, file: Path, count: int, window: int, device: str, ranks: EvalRanks
) -> tuple[dict[str, Score], list[Sample]]:
    """Return the score of the first `count` conversations of `file` by id, a hash, and a sample of each; {} if empty.

    A sample has the bits of all answers, their `<|eot_id|>` included, and the UTF-8 bytes of their contents. A long
    conversation loses its beginning, as in `score_requests`.
    """
    rows = sorted(map(json.loads, file.read_text(encoding="utf-8").splitlines()), key=lambda row: row["id"])[:count]
    sequences: list[Scorable] = []
    owners: list[int] = []
    for index, row in enumerate(rows):
        for turn, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                start = len(encode_chat(tokenizer, row["messages"][:turn], add_generation_prompt=True))
                sequences.append((encode_chat(tokenizer, row["messages"][: turn + 1], False), start))
                owners.append(index)
    bits, sizes, tokens = ([0.0] * len(rows) for _ in range(3))
    for index, likelihood in zip(owners, score_sequences(model, sequences, window, device, ranks=ranks), strict=True):
        bits[index] += likelihood.nll / math.log(2)
        tokens[index] += likelihood.tokens
    for index, row in enumerate(rows):
        answers = (message["content"].strip() for message in row["messages"] if message["role"] == "assistant")
        sizes[index] = float(sum(len(answer.encode("utf-8", "ignore")) for answer in answers))
    if not rows:
        return {}, []
    digest = hashlib.sha256("\n".join(row["id"] for row in rows).encode()).hexdigest()
    score = Score.from_estimate(RESPONSES, ratio(bits, sizes), BITS, "lower", digest, None)
    columns = zip(rows, bits, sizes, tokens, strict=True)
    return {RESPONSES: score}, [Sample(RESPONSES, row["id"], b, s, int(t), None, None) for row, b, s, t in columns]
