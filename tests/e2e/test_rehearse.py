"""`herd rehearse` on the large recipes: the whole chain in small, and mistakes that only a run finds."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from herd.llama3.recipe.load import load_recipe
from herd.storage.artifact import Store
from herd.storage.processes import free_port
from tests.e2e.conftest import Herd, NewHerd, record, wait_for
from tests.storage.hub import TOKEN, Hub, stand_in_hub

DOMAINS = ("general", "math", "code", "multilingual")
CLUSTER = """
fabric: roce-24k
processes: 256
micro_batch: 1
layout: {zero: 3}
stages: {long: {layout: {cp: 8, zero: 3}}, anneal: {layout: {cp: 8, zero: 3}}}
"""


IN_SMALL = (
    *("evaluate.suite=quick", "evaluate.final=quick", "evaluate.data=null", "tokens.max_epochs=1e12"),
    # installed documents are manuals: rules for web text keep few of them
    *("curate.quality={rules: [], max_divergence: null}", "curate.quality_for={}"),
)


PublicData = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def rehearsing(new_herd: NewHerd, tmp_path_factory: pytest.TempPathFactory) -> Herd:
    return new_herd(tmp_path_factory.mktemp("rehearsals"))


def rehearse(
    herd: Herd, name: str, *overrides: str, cluster: str = "", status: int = 1, sources: Sequence[str] = ()
) -> list[str]:
    """Return the faults of the recipe on the session's text, whose repetitions are not limited.

    `sources`: overrides with which the recipe finds that text.
    """
    folder = Path(herd.recipe).parent
    changes = [
        *(sources or [f'sources.{domain}=[{{uri: "{folder}/{domain}.jsonl"}}]' for domain in DOMAINS]),
        *IN_SMALL,
        *overrides,
    ]
    words = [word for change in changes for word in ("--set", change)]
    file = folder / "cluster.yaml"
    file.write_text(cluster or CLUSTER)
    herd("rehearse", f"recipes/llama3-{name}.yaml", "--cluster", str(file), *words, status=status)
    page = herd.root / "rehearsals" / f"llama3-{name}" / "rehearsal.json"
    found = json.loads(page.read_text())
    assert isinstance(found["faults"], list)
    return [text for text in found["faults"] if not text.startswith("root: ")]  # this disk is too small for an 8B


def proven(herd: Herd, name: str) -> dict[str, str]:
    page = herd.root / "rehearsals" / f"llama3-{name}" / "rehearsal.json"
    return dict(json.loads(page.read_text())["proven"])


@pytest.mark.slow
def test_the_8b_recipe_is_run_in_small_to_a_promoted_and_exported_model(rehearsing: Herd) -> None:
    """With a last stage that fine-tunes, in sequences that hold whole conversations."""
    stages = yaml.safe_load(Path("recipes/llama3-8b.yaml").read_text())["stages"]
    chat = {"name": "chat", "kind": "sft", "for": "100M", "seq_len": 8192, "batch": "2Mi", "mix": "annealing"}
    tuned = [*stages, chat | {"replay": "10%", "lr": "linear from 1e-5 to 0"}]
    words = (f"stages={json.dumps(tuned)}", "conversations=[{uri: problems, limit: 400}]")
    assert rehearse(rehearsing, "8b", *words) == []
    found = proven(rehearsing, "8b")
    assert found["layouts"].startswith("built at full size: ramp-4k 32 layers, ")
    assert list(found) == ["layouts", "data", "training", "recovery", "evaluation", "promotion", "export"]
    assert "ramp-4k, main, long, anneal, chat" in found["training"]
    assert found["recovery"].endswith("attempt 2 went on from a checkpoint")
    assert found["promotion"] == "the gate decided: promoted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("tokens.max_epochs=4", "more than tokens.max_epochs 4 allows"),
        ("curate.languages=[sw]", "step curate: sources.multilingual: nothing is left to train on"),
        ("sources.code.0.text=content", "sources.code.0.text: "),
        ("curate.quality.min_words=100000", "nothing is left to train on"),
    ],
)
def test_mistakes_in_the_data_are_found(rehearsing: Herd, override: str, says: str) -> None:
    assert any(says in text for text in rehearse(rehearsing, "8b", override))


@pytest.mark.slow
def test_a_checkpoint_folder_that_cannot_be_written_fails_the_first_stage(rehearsing: Herd) -> None:
    faults = rehearse(rehearsing, "8b", cluster=f"{CLUSTER}checkpoints: /proc/herd\n")
    assert any(text.startswith("step ramp-4k: ") for text in faults)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 400 s of CPU
def test_the_405b_recipe_in_small_becomes_a_chat_model_that_is_served(
    rehearsing: Herd, new_herd: NewHerd, public_data: PublicData, tmp_path: Path
) -> None:
    """From the texts of a stand-in hub to a promoted model, fine-tuned, evaluated in parts, promoted and served."""
    cluster = """
fabric: roce-24k
processes: 16384
micro_batch: 1
layout: {tp: 8, pp: 16}
stages:
  long: {layout: {tp: 8, cp: 16, pp: 16}}
  anneal: {layout: {tp: 8, cp: 16, pp: 16}}
"""
    faults = rehearse(
        rehearsing, "405b", "stages.long.seq_len=[16384, 131072]", cluster=cluster, sources=public_data("llama3-405b")
    )
    assert faults == []
    found = proven(rehearsing, "405b")
    assert "layout axes: tp, cp, pp, dp" in found["training"]
    assert "gate-long-" in found["evaluation"]

    small = new_herd(rehearsing.root / "rehearsals" / "llama3-405b")
    small.variables.update(rehearsing.variables)
    recipe = yaml.safe_load((small.root / "recipe.yaml").read_text())
    start = f"{recipe['name']}@champion"
    chat = {field: recipe[field] for field in ("sources", "curate", "mix", "model", "precision", "seed", "tokens")} | {
        "name": "llama3-405b-chat",
        "init_from": {"path": start, "format": "herd"},
        "tokenizer": {"use": start},
        "conversations": [{"uri": "problems", "limit": 300}],
        "lr": {"peak": 3e-3, "warmup": "2 steps", "linear": {"to": 0, "over": "64Ki"}},
        "stages": [
            {"name": "chat", "kind": "sft", "for": "64Ki", "seq_len": 256, "batch": "4Ki", "mix": "base",
             "replay": "12.5%"},
        ],
        "evaluate": {"documents": 8, "questions": 10},
        "promote": {"when": {"eval/sft/bpb": "better", "eval/bpb": "no worse than 50%"}},
    }  # fmt: skip
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(chat, sort_keys=False))
    (tmp_path / "cluster.yaml").write_text(
        "{processes: 8, micro_batch: 2, layout: {tp: 2, pp: 2}, evaluate: {processes: 4, layout: {tp: 2, pp: 2}}}"
    )
    where = ("--cluster", str(tmp_path / "cluster.yaml"))
    plan = small("plan", str(tmp_path / "chat.yaml"), *where)
    assert "conversations with 12.5% base" in plan
    printed = small("run", str(tmp_path / "chat.yaml"), *where)
    assert "llama3-405b-chat version 1 is the champion" in printed
    assert (small.root / "runs" / "llama3-405b-chat-1" / "logs" / "chat" / "attempt-1" / "rank-7.log").exists()
    tuned = Store(small.root).load(record(small, "llama3-405b-chat-1").steps["chat"].artifact).metadata
    assert tuned["last_loss"] < tuned["first_loss"]

    port = free_port()
    small.start("serve", "llama3-405b-chat@champion", "--port", str(port), "--tp", "2")
    address = f"http://127.0.0.1:{port}"
    wait_for(lambda: answers(f"{address}/health"), "herd serve")
    body = {"model": "llama3-405b-chat@champion", "messages": [{"role": "user", "content": "What is 7 + 8?"}]}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body | {"temperature": 0, "max_tokens": 32}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


COLUMNS: dict[str, dict[str, Any]] = {
    "EssentialAI/eai-taxonomy-code-w-dclm": {"id": 1, "pid": "1", "metadata": {"url": "https://g.org/{n}"}},
    "EssentialAI/eai-taxonomy-stem-w-dclm": {"id": 1, "pid": "1", "metadata": {"url": "https://h.org/{n}"}},
    "HuggingFaceFW/fineweb-edu": {"id": "<urn:uuid:1>", "dump": "CC-MAIN-2024-10", "url": "https://a.org/{n}",
        "file_path": "s3://commoncrawl/x", "language": "en", "language_score": 0.9, "token_count": 100, "score": 3.1,
        "int_score": 3},
    "HuggingFaceFW/fineweb-2": {"id": "<urn:uuid:1>", "dump": "CC-MAIN-2024-10", "url": "https://b.org/{n}",
        "date": "2024-02-21T15:27:24Z", "file_path": "s3://commoncrawl/x", "language": "fra", "language_score": 0.9,
        "language_script": "Latn", "minhash_cluster_size": 2, "top_langs": "{}"},
    "HuggingFaceTB/finemath": {"url": "https://c.org/{n}", "fetch_time": 1369061018000,
        "content_mime_type": "text/html", "warc_filename": "x", "warc_record_offset": 1, "warc_record_length": 1,
        "token_count": 1, "char_count": 1,
        "metadata": "{}", "score": 4.0, "int_score": 4, "crawl": "x", "snapshot_type": "x", "language": "en",
        "language_score": 0.9},
    "HuggingFaceTB/stack-edu": {"language": "Python", "repo_name": "a/b", "path": "/c.py", "src_encoding": "UTF-8",
        "length_bytes": 1, "score": 3.2, "int_score": 3, "detected_licenses": ["MIT"], "license_type": "permissive"},
    "HPLT/HPLT2.0_cleaned": {"u": "https://d.org/{n}", "c": "text/html", "ts": "2021-01-01T00:00:00Z", "lang": ["de"],
        "prob": [0.9], "id": "1", "filter": "keep"},
    "LLM360/MegaMath": {"url": "https://e.org/{n}"},
    "bigcode/starcoderdata": {"max_stars_repo_path": "a.py", "max_stars_repo_name": "a/b", "max_stars_count": 3,
        "id": "1"},
    "nvidia/Nemotron-CC-v2": {"id": "1"},
    "nvidia/Nemotron-CC-Math-v1": {"id": "1"},
    "nvidia/Nemotron-CC-Code-v1": {"id": "1"},
    "mlfoundations/dclm-baseline-1.0": {"url": "https://f.org/{n}", "bff_contained_ngram_count_before_dedupe": 1,
        "language_id_whole_page_fasttext": {"en": 0.9}, "warcinfo": "x"},
}  # fmt: skip
"""Data set -> its columns beside the text, as its page lists them, with a value."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("gpt2-24gb", "{processes: 1}"),
        ("llama3-1b-100b", "{fabric: roce-24k, processes: 8, micro_batch: 1}"),
        (
            "llama3-8b-200b",
            "{fabric: roce-24k, processes: 64, micro_batch: 1, layout: {zero: 3}, "
            "stages: {long: {layout: {cp: 4, zero: 3}}, anneal: {layout: {cp: 4, zero: 3}}}}",
        ),
    ],
    ids=["0.1B", "1B", "8B"],
)
def test_a_recipe_on_public_data_runs_in_small(
    rehearsing: Herd, public_data: PublicData, name: str, cluster: str, tmp_path: Path
) -> None:
    """Its own addresses and commits, at a stand-in for the Hub with rows of the same columns."""
    (tmp_path / "cluster.yaml").write_text(cluster)
    overrides = [*IN_SMALL, *public_data(name)]
    words = [word for change in overrides for word in ("--set", change)]
    words += ["--cluster", str(tmp_path / "cluster.yaml")]
    rehearsing.start("rehearse", f"recipes/{name}.yaml", *words).communicate(timeout=560)
    page = json.loads((rehearsing.root / "rehearsals" / name / "rehearsal.json").read_text())
    assert [text for text in page["faults"] if not text.startswith("root: ")] == []  # this disk is small
    proven = dict(page["proven"])
    assert "main, " in proven["training"]
    assert proven["promotion"] == "the gate decided: promoted"


@pytest.fixture
def public_data(rehearsing: Herd, tmp_path: Path) -> Iterator[PublicData]:
    """Put the session's text where a recipe names it, at a stand-in for the Hub with one file for each source.

    Returns the overrides that the recipe needs to read it there. The columns are those of the data sets.
    """
    texts, contents = Path(rehearsing.recipe).parent, tmp_path / "content"
    contents.mkdir()
    with stand_in_hub() as hub, folder_server(tmp_path) as address:
        rehearsing.variables.update(HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN)

        def put(name: str) -> list[str]:
            overrides = []
            for domain, sources in load_recipe(Path("recipes") / f"{name}.yaml").sources.items():
                rows = [json.loads(line) for line in (texts / f"{domain}.jsonl").read_text().splitlines()]
                for number, source in enumerate(sources):
                    own = [row["text"] for row in rows[number :: len(sources)]]
                    if source.contents:
                        own = [stored(contents, text.encode()) for text in own]
                        overrides.append(f"sources.{domain}.{number}.contents={address}/content/{{}}")
                    put_file(hub, source.uri, source.text, own)
            return overrides

        yield put


def put_file(hub: Hub, uri: str, field: str, texts: list[str]) -> None:
    """Put a file that the glob `uri` matches into its data set, with `texts` in the column `field`."""
    owner, named, path = uri.removeprefix("hf://datasets/").split("/", 2)
    dataset, _, commit = named.partition("@")
    file = re.sub(r"\[(\w).*?\]", r"\1", path).replace("of-*", "of-00001")
    file = re.sub(r"\*$", "shard_00000000_processed.jsonl.zst", file).replace("*", "1")
    columns = {key: [fill(value, n) for n in range(len(texts))] for key, value in COLUMNS[f"{owner}/{dataset}"].items()}
    files = hub.repositories.setdefault(f"datasets/{owner}/{dataset}", {})
    files[file] = packed({field: texts, **columns}, file)
    if commit:
        hub.history[commit] = files


def fill(value: Any, number: int) -> Any:
    return value.replace("{n}", str(number)) if isinstance(value, str) else value


def packed(columns: dict[str, Any], name: str) -> bytes:
    """Return a table in the format that the ending of `name` says."""
    if name.endswith(".parquet"):
        buffer = io.BytesIO()
        pq.write_table(pa.table(columns), buffer)
        return buffer.getvalue()
    rows = (json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in zip(*columns.values(), strict=True))
    return bytes(pa.compress("".join(rows).encode(), codec="zstd", asbytes=True))


def stored(folder: Path, data: bytes) -> str:
    """Store a content as Software Heritage does, and return its id."""
    key = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    (folder / key).write_bytes(gzip.compress(data))
    return key


@contextmanager
def folder_server(folder: Path) -> Iterator[str]:
    """Serve the files of a folder; yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def answers(address: str) -> bool:
    """Return whether a server answers at `address`."""
    with suppress(httpx.ConnectError):
        return httpx.get(address).status_code == 200
    return False
