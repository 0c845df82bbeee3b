"""Find a model by run, alias or folder; load it, evaluate it, or generate text with it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.markup import escape
from rich.table import Table

from herd.llama3.parallel.layout import FIELD, Layout
from herd.llama3.parallel.memory import inference_layout
from herd.llama3.recipe.sections import Model
from herd.llama3.recipe.units import Tokens
from herd.storage.object_artifact import open_store
from herd.storage.page_cache import lazy_folder
from herd.storage.processes import processors
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.runs.records import Runs, trained_stages

if TYPE_CHECKING:
    from herd.llama3.evaluate.evaluate import EvaluationResult
    from herd.llama3.evaluate.generate import Runner
    from herd.llama3.evaluate.suite import LoadedSuite
    from herd.llama3.tokens.inspect import Inspection
    from herd.llama3.tokens.tokenizer import Tokenizer


def model_folder(root: Root, name: str) -> Path:
    """Return the folder of a model: of a run's last checkpoint, a checkpoint's label, `FAMILY@ALIAS`, or a folder.

    Raises ValueError naming what exists.
    """
    if any((Path(name) / file).is_file() for file in ("config.json", "params.json")):
        return Path(name)
    if name.startswith("checkpoint/"):
        return open_store(root).load(name).path_of("model")
    family, separator, alias = name.partition("@")
    if separator:
        label = label_of_alias(root, family, alias)
        if label is None:
            raise ValueError(f"model {family}@{alias}: no version holds that alias; promote one, or name a run")
        return open_store(root).load(label).path_of("model")
    runs = Runs(root)
    record, recipe = runs.find(name), runs.recipe(name)
    trained = trained_stages(recipe, record)
    if not trained:
        raise ValueError(f"run {name!r} has not finished a training stage; wait for it or choose another")
    return open_store(root).load(record.steps[trained[-1].name].artifact).path_of("model")


def label_of_alias(root: Root, family: str, alias: str) -> str | None:
    """Return the label of the checkpoint that holds `alias`, or None.

    The promotion log decides; MLflow is asked for an alias that was given by hand, and raises MlflowException if it
    does not answer.
    """
    from herd.tasks.promotion.log import ALIASES, logged_label

    label = logged_label(root, family, alias)
    if label or alias in ALIASES:
        return label or None
    from herd.tasks.promotion.registry import Registry
    from herd.tasks.tracking.mlflow import MLflowTracker

    version = Registry(MLflowTracker(root, family)).version_with_alias(alias)
    return None if version is None else str(version.tags["herd.artifact"])


@contextmanager
def load_runner(
    folder: Path, tp: int | None, pp: int | None, dtype: Literal["bf16", "fp32"] | None, threads: int = 0
) -> Iterator[Runner]:
    """Load the model in `folder` for generation: in this process, or split over `tp` x `pp` of this machine.

    On GPUs if there are any. Without `tp` and `pp` the model takes as few of them as it fits. `dtype` None: as stored.
    The processes of a split model share `threads` processor threads; 0: all. Raises ValueError, before weights are
    read, if the model cannot be split so or there are too few GPUs.
    """
    import torch

    from herd.llama3.evaluate.generate import ModelRunner
    from herd.llama3.model.files import load_model, open_model

    weights = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    layout = Layout()
    if tp or pp:
        layout = Layout(tp=tp or 1, pp=pp or 1)
        model = open_model(folder)
        check_layout(model.config, model.vocab_size, layout, gpus)
    elif gpus > 1:
        from herd.tasks.launch.devices import device_memory

        model, device = open_model(folder), device_memory(Cluster())
        itemsize = (weights or model.slice("embedding.weight", slice(0, 0)).dtype).itemsize
        if device and device.cuda:
            layout = choose_layout(model.config, model.vocab_size, itemsize, gpus, device.limit)
    if layout.model_parallel == 1:
        yield ModelRunner(load_model(folder, weights, "cuda" if gpus else "cpu"))
        return
    from herd.llama3.evaluate.distributed import RankJob, SplitRunner
    from herd.tasks.launch.local import InferenceRanks

    count = layout.model_parallel
    threads = max(1, (threads or processors()) // count)
    with InferenceRanks(count, threads) as ranks:
        yield SplitRunner(ranks, RankJob(folder, layout, weights, "cuda" if gpus else "cpu", threads))


def check_layout(config: Model, vocab_size: int, layout: Layout, gpus: int) -> None:
    """Raise ValueError if a model cannot be split so, or takes more GPUs than there are, if there are any."""
    count = layout.model_parallel
    try:
        layout.check(config, vocab_size, count)
    except ValueError as error:
        raise ValueError(str(error).replace(f"{FIELD}.", "--")) from None
    if 0 < gpus < count:
        raise ValueError(
            f"--tp {layout.tp} x --pp {layout.pp}: needs {count} GPUs, and this machine has {gpus}; write less"
        )


def choose_layout(config: Model, vocab_size: int, itemsize: int, gpus: int, limit: float) -> Layout:
    """Return the layout with the fewest of `gpus` GPUs that a model fits, with `limit` bytes of memory each.

    `itemsize` is the bytes of a weight. Raises ValueError if there is none.
    """
    layout = inference_layout(config, vocab_size, itemsize, "cuda", limit, gpus)
    if layout is None or layout.model_parallel > gpus:
        smaller = "write --dtype bf16, or " if itemsize > 2 else ""
        raise ValueError(
            f"--tp: the model with {itemsize} bytes a weight does not fit {gpus} GPUs of {limit / 1e9:.0f} GB each; "
            f"{smaller}use more GPUs, or give --tp and --pp to try it"
        )
    return layout


def evaluate_folder(
    folder: Path, suite: LoadedSuite, tables: Path | None, threads: int, device: str
) -> EvaluationResult:
    """Evaluate the model in `folder`, of herd's, Hugging Face's or Meta's format, on the tasks of `suite`.

    Weights are read as fp32, so that scores do not depend on the machine's number format. `device` is `cpu`, `cuda` or
    `auto`. Raises ValueError if the folder holds no Llama 3 with its tokenizer.
    """
    import torch

    from herd.llama3.evaluate.evaluate import evaluate_tasks
    from herd.llama3.export.convert import load_model_any_format

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    network, tokenizer = load_model_any_format(folder, torch.float32, device)
    return evaluate_tasks(network, tokenizer, suite, tables, threads=threads, device=device)


@dataclass
class GenerationStats:
    """Tokens and seconds of a generation, counted while it runs."""

    tokens: int = 0
    """Decoding steps, with the step that chose the end."""
    first_s: float = 0.0
    """Seconds from the loaded model to the first token: the prefill."""
    seconds: float = 0.0
    """Seconds from the loaded model to the last token."""

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token; 0 if there was only one."""
        return (self.tokens - 1) / (self.seconds - self.first_s) if self.tokens > 1 else 0.0


def generate_text(
    runner: Runner,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    count: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    until: Sequence[str] = (),
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    stop_token_ids: tuple[int, ...] = (),
) -> tuple[Iterator[str], GenerationStats]:
    """Return the model's continuation of `prompt` in pieces as they are generated, and their tokens and seconds.

    Raises ValueError, before anything is generated, if a setting is invalid or the tokenizer is not the model's.
    """
    from herd.llama3.evaluate.generate import stream

    settings = (temperature, top_p, seed, until, top_k, repetition_penalty, stop_token_ids)
    pieces = stream(runner, tokenizer, prompt, count, *settings)
    written = GenerationStats()

    def counted() -> Iterator[str]:
        began = time.perf_counter()
        for piece in pieces:
            written.tokens += 1
            written.seconds = time.perf_counter() - began
            written.first_s = written.first_s or written.seconds
            yield piece
            began = time.perf_counter() - written.seconds  # time of the consumer does not count

    return counted(), written


# The documents that a run trains on between two positions: the tables of `herd inspect`.


def parse_span(text: str) -> tuple[int, int]:
    """Return the positions that `A:B` names, such as 120M:121M. Raises ValueError."""
    ends = text.split(":")
    if len(ends) != 2 or not all(ends):
        raise ValueError(f"--tokens: {text!r} is not a span; write two positions, e.g. 120M:121M")
    start, stop = (int(end) if end.isdigit() else int(Tokens.parse(end)) for end in ends)
    if stop <= start:
        raise ValueError(f"--tokens: {text!r} is empty; write the smaller position first")
    return start, stop


def inspect_run(root: Root, run: str, tokens: str, limit: int) -> Inspection:
    """Return which documents `run` trains on in the span `tokens`. Raises ValueError if it has no token shards yet."""
    from herd.llama3.tokens.inspect import inspect, stream_position  # imports numba
    from herd.llama3.tokens.tokenizer import Tokenizer

    start, stop = parse_span(tokens)
    runs, store = Runs(root), open_store(root)
    record, recipe = runs.find(run), runs.recipe(run)
    if "tokenize" not in record.steps:
        raise ValueError(f"{run} has no token shards yet; wait until its step tokenize is done")
    if recipe.conversations and start >= stream_position(recipe, start + 1):
        raise ValueError(f"--tokens: {tokens!r} begins in a stage of kind sft; name positions before it")
    shards = store.load(record.steps["tokenize"].artifact)
    tokenizer = Tokenizer.load(store.load(record.steps["tokenizer"].artifact).path)
    return inspect(lazy_folder(shards, 0), recipe, start, stop, tokenizer=tokenizer, limit=limit)


def inspection_tables(inspection: Inspection) -> Iterator[Table]:
    """Yield the totals by domain, source, language and license, then the documents in the order of training."""
    total = inspection.stop - inspection.start
    for title, counts in (
        ("domain", inspection.domains),
        ("source", inspection.sources),
        ("language", inspection.languages),
        ("license", inspection.licenses),
    ):
        table = _table(title, "tokens", "share", "documents")
        for name, (tokens, documents) in counts.items():
            table.add_row(escape(name), f"{tokens:,}", f"{tokens / total:.2%}", f"{documents:,}")
        yield table
    table = _table("position", "tokens", "from", "epoch")
    for name, ratio in (("document", None), ("source", None), ("text", 1)):
        table.add_column(name, justify="left", no_wrap=True, overflow="ellipsis", ratio=ratio)
    table.expand = True
    excerpts = inspection.excerpts or [""] * len(inspection.documents)
    for use, excerpt in zip(inspection.documents, excerpts, strict=True):
        numbers = (use.position, use.last - use.first + 1, use.first, use.epoch)
        text, source = escape(re.sub(r"\s+", " ", excerpt).strip()), escape(f"{use.dataset}: {use.source}")
        table.add_row(*(f"{n:,}" for n in numbers), use.document[:12], source, text)
    yield table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(first, justify="left", no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
