from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

from herd.llama3.data.dedup.minhash import CLUSTERS, ROUNDS, MinHash, round_shuffles
from herd.llama3.data.mapreduce import CurationJob
from herd.llama3.data.text.words import split_words
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.data_schema import Curate, Dedup
from tests.llama3.data.shard_samples import attributes, drops, make_job, without

Document = dict[str, Any]
VOCABULARY = [f"w{i}" for i in range(3000)]
ALPHABETS = {
    "en": ("abcdefghijklmnopqrstuvwxyz", " "),
    "ru": ("абвгдежзийклмнопрстуфхцчшщыэюя", " "),
    "hi": ("कखगघचछजझटठडढतथदधनपफबभमयरलवशसह", " "),
    "zh": ("".join(chr(0x4E00 + i) for i in range(400)), ""),
}


def planted(seed: int, families: int) -> list[Document]:
    """Return families of documents: an original and up to four copies with 0.2 to 8 % of the words replaced."""
    rng = random.Random(seed)
    documents = []
    for family in range(families):
        language = sorted(ALPHABETS)[family % len(ALPHABETS)]
        letters, blank = ALPHABETS[language]
        vocabulary = ["".join(rng.choices(letters, k=rng.randint(2, 9) if blank else 1)) for _ in range(800)]
        original = rng.choices(vocabulary, k=rng.randint(60, 400))
        for copy in range(rng.randint(1, 5)):
            rate = rng.uniform(0.002, rng.choice((0.02, 0.08))) if copy else 0
            edited = [rng.choice(vocabulary) if rng.random() < rate else word for word in original]
            documents.append({"text": blank.join(edited), "language": language, "rank": rng.choice((0.0, 0.5))})
    return list({document["text"]: document for document in documents}.values())


def ran(
    folder: Path, documents: list[Document], shards: int = 1, partitions: int = 1, fan: int = 256, **dedup: Any
) -> CurationJob:
    recipe = SimpleNamespace(curate=Curate(dedup=Dedup(**dedup)))
    job = make_job(folder, documents, shards, partitions, recipe, [MinHash()], fan=fan)
    MinHash().passes(run_serial, job)  # `run` would remove the verdicts
    return job


def verdicts(job: CurationJob) -> list[dict[str, Any]]:
    """Return the verdicts of all rounds."""
    rounds = [round_shuffles(job, number).verdicts for number in rounds_of(job)]
    return [
        row for each in rounds for partition in range(job.partitions) for row in each.read(job, partition).to_pylist()
    ]


def rounds_of(job: CurationJob) -> list[int]:
    """Return the rounds that compared pairs."""
    return sorted(int(path.parent.name) for path in Path(job.folder, "minhash").glob("*/open"))


def texts_of(job: CurationJob) -> dict[str, str]:
    """Return id -> text."""
    tables = [pq.read_table(shard.text, columns=["id", "text"]) for shard in job.shards]
    return {row["id"]: row["text"] for table in tables for row in table.to_pylist()}


class Member(NamedTuple):
    """A document of a cluster."""

    cluster: str
    size: int
    kept: str
    jaccard: float


def clusters(job: CurationJob) -> dict[str, Member]:
    """Return id -> member of every document in a cluster."""
    rows = [row for file in job.files(job.by_partition(CLUSTERS)) for row in pq.read_table(file).to_pylist()]
    assert all(row["id"] == attributes_of[row["row"]]["id"] for attributes_of in [attributes(job)] for row in rows)
    return {row["id"]: Member(*(row[name] for name in Member._fields)) for row in rows}


def true_pairs(job: CurationJob) -> dict[frozenset[str], float]:
    """Return the Jaccard of all pairs of documents of one language that share a shingle, by plain Python."""
    language = {one["id"]: one["language"] for one in attributes(job).values()}
    sets = {}
    for name, text in texts_of(job).items():
        found = split_words(text)
        sets[name] = {tuple(found[i : i + 5]) for i in range(max(1, len(found) - 4))}
    pairs = [(a, b) for a, b in combinations(sets, 2) if language[a] == language[b] and sets[a] & sets[b]]
    return {frozenset(pair): len(sets[pair[0]] & sets[pair[1]]) / len(sets[pair[0]] | sets[pair[1]]) for pair in pairs}


def joined(pairs: list[frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return the connected component of every end of `pairs`."""
    group: dict[str, frozenset[str]] = {}
    for pair in pairs:
        merged = frozenset[str]().union(*(group.get(one, frozenset([one])) for one in pair))
        group |= dict.fromkeys(merged, merged)
    return group


@pytest.fixture(scope="module")
def planted_job(tmp_path_factory: pytest.TempPathFactory) -> CurationJob:
    return ran(tmp_path_factory.mktemp("planted"), planted(1, 120), shards=2, partitions=2)


@pytest.fixture(scope="module")
def pairs(planted_job: CurationJob) -> dict[frozenset[str], float]:
    return true_pairs(planted_job)


def apart(job: CurationJob, pairs: dict[frozenset[str], float]) -> list[float]:
    """Return the Jaccard of the `pairs` whose ends are not in one cluster."""
    found = clusters(job)
    return [jaccard for pair, jaccard in pairs.items() if len({found.get(one, (one,))[0] for one in pair}) == 2]


def check_choice(job: CurationJob, pairs: dict[frozenset[str], float]) -> list[float]:
    """Check who leaves for whom against all `pairs`; return the Jaccard of those of which both stay."""
    gone = {one: str(kept) for one, (_, kept) in drops(job, "minhash").items()}
    documents = {one["id"]: one for one in attributes(job).values()}
    for one, kept in gone.items():
        assert kept not in gone
        assert pairs[frozenset((one, kept))] >= 0.8
        assert first_of([documents[one], documents[kept]])["id"] == kept
    ids = {row: one["id"] for row, one in attributes(job).items()}
    for row in verdicts(job):
        assert row["jaccard"] < 0.8 or {ids[row["row"]], ids[row["center"]]} & set(gone)
    assert {one: found.kept for one, found in clusters(job).items() if found.kept != one} == gone
    return [jaccard for pair, jaccard in pairs.items() if jaccard >= 0.8 and not pair & set(gone)]


def first_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of the documents in KEEP order."""
    newest = [one for one in documents if one["rank"] == max(other["rank"] for other in documents)]
    newest = [one for one in newest if one["date"] == max(other["date"] for other in newest)]
    return min(newest, key=lambda one: one["id"])


def test_only_bands_lose_pairs(planted_job: CurationJob, pairs: dict[frozenset[str], float]) -> None:
    """A pair shares no band with probability (1 - J^rows)^bands; what follows loses none of the rest."""
    alike = {pair: jaccard for pair, jaccard in pairs.items() if jaccard >= 0.8}
    assert len(alike) > 120
    expected = sum((1 - jaccard**8) ** 14 for jaccard in alike.values())
    assert len(apart(planted_job, alike)) <= expected + expected**0.5


def test_recall_and_precision_with_more_bands(tmp_path: Path) -> None:
    job = ran(tmp_path, planted(1, 120), bands=20, rows=6)
    pairs = true_pairs(job)
    alike = {pair: jaccard for pair, jaccard in pairs.items() if jaccard >= 0.8}
    assert len(apart(job, alike)) <= 0.005 * len(alike)
    chained = [pairs.get(frozenset((one, str(kept))), 0) for one, (_, kept) in drops(job, "minhash").items()]
    assert sum(jaccard >= 0.7 for jaccard in chained) >= 0.97 * len(chained)


def test_clusters_are_components_of_pairs_that_are_alike(
    planted_job: CurationJob, pairs: dict[frozenset[str], float]
) -> None:
    truth = joined([pair for pair, jaccard in pairs.items() if jaccard >= 0.8])
    for name, found in clusters(planted_job).items():
        assert {found.cluster, found.kept} <= truth[name]
        assert 1 < found.size <= len(truth[name])
        assert found.jaccard == (pairs[frozenset((name, found.kept))] if name != found.kept else 1)


def test_every_edge_has_its_true_jaccard(planted_job: CurationJob, pairs: dict[frozenset[str], float]) -> None:
    ids = {row: one["id"] for row, one in attributes(planted_job).items()}
    rows = verdicts(planted_job)
    assert len(rows) > 250
    for row in rows:
        assert row["jaccard"] == pairs.get(frozenset((ids[row["center"]], ids[row["row"]])), 0)
    similar = {frozenset((row["center"], row["row"])) for row in rows if row["jaccard"] >= 0.8}
    assert {frozenset((row["center"], row["row"])) for row in rows if row["edge"]} == similar
    assert not all(row["jaccard"] >= 0.8 for row in rows)  # bands alone would join these


def test_the_keep_rule_chooses_in_each_cluster(planted_job: CurationJob, pairs: dict[frozenset[str], float]) -> None:
    documents = {one["id"]: one for one in attributes(planted_job).values()}
    assert not check_choice(planted_job, pairs)
    found = clusters(planted_job)
    for cluster in {one.cluster for one in found.values()}:
        members = [documents[name] for name, one in found.items() if one.cluster == cluster]
        assert len(members) == found[cluster].size
        assert first_of(members)["id"] == cluster == found[cluster].kept


def test_a_chain_keeps_what_resembles_nothing_that_stays(tmp_path: Path) -> None:
    """60 documents, each 0.867 similar to the next and 0.75 to the one after it."""
    documents = [{"text": " ".join(VOCABULARY[7 * i : 7 * i + 102])} for i in range(60)]
    job = ran(tmp_path, documents, shards=3, partitions=2)
    assert not check_choice(job, true_pairs(job))
    assert 20 <= len(documents) - len(drops(job, "minhash")) <= 31
    assert max(found.size for found in clusters(job).values()) > 30


@pytest.mark.parametrize("seed", range(8))
def test_what_leaves_is_similar_to_what_stays(tmp_path: Path, seed: int) -> None:
    """Families in which each document is an edit of an earlier one, so that many are only similar to some."""
    rng = random.Random(seed)
    documents: list[Document] = []
    for _ in range(6):
        family = [rng.choices(VOCABULARY, k=rng.randint(80, 200))]
        rate = rng.choice((0.002, 0.01, 0.02))
        for _ in range(rng.randint(1, 40)):
            parent = family[0] if rng.random() < 0.5 else rng.choice(family)
            family.append([rng.choice(VOCABULARY) if rng.random() < rate else word for word in parent])
        ranks = rng.choice(((0.0,), (0.0, 0.5), (-1.5, 0.25, 0.25 + 1e-12)))
        dates = rng.choice((("",), ("", "2024-01-31", "2024-01-31T10:20:30Z", "2024-01-31T10:40:00Z")))
        documents += [{"text": " ".join(text), "rank": rng.choice(ranks), "date": rng.choice(dates)} for text in family]
    documents = list({document["text"]: document for document in documents}.values())
    job = ran(tmp_path, documents, rng.randint(1, 3), rng.randint(1, 3), rng.choice((2, 256)), bands=20, rows=5)
    pairs = true_pairs(job)
    assert len(check_choice(job, pairs)) <= 0.005 * sum(jaccard >= 0.8 for jaccard in pairs.values())


def test_copies_of_one_that_leaves_leave_too(tmp_path: Path) -> None:
    """All resemble the second best document, which leaves for the best, and they do not resemble the best."""
    page = VOCABULARY[:104]
    copies = [[*page[:-8], *VOCABULARY[200 + 8 * i : 208 + 8 * i]] for i in range(30)]
    texts = [[*VOCABULARY[192:200], *page[8:]], page, *copies]
    documents = [{"text": " ".join(text), "rank": max(1 - i / 2, 0)} for i, text in enumerate(texts)]
    job = ran(tmp_path, documents, shards=2, partitions=2, bands=4, rows=1)
    assert not check_choice(job, true_pairs(job))
    assert len(documents) - len(drops(job, "minhash")) == 2  # the best, and one of the copies


def test_two_copies_of_one_that_leaves_need_no_bucket_of_their_own(tmp_path: Path) -> None:
    """Verification ends before ROUNDS here, and the closing rounds compare what shares no band."""
    rng, documents = random.Random(0), list[Document]()
    for _ in range(40):
        page = rng.choices(VOCABULARY, k=104)
        copies = [[*page[:-8], *rng.choices(VOCABULARY, k=8)] for _ in range(2)]
        texts = [[*rng.choices(VOCABULARY, k=8), *page[8:]], page, *copies]
        documents += [{"text": " ".join(text), "rank": 1 - i / 4} for i, text in enumerate(texts)]
    job = ran(tmp_path, documents, shards=2, partitions=2, bands=5, rows=4)
    assert ROUNDS - 1 not in rounds_of(job)
    assert len(check_choice(job, true_pairs(job))) <= 1  # a pair shares no band with a probability of 2.5 %


@pytest.mark.parametrize(("shards", "partitions", "fan"), [(16, 1, 256), (3, 7, 2)])
def test_equal_for_any_shards_parts_and_order(
    planted_job: CurationJob, tmp_path: Path, shards: int, partitions: int, fan: int
) -> None:
    documents = planted(1, 120)
    random.Random(shards).shuffle(documents)
    job = ran(tmp_path, documents, shards, partitions, fan)
    assert clusters(job) == clusters(planted_job)
    assert drops(job, "minhash") == drops(planted_job, "minhash")


def test_rank_then_date_then_id(tmp_path: Path) -> None:
    base = VOCABULARY[:200]
    text = {name: " ".join([*base, name]) for name in "abcd"}
    found = {}
    for case, of in {
        "rank": {"a": {"rank": 0.1, "date": "2024-01-01"}, "b": {"rank": 0.2}},
        "date": {"a": {"date": "2023-12-31"}, "b": {"date": "2024-01-01"}, "c": {}},
        "id": {"a": {}, "b": {}, "c": {}, "d": {}},
    }.items():
        job = ran(tmp_path / case, [{"text": text[name], **rest} for name, rest in of.items()])
        dropped = drops(job, "minhash")
        assert len(dropped) == len(of) - 1
        found[case] = texts_of(job)[str(next(iter(dropped.values()))[1])][-1]
        smallest = min(texts_of(job))
    assert found["rank"] == found["date"] == "b"
    assert texts_of(job)[smallest][-1] == found["id"]


def test_a_hot_bucket_costs_its_size(tmp_path: Path) -> None:
    page = VOCABULARY[:300]
    documents = [{"text": " ".join([*page, f"visitor {i}"])} for i in range(2000)]
    job = ran(tmp_path, documents, shards=2, partitions=3)
    rays = len(verdicts(job))
    assert rays <= 2000 * Dedup().bands
    assert len(drops(job, "minhash")) == 1999
    assert {kept for _, kept in drops(job, "minhash").values()} == {min(texts_of(job))}


def test_a_bucket_of_unlike_documents_costs_a_few_stars(tmp_path: Path) -> None:
    """All share their first words, so bands of one row meet all the time, but no two are alike."""
    rng = random.Random(3)
    page = VOCABULARY[:60]
    documents = [{"text": " ".join(page + rng.choices(VOCABULARY, k=60))} for _ in range(200)]
    job = ran(tmp_path, documents, bands=4, rows=1)
    assert drops(job, "minhash") == {}
    assert rounds_of(job)[:ROUNDS] == list(range(ROUNDS))
    rays = len(verdicts(job))
    assert 200 < rays <= 200 * 4 * ROUNDS


def test_one_centre_is_not_enough(tmp_path: Path) -> None:
    """Two pairs of alike documents in buckets that all four share."""
    page, tails = VOCABULARY[:150], (VOCABULARY[500:570], VOCABULARY[600:670])
    documents = [{"text": " ".join([*page, *tail, f"x{i}"])} for tail in tails for i in range(2)]
    job = ran(tmp_path, documents, bands=20, rows=1)
    assert sorted(found.size for found in clusters(job).values()) == [2, 2, 2, 2]


def test_short_documents_and_scripts_without_spaces(tmp_path: Path) -> None:
    chinese = "深度学习模型需要大量的文本数据。" * 3 + "我们在这里描述如何收集、清理和去除重复的文档。"
    other = "今天天气很好，我们决定去公园散步，然后在湖边吃午饭，看孩子们放风筝，直到太阳下山才回家。"
    texts = ["one two", "One, two!", "two one", "!!!", "???", "", chinese, chinese + "好", other]
    job = ran(tmp_path, [{"text": text} for text in texts])
    found = {
        frozenset((texts_of(job)[one], texts_of(job)[str(kept)])) for one, (_, kept) in drops(job, "minhash").items()
    }
    assert found == {frozenset(("one two", "One, two!")), frozenset((chinese, chinese + "好"))}


def test_each_domain_and_language_for_itself(tmp_path: Path) -> None:
    text = " ".join(VOCABULARY[:100])
    places = [("general", "en"), ("general", "de"), ("multilingual", "de")]
    documents = [{"text": f"{text} {i}", "domain": domain, "language": of} for i, (domain, of) in enumerate(places)]
    assert drops(ran(tmp_path / "apart", documents), "minhash") == {}
    documents += [{"text": f"{text} other", "domain": "multilingual", "language": "de"}]
    assert len(drops(ran(tmp_path / "together", documents), "minhash")) == 1


def test_what_is_gone_takes_nothing_with_it(tmp_path: Path) -> None:
    """The document that would be kept was dropped by an earlier step."""
    documents = [{"text": " ".join([*VOCABULARY[:100], name]), "rank": rank} for name, rank in (("a", 1.0), ("b", 0.0))]
    job = make_job(tmp_path, documents, stages=[MinHash()])
    job = without(job, [row for row, one in attributes(job).items() if one["rank"] == 1])
    MinHash().run(run_serial, job)
    assert drops(job, "minhash") == {}


def test_the_bound_itself_is_similar_enough(tmp_path: Path) -> None:
    """Pairs of 13 words with another last one share 8 of 10 shingles."""
    words = [f"v{number}" for number in range(13 * 20)]
    texts = [words[start : start + 13] for start in range(0, len(words), 13)]
    documents = [{"text": " ".join(text)} for one in texts for text in (one, [*one[:-1], "other"])]
    rows = verdicts(ran(tmp_path, documents, jaccard=0.8))
    assert {row["jaccard"] for row in rows} == {0.8}
    assert sum(row["edge"] for row in rows) == 20


def test_one_keeps_all_but_exact_copies(tmp_path: Path) -> None:
    text = " ".join(VOCABULARY[:50])
    recipe = SimpleNamespace(curate=Curate(dedup=Dedup(jaccard=1)))
    job = make_job(tmp_path, [{"text": text}, {"text": text.upper()}], recipe=recipe, stages=[MinHash()])
    MinHash().run(run_serial, job)
    assert not Path(job.folder).exists()
    assert len(job.survivors(0, "end", ["id"])) == 2


def test_a_killed_job_goes_on(tmp_path: Path) -> None:
    documents = planted(2, 30)
    whole = make_job(tmp_path / "whole", documents, shards=2, partitions=2, stages=[MinHash()])
    done: list[int] = []
    MinHash().run(lambda *work: (done.extend(work[3]), run_serial(*work))[1], whole)
    for stop in range(3, len(done), 17):
        job = make_job(tmp_path / str(stop), documents, shards=2, partitions=2, stages=[MinHash()])
        with pytest.raises(KeyboardInterrupt):
            MinHash().run(stopping(stop), job)
        MinHash().run(run_serial, replace(job, partitions=2 + stop % 2))  # other partitions begin the stage again
        assert fates(job) == fates(whole)


def fates(job: CurationJob) -> list[bytes]:
    return [Path(file).read_bytes() for file in job.files("minhash/fates")]


def stopping(after: int) -> Any:
    """Return a runner that stops after so many items."""
    left = iter(range(after))

    def runner(job: CurationJob, step: str, work: Any, items: Any) -> None:
        for item in items:
            if next(left, None) is None:
                raise KeyboardInterrupt
            work(job, item)

    return runner
