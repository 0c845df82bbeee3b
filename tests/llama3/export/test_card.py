"""The card of an exported folder: what it must say, what it leaves out, and the digests beside it (X6)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from herd.llama3.evaluate.scores import Score
from herd.llama3.export.card import Card, MixLine, SourceRow, StageLine, Training, render, truncate, write_card
from herd.llama3.export.convert import convert
from herd.llama3.export.formats import EXPORT_FORMATS, Form
from herd.llama3.recipe.sections import Model
from herd.llama3.statistics.estimates import Estimate
from tests.llama3.export.export_samples import herd_folder, shape, tokenizer

SCORE = Score("eval/arc", 0.4, 0.02, 0.361, 0.44, 600, 0.25, "accuracy", "higher", "ab12" * 16, 5, 2)
ODD = Score.from_estimate(
    "eval/odd", Estimate(1.0, math.nan, math.nan, math.nan, 1), "bits per byte", "lower", "cd34" * 16, None
)
TRAINING = Training(
    run="small-3",
    tokens=3_000_000,
    stages=[StageLine("main", 0, 3_000_000, "512", 2048, "base", 3.25)],
    mix=[MixLine("general", 0.5, 1_530_000, 0.51), MixLine("math", 0.5, 1_470_000, 0.49)],
    sources=[SourceRow("general/web | a<b>", 1_530_000, 0.51, 700), SourceRow("math/sums", 1_470_000, 0.49, 90)],
    licenses=[SourceRow("CC BY-SA 4.0", 1_530_000, 0.51, 700), SourceRow("unknown", 1_470_000, 0.49, 90)],
    languages=["en", "de"],
    scores={"eval/arc": SCORE, "eval/odd": ODD},
    curve="training-loss.png",
    recipe="name: small\n",
)
CARD = Card(
    "small", Model(preset="8b"), 128_256, "hf", "bf16", "Apache-2.0", TRAINING, {"data mix": "d" * 64, "code": "c0de"}
)


def head(text: str) -> dict[str, Any]:
    _, first, _ = text.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(first)
    return found


def test_a_card_says_what_is_known() -> None:
    text = render(CARD)
    assert head(text) == {
        "license": "apache-2.0",
        "language": ["en", "de"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llama", "base-model", "pretrained"],
    }
    for line in (
        "# small",
        "| parameters | 8,030,261,248 |",
        "| main | 3M | 512 | 2Ki | base | 3.250 |",
        "| general | 50.00% | 51.00% | 1.53M |",
        "| CC BY-SA 4.0 | 1.53M | 51.00% | 700 |",
        r"| general/web \| a&lt;b> | 1.53M | 51.00% | 700 |",
        "| odd | 1.000 |  | 1 |  | 0 | bits per byte | 1 | `cd34cd34` |",
        "| arc | 0.400 | 0.361 to 0.440 | 600 | 0.25 | 5 | accuracy | 2 | `ab12ab12` |",
        "| data mix | `" + "d" * 64 + "` |",
        "![Training loss against tokens](training-loss.png)",
        "The weights are under Apache-2.0. The sources of the training text name 1 license, counted by spelling and "
        "listed below; for 49.0% of its tokens none is known.",
        "| stage | tokens | sequence | batch, tokens | mix | mean loss of the last tenth, nats per token |",
    ):
        assert line in text.splitlines(), line


def test_a_folder_from_elsewhere_gets_a_short_card() -> None:
    bare = Card("x", Model(preset="8b"), 128_256, "meta", "fp32")
    text = render(bare)
    assert "license" not in head(text)
    for absent in ("## Training", "## Data", "## Evaluation", "recipe.yaml", "None", "none is known"):
        assert absent not in text
    assert "No license was given for the weights. The licenses of the training text are not recorded here." in text


def test_licenses_that_nobody_knows_are_called_so() -> None:
    training = dataclasses.replace(TRAINING, licenses=[SourceRow("unknown", 3_000_000, 1.0, 790)])
    notice = dataclasses.replace(CARD, training=training, license="").notice
    assert notice == "No license was given for the weights. The licenses of the training text are unknown."


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_every_format_says_how_it_is_used(form: Form) -> None:
    use = render(dataclasses.replace(CARD, form=form)).split("## Use")[1].split("## Model")[0].strip()
    command = {"hf": "AutoModelForCausalLM", "gguf": "llama-cli -m model.gguf", "mlflow": "mlflow models serve"}
    command |= dict.fromkeys(("meta", "meta-safetensors"), "params.json")
    assert use
    assert command.get(form, "") in use


def test_long_tables_are_summed_up() -> None:
    lines = [SourceRow(f"s{number}", 100 - number, 0.01, 1) for number in range(50)]
    short = truncate(lines)
    assert len(short) == 20
    assert short[-1] == SourceRow("31 more", sum(100 - number for number in range(19, 50)), pytest.approx(0.31), 31)
    assert truncate(lines[:20]) == lines[:20]


def test_the_digest_of_every_file_is_written(tmp_path: Path) -> None:
    herd_folder(tmp_path / "ours", shape(), coder=tokenizer())
    convert(tmp_path / "ours", "herd", tmp_path / "hf", "hf", add=lambda folder: write_card(folder, CARD))
    lines = (tmp_path / "hf" / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"README.md", "manifest.json", "recipe.yaml", "model.safetensors", "tokenizer.json"} < files
    assert sums.keys() == files - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((tmp_path / "hf" / name).read_bytes()).hexdigest() == digest
    manifest = json.loads((tmp_path / "hf" / "manifest.json").read_text())
    assert manifest["digests"] == {"data mix": "d" * 64, "code": "c0de"}
    assert manifest["tokens_by_license"] == {"CC BY-SA 4.0": 1_530_000, "unknown": 1_470_000}
    assert "under Apache-2.0" in manifest["license_notice"]


def test_no_folder_appears_without_its_card(tmp_path: Path) -> None:
    herd_folder(tmp_path / "ours", shape())

    def fail(folder: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        convert(tmp_path / "ours", "herd", tmp_path / "hf", "hf", add=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
