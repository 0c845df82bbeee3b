"""lm-eval as a client of the server: sample by sample what herd's own evaluation finds, for all kinds of task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks.evaluate_tasks import pairs
from benchmarks.ours.evaluate import work
from herd.llama3.evaluate.generate import GeneratedText, IncrementalDecoder, Sampler, TextStream
from herd.llama3.export.convert import convert
from herd.llama3.model.files import load_model
from herd.llama3.model.transformer import Transformer
from herd.llama3.serve.engine import BatchEngine
from herd.llama3.tokens.chat import END_OF_TURN, encode_chat, special_id
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.tasks.models.serve import Served
from tests.llama3.evaluate.test_evaluate_lm_eval import (
    ALL,
    check,
    decided,
    kinds,
    lm_eval_samples,
    model,
    needs_lm_eval,
)
from tests.llama3.evaluate.tiny_data import write_data
from tests.tasks.models.test_serve import serving

QUESTIONS = 16


@needs_lm_eval
@pytest.mark.slow
def test_a_client_finds_the_scores_of_herd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    made = pairs(write_data(tmp_path / "data"), QUESTIONS)
    assert kinds(made) == ALL
    folder = model(tmp_path / "model", made, 400)
    convert(folder, "herd", tmp_path / "hf", "hf")
    network, tokenizer = load_model(folder), Tokenizer.load(folder)
    engine = BatchEngine(network, tokenizer)
    try:
        with serving(Served("m", engine, chat=True, token="key")) as address:
            theirs = lm_eval_samples(tmp_path, made, server=address)
            ours = work(tmp_path / "job", tmp_path, str(folder))["samples"]
            written = [pair for pair in made if pair.task.kind == "generate"]
            chats = lm_eval_samples(tmp_path / "chat", written, server=address, chat=True)
    finally:
        engine.stop()
    check(made, ours, theirs)
    assert decided(ours, "acc") == {0, 1}
    for pair in written:
        for prompt, sample in zip(pair.task.prompts, chats[pair.task.key].values(), strict=True):
            due = greedy(network, tokenizer, prompt.context, pair.task.writing.max_tokens, pair.task.writing.until)
            assert sample["text"] == due


@torch.inference_mode()
def greedy(network: Transformer, tokenizer: Tokenizer, content: str, new: int, until: Sequence[str]) -> str:
    """Return the answer to a message, decoded without the server's engine."""
    ids, end = encode_chat(tokenizer, [{"role": "user", "content": content}], True), special_id(tokenizer, END_OF_TURN)
    sampler = Sampler(len(tokenizer.base), tokenizer.end, stop_token_ids=(end,))
    text = GeneratedText(tokenizer, ids, new, Random(0), TextStream(until[:4]))
    decoder = IncrementalDecoder(network, len(ids) + new)
    while text.left:
        text.add(*sampler.pick(decoder.read(text.tokens), [text.dice]))
    return "".join(text.written)
