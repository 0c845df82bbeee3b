"""The tutorial from the Hub to tokens, as printed: its recipe and its commands, on a stand-in for the Hub."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.format import format_bytes
from tests.e2e.conftest import Herd, record
from tests.flows.test_tutorials import blocks, commands
from tests.storage.hub import TOKEN, Hub, stand_in_hub

pytestmark = pytest.mark.slow
PAGE = Path("docs/tutorials/from-the-hub-to-tokens.md")
WEB, MATH = "datasets/HuggingFaceFW/fineweb-edu", "datasets/HuggingFaceTB/finemath"


def table(name: str, count: int = 500) -> bytes:
    chance = random.Random(name)
    words = ["".join(chance.choices("aeioubdfglmnprst", k=chance.randint(2, 9))) for _ in range(5000)]
    texts = [f"{' '.join(chance.choices(words, k=150))}. {name} {n}." for n in range(count)]
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "url": [f"https://{name}/{n}" for n in range(count)]}), buffer)
    return buffer.getvalue()


@pytest.fixture
def command(prefect_home: Path, prefect_api: str, tmp_path: Path) -> Iterator[Herd]:
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
    assert "general  1,002 documents, " in tried
    assert f"sources.general.0: 3 files, {size}, main at {web[:12]}, license odc-by, about " in estimate
    assert " at 50.0 MB/s" in estimate
    assert re.search(r"5 files are here; .* came in ", fetched)
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
