"""The scores and topics that a recipe asks for: models trained from seed files, and applied to batches of documents.

Each score is one model for all its domains (arXiv 2407.21783, section 3.1.1: what Wikipedia would cite; code; math): a
linear classifier (`classifier.py`) from files of good and bad examples, or a transformer (`transformer.py`). Without
bad examples, documents of the corpus stand for them. That is right while good ones are rare there; where they are half
of it, the classifier learns that half of the good is bad, and scores move towards the middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llama3.data.classifier import MODEL, Classifier, Facts, TooFew, chosen_examples, shortened, train_classifier
from llama3.data.kernels.histogram import Floats
from llama3.data.markup import plain_text
from llama3.data.normalise import normalise
from llama3.data.skips import Fault
from llama3.data.sources import open_source
from llama3.recipe.curation import Curate, Score
from llama3.recipe.data import Source
from llama3.recipe.section import Domain
from storage.filesystem import glob

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
                from llama3.data.transformer import check_transformer

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
            from llama3.data.transformer import loaded_scorer

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


def _patterns(score: Score, index: int) -> list[tuple[str, str]]:
    both = (("good", score.good), ("bad", score.bad))
    return [(f"curate.scores.{index}.{name}", pattern) for name, files in both for pattern in files]


def _prepared(score: Score, index: int, text_files: Mapping[Domain, Sequence[Path]], folder: Path) -> Facts:
    if score.model:
        from llama3.data.transformer import transformer_facts  # torch

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
