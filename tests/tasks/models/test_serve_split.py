"""`herd serve` and `herd generate` with a model that is split over processes, and the layouts that are refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from herd.flows.cli.main import app as cli
from herd.llama3.evaluate.generate import generate
from herd.llama3.model.files import save_model
from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.sections import Model
from herd.storage.processes import free_port
from herd.storage.secrets import PAGE_KEY
from herd.tasks.models.lookup import check_layout, choose_layout
from tests.dist import Forked
from tests.llama3.evaluate.test_generate_batch import TOKENIZER, made
from tests.tasks.models.test_serve import CONFIG

WAIT_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, CONFIG, TOKENIZER.vocab_size, made(CONFIG).state_dict())
    TOKENIZER.save(path)
    return path


@contextmanager
def serving(folder: Path, root: Path) -> Iterator[tuple[Forked, httpx.Client, list[psutil.Process]]]:
    """Yield the command, a client and the ranks."""
    address = f"http://127.0.0.1:{free_port()}/"
    words = ["serve", str(folder), "--tp", "2", "--port", address.rpartition(":")[2][:-1], "--root", str(root)]
    process = Forked("herd.flows.cli.main", *words, environment=dict(os.environ))
    try:
        assert process.stdout.readline() == "loading the model\n"
        said = [process.stdout.readline() for _ in range(4)]
        assert said[:2] == [f"{folder} is served by 2 processes; Ctrl-C stops it\n", f"page     {address}\n"]
        assert said[3] == f"api_key  the text of {root / PAGE_KEY}\n"
        login = {"Authorization": f"Bearer {(root / PAGE_KEY).read_text().strip()}"}
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        with httpx.Client(base_url=address, timeout=WAIT_S, headers=login) as client:
            yield process, client, ranks
        _, alive = psutil.wait_procs(ranks, 10)
        assert not alive
    finally:
        process.kill()


@pytest.mark.slow
def test_a_split_model_is_served_until_ctrl_c(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as (process, client, _):
        body = {"model": str(folder), "prompt": "The", "temperature": 0}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        assert choice["text"] == generate(made(CONFIG), TOKENIZER, "The", 16)
        with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 20, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            *_, last = lines
        assert last == "data: [DONE]"
        assert process.communicate(WAIT_S) == ("", None)
        assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_rank_that_is_killed_ends_the_server_and_says_so(folder: Path, tmp_path: Path, busy: bool) -> None:
    with serving(folder, tmp_path) as (process, client, ranks):
        if busy:
            body = {"model": str(folder), "prompt": "The", "max_tokens": 19_000, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = (line for line in answer.iter_lines() if line)
                next(lines)
                ranks[1].kill()
                *_, last = lines
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        else:
            ranks[1].kill()
        output, _ = process.communicate(WAIT_S)
        assert "error  rank 1 was killed by SIGKILL\n" in output
        assert process.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_server(folder: Path, tmp_path: Path, number: int) -> None:
    with serving(folder, tmp_path) as (process, _, ranks):
        for rank in ranks:
            rank.suspend()  # as if it waited for a GPU
        process.send_signal(number)
        assert process.wait(WAIT_S) == -number


@pytest.mark.slow
def test_a_split_model_generates_the_text_of_one_process(tmp_path: Path) -> None:
    model = made(CONFIG.model_copy(update={"max_seq_len": 24}))
    save_model(tmp_path, model.config, TOKENIZER.vocab_size, model.state_dict())
    TOKENIZER.save(tmp_path)
    words = ["generate", str(tmp_path), "--tokens", "40", "--tp", "2", "--pp", "2", "--dtype", "fp32"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert result.stdout_bytes.decode() == f"The{generate(model, TOKENIZER, 'The', 40, 0.8)}\n"
    assert result.stderr.endswith(", 4 processes\n")
    assert not [each for each in psutil.Process().children() if "herd.llama3.evaluate.distributed" in each.cmdline()]


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "3"], "error --tp: 3 does not divide heads 4, kv_heads 2, vocab_size 512; use one of 1, 2"),
        (["--pp", "5"], "error --pp: 5 x vpp 1 stages are too many for 2 layers"),
        (["--tp", "0"], "--tp"),
        (["--dtype", "fp16"], "--dtype"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    folder: Path, command: str, options: list[str], message: str
) -> None:
    words = [command, str(folder), *options, *(["--port", "0"] if command == "serve" else [])]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_more_processes_than_gpus_are_refused() -> None:
    check_layout(CONFIG, TOKENIZER.vocab_size, Layout(tp=2), 2)
    check_layout(CONFIG, TOKENIZER.vocab_size, Layout(tp=2), 0)
    with pytest.raises(ValueError, match=r"--tp 2 x --pp 2: needs 4 GPUs, and this machine has 2; write less"):
        check_layout(CONFIG, TOKENIZER.vocab_size, Layout(tp=2, pp=2), 2)


def test_a_model_takes_as_few_gpus_as_it_fits() -> None:
    small, large, largest = (
        Model(layers=layers, dim=dim, ffn=ffn, heads=heads, kv_heads=8, max_seq_len=131_072, tied_embeddings=False)
        for layers, dim, ffn, heads in ((32, 4096, 14_336, 32), (80, 8192, 28_672, 64), (126, 16_384, 53_248, 128))
    )
    assert choose_layout(small, 128_256, 2, 8, 75e9) == Layout()
    assert choose_layout(large, 128_256, 2, 8, 75e9) == Layout(tp=4)
    assert choose_layout(largest, 128_256, 2, 8, 132e9) == Layout(tp=8)
    with pytest.raises(ValueError, match=r"--tp: the model with 4 bytes a weight does not fit 8 GPUs of 132 GB"):
        choose_layout(largest, 128_256, 4, 8, 132e9)
    with pytest.raises(ValueError, match=r"8 GPUs of 75 GB each; use more GPUs"):
        choose_layout(largest, 128_256, 2, 8, 75e9)
