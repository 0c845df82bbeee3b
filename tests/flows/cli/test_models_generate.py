"""`herd generate`: the text goes to standard output as it is, and what it took to standard error."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from shutil import copytree

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from herd.flows.cli import models
from herd.flows.cli.main import app
from herd.llama3.evaluate.generate import generate, stream
from herd.llama3.model.files import load_model, save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.chat import encode_chat
from herd.llama3.tokens.chat_template import TEMPLATE
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer

TOKENIZER = Tokenizer([bytes([value]) for value in range(256)])
CONFIG = Model(layers=1, dim=16, ffn=32, heads=2, kv_heads=1, max_seq_len=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    model = build_model(CONFIG, TOKENIZER.vocab_size, 0, torch.float32, torch.device("cpu"))
    save_model(made, CONFIG, TOKENIZER.vocab_size, model.state_dict())
    TOKENIZER.save(made)
    return made


def herd(folder: Path, *options: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", str(folder), *options], input=given)


def due(folder: Path, prompt: str, tokens: int, top_p: float = 1.0) -> str:
    return generate(load_model(folder), TOKENIZER, prompt, tokens, 0.8, top_p, 3)


def test_the_text_stands_alone_on_standard_output(folder: Path) -> None:
    prompt = "Once [b]up :smile:"
    result = herd(folder, "--prompt", prompt, "--tokens", "30", "--top-p", "0.9", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout_bytes.decode() == prompt + due(folder, prompt, 30, 0.9) + "\n"
    assert re.fullmatch(
        r"30 tokens, [\d.]+ tokens/s, first after \d+\.\d\d s, peak memory \d+\.\d\d GiB\n", result.stderr
    )


def test_a_message_is_answered_up_to_the_end_of_the_turn(folder: Path, tmp_path: Path) -> None:
    chat = tmp_path / "chat"
    copytree(folder, chat)
    assert "--chat: " in herd(chat, "--chat").output
    (chat / TEMPLATE_FILE).write_text(TEMPLATE)
    ids, end = encode_chat(TOKENIZER, [{"role": "user", "content": "Hi"}], True), TOKENIZER.turn_end
    text = "".join(stream(load_model(folder), TOKENIZER, ids, 20, 0.8, 1.0, 3, stop_token_ids=(end,)))
    result = herd(chat, "--chat", "--prompt", "Hi", "--tokens", "20", "--seed", "3")
    assert result.stdout_bytes.decode() == f"Hi\n{text}\n"


def test_tokens_are_sampled_as_asked(folder: Path) -> None:
    options = ["--max-tokens", "30", "--top-k", "3", "--repetition-penalty", "1.3", "--seed", "3"]
    text = generate(load_model(folder), TOKENIZER, "The", 30, 0.8, 1.0, 3, top_k=3, repetition_penalty=1.3)
    assert herd(folder, *options).stdout_bytes.decode() == f"The{text}\n"
    assert text not in (
        due(folder, "The", 30),
        generate(load_model(folder), TOKENIZER, "The", 30, 0.8, 1.0, 3, top_k=3),
    )


def test_a_dash_takes_the_prompt_from_standard_input(folder: Path) -> None:
    result = herd(folder, "--prompt", "-", "--tokens", "5", "--seed", "3", given="two\nlines\n")
    assert result.stdout_bytes.decode() == "two\nlines" + due(folder, "two\nlines", 5) + "\n"


def test_the_text_ends_before_a_stop_text(folder: Path) -> None:
    text = due(folder, "The", 30)
    stop = text[7:9]
    result = herd(folder, "--tokens", "30", "--seed", "3", "--stop", "never there", "--stop", stop)
    assert result.stdout_bytes.decode() == "The" + text[: text.index(stop)] + "\n"


def test_on_a_terminal_the_prompt_is_dim_and_nothing_written_can_steer_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = StringIO()
    monkeypatch.setattr(
        models, "out", Console(file=shown, force_terminal=True, color_system="standard", soft_wrap=True)
    )
    result = herd(folder, "--prompt", "a\x1b[31mb", "--tokens", "60", "--temperature", "3", "--seed", "3")
    assert result.exit_code == 0, result.output
    dim, text = shown.getvalue().split("\x1b[0m", 1)
    assert dim == "\x1b[2ma\N{SYMBOL FOR ESCAPE}[31mb"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    written = generate(load_model(folder), TOKENIZER, "a\x1b[31mb", 60, 3.0, 1.0, 3)
    assert re.search(r"[\x00-\x08\x0b-\x1f]", written)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-p", "0"], "--top-p: 0.0 must be in (0, 1]; 1 draws from all tokens"),
        (["--temperature", "inf"], "--temperature: inf must be 0 or more; 0 takes the likeliest token"),
        (["--stop", ""], "--stop: '' is at the start of every text; write the text to stop before"),
        (["--tokens", "0"], "--tokens"),
        (["--top-k", "-1"], "--top-k"),
        (["--repetition-penalty", "0"], "--repetition-penalty: 0.0 must be above 0; 1 changes nothing"),
    ],
)
def test_settings_without_meaning_are_refused(folder: Path, options: list[str], message: str) -> None:
    result = herd(folder, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "The" not in result.stdout


def test_the_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    Tokenizer([*TOKENIZER.base, b"ab"]).save(tmp_path)
    result = herd(tmp_path)
    assert result.exit_code == 2
    assert "vocab_size 512, the tokenizer 513" in " ".join(result.output.split())
