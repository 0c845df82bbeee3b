"""Quality scores and topics: classifiers trained from seed files and applied to batches of documents.

Each score is one model for all its domains (arXiv 2407.21783, section 3.1.1: what Wikipedia would cite; code; math): a
linear classifier over hashed words and word pairs, or a transformer (`hf_classifier.py`). The linear model is fastText
without its hidden layer (arXiv 1607.01759): the mean of one weight vector per word and per word pair, then a softmax.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from herd.llama3.data.kernels.arrow import text_buffers
from herd.llama3.data.kernels.histogram import (
    PIECE,
    Floats,
    Weights,
    allocate_word_arrays,
    classify,
    longest_text,
    train_epoch,
)
from herd.llama3.data.readers.files import Fault
from herd.llama3.data.readers.sources import open_source
from herd.llama3.data.text.extract import plain_text
from herd.llama3.data.text.normalize import normalize
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.data_schema import Curate, Source
from herd.storage.files import open_file
from herd.storage.filesystem import glob, write_atomic

# Not the fasttext package: it loads a truncated model without an error, crashes or hangs on a damaged count, holds the
# GIL and takes an unspaced Chinese sentence for one word; 20 to 40 MB/s on one core, ours 150 to 300. Eleven kinds of
# text, 300 characters each: accuracy 94.2 to 94.9 %, ours 94.7 %. Not HashingVectorizer and SGDClassifier of
# scikit-learn: 12 MB/s and 95.4 % where ours reaches 236 MB/s and 96.0 %. Ours has no subwords.

Metadata = dict[str, Any]
MODEL = "model.safetensors"
BUCKETS = 2**18
MOST = 100_000
"""Maximum examples per label, those with the smallest hashes: more hardly change a linear model."""
LEAST = 10
"""Minimum examples per label."""
HELD_OUT = 10
"""One example in 10, by its hash, is held out of training."""
_RATE, _EPOCHS, _STEPS = 1.0, 5, 5000
_STRONGEST = 2.0
"""Maximum factor on the steps of a rare label; longer ones would overshoot, so its examples are repeated instead."""
_PATH = "correct the path (it is relative to where herd runs)"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class TooFewExamples(ValueError):
    """A label has too few examples; the message begins with the label."""


@dataclass(frozen=True)
class Classifier:
    """A trained linear model: `names` of the labels, `weights` float32[buckets, labels].

    Without a constant term, a text of unseen words gives all labels equal probability.
    """

    names: tuple[str, ...]
    weights: Weights
    metadata: Metadata = field(default_factory=dict)
    """Metrics on held-out examples."""

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """Load a model that `train_classifier` wrote. Raises ValueError if it is missing or damaged."""
        path = folder / MODEL
        try:
            with safe_open(str(path), framework="numpy") as file:
                about = json.loads(file.metadata()["classifier"])
                weights = file.get_tensor("weights")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a classifier ({error}); delete it and train it again") from error
        return cls(tuple(about["labels"]), weights, about["metadata"])

    def save(self, folder: Path) -> None:
        """Write the model as one file, atomically. Equal models give equal bytes."""
        about = json.dumps({"labels": self.names, "metadata": self.metadata}, sort_keys=True)
        # One metadata key: safetensors writes several in an order that differs between processes.
        write_atomic(folder / MODEL, save({"weights": self.weights}, metadata={"classifier": about}))

    def probabilities(self, texts: Any) -> Floats:
        """Return the probability of each label for each text of an Arrow string column: float64[texts, labels].

        Of a text longer than 16 KiB, only the first 8 KiB and 8 KiB around the middle are read.
        """
        data, offsets = text_buffers(texts)
        out = np.empty((len(offsets) - 1, len(self.names)), np.float64)
        classify(data, offsets, *_room(offsets), self.weights, out)
        return out

    def scores(self, texts: Any, label: str) -> Floats:
        """Return the probability of `label` for each text."""
        return self.probabilities(texts)[:, self.names.index(label)].copy()

    def labels(self, texts: Any) -> tuple[list[str], Floats]:
        """Return the most probable label of each text (ties: the first by name), and its probability."""
        probabilities = self.probabilities(texts)
        best = probabilities.argmax(axis=1)
        return [self.names[index] for index in best], probabilities[np.arange(len(best)), best]


def train_classifier(examples: Mapping[str, Iterable[str]], folder: Path, seed: int = 0) -> Metadata:
    """Train on texts by label, write the model into `folder` and return its metrics on the held-out tenth.

    Labels have equal weight for any number of examples, so probabilities assume equally frequent labels. The order of
    examples does not matter. Metadata: examples and held_out by label; accuracy, recall by label and, for two labels,
    auc, if enough was held out. Raises TooFewExamples if a label has fewer than 10 examples.
    """
    names = tuple(sorted(examples))
    chosen = {name: select_examples(examples[name]) for name in names}
    for name, texts in chosen.items():
        if len(texts) < LEAST:
            raise TooFewExamples(
                f"{name}: {len(texts)} different examples are too few to learn from; give {LEAST} or more"
            )
    labeled = sorted((digest, label, text) for label, name in enumerate(names) for digest, text in chosen[name])
    weights = _train(len(names), [example for example in labeled if example[0] % HELD_OUT] or labeled, seed)
    metadata = {"examples": {name: len(texts) for name, texts in chosen.items()}}
    metadata |= _evaluate(Classifier(names, weights), [example for example in labeled if not example[0] % HELD_OUT])
    Classifier(names, weights, metadata).save(folder)
    return metadata


def _train(label_count: int, examples: list[tuple[int, int, str]], seed: int) -> Weights:
    """Return float32[buckets, labels] trained by SGD on examples (hash, label, text), reshuffled in each epoch."""
    digests, label_numbers, texts = zip(*examples, strict=True)
    hashes, labels = np.array(digests, np.uint64), np.array(label_numbers, np.int64)
    data, offsets = text_buffers(pa.array(texts, pa.large_string()))
    share = len(examples) / label_count / np.maximum(np.bincount(labels, minlength=label_count), 1)
    repeats = np.ceil(share / _STRONGEST).astype(np.int64)
    turns = np.repeat(np.arange(len(examples)), repeats[labels])
    numbers = np.arange(len(turns), dtype=np.uint64)
    weights = np.zeros((BUCKETS, label_count), np.float32)
    epochs = max(_EPOCHS, -(-_STEPS // len(turns)))
    for epoch in range(epochs):
        # Our own shuffle by text hashes, so that no library version changes the order.
        turn = str(seed * epochs + epoch).encode()
        odd = np.uint64(int.from_bytes(blake2b(turn, digest_size=8).digest(), "little") | 1)
        order = turns[np.argsort((hashes[turns] + numbers * _GOLDEN) * odd, kind="stable")]
        rates = _RATE * (1 - epoch / epochs), _RATE * (1 - (epoch + 1) / epochs)
        train_epoch(data, offsets, *_room(offsets), labels, share / repeats, order, *rates, weights)
    return weights


def _evaluate(model: Classifier, examples: list[tuple[int, int, str]]) -> Metadata:
    """Return the metrics of `model` on held-out examples (hash, label, text)."""
    truth = np.array([label for _, label, _ in examples], np.int64)
    held_out = {name: int((truth == label).sum()) for label, name in enumerate(model.names)}
    metrics: Metadata = {"held_out": held_out}
    if examples:
        probabilities = model.probabilities(pa.array([text for *_, text in examples], pa.large_string()))
        right = probabilities.argmax(axis=1) == truth
        recall = {name: float(right[truth == label].mean()) for label, name in enumerate(model.names) if held_out[name]}
        metrics |= {"accuracy": float(right.mean()), "recall": recall}
        if len(model.names) == 2 and all(held_out.values()):
            metrics["auc"] = area_under_curve(probabilities[:, 1], truth == 1)
    return metrics


def select_examples(texts: Iterable[str]) -> list[tuple[int, str]]:
    """Return (hash, text) of distinct texts, at most MOST with the smallest hashes, cut to what the model reads."""

    def digest(text: str) -> int:
        return int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"example").digest(), "little")

    return sorted(set(heapq.nsmallest(MOST, ((digest(short), short) for short in map(truncate, texts)))))


def area_under_curve(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve: P(a positive text scores above a negative one), ties count half."""
    low = np.sort(scores[~positive])
    below = np.searchsorted(low, scores[positive], "left") + np.searchsorted(low, scores[positive], "right")
    return float(below.mean() / (2 * len(low)))


def _room(offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
    return allocate_word_arrays(
        min(longest_text(offsets), 2 * PIECE + 8)
    )  # a piece may end 3 bytes later, after a whole character


def truncate(text: str) -> str:
    """Return the pieces of `text` that the model reads."""
    data = text.encode("utf-8", "replace")
    if len(data) <= 2 * PIECE:
        return data.decode()
    middle = max(PIECE, (len(data) - PIECE) // 2)
    return (data[: PIECE - 1] + b"\n" + data[middle : middle + PIECE]).decode("utf-8", "ignore")


def check_seeds(curate: Curate) -> list[str]:
    """Return one error message for each seed file pattern or model folder of the recipe that does not exist."""
    patterns = []
    for index, score in enumerate(curate.scores):
        for name, files in (("good", score.good), ("bad", score.bad)):
            patterns += [(f"curate.scores.{index}.{name}", pattern) for pattern in files]
    for topic, files in (curate.topics.seeds if curate.topics else {}).items():
        patterns += [(f"curate.topics.seeds.{topic}", pattern) for pattern in files]
    faults = [f"{where}: {pattern!r} matches no file; {_PATH}" for where, pattern in patterns if not glob(pattern)]
    for index, score in enumerate(curate.scores):
        try:
            if score.model:
                from herd.llama3.data.hf_classifier import check_transformer  # imports torch

                check_transformer(Path(score.model))
        except ValueError as error:
            faults.append(f"curate.scores.{index}.model: {error}")
    return faults


def read_seeds(patterns: Sequence[str], where: str) -> Iterator[str]:
    """Yield the normalized texts of files, folders or globs. Raises ValueError for the field `where` if none match."""
    for pattern in patterns:
        if not glob(pattern):
            raise ValueError(f"{where}: {pattern!r} matches no file; {_PATH}")
        for document in open_source(Source(uri=pattern), "general", 0):
            text = document.text if document.format != "html" else plain_text(document.text, "html", "resiliparse")
            if isinstance(text, Fault):
                raise ValueError(f"{where}: {pattern!r}: {document.url} {text.message}")
            yield normalize(text)


def prepare_scores(curate: Curate, text_files: Mapping[Domain, Sequence[str]], folder: Path) -> dict[str, Metadata]:
    """Train the models of `curate` into `folder` unless they exist; return metadata by score, and "topics" for topics.

    `text_files`: Parquet files with `text` and `draw` by domain. A score without bad examples takes documents of the
    corpus instead, those with the smallest `draw`, as many as there are good ones. Raises ValueError naming the field.
    """
    if faults := check_seeds(curate):
        raise ValueError("\n".join(faults))
    metadata: dict[str, Metadata] = {}
    for index, score in enumerate(curate.scores):
        where, target = f"curate.scores.{index}.", folder / "scores" / score.name
        if score.model:
            from herd.llama3.data.hf_classifier import transformer_metadata  # imports torch

            metadata[score.name] = transformer_metadata(Path(score.model))
        elif (target / MODEL).exists():
            metadata[score.name] = Classifier.load(target).metadata
        else:
            good = [text for _, text in select_examples(read_seeds(score.good, where + "good"))]
            domains = score.domains or text_files
            scored = [file for domain, files in text_files.items() if domain in domains for file in files]
            # Right while good documents are rare in the corpus. Where half of it is good, the classifier learns half of
            # them as bad, and scores move toward the middle.
            bad = read_seeds(score.bad, where + "bad") if score.bad else sample_texts(scored, len(good))
            metadata[score.name] = _train_once({"good": good, "bad": bad}, target, where)
    if curate.topics:
        where = "curate.topics.seeds."
        seeds = {topic: read_seeds(files, where + topic) for topic, files in curate.topics.seeds.items()}
        metadata["topics"] = _train_once(seeds, folder / "topics", where)
    return metadata


def _train_once(examples: Mapping[str, Iterable[str]], folder: Path, where: str) -> Metadata:
    if (folder / MODEL).exists():
        return Classifier.load(folder).metadata
    try:
        return train_classifier(examples, folder)
    except TooFewExamples as error:
        raise ValueError(f"{where}{error}") from error


def score_texts(curate: Curate, folder: Path, domain: Domain, texts: Any) -> dict[str, Floats]:
    """Return column `score_<name>` for each score of the recipe: float64[texts], NaN if `domain` is not scored."""
    columns = {}
    for score in curate.scores:
        if score.domains and domain not in score.domains:
            values = np.full(len(texts), np.nan)
        elif score.model:
            from herd.llama3.data.hf_classifier import load_scorer  # imports torch

            values = load_scorer(Path(score.model)).scores(texts)
        else:
            values = _loaded(folder / "scores" / score.name).scores(texts, "good")
        columns[f"score_{score.name}"] = values
    return columns


def topic_texts(curate: Curate, folder: Path, domain: Domain, texts: Any) -> list[str]:
    """Return the topic of each text; "" if `domain` is not classified."""
    if curate.topics is None or domain not in curate.topics.domains:
        return [""] * len(texts)
    return _loaded(folder / "topics").labels(texts)[0]


def sample_texts(files: Sequence[str], most: int) -> list[str]:
    """Return the texts with the `most` smallest `draw` over all `files`."""
    smallest = np.empty(0, np.uint64)
    for uri in files:
        for batch in pq.ParquetFile(open_file(uri)).iter_batches(1 << 20, columns=["draw"]):
            smallest = np.unique(np.concatenate([smallest, batch["draw"].to_numpy()]))[:most]
    texts: list[str] = []
    for file in map(pq.ParquetFile, map(open_file, files)):
        for group in range(file.num_row_groups):
            chosen = pc.is_in(file.read_row_group(group, ["draw"])["draw"], pa.array(smallest, pa.uint64()))
            if pc.any(chosen).as_py():  # text is large: decompress only row groups with a chosen one
                texts += map(truncate, file.read_row_group(group, ["text"])["text"].filter(chosen).to_pylist())
    return texts


def _loaded(folder: Path) -> Classifier:
    return _load(folder, (folder / MODEL).stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _load(folder: Path, changed: int) -> Classifier:
    return Classifier.load(folder)
