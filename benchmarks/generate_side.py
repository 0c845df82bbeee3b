"""Herd's sides of the generation benchmark: a text as it streams, several together, each token computed anew, and texts
that a server streams to as many clients.

They run as steps of `train_side`. The tokens that were written go to a file. All tokens that the benchmark's weights
can choose are four characters long, so the text says which they were.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import uvicorn

from benchmarks.clients import ask_all
from herd.llama3.evaluate.generate import generate_batch, stream
from herd.llama3.evaluate.task import GenerationSettings, Prompt
from herd.llama3.model.files import load_model
from herd.llama3.model.transformer import Transformer
from herd.llama3.serve.engine import BatchEngine
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.tasks.models.serve import Served, bind, create_app

BYTES, WIDTH = 256, 4
"""Tokens that are one byte; characters of the others."""


@cache
def coder(vocab: int) -> Tokenizer:
    """Return a tokenizer of single bytes and of numbers in four characters."""
    numbers = [f"{number:0{WIDTH}x}".encode() for number in range(vocab - BYTES)]
    return Tokenizer([*(bytes([value]) for value in range(BYTES)), *numbers])


def stepper(shape: dict[str, Any], bf16: bool) -> Callable[[], float]:
    """Return a function that writes all texts of `shape` once; it returns how many tokens these have."""
    model = load_model(Path(shape["models"], "herd"), torch.bfloat16 if bf16 else torch.float32)
    if shape["side"] == "served":
        return _served(model, shape)
    write = {"stream": _streamed, "answer": _answered, "recompute": _recomputed}[shape["side"]]

    def step() -> float:
        tokens = write(model, shape)
        Path(shape["out"], f"{shape['side']}.json").write_text(json.dumps(tokens))
        return float(sum(map(len, tokens)))

    return step


def _streamed(model: Transformer, shape: dict[str, Any]) -> list[list[int]]:
    tokenizer = coder(shape["vocab"])
    return [_ids("".join(stream(model, tokenizer, text, shape["new"]))) for text in shape["texts"]]


def _answered(model: Transformer, shape: dict[str, Any]) -> list[list[int]]:
    prompts = [Prompt("bench", str(number), text, ()) for number, text in enumerate(shape["texts"])]
    answers = generate_batch(model, coder(shape["vocab"]), prompts, GenerationSettings(max_tokens=shape["new"]), 0)
    return [_ids(text) for (text,) in answers]


@torch.inference_mode()
def _recomputed(model: Transformer, shape: dict[str, Any]) -> list[list[int]]:
    """Read the whole text again for each token; of the output, the last position alone, as with a cache."""
    texts = []
    for prompt in shape["prompts"]:
        tokens = list(prompt)
        for _ in range(shape["new"]):
            last_BV = model(torch.tensor([tokens]), head=lambda hidden_BSD, weight_VD: hidden_BSD[:, -1] @ weight_VD.T)
            tokens.append(int(last_BV.argmax()))
        texts.append(tokens[len(prompt) :])
    return texts


def _served(model: Transformer, shape: dict[str, Any]) -> Callable[[], float]:
    """Return the step of a server, whose clients are another process; with `shape["first"]` it returns milliseconds."""
    address = _serve(BatchEngine(model, coder(shape["vocab"]), max_batch=len(shape["texts"])))
    body = {"model": "bench", "max_tokens": shape["new"], "temperature": 0, "stream": shape["stream"]}
    clients, steps = ProcessPoolExecutor(1, get_context("spawn")), count()

    def step() -> float:
        # a prompt that begins like the last one would not be read again
        mark = chr(ord("a") + next(steps) % 26) if shape.get("first") else ""
        bodies = [{**body, "prompt": mark + text} for text in shape["texts"]]
        texts, wall_ms = clients.submit(ask_all, address, bodies).result()
        tokens = [_ids(text) for text in texts]
        Path(shape["out"], "served.json").write_text(json.dumps(tokens))
        return wall_ms if shape.get("first") else float(sum(map(len, tokens)))

    return step


def _serve(engine: BatchEngine) -> str:
    """Serve in a thread, until the process ends; return the address."""
    listener = bind("127.0.0.1", 0)
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(create_app(Served("bench", engine, chat=False), ""), log_level="warning"))
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _ids(text: str) -> list[int]:
    return [BYTES + int(text[at : at + WIDTH], 16) for at in range(0, len(text), WIDTH)]
