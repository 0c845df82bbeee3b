"""The tutorials that end in tokens, as printed: their recipes and commands, on a stand-in for the Hub and own files."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.storage.filesystem import FETCHED
from herd.tasks.format import format_bytes
from tests.e2e.conftest import Herd, record
from tests.storage.hub import TOKEN, Hub, stand_in_hub
from tests.test_tutorials import blocks, commands, lines

pytestmark = pytest.mark.slow
PAGE = Path("docs/tutorials/from-the-hub-to-tokens.md")
OWN = Path("docs/tutorials/your-own-data.md")
WEB, MATH = "datasets/HuggingFaceFW/fineweb-edu", "datasets/HuggingFaceTB/finemath"


def table(name: str, count: int = 500) -> bytes:
    chance = random.Random(name)
    words = ["".join(chance.choices("aeioubdfglmnprst", k=chance.randint(2, 9))) for _ in range(5000)]
    texts = [f"{' '.join(chance.choices(words, k=150))}. {name} {n}." for n in range(count)]
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "url": [f"https://{name}/{n}" for n in range(count)]}), buffer)
    return buffer.getvalue()


@pytest.fixture
def command(prefect_home: Path, prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Herd]:
    monkeypatch.delenv(FETCHED, raising=False)
    herd = Herd(tmp_path / "root", prefect_home, prefect_api, "", folder=tmp_path)
    yield herd
    herd.stop_all()


def test_the_commands_of_the_tutorial(command: Herd, tmp_path: Path) -> None:
    (recipe,) = blocks(PAGE)
    (tmp_path / "corpus.yaml").write_text(recipe)
    herd_commands = [words[1:] for words in commands(PAGE) if words[0].endswith("/herd")]
    assert [words[0] for words in herd_commands] == ["fetch", "fetch", "plan", "data", "data", "fetch", "fetch"]
    with stand_in_hub() as hub:
        hub.repositories = {
            WEB: {f"sample/10BT/{number:03}_00000.parquet": table(f"web{number}") for number in range(3)},
            MATH: {f"finemath-4plus/train-{number}.parquet": table(f"math{number}") for number in range(2)},
        }
        command.variables.update(HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN)
        web, math = hub.commit(WEB), hub.commit(MATH)
        size = format_bytes(sum(map(len, hub.repositories[WEB].values())))
        printed = [command(*words, forked=False) for words in herd_commands[:2]]
        hub.use("reset", first=1, times=10**6)
        printed += [command(*words, forked=False) for words in herd_commands[2:5]]
        assert hub.log == []
        move(hub)
        printed += [command(*words, forked=False) for words in herd_commands[5:]]
    estimate, fetched, plan, tried, run, again, updated = printed
    assert "general  1,000 documents, " in tried
    assert f"sources.general.0: 3 files, {size}, main at {web[:12]}, license odc-by, about " in estimate
    assert " at 50.0 MB/s" in estimate
    assert re.search(r"5 files are here; .* downloaded in ", fetched)
    for text in (plan, run):
        assert f"copies   2 of 2 remote addresses in {tmp_path}/root/fetched at " in text
        assert web[:12] in text
        assert math[:12] in text
    assert {"collect", "annotate", "curate", "tokenizer", "tokenize"} <= set(record(command, "corpus-1").steps)
    assert f"main is now at {hub.commit(WEB)[:12]}; the copy stays at {web[:12]}" in again
    assert f"main at {hub.commit(WEB)[:12]}" in updated
    assert TOKEN not in "".join(printed)


def move(hub: Hub) -> None:
    """Let the data set have another commit, and answer again."""
    hub.use()
    hub.repositories[WEB]["sample/10BT/003_00000.parquet"] = table("web3", 10)


def sentences(chance: random.Random, count: int) -> str:
    def words() -> str:
        return " ".join("".join(chance.choices("aeioubdfglmnprst", k=6)) for _ in range(12))

    return " ".join(f"The {words()} is it." for _ in range(count))


def write_corpus(folder: Path) -> None:
    """Write tickets as JSON lines with the text in `body` (one file is cut), pages, and a table."""
    chance = random.Random(1)
    (folder / "tickets").mkdir(parents=True)
    (folder / "handbook").mkdir()
    for file in range(3):
        rows = [
            {"body": sentences(chance, 2 if n % 6 == 0 else 9), "url": f"https://tickets.acme.example/{file}-{n}"}
            for n in range(360)
        ]
        data = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
        (folder / "tickets" / f"{file}.jsonl.gz").write_bytes(data[: len(data) // 2] if file == 2 else data)
    for n in range(150):
        page = f"<nav><a href='/'>Imprint</a></nav><main><h1>Page {n}</h1><p>{sentences(chance, 12)}</p></main>"
        (folder / "handbook" / f"{n}.html").write_text(f"<html><body>{page}</body></html>")
    table = {"title": [f"t{n}" for n in range(400)], "content": [sentences(chance, 9) for n in range(400)]}
    pq.write_table(pa.table(table), folder / "wiki.parquet")


def test_a_folder_of_own_files_becomes_tokens(command: Herd, tmp_path: Path) -> None:
    write_corpus(tmp_path / "acme")
    (recipe,) = blocks(OWN)
    file = tmp_path / "acme.yaml"
    file.write_text(recipe)
    errors = [" ".join(text.split()) for text in OWN.read_text().split("\n\n") if text.lstrip().startswith("error")]
    column, damage = (text.replace("acme/", f"{tmp_path}/acme/") for text in errors)
    plan, again, look, bound, rule, make = [words[1:] for words in commands(OWN)]
    assert column in " ".join(command(*plan, status=2).split())
    corrected = {line.partition(",")[0]: line for line in lines(OWN) if line.startswith("- {uri:")}
    for begin, line in corrected.items():
        recipe = re.sub(re.escape(begin) + r"\b.*", line, recipe)
    file.write_text(recipe.replace(", ignore: [2.jsonl.gz]", ""))
    assert damage in " ".join(command(*plan, status=2).split())
    file.write_text(recipe)
    assert "source   general: " in command(*again)
    before, after = command(*look), command(*bound)
    assert "too_few_words" not in before
    some, fewer = (int(re.findall(r"([\d,]+) +[\d.]+% .* kept ", text)[0].replace(",", "")) for text in (before, after))
    assert 0 < fewer < some
    assert command(*rule).count("too_few_words https://tickets.acme.example/") == 8
    (curate,) = (line for line in lines(OWN) if line.startswith("curate: "))
    file.write_text(f"{recipe}{curate}\n")
    assert "left out while reading: general passed_over 1" in command(*make)
    assert {"collect", "curate", "tokenizer", "tokenize"} == set(record(command, "acme-1").steps) - {"annotate"}
    page = (tmp_path / "root" / "runs" / "acme-1" / "data.html").read_text()
    assert all(text in page for text in ("too few words", "acme/tickets", "acme/handbook", "acme/wiki"))
