from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from herd.llama3.data.hf_classifier import (
    WINDOW,
    TransformerScorer,
    check_transformer,
    load_scorer,
    transformer_metadata,
)

WORDS = re.findall(r"\w+", "the a cat dog sat ran on under mat tree and then saw one two")


@pytest.fixture(scope="session")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="package transformers is not installed: herd-llm[scorer]")


@pytest.fixture(scope="module")
def folder(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(transformers, tmp_path_factory.mktemp("model"), 2)


def make(transformers: Any, folder: Path, labels: int, positions: int = WINDOW + 2) -> Path:
    """Write a RoBERTa of two small layers with random weights, large enough that texts differ in their scores."""
    vocabulary = {word: place for place, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(5)
    config = transformers.RobertaConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=positions, num_labels=labels, initializer_range=0.3, pad_token_id=1,
    )  # fmt: skip
    transformers.RobertaForSequenceClassification(config).save_pretrained(folder)
    return folder


def texts(count: int, longest: int = 60) -> list[str]:
    draw = random.Random(3)
    return [" ".join(draw.choices(WORDS, k=draw.randint(0, longest))) for _ in range(count)]


def plain_scores(transformers: Any, folder: Path, texts: list[str]) -> list[float]:
    """Return the scores one text at a time and without padding."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(WINDOW)
    with torch.inference_mode():
        logits = [model(torch.tensor([tokenizer.encode(text).ids])).logits[0].double() for text in texts]
    return [float(x.softmax(-1)[-1] if len(x) > 1 else x.sigmoid()[0]) for x in logits]


@pytest.mark.parametrize(
    "labels", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_scores_equal_those_of_one_text_at_a_time(transformers: Any, tmp_path: Path, labels: int) -> None:
    scorer = TransformerScorer.load(make(transformers, tmp_path, labels), "cpu")
    given = [*texts(20), "", "花 unheard", *texts(2, 700)]
    scores = scorer.scores(pa.array(given))
    assert scores.dtype == np.float64
    assert scores.std() > 0.01
    np.testing.assert_allclose(scores, plain_scores(transformers, tmp_path, given), atol=1e-6)


def test_a_score_does_not_depend_on_the_texts_beside_it(folder: Path) -> None:
    scorer, given = TransformerScorer.load(folder, "cpu"), texts(40)
    together = scorer.scores(pa.chunked_array([given]))
    backwards = scorer.scores(pa.array(given[::-1]))[::-1]
    alone = [float(scorer.scores(pa.array([text]))[0]) for text in given[:10]]
    np.testing.assert_array_equal(together, backwards)
    np.testing.assert_array_equal(together[:10], alone)
    assert scorer.scores(pa.array([], pa.string())).shape == (0,)


@pytest.mark.slow
def test_padding_and_empty_rows_change_nothing_but_the_last_bits(folder: Path) -> None:
    """The batches of a GPU, here on the CPU."""
    alone, given = TransformerScorer.load(folder, "cpu"), ["", *texts(10), *texts(3, 900)]
    scores = replace(alone, batch_size=4).scores(pa.array(given))
    np.testing.assert_allclose(scores, alone.scores(pa.array(given)), atol=1e-6)


def test_a_model_with_few_positions_reads_as_much_as_it_can(transformers: Any, tmp_path: Path) -> None:
    scorer = TransformerScorer.load(make(transformers, tmp_path, 2, positions=50), "cpu")
    start = " ".join(WORDS * 4)
    same = scorer.scores(pa.array([f"{start} cat", f"{start} dog dog", WORDS[0]]))
    assert scorer.window == 48
    assert same[0] == same[1] != same[2]


def test_a_model_is_loaded_once(folder: Path) -> None:
    assert load_scorer(folder) is load_scorer(folder)
    assert len(transformer_metadata(folder)["sha256"]) == 64


def test_the_package_may_be_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: find(name, *rest) if name != "transformers" else None
    )
    with pytest.raises(ValueError, match=r"needs the package transformers; pip install transformers"):
        check_transformer(folder)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no model\.safetensors, tokenizer\.json; name a folder with"):
        TransformerScorer.load(tmp_path)


def test_a_model_without_a_classification_head_is_refused(transformers: Any, tmp_path: Path) -> None:
    make(transformers, tmp_path, 2)
    whole = transformers.RobertaForSequenceClassification.from_pretrained(tmp_path)
    whole.roberta.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is not a trained sequence classifier: model\.safetensors lacks classifier"):
        TransformerScorer.load(tmp_path, "cpu")


def test_a_damaged_model_is_refused(transformers: Any, tmp_path: Path) -> None:
    make(transformers, tmp_path, 2)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="holds no sequence classifier that transformers can load"):
        TransformerScorer.load(tmp_path, "cpu")


@pytest.mark.slow
def test_importing_it_does_not_load_the_package() -> None:
    code = "import sys, herd.llama3.data.classifiers; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: bfloat16 scores are not checked")
def test_a_gpu_gives_nearly_the_same_scores_and_always_the_same(folder: Path) -> None:
    given = texts(100)
    cpu, gpu = (TransformerScorer.load(folder, device).scores(pa.array(given)) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu, cpu, atol=0.05)
    np.testing.assert_array_equal(gpu, TransformerScorer.load(folder, "cuda").scores(pa.array(given[::-1]))[::-1])
