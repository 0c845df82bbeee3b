"""A model that is broken, or whose exports are, is found and named; one that is whole passes."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from herd.llama3.evaluate.gate import Check, CheckUnfinished
from herd.llama3.export import checks, hf, meta
from herd.llama3.export.checks import EXPORT, RELOAD, TOKENIZER, check_model, check_tokenizer, checked, is_machine_error
from herd.llama3.model.files import CONFIG, WEIGHTS
from herd.llama3.tokens.tokenizer import train_tokenizer
from tests.llama3.export.export_samples import SCALED, TEXTS, herd_folder, shape, tokenizer


def vetted(folder: Path) -> dict[str, Check]:
    return {check.metric: check for check in check_model(folder, folder.parent / "scratch")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a scaled rotary embedding, whose absence the logits must show."""
    herd_folder(tmp_path / "model", shape(**SCALED), coder=tokenizer())
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("more", "dtype"),
    [({}, torch.float32), (SCALED, torch.bfloat16), ({"tied_embeddings": True}, torch.float32)],
    ids=["plain", "scaled bf16", "tied"],
)
def test_a_whole_model_passes_and_leaves_nothing_behind(
    tmp_path: Path, more: dict[str, Any], dtype: torch.dtype
) -> None:
    herd_folder(tmp_path / "model", shape(**more), dtype=dtype, coder=tokenizer())
    found = vetted(tmp_path / "model")
    assert {metric: check.passed for metric, check in found.items()} == {RELOAD: True, EXPORT: True}
    assert "Hugging Face equal, logits" in found[EXPORT].reason
    assert "Meta equal, logits" in found[EXPORT].reason
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_model_too_large_for_its_logits_is_compared_by_its_parameters(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "LOGITS_BYTES", 1000)
    found = vetted(folder)
    assert found[EXPORT].reason == "Hugging Face equal; Meta equal; too large to compare logits here"
    swap_gate_and_up(monkeypatch)
    assert "Hugging Face changes layers.0.ffn" in vetted(folder)[EXPORT].reason


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS)


def test_numbers_that_are_not_finite_are_named(folder: Path) -> None:
    rewrite(folder, lambda state: state["layers.1.ffn.down.weight"].view(-1)[7].fill_(float("nan")))
    found = vetted(folder)[RELOAD]
    assert not found.passed
    assert found.reason.startswith("layers.1.ffn.down.weight holds numbers that are not finite")


@pytest.mark.parametrize("what", ["cut", "missing", "parameter", "shape"])
def test_files_that_are_no_model_fail_both_and_raise_nothing(folder: Path, what: str) -> None:
    match what:
        case "cut":
            data = (folder / WEIGHTS).read_bytes()
            (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
        case "missing":
            (folder / WEIGHTS).unlink()
        case "parameter":
            rewrite(folder, lambda state: state.pop("norm.weight"))
        case _:
            config = json.loads((folder / CONFIG).read_text())
            (folder / CONFIG).write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    assert [check.passed for check in vetted(folder).values()] == [False, False]


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow beyond a few bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_says_nothing_of_the_model(folder: Path) -> None:
    with full_disk(), pytest.raises(CheckUnfinished, match=f"{EXPORT}: the check did not come to its end"):
        check_model(folder, folder.parent / "scratch")
    assert vetted(folder)[EXPORT].passed


@pytest.mark.parametrize(
    ("error", "of_the_machine"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 12 bytes"),
            True,
        ),
        (OSError(errno.EIO, "Input/output error"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("Error while deserializing header: header too large"), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (RuntimeError("shape '[3, 2]' is invalid for input of size 7"), False),
        (ValueError("no"), False),
    ],
)
def test_what_is_of_the_machine(error: Exception, of_the_machine: bool) -> None:
    def fail() -> str:
        raise error

    assert is_machine_error(error) == of_the_machine
    if of_the_machine:
        with pytest.raises(CheckUnfinished):
            checked("x", fail)
    else:
        assert not checked("x", fail).passed


def swap_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the reader of Hugging Face's files take one for the other, as a wrong table of names would."""
    read = hf.HuggingFaceModel.tensor
    other = {"gate": "up", "up": "gate"}

    def swapped(self: hf.HuggingFaceModel, name: str) -> Tensor:
        return read(self, ".".join(other.get(part, part) for part in name.split(".")))

    monkeypatch.setattr(hf.HuggingFaceModel, "tensor", swapped)


def test_swapped_parameters_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_gate_and_up(monkeypatch)
    assert vetted(folder)[EXPORT] == Check(
        metric=EXPORT, passed=False, reason="the export to Hugging Face changes layers.0.ffn.gate.weight"
    )


def test_rows_that_are_not_permuted_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "to_half_rope", lambda weight, heads: weight)
    assert vetted(folder)[EXPORT].reason == "the export to Meta changes layers.0.attention.q.weight"


@pytest.mark.parametrize(
    ("key", "value"), [("rope_scaling", None), ("rms_norm_eps", 1e-3), ("rope_theta", 10_000.0)], ids=str
)
def test_a_wrong_setting_shows_in_the_logits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    settings = hf.hugging_face_settings
    monkeypatch.setattr(hf, "hugging_face_settings", lambda *given: {**settings(*given), key: value})
    found = vetted(folder)[EXPORT]
    assert not found.passed
    assert found.reason.startswith("the export to Hugging Face gives logits that differ by")


def test_the_tokenizer_must_be_that_of_the_tokens(folder: Path) -> None:
    assert check_tokenizer(folder, tokenizer().digest).passed
    other = train_tokenizer([text.upper() for text in TEXTS], 290)
    found = check_tokenizer(folder, other.digest)
    assert (found.metric, found.passed) == (TOKENIZER, False)
    assert other.digest[:12] in found.reason
    for path in folder.glob("tokenizer*"):
        shutil.move(path, folder.parent / path.name)
    assert not check_tokenizer(folder, other.digest).passed
