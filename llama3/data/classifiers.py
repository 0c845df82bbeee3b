"""The scores and topics that a recipe asks for: models trained from seed files, and applied to batches of documents.

Each score is one model for all its domains (arXiv 2407.21783, section 3.1.1: what Wikipedia would cite; code; math): a
linear classifier (`classifier.py`) from files of good and bad examples, or a transformer (`transformer.py`). Without
bad examples, documents of the corpus stand for them. That is right while good ones are rare there; where they are half
of it, the classifier learns that half of the good is bad, and scores move towards the middle.
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

from llama3.data.kernels.arrow import text_buffers
from llama3.data.kernels.histogram import PIECE, Floats, Weights, classify, learn, longest, room
from llama3.data.readers.files import Fault
from llama3.data.readers.sources import open_source
from llama3.data.text.extract import plain_text
from llama3.data.text.normalize import normalise
from llama3.recipe.base import Domain
from llama3.recipe.data_schema import Curate, QualityScore, Source
from storage.filesystem import glob, write_atomic

# A linear classifier of texts by words and word pairs, fast enough for every document of a corpus.
#
# The model is fastText's without its hidden layer (arXiv 1607.01759): the mean of one weight vector per word and
# per pair of neighbours, hashed into 2^18 buckets, and a softmax. There is no constant term, so words never seen
# leave all labels equally likely. Two labels: 150 to 300 MB/s on one core (fastText: 20 to 40). Eleven kinds of
# text are told apart by 300 characters in 94.7 % (fastText: 94.2 to 94.9 %, the more the longer it is trained). The
# fasttext package is not used: it loads a model file cut in half without an error and guesses, dies with signal 11
# or hangs on a damaged count, holds Python's lock while it predicts, and takes an unspaced Chinese sentence for one
# word. Ours is one safetensors file. What this gives up: no subwords, so an unseen form of a known word says
# nothing; probabilities are surer than right.

Facts = dict[str, Any]
MODEL = "model.safetensors"
BUCKETS = 2**18
MOST = 100_000
"""Examples per label at most, those with the smallest hashes: more hardly changes a linear model and fills memory."""
LEAST = 10
"""Examples per label at least."""
HELD_OUT = 10
"""One example in so many, by its hash, is not trained on."""
_RATE, _EPOCHS, _STEPS = 1.0, 5, 5000
_STRONGEST = 2.0
"""Steps of a rare label are longer up to this factor, beyond it its examples are repeated: longer ones overshoot."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class TooFew(ValueError):
    """A label with too few examples; the text begins with its name."""


@dataclass(frozen=True)
class Classifier:
    """A trained model: `names` of the labels, `weights` float32[buckets, labels]."""

    names: tuple[str, ...]
    weights: Weights
    facts: Facts = field(default_factory=dict)
    """How it did on examples that it was not trained on."""

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """Read what `train_classifier` wrote. Raises ValueError if it is missing or damaged."""
        path = folder / MODEL
        try:
            with safe_open(str(path), framework="numpy") as file:
                about = json.loads(file.metadata()["classifier"])
                weights = file.get_tensor("weights")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a classifier ({error}); delete it and train it again") from error
        return cls(tuple(about["labels"]), weights, about["facts"])

    def save(self, folder: Path) -> None:
        """Write the model as one file, whole or not at all. Equal models give equal bytes."""
        about = json.dumps({"labels": self.names, "facts": self.facts}, sort_keys=True)
        # one key only: the library writes several in an order that changes from process to process
        write_atomic(folder / MODEL, save({"weights": self.weights}, metadata={"classifier": about}))

    def probabilities(self, texts: Any) -> Floats:
        """Return the probability of each label for each text of an Arrow string column: float64[texts, labels].

        Of a text beyond 16 KiB, the first 8 KiB and 8 KiB around the middle are read.
        """
        data, offsets = text_buffers(texts)
        out = np.empty((len(offsets) - 1, len(self.names)), np.float64)
        classify(data, offsets, *_room(offsets), self.weights, out)
        return out

    def scores(self, texts: Any, label: str) -> Floats:
        """Return the probability of `label` for each text."""
        return self.probabilities(texts)[:, self.names.index(label)].copy()

    def labels(self, texts: Any) -> tuple[list[str], Floats]:
        """Return the most probable label of each text (the first by name where two are equal), and its probability."""
        probabilities = self.probabilities(texts)
        best = probabilities.argmax(axis=1)
        return [self.names[index] for index in best], probabilities[np.arange(len(best)), best]


def train_classifier(examples: Mapping[str, Iterable[str]], folder: Path, seed: int = 0) -> Facts:
    """Train on texts by label, write the model into `folder` and return how it did on the tenth held out.

    All labels count alike however many examples they have, so the probabilities assume them equally frequent. The
    result does not depend on the order of examples. Facts: examples and held_out by label; accuracy, recall by label
    and, of two labels, auc, where enough was held out. Raises ValueError if a label has fewer than 10 examples.
    """
    names = tuple(sorted(examples))
    chosen = {name: chosen_examples(examples[name]) for name in names}
    for name, found in chosen.items():
        if len(found) < LEAST:
            raise TooFew(f"{name}: {len(found)} different examples are too few to learn from; give {LEAST} or more")
    rows = sorted((digest, label, text) for label, name in enumerate(names) for digest, text in chosen[name])
    train = [row for row in rows if row[0] % HELD_OUT] or rows
    tested = [row for row in rows if not row[0] % HELD_OUT]
    model = _trained(names, train, seed)
    facts = {"examples": {name: len(found) for name, found in chosen.items()}} | _measured(model, tested)
    Classifier(names, model.weights, facts).save(folder)
    return facts


def chosen_examples(texts: Iterable[str]) -> list[tuple[int, str]]:
    """Return (hash, text) of different texts, at most 100,000 with the smallest hashes, cut to what the model reads."""
    return sorted(set(heapq.nsmallest(MOST, ((_digest(short), short) for short in map(shortened, texts)))))


def area_under_curve(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve: the chance that a positive text scores above a negative one, a tie half."""
    low = np.sort(scores[~positive])
    below = np.searchsorted(low, scores[positive], "left") + np.searchsorted(low, scores[positive], "right")
    return float(below.mean() / (2 * len(low)))


def _trained(names: tuple[str, ...], rows: list[tuple[int, int, str]], seed: int) -> Classifier:
    hashes = np.array([row[0] for row in rows], np.uint64)
    labels = np.array([row[1] for row in rows], np.int64)
    data, offsets = text_buffers(pa.array([row[2] for row in rows], pa.large_string()))
    counts = np.bincount(labels, minlength=len(names))
    share = len(rows) / len(names) / np.maximum(counts, 1)
    repeats = np.ceil(share / _STRONGEST).astype(np.int64)
    turns = np.repeat(np.arange(len(rows)), repeats[labels])
    weights = np.zeros((BUCKETS, len(names)), np.float32)
    epochs = max(_EPOCHS, -(-_STEPS // len(turns)))
    for epoch in range(epochs):
        order = _shuffled(turns, hashes, seed * epochs + epoch)
        rates = _RATE * (1 - epoch / epochs), _RATE * (1 - (epoch + 1) / epochs)
        learn(data, offsets, *_room(offsets), labels, share / repeats, order, *rates, weights)
    return Classifier(names, weights)


def _shuffled(turns: NDArray[np.int64], hashes: NDArray[np.uint64], turn: int) -> NDArray[np.int64]:
    """Return `turns` in an order that hangs on the texts and on `turn`; our own, so that no library can change it."""
    places = np.arange(len(turns), dtype=np.uint64)
    odd = np.uint64(int.from_bytes(blake2b(str(turn).encode(), digest_size=8).digest(), "little") | 1)
    return turns[np.argsort((hashes[turns] + places * _GOLDEN) * odd, kind="stable")]


def _measured(model: Classifier, rows: list[tuple[int, int, str]]) -> Facts:
    truth = np.array([row[1] for row in rows], np.int64)
    held_out = {name: int((truth == label).sum()) for label, name in enumerate(model.names)}
    facts: Facts = {"held_out": held_out}
    if not rows:
        return facts
    probabilities = model.probabilities(pa.array([row[2] for row in rows], pa.large_string()))
    right = probabilities.argmax(axis=1) == truth
    recall = {name: float(right[truth == label].mean()) for label, name in enumerate(model.names) if held_out[name]}
    facts |= {"accuracy": float(right.mean()), "recall": recall}
    if len(model.names) == 2 and all(held_out.values()):
        facts["auc"] = area_under_curve(probabilities[:, 1], truth == 1)
    return facts


def _room(offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
    return room(min(longest(offsets), 2 * PIECE + 8))  # a piece ends up to 3 bytes later, where a character does


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"example").digest(), "little")


def shortened(text: str) -> str:
    """Return the part of `text` that the model reads, so that long examples do not fill memory."""
    data = text.encode("utf-8", "replace")
    if len(data) <= 2 * PIECE:
        return data.decode()
    middle = max(PIECE, (len(data) - PIECE) // 2)
    return (data[: PIECE - 1] + b"\n" + data[middle : middle + PIECE]).decode("utf-8", "ignore")


_PATH = "correct the path (it is relative to where herd runs)"


def check_seeds(curate: Curate) -> list[str]:
    """Return one line for each seed file pattern and model folder of the recipe that is not there, with its remedy."""
    patterns = [pair for index, score in enumerate(curate.scores) for pair in _patterns(score, index)]
    for topic, files in (curate.topics.seeds if curate.topics else {}).items():
        patterns += [(f"curate.topics.seeds.{topic}", pattern) for pattern in files]
    faults = [f"{where}: {pattern!r} matches no file; {_PATH}" for where, pattern in patterns if not glob(pattern)]
    for index, score in enumerate(curate.scores):
        try:
            if score.model:
                from llama3.data.hf_classifier import check_transformer

                check_transformer(Path(score.model))
        except ValueError as error:
            faults.append(f"curate.scores.{index}.model: {error}")
    return faults


def read_seeds(patterns: Sequence[str], where: str) -> Iterator[str]:
    """Yield the normalised texts in files, folders or globs. Raises ValueError, naming field `where`, for no match."""
    for pattern in patterns:
        if not glob(pattern):
            raise ValueError(f"{where}: {pattern!r} matches no file; {_PATH}")
        for document in open_source(Source(uri=pattern), "general", 0):
            text = document.text if document.format != "html" else plain_text(document.text, "html", "resiliparse")
            if isinstance(text, Fault):
                raise ValueError(f"{where}: {pattern!r}: {document.url} {text.said}")
            yield normalise(text)


def prepare_scores(curate: Curate, text_files: Mapping[Domain, Sequence[Path]], folder: Path) -> dict[str, Facts]:
    """Train what `curate` asks for into `folder` unless it is there, and return facts by score; topics under "topics".

    `text_files`: Parquet files with `text` and `draw` by domain. Bad examples, where a score names none, are the
    documents with the smallest `draw`, as many as there are good ones. Raises ValueError naming the field at fault.
    """
    if faults := check_seeds(curate):
        raise ValueError("\n".join(faults))
    facts = {score.name: _prepared(score, index, text_files, folder) for index, score in enumerate(curate.scores)}
    if curate.topics:
        where = "curate.topics.seeds."
        seeds = {topic: read_seeds(files, where + topic) for topic, files in curate.topics.seeds.items()}
        facts["topics"] = _trained_once(seeds, folder / "topics", where)
    return facts


def score_texts(curate: Curate, folder: Path, domain: Domain, texts: Any) -> dict[str, Floats]:
    """Return column `score_<name>` for each score of the recipe: float64[texts], NaN where the domain is not scored."""
    columns = {}
    for score in curate.scores:
        if score.domains and domain not in score.domains:
            values = np.full(len(texts), np.nan)
        elif score.model:
            from llama3.data.hf_classifier import loaded_scorer

            values = loaded_scorer(Path(score.model)).scores(texts)
        else:
            values = _loaded(folder / "scores" / score.name).scores(texts, "good")
        columns[f"score_{score.name}"] = values
    return columns


def topic_texts(curate: Curate, folder: Path, domain: Domain, texts: Any) -> list[str]:
    """Return the topic of each text, "" in domains that are not classified."""
    if curate.topics is None or domain not in curate.topics.domains:
        return [""] * len(texts)
    return _loaded(folder / "topics").labels(texts)[0]


def sample_texts(files: Sequence[Path], most: int) -> list[str]:
    """Return the texts whose `draw` is among the `most` smallest in all `files`, whichever file they stand in."""
    smallest = np.empty(0, np.uint64)
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(1 << 20, columns=["draw"]):
            smallest = np.unique(np.concatenate([smallest, batch["draw"].to_numpy()]))[:most]
    texts: list[str] = []
    for file in map(pq.ParquetFile, files):
        for group in range(file.num_row_groups):
            chosen = pc.is_in(file.read_row_group(group, ["draw"])["draw"], pa.array(smallest, pa.uint64()))
            if pc.any(chosen).as_py():  # text is large: only row groups with a chosen one are unpacked
                texts += map(shortened, file.read_row_group(group, ["text"])["text"].filter(chosen).to_pylist())
    return texts


def _patterns(score: QualityScore, index: int) -> list[tuple[str, str]]:
    both = (("good", score.good), ("bad", score.bad))
    return [(f"curate.scores.{index}.{name}", pattern) for name, files in both for pattern in files]


def _prepared(score: QualityScore, index: int, text_files: Mapping[Domain, Sequence[Path]], folder: Path) -> Facts:
    if score.model:
        from llama3.data.hf_classifier import transformer_facts  # imports torch

        return transformer_facts(Path(score.model))
    where, target = f"curate.scores.{index}.", folder / "scores" / score.name
    if (target / MODEL).exists():
        return Classifier.load(target).facts
    good = [text for _, text in chosen_examples(read_seeds(score.good, where + "good"))]
    scored = [file for domain, files in text_files.items() if domain in (score.domains or text_files) for file in files]
    bad = read_seeds(score.bad, where + "bad") if score.bad else sample_texts(scored, len(good))
    return _trained_once({"good": good, "bad": bad}, target, where)


def _trained_once(examples: Mapping[str, Iterable[str]], folder: Path, where: str) -> Facts:
    if (folder / MODEL).exists():
        return Classifier.load(folder).facts
    try:
        return train_classifier(examples, folder)
    except TooFew as error:
        raise ValueError(f"{where}{error}") from error


def _loaded(folder: Path) -> Classifier:
    return _read(folder, (folder / MODEL).stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _read(folder: Path, changed: int) -> Classifier:
    return Classifier.load(folder)


# Scores by a transformer, for what a linear model cannot see (arXiv 2407.21783, section 3.1.1: DistilRoberta).
#
# The model is a local folder in Hugging Face's layout: `config.json`, `model.safetensors`, `tokenizer.json`.
# Nothing is downloaded, no pickle is opened, no code from the folder runs. A text's score must not depend on the
# texts beside it, but the last bits of a matrix product depend on its shape and, on a CPU, on the place of a row in
# it. So a CPU takes one text at a time, and a GPU takes batches sorted by length, always of 64 rows and padded to
# one of five lengths. What this gives up: a third of a GPU's arithmetic goes into padding, and only the first 512
# tokens are read. bfloat16 on a GPU, where a score has about two digits; float32 on a CPU, a few texts a second: to
# try a model, or for small corpora.
