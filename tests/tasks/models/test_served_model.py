"""A model that MLflow loads without a pickle, serves over HTTP, and refuses bad requests of."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas
import psutil
import pytest
import torch
from mlflow.exceptions import MlflowException

from herd.flows.local_server import await_answer
from herd.llama3.evaluate.gate import CheckUnfinished
from herd.llama3.evaluate.generate import generate
from herd.llama3.export.convert import convert
from herd.llama3.model.files import load_model
from herd.storage.processes import die_with_parent, free_port
from herd.tasks.models.export import MODEL, SERVED, TRIES, smoke_test, write_served
from tests.llama3.export.export_samples import herd_folder, shape, tokenizer

CODER = tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    herd_folder(folder, shape(), coder=CODER)
    return folder


def served(folder: Path, model: Path) -> Path:
    """Make what `herd export --format mlflow` makes."""
    write_served(folder)
    convert(model, "herd", folder / MODEL, "herd")
    return folder


def test_the_folder_has_no_pickle_and_no_path_of_this_machine(tmp_path: Path, model: Path, checkout: Path) -> None:
    folder = served(tmp_path / "served", model)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"MLmodel", SERVED, "model/model.safetensors", "model/tokenizer.model"} <= files
    assert not {name for name in files if name.endswith((".pkl", ".pth", ".pt", ".bin"))}
    for name in ("MLmodel", "conda.yaml", "python_env.yaml", "requirements.txt", SERVED):
        assert str(checkout) not in (folder / name).read_text()
    assert "herd" not in (folder / "requirements.txt").read_text()  # another package has that name


def test_it_loads_without_pickles_and_writes_our_text(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    loaded = mlflow.pyfunc.load_model(str(served(tmp_path / "served", model)))
    prompts = ["the quick", "été"]
    options = {"max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 5}
    found = loaded.predict(pandas.DataFrame({"prompt": prompts}), params=options)
    ours = load_model(model)
    texts = [generate(ours, CODER, prompt, **options) for prompt in prompts]  # type: ignore[arg-type]
    assert found["text"].tolist() == texts
    stop = texts[0][3:5]
    cut = loaded.predict(pandas.DataFrame({"prompt": prompts[:1]}), params={**options, "stop": [stop]})
    assert cut["text"].tolist() == [texts[0][: texts[0].index(stop)]]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": -1}, "max_tokens -1"), ({"temperature": -0.5}, "temperature -0.5"),
        ({"top_p": 0.0}, "top_p 0.0"), ({"stop": [""]}, "empty"),
    ]  # fmt: skip
    for params, message in bad:
        with pytest.raises(MlflowException, match=message) as caught:
            loaded.predict(pandas.DataFrame({"prompt": ["x"]}), params=params)
        assert caught.value.get_http_status_code() == 400


@pytest.mark.slow
def test_a_smoke_test_passes(model: Path) -> None:
    assert smoke_test(model) is None


@pytest.mark.slow
def test_a_smoke_test_says_what_is_wrong(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "tokenizer.model").unlink()
    assert "tokenizer.model cannot be read" in (smoke_test(broken) or "")


@contextmanager
def killer(times: int) -> Iterator[list[int]]:
    """Kill the first `times` processes that are to load a model, as a kernel short of memory does; yield which."""
    killed: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set() and len(killed) < times:
            for process in psutil.Process().children():
                with suppress(psutil.Error):
                    if "herd.tasks.models.export" in process.cmdline() and process.pid not in killed:
                        killed.append(process.pid)
                        process.kill()
            time.sleep(0.01)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_process_that_is_killed_says_nothing_of_the_model(model: Path) -> None:
    with killer(1) as killed:
        assert smoke_test(model) is None
    assert len(killed) == 1
    with killer(TRIES) as killed, pytest.raises(CheckUnfinished, match="gave no answer; it was killed by SIGKILL"):
        smoke_test(model)
    assert len(killed) == TRIES


@pytest.mark.slow
def test_a_process_that_takes_too_long_or_has_no_memory_says_nothing_either(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckUnfinished, match="it took longer than 0 s"):
        smoke_test(model, 0.05)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    own = subprocess.Popen

    def poor(*words: Any, **more: Any) -> Any:
        return own(*words, **more, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 27, hard)))

    monkeypatch.setattr(subprocess, "Popen", poor)
    with pytest.raises(CheckUnfinished, match="gave no answer"):
        smoke_test(model)


@contextmanager
def server(folder: Path, log: Path) -> Iterator[str]:
    """Serve `folder` as the documented command does, on a free port; stop it by its process group."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(folder), "--env-manager", "local"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # uvicorn is looked up there
    environment = {**os.environ, "PATH": path, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
    try:
        await_answer(f"http://127.0.0.1:{port}/ping", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(uri: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{uri}/invocations", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.slow
def test_a_server_serves_refuses_and_after_a_rollback_serves_the_earlier_model(tmp_path: Path, model: Path) -> None:
    """An alias is exported and served; to roll back, the alias is given back, exported, and served again (P4, P5)."""
    later = tmp_path / "later"
    herd_folder(later, shape(layers=1), torch.float32, CODER)
    params = {"max_tokens": 8, "temperature": 0.0}
    body = {"dataframe_records": [{"prompt": "the quick"}], "params": params}
    texts = [generate(load_model(folder), CODER, "the quick", 8) for folder in (model, later)]
    assert texts[0] != texts[1]
    with server(served(tmp_path / "champion", later), tmp_path / "log") as uri:
        assert ask(uri, body) == (200, {"predictions": [{"text": texts[1]}]})
        status, answer = ask(uri, {"dataframe_records": [{"question": "x"}]})
        assert (status, "prompt" in answer["message"]) == (400, True)
        status, answer = ask(uri, {**body, "params": {"top_p": 2.0}})
        assert (status, "top_p 2.0" in answer["message"]) == (400, True)
        status, answer = ask(uri, {**body, "params": {"max_tokens": "many"}})
        assert (status, "max_tokens" in answer["message"]) == (400, True)
    with server(served(tmp_path / "previous", model), tmp_path / "log") as uri:
        assert ask(uri, body) == (200, {"predictions": [{"text": texts[0]}]})
