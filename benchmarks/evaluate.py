"""Rows of `python -m benchmarks evaluate`: herd's evaluator beside lm-eval's own `hf` model.

Each side runs in a process of its own, one thread, one after the other. Imports and the loading of weights are paid for
before the clock starts, and the imports are a row. lm-eval gets the batch size that was fastest on a tenth of the
questions. Samples are equal if every decision on them is (right or wrong, by each rule of the task) and the likelihoods
agree to a ten-thousandth; where the model writes, if the texts are equal. What this gives up: generation is not timed.

The rows `score` say what the model gets, beside what lm-eval finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.evaluate_tasks import TaskPair, pairs, write_job
from benchmarks.measure import Bench, Cost, NotMeasured
from benchmarks.rows import EVALUATE_TARGETS, Row, measured, rows_of
from herd.llama3.export.convert import convert, format_of
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer
from herd.storage.filesystem import local_path

EvaluateSize = Literal["tiny", "small"]
BATCHES = (1, 8, 32)
"""Batch sizes that lm-eval may have."""
CLOSE = 1e-4
"""Relative difference of two likelihoods of a text below which they are the same; below a nat, absolute."""
PROBED, WRITTEN = 10, 10
"""One in so many questions chooses lm-eval's batch; the model writes the answers to one in so many."""
WRITING_BATCH = 8
SCORES = {
    "score/arc": ("arc_", "acc_norm"),
    "score/mmlu_letters": ("mmlu_letters_", "acc"),
    "score/mmlu_cloze": ("mmlu_cloze", "acc_norm"),
    "score/lambada": ("lambada_openai", "acc"),
    "score/wikitext": ("wikitext", ""),
    "score/gsm8k": ("gsm8k", "exact_match"),
    "score/humaneval": ("humaneval", "passed"),
}
"""Row -> how its tasks begin, whose mean it is, and the rule that decides; none: bits per byte."""


class RandomModelShape(NamedTuple):
    """Of the random model."""

    layers: int
    dim: int
    vocab: int


Samples = Mapping[str, Mapping[str, Any]]
"""Task -> question -> what was decided, and the nats of its texts or what was written."""

SIZES: Mapping[EvaluateSize, RandomModelShape] = {
    "tiny": RandomModelShape(2, 32, 300),
    "small": RandomModelShape(6, 384, 4096),
}


@dataclass(frozen=True)
class EvaluateSettings:
    """What the user of `python -m benchmarks evaluate` chooses."""

    folder: Path
    data: Path
    """Folder of benchmark files (see `evaluate_tasks`)."""
    size: EvaluateSize = "small"
    limit: int = 100
    """Questions of each task."""
    model: str = ""
    """Model folder with its tokenizer, or a GGUF file; empty: random weights."""
    only: tuple[str, ...] = ()
    peers: str = ""
    """Python that has lm-eval."""


@dataclass
class EvaluateSession:
    """Measures for the rows of one run."""

    settings: EvaluateSettings
    _costs: dict[tuple[Any, ...], Cost] = field(default_factory=dict)

    @cached_property
    def pairs(self) -> list[TaskPair]:
        """The tasks that have questions. Raises ValueError if the data folder has none of the files."""
        answered = [pair for pair in pairs(self.settings.data, self.settings.limit) if pair.task.requests]
        if not answered:
            raise ValueError(f"--data: {self.settings.data} has no file of a task; give a folder with one")
        return answered

    @cached_property
    def models(self) -> dict[str, str]:
        """Return the folders of herd's and of lm-eval's model, same weights."""
        ours, theirs = self.settings.folder / "model", self.settings.folder / "hf"
        if self.settings.model:
            source = local_path(self.settings.model)
            convert(source, format_of(source), ours, "herd", "fp32")
        else:
            self._write_random(ours)
        convert(ours, "herd", theirs, "hf", "fp32")
        return {"ours": str(ours), "peers": str(theirs)}

    @cached_property
    def batch(self) -> int:
        """Return the batch size with which lm-eval needs least wall time."""
        return min(BATCHES, key=lambda batch: self._theirs(PROBED, batch).wall_s)

    def ours(self, share: bool = True) -> Cost:
        return self._cost("ours.evaluate", 1, share=share)

    def theirs(self) -> Cost:
        return self._theirs(1, self.batch)

    def _theirs(self, part: int, batch: int, written: bool = False) -> Cost:
        start = Tokenizer.load(Path(self.models["ours"])).start
        return self._cost("peers.lm_eval_tasks", part, written, start=start, batch=batch)

    def read(self) -> tuple[Samples, Samples]:
        """Return what both sides decide by likelihoods."""
        return self.ours().facts["samples"], self.theirs().facts["samples"]

    def written(self) -> tuple[Samples, Samples]:
        """Return what both sides write. Raises NotMeasured for random weights."""
        if not self.settings.model:
            raise NotMeasured("random weights want special tokens, which herd never writes; give --model")
        ours = self._cost("ours.evaluate", WRITTEN, written=True)
        return ours.facts["samples"], self._theirs(WRITTEN, WRITING_BATCH, written=True).facts["samples"]

    def _cost(self, module: str, part: int, written: bool = False, **options: Any) -> Cost:
        """Return the cost of a side on one in `part` of the questions, measured once."""
        key = (module, part, written, *options.values())
        if key not in self._costs:
            bench = (
                Bench(self.settings.folder, self.settings.peers) if self.settings.peers else Bench(self.settings.folder)
            )
            model = self.models[module.split(".")[0]]
            few = self._job(max(1, self.settings.limit // 20), False)
            job = self._job(max(1, self.settings.limit // part), written)
            self._costs[key] = bench.cost(module, job, few, model=model, **options)
        return self._costs[key]

    def _job(self, limit: int, written: bool) -> Path:
        folder = self.settings.folder / f"{'written' if written else 'tasks'}-{limit}"
        if not folder.exists():
            made = pairs(self.settings.data, limit)
            write_job([pair for pair in made if bool(pair.task.prompts) == written], folder)
        return folder

    def _write_random(self, folder: Path) -> None:
        """Write random weights, large enough to make decisions, and a tokenizer of the questions' own text."""
        layers, dim, vocab = SIZES[self.settings.size]
        config = Model(layers=layers, dim=dim, ffn=dim * 7 // 2, heads=max(2, dim // 64), kv_heads=2, max_seq_len=4096)
        texts = sorted(
            {request.context + request.continuation for pair in self.pairs for request in pair.task.requests}
        )
        tokenizer = train_tokenizer(texts, vocab)
        model = build_model(config, tokenizer.vocab_size, 0, torch.float32, torch.device("cpu"))
        weights = ((name, value * (3 if value.ndim > 1 else 1)) for name, value in model.state_dict().items())
        save_model(folder, config, tokenizer.vocab_size, weights)
        tokenizer.save(folder)


def evaluate_rows(run: EvaluateSession) -> Iterator[Row]:
    """Yield the wanted rows as they are measured. Raises ValueError for a row that there is not, or without data."""
    assert run.pairs
    return rows_of(run, EVALUATE_TARGETS, MEASURES)


def _wall(run: EvaluateSession, name: str) -> Row:
    ours, theirs = run.ours(), run.theirs()
    note = f"{ours.wall_s:.2f} s against {theirs.wall_s:.2f} s with batches of {run.batch}"
    counts = {pair.task.key: len(pair.rows) for pair in run.pairs}
    tried = {str(key[-1]): round(cost.wall_s, 3) for key, cost in run._costs.items() if key[:2] == _PROBE}
    return measured(name, theirs.wall_s / ours.wall_s, note, questions=counts, batches_wall_s=tried)


def _cpu(run: EvaluateSession, name: str) -> Row:
    ours, theirs = run.ours(), run.theirs()
    return measured(name, theirs.cpu_s / ours.cpu_s, f"{ours.cpu_s:.2f} s against {theirs.cpu_s:.2f} s")


def _equal(run: EvaluateSession, name: str) -> Row:
    return _alike(name, *run.read())


def _written(run: EvaluateSession, name: str) -> Row:
    return _alike(name, *run.written())


def _alike(name: str, ours: Samples, theirs: Samples) -> Row:
    differ = differing(ours, theirs)
    asked = sum(map(len, ours.values()))
    note = f"{asked} samples of {len(ours)} tasks"
    if differ:
        note += f"; {len(differ)} differ, with likelihoods up to {max(differ.values()):.1e} apart (relative)"
    return measured(name, 100 * (1 - len(differ) / asked), note, differing=differ)


def _score(run: EvaluateSession, name: str) -> Row:
    begins, rule = SCORES[name]
    sides = run.written() if rule in ("exact_match", "passed") else run.read()
    tasks = [task for task in sides[0] if task.startswith(begins)]
    if not tasks:
        raise NotMeasured(f"{run.settings.data} has no file of such a task")
    count = sum(len(sides[0][task]) for task in tasks)
    if rule == "passed":
        passed = 100 * fmean(one["passed"] for one in sides[0]["humaneval"].values())
        return measured(name, passed, f"of {count} questions; lm-eval does not run programs")
    value, other = (fmean(_mean(run, task, side[task], rule) for task in tasks) for side in sides)
    return measured(name, value, f"of {count} questions; lm-eval {other:.4g}")


def _mean(run: EvaluateSession, task: str, answers: Mapping[str, Any], rule: str) -> float:
    """Return the percentage of right answers, or bits per byte."""
    if rule:
        return 100 * fmean(one["decided"][rule] for one in answers.values())
    (pair,) = (pair for pair in run.pairs if pair.task.key == task)
    nats: float = sum(one["nats"][0] for one in answers.values())
    return nats / math.log(2) / sum(request.bytes for request in pair.task.requests)


def _imports(run: EvaluateSession, name: str) -> Row:
    ours, theirs = (side.facts["import_s"] for side in (run.ours(), run.theirs()))
    return measured(name, theirs, f"lm-eval; herd {ours:.1f} s; in no other row")


def _sharing(run: EvaluateSession, name: str) -> Row:
    shared, whole = run.ours(), run.ours(share=False)
    return measured(name, whole.wall_s / shared.wall_s, f"{shared.wall_s:.2f} s against {whole.wall_s:.2f} s")


def differing(ours: Samples, theirs: Samples) -> dict[str, float]:
    """Return the samples (`task/question`) on which the sides disagree, with how far apart their likelihoods are.

    That is the largest relative difference over the texts of a sample: a decision that differs while likelihoods agree
    to a millionth was a tie to a millionth. Raises RuntimeError if the sides were not asked the same.
    """
    if {key: list(answers) for key, answers in ours.items()} != {key: list(theirs.get(key, ())) for key in ours}:
        raise RuntimeError("the sides answered different questions")
    found = {}
    for task, answers in ours.items():
        for question, mine in answers.items():
            other = theirs[task][question]
            pairs = zip(mine.get("nats", ()), other.get("nats", ()), strict=True)
            apart = max((abs(a - b) / max(abs(a), abs(b), 1) for a, b in pairs), default=0.0)
            if mine["decided"] != other["decided"] or mine.get("text") != other.get("text") or apart > CLOSE:
                found[f"{task}/{question}"] = apart
    return found


_PROBE = ("peers.lm_eval_tasks", PROBED)
MEASURES: dict[str, Callable[[EvaluateSession, str], Row]] = {
    "lm-eval/wall": _wall,
    "lm-eval/cpu": _cpu,
    "lm-eval/equal": _equal,
    "lm-eval/written": _written,
    "lm-eval/imports": _imports,
    "sharing/wall": _sharing,
    **dict.fromkeys(SCORES, _score),
}
