"""lm-eval's evaluator on tasks as YAML files: with its own `hf` model, or as a client of a server.

Offline, and with caches of its own: the library locks what it keeps in the user's folder, so that two evaluations at a
time wait for each other. Rolling likelihoods are taken without the begin token that Llama's tokenizer adds by itself:
lm-eval puts one before each text anyway, and would score the second one as part of the text.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf-")
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[_name] = "1"
_began = time.perf_counter()
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

IMPORT_S = time.perf_counter() - _began


def work(
    source: Path,
    folder: Path,
    model: str,
    batch: int,
    server: str = "",
    chat: bool = False,
    start: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return what the model answers to the tasks in `source`, `batch` sequences at a time.

    The folder `model` has it in Hugging Face form; with the address `server` only its tokenizer is used, and with
    `chat` not even that. `start` is the id before a text without a context; None: the tokenizer's begin token, which
    for some chat models begins a turn and never stood before a document.
    """
    rolling = {path: "loglikelihood_rolling" in path.read_text() for path in sorted(source.glob("*.yaml"))}
    manager = TaskManager(include_path=str(source), include_defaults=False)
    answered: dict[str, list[dict[str, Any]]] = {}
    for alone in (False, True):
        tasks = [path.stem for path in rolling if rolling[path] == alone]
        if tasks:
            if server:
                lm = _client(server, model, batch, not alone, chat)
            else:
                lm = _loaded(model, batch, False if alone else None, start)
            options = {"task_manager": manager, "bootstrap_iters": 0, "apply_chat_template": chat}
            answered |= simple_evaluate(model=lm, tasks=tasks, **options)["samples"]
    samples = {
        task: {str(one["doc_id"]): _sample(one) for one in sorted(some, key=lambda one: int(one["doc_id"]))}
        for task, some in answered.items()
    }
    return {"samples": samples, "import_s": IMPORT_S}


def _sample(one: dict[str, Any]) -> dict[str, Any]:
    """Return what was decided (0 or 1 by rule), the nats and the arguments of each request, or what was written."""
    decided = {name: float(one[name]) for name in ("acc", "acc_norm", "exact_match") if name in one}
    (first, *_), answers = one["resps"], one["filtered_resps"]
    if isinstance(first[0] if isinstance(first, list) else first, str):
        return {"decided": decided, "text": first[0] if isinstance(first, list) else first}
    nll = [-float(answer[0] if isinstance(answer, (tuple, list)) else answer) for answer in answers]
    return {"decided": decided, "nats": nll, "arguments": [list(arguments) for arguments in one["arguments"]]}


@cache
def _loaded(model: str, batch: int, begin: bool | None, start: int | None) -> Any:
    """Return the model; `begin` None puts a begin token before every text because the tokenizer says so."""
    options = {"dtype": "float32", "batch_size": batch, "add_bos_token": begin, "prefix_token_id": start}
    return HFLM(pretrained=model, device="cpu", **options)


def _client(server: str, model: str, batch: int, begin: bool, chat: bool) -> Any:
    """Return a client, which by itself puts no begin token before a text."""
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    if chat:
        return LocalChatCompletion(model="m", base_url=f"{server}/v1/chat/completions", max_length=4096)
    options = {"tokenizer": model, "tokenizer_backend": "huggingface", "add_bos_token": begin, "max_length": 4096}
    return LocalCompletionsAPI(model="m", base_url=f"{server}/v1/completions", batch_size=batch, **options)
