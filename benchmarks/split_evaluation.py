"""Rows `replicas/*`, `split/*` and `offered/*` of `python -m benchmarks evaluate`: one model, several processes.

Sides take turns; a value is the median over rounds of a ratio within a round. `run_evaluation` evaluates, as in a run:
ranks with one thread each are forked from an agent that has imported torch, and the CPU time of agent and ranks counts.
Stages are trained by `herd run`; step times are those of the journal.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pyarrow.parquet as pq
import torch
import yaml

from benchmarks.measure import NotMeasured
from benchmarks.process_tree import TreeCost, tree_cost
from benchmarks.rows import Row, measured
from benchmarks.study_overhead import run_environment
from benchmarks.train_rounds import Rounds
from herd.llama3.data.demo.word_problems import questions
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.load import load_recipe, to_yaml
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.llama3.train import metrics
from herd.storage.artifact import Artifact
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, EvaluationCluster
from herd.tasks.launch.local import Agents
from herd.tasks.runs.records import Runs
from herd.tasks.stages.evaluate import CheckpointQueue, run_evaluation

RANKS = 4
STAGE = "main"
WATCH_S = 0.1
"""Between two looks at the CPU time of a trainer and at what it offers."""
CLOSE = 1e-4
"""Relative difference of two scores below which they are the same: a split model rounds otherwise."""
WARM_UP = 5
"""Steps of a stage that are not counted."""


@dataclass(frozen=True)
class SplitSize:
    """How much is evaluated and trained."""

    data: list[str]
    """Changes to the recipe whose documents are read."""
    model: Mapping[str, Any]
    seq_len: int
    documents: int
    """Held-out documents of each domain."""
    questions: int
    """Of each multiple-choice task."""
    prompts: int
    """Questions that are answered in writing."""
    max_tokens: int
    rounds: int
    trained: Mapping[str, Any]
    """The stage."""
    every: str
    """Tokens between two checkpoints, each of which is offered."""


SIZES: Mapping[str, SplitSize] = {
    "tiny": SplitSize(
        ["sources.general=[{uri: installed, limit: 400KB}]", "sources.math=[{uri: installed, limit: 200KB}]",
         "sources.code=[{uri: installed, limit: 200KB}]", "sources.multilingual=[{uri: installed, limit: 200KB}]",
         "tokenizer={train: {vocab: 512, sample: 200KB}}", "tokens.max_epochs=8"],  # math is read 4.03 times
        {"layers": 2, "dim": 32, "ffn": 112, "heads": 2, "kv_heads": 2, "max_seq_len": 512},
        256, 2, 4, 6, 4, 1, {"until": "20K", "seq_len": 64, "batch": "256 tokens"}, "5K",
    ),
    "small": SplitSize(
        [], {"layers": 6, "dim": 384, "ffn": 1344, "heads": 6, "kv_heads": 2, "max_seq_len": 2048},
        512, 32, 200, 200, 32, 3, {"until": "100K", "seq_len": 256, "batch": "1Ki"}, "20K",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TrainedStage:
    """What a stage cost."""

    step_s: Sequence[float]
    """Wall time of its steps, without the first ones."""
    cpu_s: float
    """CPU time of the trainer."""
    offered: int
    """Checkpoints that were pinned for an evaluation."""
    scored: int
    """Checkpoints whose scores another process wrote meanwhile."""


@dataclass(frozen=True)
class SplitSession:
    """Evaluations and stages of one run of the benchmark, below an empty folder."""

    folder: Path
    size: SplitSize
    recipe: Path
    herd: Sequence[str]
    """How the command line is started."""

    @cached_property
    def data(self) -> tuple[Root, Artifact, Artifact]:
        """A root with curated documents, tokenizer and tokens; the artifacts of documents and tokenizer."""
        recipe, root = self._write("data", load_recipe(self.recipe, self.size.data)), Root.parse(self.folder / "data")
        words = [*self.herd, "run", str(recipe), "--root", root.uri, "--until", "tokenize"]
        tree_cost(words, self.folder / "data.log", run_environment(self.folder))
        (record,), store = Runs(root).all(), open_store(root)
        curated, tokenizer = (store.load(record.steps[step].artifact) for step in ("curate", "tokenizer"))
        return root, curated, tokenizer

    @cached_property
    def evaluations(self) -> Mapping[str, list[TreeCost]]:
        """The cost of one evaluation by each side, in each round. Raises RuntimeError if scores differ."""
        recipe, model = self._suite(), self._model()
        sides = {"one": (1, Layout()), "replicas": (RANKS, Layout()), "split": (RANKS, Layout(tp=2, pp=2))}
        costs: dict[str, list[TreeCost]] = {name: [] for name in sides}
        scores: dict[str, dict[str, Any]] = {}
        with Agents(self.folder / "agent.log") as agents:

            def evaluated(name: str, side: str, with_recipe: Recipe) -> dict[str, Any]:
                processes, layout = sides[side]
                place = EvaluationCluster(processes=processes, layout=layout)
                work = self.folder / "evaluations" / name
                return run_evaluation(
                    with_recipe, model, self.data[1].path, work / "scores", work / "work",
                    Cluster(evaluate=place, threads=1, device="cpu"), agents, tokenizer=model,
                )  # fmt: skip

            little = recipe.evaluate.model_copy(update={"documents": 2, "questions": 2, "limit": 2})
            few = recipe.model_copy(update={"evaluate": little})
            evaluated("warm-up", "one", few)  # the agent imports torch
            for number in range(self.size.rounds):
                order = [*sides][number % len(sides) :] + [*sides][: number % len(sides)]
                for side in order:
                    began, busy = time.monotonic(), agents_cpu()
                    scores[side] = evaluated(f"{side}-{number}", side, recipe)
                    costs[side].append(TreeCost(agents_cpu() - busy, time.monotonic() - began))
        check_scores(scores)
        return costs

    @cached_property
    def stages(self) -> Mapping[str, list[TrainedStage]]:
        """One stage trained with and without offers, and with offers that are scored here, in each round."""
        stages: dict[str, list[TrainedStage]] = {"never": [], "offered": [], "scored": []}
        for number in range(self.size.rounds):
            order = [*stages][number % len(stages) :] + [*stages][: number % len(stages)]
            for side in order:
                stages[side].append(self._train(f"{side}-{number}", offer=side != "never", score=side == "scored"))
        return stages

    def _write(self, name: str, recipe: Recipe) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(to_yaml(recipe))
        return path

    def _suite(self) -> Recipe:
        """Write the suite: bits of held-out documents, two multiple-choice tasks, and answers in writing."""
        task = {
            "name": "written", "kind": "generate", "data": "written.jsonl", "context": "Question: {{ query }}",
            "gold": "gold", "before_answer": "\nAnswer: ",
            "writing": {"max_tokens": self.size.max_tokens, "until": ["\n\n\n"]},
        }  # fmt: skip
        lines = [{"query": item.query, "gold": item.choices[item.gold]} for item in questions(1, self.size.prompts)]
        (self.folder / "written.yaml").write_text(yaml.safe_dump(task))
        (self.folder / "written.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        suite = {"built_in": ["bits", "arithmetic", "continuation"], "tasks": ["written.yaml"]}
        (self.folder / "suite.yaml").write_text(yaml.safe_dump(suite))
        sets = {
            "suite": self.folder / "suite.yaml", "data": self.folder,
            "documents": self.size.documents, "questions": self.size.questions,
        }  # fmt: skip
        stage = {"name": STAGE, "until": "1M", "seq_len": self.size.seq_len, "batch": "4Ki", "mix": "base"}
        return load_recipe(
            self.recipe,
            [
                *self.size.data, f"model={json.dumps(self.size.model)}", f"stages={json.dumps([stage])}",
                "evaluate.after=[]", *(f"evaluate.{name}={value}" for name, value in sets.items()),
            ],
        )  # fmt: skip

    def _model(self) -> Path:
        """Write random weights, large enough to make decisions, with the tokenizer of the data."""
        folder, config = self.folder / "model", self._suite().model
        tokenizer = Tokenizer.load(self.data[2].path)
        model = build_model(config, tokenizer.rows, 0, torch.float32, torch.device("cpu"))
        weights = {name: value * (3 if value.ndim > 1 else 1) for name, value in model.state_dict().items()}
        save_model(folder, config, tokenizer.rows, weights)
        tokenizer.save(folder)
        return folder

    def _train(self, name: str, offer: bool, score: bool) -> TrainedStage:
        """Train the stage by `herd run`, in a copy of the data's root, and score what is offered if `score`."""
        root = Root.parse(shutil.copytree(self.data[0].local, self.folder / name, symlinks=True))
        stage = {"name": STAGE, "mix": "base", **self.size.trained}
        sets = [
            *self.size.data, f"stages={json.dumps([stage])}", "lr.warmup=10 steps", f"lr.cosine.over={stage['until']}",
            "evaluate.after=[]", "evaluate.val_interval=never", f"checkpoint.every={self.size.every}",
            "checkpoint.keep.last=1", "precision=fp32",  # bf16 is slow on processors without its instructions
            *([f"evaluate.every={self.size.every}"] if offer else []),
        ]  # fmt: skip
        recipe, names = self._write(f"{name}-recipe", load_recipe(self.recipe, sets)), run_environment(self.folder)
        words = [*self.herd, "run", str(recipe), "--root", root.uri, "--until", STAGE]
        cpu_s, offered = 0.0, set[int]()
        agent: psutil.Process | None = None
        scorer: subprocess.Popen[bytes] | None = None
        with (self.folder / f"{name}.log").open("w+") as log:
            run = psutil.Popen(words, env=names, stdout=log, stderr=subprocess.STDOUT)
            while run.poll() is None:
                time.sleep(WATCH_S)
                with suppress(psutil.Error, StopIteration):
                    agent = agent or next(
                        child for child in run.children() if "herd.llama3.train.launch" in child.cmdline()
                    )
                    times = agent.cpu_times()  # has the trainer's once that has ended
                    cpu_s = max(cpu_s, times.children_user + times.children_system)
                for folder in root.local.glob("work/*/checkpoints"):
                    waiting = CheckpointQueue(str(folder)).waiting()
                    offered |= set(waiting)
                    if score and waiting and (scorer is None or scorer.poll() is not None):
                        words = [*self.herd, "eval", "waiting", "latest", "--root", root.uri]
                        scorer = subprocess.Popen(words, env=names, stdout=log, stderr=subprocess.STDOUT)
            if scorer is not None:
                scorer.wait()
            log.seek(0)
            if run.returncode:
                raise RuntimeError(f"{name}: herd run failed: {log.read()[-600:]}")
        store = open_store(root)
        (checkpoint,) = store.all("checkpoint")
        journal = pq.read_table(checkpoint.part("metrics.parquet"), filters=[("key", "=", metrics.STEP_S)])
        steps = journal.sort_by("position")["value"].to_pylist()[WARM_UP:]
        return TrainedStage(steps, cpu_s, len(offered), len(store.all("evaluation")))


def agents_cpu() -> float:
    """Return the CPU seconds of this process's children and of theirs that have ended."""
    return sum(sum(child.cpu_times()[:4]) for child in psutil.Process().children())


def check_scores(scores: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise RuntimeError unless all sides found what one process found."""
    for side, facts in scores.items():
        for key, value in scores["one"].items():
            same = math.isclose(facts[key], value, rel_tol=CLOSE) if isinstance(value, float) else facts[key] == value
            if not same:
                raise RuntimeError(f"{side}: {key} is {facts[key]}, and {value} by one process")


def compared(name: str, costs: Mapping[str, Sequence[float]], side: str, over: str, note: str, unit: str) -> Row:
    """Return the row of the ratio of two sides."""
    taken = Rounds(costs, {}, {}, {}, {})
    ratio = taken.ratio(side, over)
    seconds = ", ".join(f"{each} {taken.seconds(each):.3g} {unit}" for each in (over, side))
    return measured(name, ratio.value, f"{note}: {seconds}; noise +-{100 * ratio.noise:.1f} %", rounds=dict(costs))


def evaluation_row(run: SplitSession, name: str) -> Row:
    """Return the CPU time of several processes over that of one."""
    side = name.partition("/")[0]
    costs = {each: [cost.cpu_s for cost in rounds] for each, rounds in run.evaluations.items()}
    return compared(name, costs, side, "one", f"{RANKS} ranks", "CPU s")


def wall_row(run: SplitSession, name: str) -> Row:
    """Return the wall time of one process over that of several. Raises NotMeasured where they have no core each."""
    cores = len(os.sched_getaffinity(0))
    if cores < RANKS:
        raise NotMeasured(f"{RANKS} ranks need {RANKS} cores, and there are {cores}")
    costs = {each: [cost.wall_s for cost in rounds] for each, rounds in run.evaluations.items()}
    return compared(name, costs, "one", "replicas", f"{RANKS} ranks", "s")


def stage_row(run: SplitSession, name: str) -> Row:
    """Return the median step, or the trainer's CPU time, with offers over that without."""
    side = "scored" if name == "scored/step" else "offered"
    costs = {each: [median(stage.step_s) for stage in stages] for each, stages in run.stages.items()}
    unit = "s"
    if name == "offered/cpu":
        costs, unit = {each: [stage.cpu_s for stage in stages] for each, stages in run.stages.items()}, "CPU s"
    last = run.stages[side][-1]
    if side == "scored" and not last.scored:
        raise NotMeasured("the stage ended before a checkpoint was scored")
    note = f"{len(last.step_s)} steps, {last.offered} checkpoints offered, {last.scored} scored meanwhile"
    return compared(name, costs, side, "never", note, unit)
