"""llama.cpp's own server reads our GGUF files: the same tokens, distributions, greedy texts and chats."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
import torch

from herd.llama3.evaluate.generate import GeneratedText, IncrementalDecoder, Sampler, TextStream
from herd.llama3.export.convert import convert
from herd.llama3.model.transformer import Transformer
from herd.llama3.tokens.adversarial_strings import random_strings
from herd.llama3.tokens.chat import encode_chat
from herd.llama3.tokens.chat_template import TEMPLATE
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer
from tests.llama3.export.export_samples import SCALED, herd_folder, shape, tokenizer

PYTHON = Path(__file__).parents[3] / ".venv/llamacpp/bin/python"
SERVER = """
import sys, xllamacpp as llama
params = llama.CommonParams()
params.model.path, params.n_ctx = sys.argv[1], int(sys.argv[2])
params.port, params.warmup, params.n_parallel = 0, False, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
server = llama.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " the quick fox \n"}]
CLOSE = 1e-4
"""Nats, of each token of a distribution: 3e-6 were measured, and 1e-3 with a `rope_theta` that is wrong by 1 %."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs llama.cpp; run `make .venv/llamacpp/bin/python`"),
]


@contextmanager
def llama_cpp(file: Path, context: int) -> Iterator[httpx.Client]:
    """Serve a file with llama.cpp."""
    words = [str(PYTHON), "-c", SERVER, str(file), str(context)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            with httpx.Client(base_url=server.stdout.readline().strip(), timeout=300) as client:
                yield client
        finally:
            server.kill()


def distribution(client: httpx.Client, ids: list[int], vocab_size: int) -> torch.Tensor:
    """Return llama.cpp's log-probability of each token after `ids`."""
    body = {"prompt": ids, "n_predict": 1, "n_probs": vocab_size, "temperature": 0, "cache_prompt": False}
    (first,) = client.post("/completion", json=body).raise_for_status().json()["completion_probabilities"]
    found = torch.zeros(vocab_size, dtype=torch.float64)
    for each in first["top_logprobs"]:
        found[each["id"]] = each["logprob"]
    assert len(first["top_logprobs"]) == vocab_size
    return found


@torch.inference_mode()
def due(model: Transformer, ids: list[int]) -> torch.Tensor:
    return IncrementalDecoder(model, len(ids)).read(ids)[0].double().log_softmax(-1)


@torch.inference_mode()
def greedy(model: Transformer, coder: Tokenizer, ids: list[int], new: int) -> str:
    sampler, decoder = Sampler(len(coder.base), coder.end), IncrementalDecoder(model, len(ids) + new)
    text = GeneratedText(coder, list(ids), new, Random(0), TextStream())
    while text.left:
        text.add(*sampler.pick(decoder.read(text.tokens), [text.dice]))
    return "".join(text.written)


@pytest.mark.parametrize(
    ("more", "lengths"),
    [
        pytest.param({}, [1, 40, 900], id="plain"),
        pytest.param({"kv_heads": 8, "rope_theta": 1e4, "max_seq_len": 2048}, [40], id="multi-head, other theta"),
        pytest.param({**SCALED, "tied_embeddings": True}, [40, 3000, 9800], id="RoPE 3.1, tied"),
    ],
)
def test_tokens_distributions_and_greedy_texts_are_ours(
    more: dict[str, object], lengths: list[int], tmp_path: Path
) -> None:
    coder = tokenizer()
    model = herd_folder(tmp_path / "model", shape(**more), coder=coder)
    convert(tmp_path / "model", "herd", tmp_path / "gguf", "gguf")
    dice = Random(1)
    with llama_cpp(tmp_path / "gguf/model.gguf", max(lengths) + 64) as client:
        for text in random_strings(200, 3):
            if "\0" not in text:
                asked = {"content": text, "add_special": False, "parse_special": False}
                assert client.post("/tokenize", json=asked).json()["tokens"] == coder.encode(text), text
        for length in lengths:
            ids = [coder.begin, *(dice.randrange(len(coder.base)) for _ in range(length - 1))]
            found, ours = distribution(client, ids, coder.vocab_size), due(model, ids)
            assert float((found - ours).abs().max()) < CLOSE, length
            assert found.argmax() == ours.argmax()
        for text in ("the quick", "été à", "123 x"):
            ids = [coder.begin, *coder.encode(text)]
            bias = [[number, False] for number in range(len(coder.base), coder.vocab_size) if number != coder.end]
            body = {"prompt": ids, "n_predict": 40, "temperature": 0, "cache_prompt": False, "logit_bias": bias}
            assert client.post("/completion", json=body).json()["content"] == greedy(model, coder, ids, 40)


def test_a_chat_is_read_with_its_template(tmp_path: Path) -> None:
    coder = tokenizer()
    model = herd_folder(tmp_path / "model", shape(), coder=coder)
    (tmp_path / "model" / TEMPLATE_FILE).write_text(TEMPLATE)
    convert(tmp_path / "model", "herd", tmp_path / "gguf", "gguf")
    ids = encode_chat(coder, CHAT, True)
    with llama_cpp(tmp_path / "gguf/model.gguf", 512) as client:
        prompt = client.post("/apply-template", json={"messages": CHAT}).json()["prompt"]
        asked = {"content": prompt, "add_special": True, "parse_special": True}
        assert client.post("/tokenize", json=asked).json()["tokens"] == ids
        body = {"messages": CHAT, "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 5}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == len(ids)
        ours = due(model, ids)
        for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            assert each["logprob"] == pytest.approx(float(ours[each["id"]]), abs=CLOSE)
