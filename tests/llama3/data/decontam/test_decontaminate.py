from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herd.llama3.data.decontam.decontaminate import Decontaminate, Overlap, overlap
from herd.llama3.data.decontam.ngrams import check_benchmarks
from herd.llama3.data.mapreduce import CurationJob
from herd.llama3.data.text.words import BARE_WORD
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.data_schema import Benchmark, Curate
from tests.llama3.data.shard_samples import dropped_rows, ids, make_job, without

Lines = list[dict[str, Any]]
VOCABULARY = [a + b + c for a in "bdfgklm" for b in "aeiou" for c in "nrst"]


def prose(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


def words_of(text: str) -> list[str]:
    return BARE_WORD.findall(text.lower())


def write(path: Path, records: Sequence[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def benchmark(folder: Path, texts: Sequence[str], name: str = "quiz", **fields: Any) -> Benchmark:
    uri = write(folder / f"{name}.jsonl", [{"question": text} for text in texts])
    return Benchmark.model_validate({"name": name, "uri": uri, "fields": ["question"], **fields})


def decontaminated(
    folder: Path, texts: Sequence[str], benchmarks: Sequence[Benchmark], shards: int = 1, partitions: int = 1
) -> CurationJob:
    recipe = SimpleNamespace(curate=Curate(decontaminate=list(benchmarks)))
    job = make_job(folder, [{"text": text} for text in texts], shards, partitions, recipe, [Decontaminate()])
    Decontaminate().run(run_serial, job)
    return job


def dropped(job: CurationJob) -> set[str]:
    """Texts of the documents that were dropped."""
    rows = dropped_rows(job, "contaminated")
    assert all(why == ("contaminated", None) for why in rows.values())
    tables = [pq.read_table(shard.text) for shard in job.shards]
    return {row["text"] for table in tables for row in table.to_pylist() if row["row"] in rows}


def table(job: CurationJob, name: str) -> Lines:
    rows: Lines = pq.read_table(job.file(f"contaminated/{name}", 0)).to_pylist()
    return rows


EXAMPLE = prose(1, 40)
HALF = " ".join(EXAMPLE.split()[:20])
LESS = " ".join(EXAMPLE.split()[:19])
SCATTERED = " ".join(word if place % 6 else "and" for place, word in enumerate(EXAMPLE.split()))


@pytest.mark.parametrize(
    ("text", "goes"),
    [
        (f"{prose(2, 90)}. {EXAMPLE}! {prose(3, 90)}", True),
        (EXAMPLE.upper().replace(" ", ", "), True),
        (f"{prose(2, 90)} {HALF} {prose(3, 50)}", True),
        (f"{prose(2, 90)} {LESS} {prose(3, 50)}", False),
        (SCATTERED, False),
        (prose(4, 300), False),
    ],
)
def test_a_document_goes_if_it_covers_an_example_to_the_threshold(tmp_path: Path, text: str, goes: bool) -> None:
    job = decontaminated(tmp_path, [text, prose(5, 100)], [benchmark(tmp_path, [EXAMPLE, prose(6, 40)])])
    assert dropped(job) == ({text} if goes else set())


def test_emphasis_is_not_part_of_a_word(tmp_path: Path) -> None:
    """Markdown writes `_word_`, and a gap is written with any number of underscores; `snake_case` is one word."""
    example = prose(1, 12).replace(" ", " _", 1) + " ___ der_fluss __größe__ " + prose(3, 12)
    words = example.replace("___ ", "").replace(" _", " ").replace("__", "").split()
    marked = " ".join(f"_{word}_" if place % 3 else f"__{word}" for place, word in enumerate(words))
    texts = [marked, " ".join(words), " ".join(words).replace("_", " ")[:120]]
    job = decontaminated(tmp_path, texts, [benchmark(tmp_path, [example], threshold="100%")])
    assert dropped(job) == set(texts[:2])
    (line,) = table(job, "report")
    assert (line["confirmed"], table(job, "examples")[0]["words"]) == (1, len(words))
    assert overlap(example, [True] * len(words), marked) == Overlap(26, 26, marked.strip("_")[:300])


def test_halves_in_two_documents_flag_the_example_but_drop_neither(tmp_path: Path) -> None:
    parts = [" ".join(EXAMPLE.split()[:16]), " ".join(EXAMPLE.split()[16:32])]
    job = decontaminated(tmp_path, parts, [benchmark(tmp_path, [EXAMPLE])], shards=2)
    assert dropped(job) == set()
    (line,) = table(job, "report")
    assert (line["flagged"], line["confirmed"], line["precision"]) == (1, 0, 0.0)
    (example,) = table(job, "examples")
    assert (example["ratio"], example["document_ratio"]) == (0.8, 0.4)


def test_report_only_drops_nothing(tmp_path: Path) -> None:
    job = decontaminated(tmp_path, [EXAMPLE], [benchmark(tmp_path, [EXAMPLE], action="report")])
    assert dropped(job) == set()
    assert (table(job, "report")[0]["documents"], table(job, "report")[0]["dropped"]) == (1, 0)


def test_dropped_documents_are_not_looked_at(tmp_path: Path) -> None:
    recipe = SimpleNamespace(curate=Curate(decontaminate=[benchmark(tmp_path, [EXAMPLE])]))
    job = without(make_job(tmp_path, [{"text": EXAMPLE}], recipe=recipe, stages=[Decontaminate()]), [0])
    Decontaminate().run(run_serial, job)
    assert dropped(job) == set()
    assert table(job, "examples") == []


INSTRUCTION = "Read the following question carefully and then answer with one of the letters given below please"


def test_a_shared_instruction_is_no_leak(tmp_path: Path) -> None:
    questions = [f"{INSTRUCTION}: {prose(seed, 12)}" for seed in range(30)]
    leaked = f"{prose(50, 30)} {prose(7, 12)}"
    job = decontaminated(tmp_path, [f"{INSTRUCTION}: {prose(40, 60)}", leaked], [benchmark(tmp_path, questions)])
    assert dropped(job) == {leaked}
    (line,) = table(job, "report")
    assert line["flagged"] == 30, "the paper's measure counts the instruction"
    assert line["confirmed"] == 0, "the questions are shorter than a run of 13 words"


def test_short_examples_are_counted_but_drop_nothing(tmp_path: Path) -> None:
    job = decontaminated(
        tmp_path, ["who wrote the Iliad, and when?"], [benchmark(tmp_path, ["Who wrote the Iliad?", "…"])]
    )
    assert dropped(job) == set()
    (line,) = table(job, "report")
    assert (line["examples"], line["short"], line["flagged"], line["confirmed"]) == (2, 2, 1, 0)


def test_each_field_of_an_example_is_looked_for_alone(tmp_path: Path) -> None:
    """A page with the question alone covers less than half of question and answer."""
    question, answer, brief = prose(11, 20), prose(12, 60), prose(13, 5)
    records = [{"question": question, "answer": answer}, {"question": brief, "answer": prose(14, 6)}]
    quiz = Benchmark(name="quiz", uri=write(tmp_path / "quiz.jsonl", records), fields=["question", "answer"])
    asked, solved = f"{prose(2, 60)}. {question}?", f"{prose(3, 60)} {answer}"
    both = f"{prose(4, 60)} {brief}: {records[1]['answer']}"
    job = decontaminated(tmp_path, [asked, solved, both, f"{prose(5, 60)} {brief}"], [quiz], shards=2, partitions=2)
    assert dropped(job) == {asked, solved, both}
    (line,) = table(job, "report")
    numbers = ("examples", "short", "template", "flagged", "confirmed", "documents")
    assert [line[name] for name in numbers] == [2, 0, 0, 2, 2, 3]
    found = {row["example"]: (row["words"], row["ratio"], row["document_ratio"]) for row in table(job, "examples")}
    assert found == {0: (60, 1.0, 1.0), 1: (11, 1.0, 1.0)}
    assert [(row["corpus"], row["document"]) for row in table(job, "ratios")] == [(2, 2)] * 10


def test_what_half_of_the_answers_share_is_template_in_every_field(tmp_path: Path) -> None:
    phrase = "so the final answer is the number that we were looking for"
    records = [{"question": prose(20 + n, 30), "answer": f"{prose(60 + n, 3)} {phrase}"} for n in range(30)]
    quiz = Benchmark(name="quiz", uri=write(tmp_path / "quiz.jsonl", records), fields=["question", "answer"])
    job = decontaminated(tmp_path, [f"{prose(2, 60)} {phrase}"], [quiz])
    assert dropped(job) == set()


def test_tables_say_what_was_found(tmp_path: Path) -> None:
    leak, half = f"{prose(2, 60)}. {EXAMPLE}?", f"{prose(3, 60)} {HALF}"
    sets = [
        benchmark(tmp_path, [prose(8, 40), EXAMPLE, prose(9, 3)], threshold="60%"),
        benchmark(tmp_path, [prose(10, 50)], "other", action="report"),
    ]
    job = decontaminated(tmp_path, [half, leak, prose(4, 80)], sets, shards=3, partitions=2)
    assert dropped(job) == {leak}
    common = {"short": 0, "template": 0}
    assert table(job, "report") == [
        {"benchmark": "quiz", "action": "drop", "threshold": "60%", "examples": 3, **common, "short": 1}
        | {"flagged": 1, "confirmed": 1, "precision": 1.0, "documents": 1, "dropped": 1},
        {"benchmark": "other", "action": "report", "threshold": "50%", "examples": 1, **common}
        | {"flagged": 0, "confirmed": 0, "precision": None, "documents": 0, "dropped": 0},
    ]
    place = next(row for row, name in ids(job).items() if row in dropped_rows(job, "contaminated"))
    (example,) = table(job, "examples")
    assert example == {
        "benchmark": "quiz", "example": 1, "words": 40, "ratio": 1.0, "document": ids(job)[place],
        "document_ratio": 1.0, "run": 40, "confirmed": True, "excerpt": EXAMPLE[:300],
    }  # fmt: skip
    ratios = table(job, "ratios")
    assert [row["ratio"] for row in ratios] == [tenth / 10 for tenth in range(1, 11)] * 2
    assert [(row["corpus"], row["document"]) for row in ratios] == [(1, 1)] * 10 + [(0, 0)] * 10


def plain_overlap(example: str, document: str) -> Overlap:
    """The plain definition: every run of 8 words of the example that stands in the document."""
    one, other = words_of(example), words_of(document)
    width = min(8, len(one))
    grams = {tuple(other[i : i + width]) for i in range(len(other) - width + 1)}
    starts = [i for i in range(len(one) - width + 1) if tuple(one[i : i + width]) in grams] if width else []
    covered = {i + k for i in starts for k in range(width)}
    runs = [
        n for n in range(width, len(one) + 1)
        if any(one[i : i + n] == other[k : k + n] for i in range(len(one) - n + 1) for k in range(len(other) - n + 1))
    ]  # fmt: skip
    return Overlap(len(covered), max(runs, default=0) if width else 0, "")


SMALL = st.lists(st.sampled_from(["a", "b", "c", "_a", "b_", "__"]), max_size=30).map(" ".join)


@given(SMALL, SMALL, st.integers(0, 30), st.integers(0, 30))
def test_overlap_equals_the_plain_definition(example: str, document: str, start: int, count: int) -> None:
    document = " ".join([document, *example.split()[start : start + count], document])
    found = overlap(example, [True] * 30, document)
    assert found._replace(excerpt="") == plain_overlap(example, document)
    assert words_of(found.excerpt) == [] or " ".join(words_of(found.excerpt)) in " ".join(words_of(example))
    assert len(words_of(found.excerpt)) == found.run


@settings(max_examples=8)  # each one runs all sub-steps
@given(st.lists(SMALL, min_size=1, max_size=4), st.lists(SMALL, min_size=1, max_size=6), st.integers(1, 100))
def test_kernel_equals_the_plain_definition(
    tmp_path_factory: pytest.TempPathFactory, examples: list[str], extra: list[str], percent: int
) -> None:
    folder, documents = tmp_path_factory.mktemp("scan"), [*extra, " ".join(examples)]
    job = decontaminated(folder, documents, [benchmark(folder, examples, threshold=f"{percent}%")], shards=2)
    best = [max(plain_overlap(example, text).words for text in documents) for example in examples]
    grams = [plain_overlap(example, f" {'x ' * 8}".join(documents)).words for example in examples]
    lengths = [len(words_of(example)) for example in examples]
    expected = {
        text
        for text in documents
        for example, length in zip(examples, lengths, strict=True)
        if length >= 8 and plain_overlap(example, text).words >= Fraction(percent, 100) * length
    }
    assert dropped(job) == expected
    found = {row["example"]: row for row in table(job, "examples")}
    for number, length in enumerate(lengths):
        row = found.get(number, {"ratio": 0.0, "document_ratio": 0.0})
        assert row["ratio"] == grams[number] / max(1, length)
        assert row["document_ratio"] == best[number] / max(1, length)


def test_result_does_not_depend_on_shards_parts_or_order(tmp_path: Path) -> None:
    examples = [prose(seed, 30) for seed in range(40)]
    texts = [f"{prose(100 + n, 50)} {' '.join(examples[n].split()[: 4 + n])} {prose(200 + n, 20)}" for n in range(30)]
    texts += [f"{examples[n]} {prose(300 + n, 9)}" for n in range(5)] + [prose(400 + n, 80) for n in range(20)]
    sets = [benchmark(tmp_path, examples[:20]), benchmark(tmp_path, examples[20:], "other", threshold="90%")]
    first = decontaminated(tmp_path / "first", texts, sets)
    assert 10 < len(dropped(first)) < 40
    for number, (shards, partitions) in enumerate([(4, 1), (16, 5), (1, 5)]):
        shuffled = random.Random(number).sample(texts, len(texts))
        job = decontaminated(tmp_path / str(number), shuffled, sets, shards, partitions)
        assert dropped(job) == dropped(first)
        for name in ("report", "ratios", "examples"):
            assert table(job, name) == table(first, name)


def test_benchmarks_are_read_in_every_form(tmp_path: Path) -> None:
    records = [{"q": prose(1, 10), "choices": [prose(2, 5), prose(3, 5)], "n": 1}, {"q": prose(4, 9), "choices": []}]
    plain = write(tmp_path / "a/set.jsonl", records)
    (tmp_path / "b").mkdir()
    with gzip.open(tmp_path / "b/set.jsonl.gz", "wb") as file:
        file.write(Path(plain).read_bytes())
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "b/set.parquet")
    for uri in (plain, str(tmp_path / "b/set.jsonl.gz"), str(tmp_path / "b/*.parquet")):
        quiz = Benchmark(name="quiz", uri=uri, fields=["q", "choices"])
        job = decontaminated(tmp_path / uri.replace("/", "_"), [prose(4, 9)], [quiz])
        assert pq.read_table(job.file("contaminated/benchmarks", 0))["words"].to_pylist() == [20, 10, 10, 9, 9]
        assert dropped(job) == {prose(4, 9)}


@pytest.mark.parametrize(
    ("content", "field", "says"),
    [
        (None, "q", "curate.decontaminate.1.uri: .* names no jsonl or parquet file"),
        ("", "q", "curate.decontaminate.1.uri: .* holds no example"),
        ('{"q": "a"', "q", "curate.decontaminate.1.uri: .* cannot be read"),
        ("[1]\n", "q", "curate.decontaminate.1.fields: .*:1 holds list, not an object"),
        ('{"q": "a", "n": 1}\n', "text", "curate.decontaminate.1.fields: .* has no field 'text'; name one of n, q"),
        ('\n{"q": "a", "n": 1}\n', "n", "curate.decontaminate.1.fields: .*:2 holds int in 'n', not text"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, content: str | None, field: str, says: str) -> None:
    if content is not None:
        (tmp_path / "set.jsonl").write_text(content)
    bad = Benchmark(name="bad", uri=str(tmp_path / "set.jsonl"), fields=[field])
    with pytest.raises(ValueError, match=says):
        check_benchmarks([benchmark(tmp_path, [EXAMPLE]), bad])


def real(path: Path, count: int) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line)["text"] for line, _ in zip(file, range(count), strict=False)]


def test_a_training_set_is_found_in_itself_and_not_in_books(shared: Path, tmp_path: Path) -> None:
    first = islice((shared / "eval/gsm8k/train.jsonl").open(), 1500)
    quiz = Benchmark(name="gsm8k", uri=write(tmp_path / "set.jsonl", [*map(json.loads, first)]), fields=["question"])
    same = decontaminated(tmp_path / "same", real(shared / "corpora/math/gsm8k-train.jsonl.gz", 1500), [quiz], 2)
    (line,) = table(same, "report")
    assert line["confirmed"] > 0.99 * line["examples"]
    assert line["precision"] > 0.99
    assert line["dropped"] > 0.99 * line["examples"]
    books = decontaminated(tmp_path / "books", real(shared / "corpora/general/books.jsonl.gz", 200), [quiz])
    (line,) = table(books, "report")
    assert line["flagged"] <= 0.001 * line["examples"]
    assert line["dropped"] == 0


def test_exactly_the_threshold_is_enough_everywhere(tmp_path: Path) -> None:
    """Half of 26 words, in a run of 13: flagged, confirmed, dropped, and in the ratios up to 0.5."""
    example = prose(1, 26)
    job = decontaminated(tmp_path, [" ".join(example.split()[:13])], [benchmark(tmp_path, [example])])
    (line,) = table(job, "report")
    assert [line[name] for name in ("flagged", "confirmed", "dropped")] == [1, 1, 1]
    assert [(row["corpus"], row["document"]) for row in table(job, "ratios")] == [(1, 1)] * 5 + [(0, 0)] * 5


def test_template_of_an_example_covers_none_of_its_words() -> None:
    example = prose(1, 20)
    assert overlap(example, [False] * 8 + [True] * 5, example) == Overlap(12, 20, example)
    assert overlap(example, [False] * 13, example).words == 0
