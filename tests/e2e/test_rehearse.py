"""`herd rehearse` on the 8B and 405B recipes: the whole chain in small, and mistakes that only a run finds."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from storage.artifact import Store
from storage.processes import free_port
from tests.e2e.conftest import Herd, NewHerd, record, wait_for

DOMAINS = ("general", "math", "code", "multilingual")
CLUSTER = """
fabric: roce-24k
processes: 256
micro_batch: 1
layout: {zero: 3}
stages: {long: {layout: {cp: 8, zero: 3}}, anneal: {layout: {cp: 8, zero: 3}}}
"""


@pytest.fixture(scope="module")
def rehearsing(new_herd: NewHerd, tmp_path_factory: pytest.TempPathFactory) -> Herd:
    return new_herd(tmp_path_factory.mktemp("rehearsals"))


def rehearse(herd: Herd, name: str, *overrides: str, cluster: str = "", status: int = 1) -> list[str]:
    """Return the faults of the recipe on the session's text, whose repetitions are not limited."""
    folder = Path(herd.recipe).parent
    changes = [
        *(f"sources.{domain}.0.uri={folder}/{domain}.jsonl" for domain in DOMAINS),
        *("evaluate.suite=quick", "evaluate.final=quick", "evaluate.data=null", "tokens.max_epochs=1e12"),
        # installed documents are manuals: rules for web text keep few of them
        *("curate.quality={rules: [], max_divergence: null}", "curate.quality_for={}"),
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
    rehearsing: Herd, new_herd: NewHerd, tmp_path: Path
) -> None:
    """From raw text to a promoted model, fine-tuned, evaluated in parts, promoted and served, on eight processes."""
    cluster = """
fabric: roce-24k
processes: 16384
micro_batch: 1
layout: {tp: 8, pp: 16}
stages:
  long: {layout: {tp: 8, cp: 16, pp: 16}}
  anneal: {layout: {tp: 8, cp: 16, pp: 16}}
"""
    faults = rehearse(rehearsing, "405b", "stages.long.seq_len=[16384, 131072]", cluster=cluster)
    assert faults == []
    found = proven(rehearsing, "405b")
    assert "layout axes: tp, cp, pp, dp" in found["training"]
    assert "gate-long-" in found["evaluation"]

    small = new_herd(rehearsing.root / "rehearsals" / "llama3-405b")
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


def answers(address: str) -> bool:
    """Return whether a server answers at `address`."""
    with suppress(httpx.ConnectError):
        return httpx.get(address).status_code == 200
    return False
