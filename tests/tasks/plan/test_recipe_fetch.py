"""`herd fetch`: what a recipe names elsewhere is downloaded, and then the same recipe makes the same artifacts."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from herd.flows.cli.main import app
from herd.llama3.data.collect import collect
from herd.llama3.data.readers.conversations import conversation_files, read_conversations
from herd.llama3.data.readers.sources import fingerprint, survey
from herd.llama3.evaluate.suite import check_suite, find_suite, render_task, suite_inputs
from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import tokens
from herd.storage.digests import digest_folder
from herd.storage.fetch import FetchRefused
from herd.storage.filesystem import FETCHED, source_state
from herd.storage.root import Root
from herd.tasks.models.start import with_local_models
from herd.tasks.operate.integrity import verify
from herd.tasks.plan.recipe import fetch_files, make_plan, prepare_fetch, summary_lines, tokens_needed
from tests.storage.hub import Hub, stand_in_hub

TINY = "tests/e2e/tiny.yaml"
WORDS = "hf://datasets/people/words@main"
SOURCES = f"""sources={{
    general: [{{uri: "{WORDS}/web", license: odc-by}}], math: [{{uri: "{WORDS}/math/*.jsonl.gz"}}],
    code: [{{uri: "{WORDS}/web/1.parquet"}}], multilingual: [{{uri: "{WORDS}/web/0.parquet"}}]}}"""
OTHERS = [
    f'curate.block=["{WORDS}/hosts.txt"]',
    f'evaluate.tasks=["{WORDS}/eval/quiz.jsonl"]',
    f'curate.decontaminate=[{{name: quiz, uri: "{WORDS}/eval/quiz.jsonl", fields: [query]}}]',
]
CHATS = [
    f'conversations=[{{uri: "{WORDS}/chats"}}]',
    "stages=[{name: main, until: 16Ki, seq_len: 64, batch: 1Ki, mix: base},"
    "{name: chat, kind: sft, for: 8Ki, seq_len: 64, batch: 1Ki, mix: base}]",
]


def rows(name: str, count: int = 40, times: int = 8) -> list[dict[str, str]]:
    return [{"text": f"Text {n} of {name} counts {n * n} words and ends. " * times, "url": name} for n in range(count)]


def table(name: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows(name)), buffer)
    return buffer.getvalue()


def lines(entries: object) -> bytes:
    assert isinstance(entries, list)
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv(FETCHED, raising=False)
    with stand_in_hub() as running:
        running.files = {f"web/{number}.parquet": table(f"web {number}") for number in range(3)}
        running.files |= {f"math/{number}.jsonl.gz": gzip.compress(lines(rows(f"m{number}"))) for number in range(4)}
        running.files |= {"web/README.md": b"about", "hosts.txt": b"bad.example\n"}
        running.files["eval/quiz.jsonl"] = lines(
            [{"query": f"{n} + 1 =", "choices": ["1", str(n + 1)], "gold": 1} for n in range(2, 9)]
        )
        running.files["chats/a.jsonl"] = lines([{"prompt": f"say {n}", "response": str(n)} for n in range(20)])
        yield running
    os.environ.pop(FETCHED, None)


def fetch(recipe: Recipe, root: Root, update: bool = False) -> None:
    folder, addresses = prepare_fetch(recipe, root, update)
    fetch_files(recipe, folder, addresses, 2, lambda came, left: None)


def state(recipe: Recipe, folder: Path) -> list[object]:
    """Return what decides the artifacts of `recipe`, and the documents and skipped input themselves."""
    facts = collect(recipe, folder)
    chats = [row for source in recipe.conversations for row in read_conversations(source, 1)]
    listed = [conversation_files(source) for source in recipe.conversations]
    files = [digest_folder(folder / "text"), (folder / "skipped.parquet").read_bytes()]
    inputs = [fingerprint(recipe), suite_inputs(recipe), source_state(recipe.curate.block[0])]
    return [facts, files, inputs, listed, chats, check_suite(recipe, None)]


def test_a_recipe_reads_the_copies_and_makes_the_same_artifacts_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    recipe, root = load_recipe(Path(TINY), [SOURCES, *OTHERS, *CHATS]), Root.parse(tmp_path / "root")
    remote = state(recipe, tmp_path / "remote")
    unseen = summary_lines(make_plan(recipe, survey(recipe)))[3]
    needed = tokens(tokens_needed(recipe, "general"))
    assert unseen == f"source   general: not looked at (remote); the run takes {needed} tokens"
    fetch(recipe, root)
    hub.use("reset", first=1, times=10**6)
    copied = state(recipe, tmp_path / "copied")
    assert copied == remote
    printed = summary_lines(make_plan(recipe, survey(recipe)))
    assert hub.log == []
    assert verify(root).files == 3 + 4 + 1 + 1 + 1
    (damaged,) = (tmp_path / "root").glob("fetched/**/hosts.txt")
    damaged.write_bytes(damaged.read_bytes()[::-1])
    (damage,) = verify(root).damaged
    assert damage.file.endswith("hosts.txt")
    assert damage.problem == "has another SHA-256; delete it and run herd fetch again"
    assert "source   general: 41.9 kB in 120 documents, about 12 (4.2 kB) held out" in printed
    commit = hub.commit()[:12]
    assert f"copies   7 of 7 remote addresses in {root.uri}/fetched at {commit}" in printed
    other = load_recipe(Path(TINY), [SOURCES.replace("math/*", "math/0*"), *OTHERS])
    assert any(
        "5 of 6 remote" in line and "read remotely: sources.math.0 (" in line
        for line in summary_lines(make_plan(other, []))
    )


@pytest.mark.slow
def test_of_a_source_with_a_limit_the_first_files_come(hub: Hub, tmp_path: Path) -> None:
    """The second file is short of text, so that the first guess is too small; a reader takes a batch at a time."""
    hub.files |= {f"math/{number}.jsonl.gz": gzip.compress(lines(rows(f"m{number}", 40, 1500))) for number in range(8)}
    hub.files["math/1.jsonl.gz"] = gzip.compress(lines([{"text": " ", "url": "x" * 2000}] * 50))
    recipe, root = (
        load_recipe(Path(TINY), [SOURCES.replace('.jsonl.gz"', '.jsonl.gz", limit: 7MB')]),
        tmp_path / "root",
    )
    remote = collect(recipe, tmp_path / "remote")
    fetch(recipe, Root.parse(root))
    here = sorted(path.name for path in root.glob("fetched/hf/**/*.gz"))
    assert here == [f"{number}.jsonl.gz" for number in range(len(here))]
    assert 4 <= len(here) <= 6
    hub.use("reset", first=1, times=10**6)
    assert collect(recipe, tmp_path / "copied") == remote
    hub.use()
    fetch(recipe, Root.parse(root))
    assert sorted(path.name for path in root.glob("fetched/hf/**/*.gz")) == here
    assert not [line for line in hub.log if "/cdn/" in line]


def test_a_tokenizer_and_weights_elsewhere_are_used_from_their_copies(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["people/weights"] = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"the same weights",
        "original/tokenizer.model": b"ranks",
    }
    named = [
        'tokenizer={use: "hf://people/weights/original/tokenizer.model"}',
        'init_from={path: "hf://people/weights", format: hf}',
    ]
    recipe, root = load_recipe(Path(TINY), named), Root.parse(tmp_path / "root")
    with pytest.raises(RecipeError, match=r"tokenizer\.use: .* is not on this machine; download it with herd fetch"):
        with_local_models(root, recipe)
    fetch(recipe, root)
    local = with_local_models(root, recipe)
    assert local.tokenizer.use
    assert local.init_from
    assert Path(local.tokenizer.use).read_bytes() == b"ranks"
    assert sorted(path.name for path in Path(local.init_from.path).iterdir()) == [
        "config.json",
        "model.safetensors",
        "original",
    ]


HUB_SETS = {
    "cais/mmlu/all/test": {"question": "1 + 1", "subject": "math", "choices": ["1", "2", "3", "4"], "answer": 1},
    "cais/mmlu/all/dev": {"question": "2 + 1", "subject": "math", "choices": ["1", "2", "3", "4"], "answer": 2},
    "openai/gsm8k/main/test": {"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"},
    "openai/gsm8k/main/train": {"question": "Two and one?", "answer": "2 + 1 = 3\n#### 3"},
    "openai/openai_humaneval/openai_humaneval/test": {
        **{"task_id": "HumanEval/0", "prompt": "def one():\n", "canonical_solution": "    return 1\n"},
        **{"test": "def check(f):\n    assert f() == 1\n", "entry_point": "one"},
    },
}
"""File at the Hub, without its end -> a row with the columns of its page."""


def test_the_sets_of_the_suite_full_hub_are_fetched_and_rendered(hub: Hub, tmp_path: Path) -> None:
    for name, row in HUB_SETS.items():
        owner, dataset, path = name.split("/", 2)
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([row] * 9), buffer)
        files = hub.repositories.setdefault(f"datasets/{owner}/{dataset}", {})
        files[f"{path}-00000-of-00001.parquet"] = buffer.getvalue()
    recipe = load_recipe(Path(TINY), ["evaluate.final=full-hub", f"evaluate.data={tmp_path}"])
    fetch(recipe, Root.parse(tmp_path / "root"))
    hub.use("reset", first=1, times=10**6)
    tasks = {task.name: task for task in find_suite("full-hub", str(tmp_path)).tasks}
    found = {name: render_task(tasks[name]).task for name in ("mmlu", "gsm8k", "humaneval")}
    assert {name: task.questions for name, task in found.items()} == {"mmlu": 9, "gsm8k": 9, "humaneval": 9}
    assert "Question: Two and one?\nAnswer: 2 + 1 = 3" in found["gsm8k"].prompts[0].context
    assert hub.log == []


def test_copies_for_a_root_in_an_object_store_need_a_folder(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, root = load_recipe(Path(TINY), [SOURCES]), Root.parse("s3://bucket/herd", str(tmp_path / "scratch"))
    with pytest.raises(FetchRefused, match=r"root: s3://bucket/herd is in an object store.*set HERD_FETCHED to one"):
        fetch(recipe, root)
    monkeypatch.setenv(FETCHED, str(tmp_path / "shared"))
    fetch(recipe, root)
    assert len(list(tmp_path.glob("shared/hf/**/*.parquet"))) == 3


def herd(hub: Hub, root: Path, *words: str) -> Result:
    return CliRunner().invoke(
        app, ["fetch", TINY, "--set", SOURCES, "--root", str(root), *words], env={"COLUMNS": "100"}
    )


def test_the_command_estimates_fetches_and_says_what_stands_in_the_way(hub: Hub, tmp_path: Path) -> None:
    root = tmp_path / "root"
    estimate = herd(hub, root, "--estimate", "--rate", "1kB")
    assert estimate.exit_code == 0, estimate.output
    assert "sources.general.0: 3 of 4 files" in estimate.output
    assert f"main at {hub.commit()[:12]}, license odc-by, about " in estimate.output
    assert " at 1.0 kB/s" in estimate.output
    (math,) = (line for line in estimate.output.splitlines() if line.startswith("sources.math: "))
    took, once, passes = re.findall(r"([\d.]+)K?(?: of| tokens| epochs)", math)
    assert float(took) / float(once) == pytest.approx(float(passes), rel=0.02)
    pinned = herd(hub, root, "--estimate", "--set", SOURCES.replace("@main", f"@{hub.commit()}")).output
    assert f"files, at {hub.commit()[:12]}, license odc-by" in re.sub(r" [\d.]+ k?B,", "", pinned)
    starved = herd(hub, root, "--estimate", "--set", "tokens.max_epochs=0.001").output
    assert "sources.math: the run takes" in starved
    assert starved.count("more than tokens.max_epochs 0.001 allows; add text, or lower its share") == 4
    assert not root.exists()
    text = sum(len(row["text"]) for row in rows("web 0")) * 3
    said = float(estimate.output.partition("about ")[2].partition("K tokens")[0]) * 1000
    assert said == pytest.approx(text / 4, rel=0.2)
    os.environ.pop(FETCHED, None)
    first = next(number for number, line in enumerate(hub.log, 1) if "resolve" in line)
    hub.use(503, first=first + 2, times=10**6)
    failed = herd(hub, root)
    assert failed.exit_code == 1, failed.output
    assert "downloaded; run the same command to resume" in failed.output
    assert failed.output.count("error  ") == 1
    hub.use()
    done = herd(hub, root)
    assert done.exit_code == 0, done.output
    assert "9 files are here; " in done.output
    assert herd(hub, root).output.count("nothing to download") == 1
    hub.gated = True
    os.environ.pop(FETCHED, None)
    gated = herd(hub, tmp_path / "other")
    assert gated.exit_code == 2, gated.output
    assert f"is gated; accept its terms at {hub.endpoint}/datasets/people/words" in gated.output
