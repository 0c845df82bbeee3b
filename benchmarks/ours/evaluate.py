"""herd's evaluator on the same tasks and weights as `peers.lm_eval_tasks`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

_began = time.perf_counter()
import torch  # noqa: E402

from benchmarks.evaluate_tasks import read_job  # noqa: E402
from herd.llama3.evaluate.generate import generate_batch  # noqa: E402
from herd.llama3.evaluate.scores import samples  # noqa: E402
from herd.llama3.evaluate.scoring import score_requests  # noqa: E402
from herd.llama3.evaluate.task import TASK_KINDS, ClozeKind, Likelihood, RollingKind, Task, WrittenKind  # noqa: E402
from herd.llama3.model.files import load_model  # noqa: E402
from herd.llama3.model.transformer import Transformer  # noqa: E402
from herd.llama3.tokens.tokenizer import Tokenizer  # noqa: E402

IMPORT_S = time.perf_counter() - _began
Answers = dict[str, dict[str, Any]]


def work(source: Path, folder: Path, model: str, share: bool = True, **_: Any) -> dict[str, Any]:
    """Return what the model in folder `model` answers to the tasks in `source`."""
    network, tokenizer = _loaded(model)
    tasks = read_job(source)
    greedy = {task.key for task in tasks if task.kind == ClozeKind.name}
    requests = [request for task in tasks for request in task.requests]
    found = iter(score_requests(network, tokenizer, requests, network.config.max_seq_len, greedy=greedy, share=share))
    answers = {task.key: _scored(task, [next(found) for _ in task.requests]) for task in tasks if task.requests}
    answers |= {task.key: _written(task, network, tokenizer) for task in tasks if task.prompts}
    return {"samples": answers, "import_s": IMPORT_S}


def _scored(task: Task, likelihoods: Sequence[Likelihood]) -> Answers:
    """Return what was decided by each rule, and the nats of each text, by question."""
    answers: Answers = {}
    for request, likelihood in zip(task.requests, likelihoods, strict=True):
        answers.setdefault(request.document, {"decided": {}, "nats": []})["nats"].append(likelihood.nll)
    rules = {"acc": replace(task, normalize="none")} if task.kind != RollingKind.name else {}
    if task.normalize == "characters":
        rules["acc_norm"] = task
    for name, rule in rules.items():
        for sample in samples(rule, likelihoods):
            answers[sample.id]["decided"][name] = sample.numerator
    return answers


def _written(task: Task, network: Transformer, tokenizer: Tokenizer) -> Answers:
    """Return what was written, with what lm-eval decides of it too, or whether it passes its tests."""
    found = list(generate_batch(network, tokenizer, task.prompts, task.writing, 0))
    answers = [(prompt, text, text) for prompt, (text,) in zip(task.prompts, found, strict=True)]
    kind = TASK_KINDS[task.kind]
    assert isinstance(kind, WrittenKind)
    made: Answers = {}
    for (prompt, text, _), verdict in zip(answers, kind.judge(answers, task.writing, 1), strict=True):
        right = float(verdict.right)
        decided = {"decided": {}, "passed": right} if kind.runs_programs else {"decided": {"exact_match": right}}
        made[prompt.document] = {**decided, "text": text}
    return made


@cache
def _loaded(model: str) -> tuple[Transformer, Tokenizer]:
    folder = Path(model)
    return load_model(folder, dtype=torch.float32, device="cpu").eval(), Tokenizer.load(folder)
