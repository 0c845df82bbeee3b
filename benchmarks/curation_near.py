"""Rows that put our removal of near copies beside datatrove and Daft, on text that none of them was tuned on.

One job on one jsonl file: two bounds of words, exact copies, MinHash with the same bands, rows and shingles, output.
Copies are planted, and the truth is the Jaccard of all pairs by plain sets (`pairs`). Ours also verifies each candidate
and writes a ledger; a peer's word is what its guide makes of a text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.corpus import SEED, Page, changed_words, cut, write_jsonl
from benchmarks.curation import documents, shared
from benchmarks.measure import Cost
from benchmarks.pairs import near_pairs
from benchmarks.rows import Row, measured, number, ratio
from benchmarks.session import Session
from herd.llama3.data.text.normalize import normalize

NEAR_BYTES = {"small": 4_000_000, "full": 20_000_000}
NEAR_TEXTS = ("math/stacks", "code/*", "multilingual/progit-[efr][sru]")
"""Files of the shared corpora: a textbook in LaTeX, source code, and a book in three languages with blanks."""
ALIKE, UNLIKE = (0.001, 0.02), (0.05, 0.1)
"""Shares of edited words: of copies that are near ones (Jaccard over 0.8), and of documents that are not."""
WORDS, MEAN_WORD = 100, (3.5, 9)
"""Bounds of the documents: well inside those of the job, so that only copies go."""


@dataclass(frozen=True)
class NearJob:
    """The corpus, its true pairs, and what each side kept of it."""

    pages: Sequence[Page]
    pairs: Mapping[tuple[int, int], float]
    costs: Mapping[str, Cost]

    def recall(self, side: str) -> float:
        """Return the share of the pairs with Jaccard >= 0.8 of which `side` kept one document at most."""
        kept = set(self.costs[side].facts["kept"])
        true = [pair for pair, score in self.pairs.items() if score >= 0.8]
        return sum(any(self.pages[place].url not in kept for place in pair) for pair in true) / len(true)

    def precision(self, side: str) -> float:
        """Return the share of the documents that `side` removed that have a pair with Jaccard >= 0.7."""
        kept = set(self.costs[side].facts["kept"])
        gone = [place for place, page in enumerate(self.pages) if page.url not in kept]
        alike = {place for pair, score in self.pairs.items() if score >= 0.7 for place in pair}
        return sum(place in alike for place in gone) / len(gone)


def near_pages(texts: Iterable[str], size: int, seed: int = SEED) -> list[Page]:
    """Return about `size` bytes of documents, a twelfth of them exact copies, a ninth near ones, a twelfth variants."""
    chance = random.Random(seed)
    pieces = [piece for text in texts for piece in cut(normalize(text), chance)]
    chance.shuffle(pieces)
    vocabulary = sorted({word for piece in pieces[:200] for word in piece.split()})
    pages: list[Page] = []
    total = 0
    for piece in pieces:
        words = piece.split()
        if len(words) < WORDS or not MEAN_WORD[0] <= sum(map(len, words)) / len(words) <= MEAN_WORD[1]:
            continue
        texts_of = [piece]
        if chance.random() < 0.11:
            texts_of.append(piece)
        for share, (low, high) in ((0.15, ALIKE), (0.11, UNLIKE)):
            if chance.random() < share:
                texts_of.append(changed_words(piece, chance.uniform(low, high), vocabulary, chance))
        pages += [Page(text, f"https://near.example/{len(pages) + n}") for n, text in enumerate(texts_of)]
        total += sum(len(text.encode()) for text in texts_of)
        if total >= size:
            break
    chance.shuffle(pages)
    return pages


def near_job(run: Session) -> NearJob:
    """Return the corpus and what each side made of it. Raises NotMeasured without the shared corpora or the peers."""

    def measure() -> NearJob:
        folder = run.settings.folder / "scale" / "near"
        folder.mkdir(parents=True)
        files = [path for name in NEAR_TEXTS for path in sorted(shared("corpora").glob(f"{name}.jsonl.gz"))]
        texts = [document["text"] for path in files for document in documents(path)]
        pages = near_pages(texts, NEAR_BYTES[run.settings.size])
        write_jsonl(pages, folder / "near.jsonl")
        write_jsonl([page for page in pages[:60] for _ in range(2)], folder / "warm.jsonl")
        sides = {"ours": "ours.near_job", "daft": "peers.daft_near_job", "datatrove": "peers.datatrove_near_job"}
        costs = {
            side: run.bench.cost(module, folder / "near.jsonl", folder / "warm.jsonl") for side, module in sides.items()
        }
        return NearJob(pages, near_pairs([page.text for page in pages], 5), costs)

    found: NearJob = run.once("scale/near", measure)
    return found


def beside(peer: str) -> Callable[[Session, str], Row]:
    """Return the measure of the CPU time of `peer` over ours."""

    def measure(run: Session, name: str) -> Row:
        job = near_job(run)
        size = sum(page.size for page in job.pages)
        return ratio(name, job.costs["ours"], job.costs[peer], size, size)

    return measure


def near_memory(run: Session, name: str) -> Row:
    """Peak memory of our process over that of Daft's."""
    job = near_job(run)
    peaks = {side: cost.peak_bytes / 1e6 for side, cost in job.costs.items()}
    note = ", ".join(f"{side} {peak:,.0f}" for side, peak in peaks.items())
    return measured(name, peaks["ours"] / peaks["daft"], f"{note} MB", **peaks)


def near_found(measure: Callable[[NearJob, str], float]) -> Callable[[Session, str], Row]:
    """Return the row of a share (`NearJob.recall` or `precision`) of ours, with the peers' in the note."""

    def row(run: Session, name: str) -> Row:
        job = near_job(run)
        shares = {side: measure(job, side) for side in job.costs}
        note = ", ".join(f"{side} {number(share)}" for side, share in shares.items())
        return measured(name, shares["ours"], f"{len(job.pages):,} documents; {note}", **shares)

    return row
