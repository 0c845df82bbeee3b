"""Write a model as a folder that MLflow loads and serves, and test that it does.

The folder holds `MLmodel`, `served_model.py` (a model from code) and `model` (safetensors, tokenizer): no pickle, so it
loads with MLFLOW_ALLOW_PICKLE_DESERIALIZATION=false. Serve it with `mlflow models serve -m FOLDER --env-manager local`
where herd is installed: the requirements do not list herd, because public registries have another package of that name.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from llama3.evaluate.gate import Unfinished
from storage.filesystem import write_atomic

SERVED = "served_model.py"


MODEL = "model"
"""Folder of weights and tokenizer."""


REQUIREMENTS = ("mlflow", "torch", "safetensors", "tiktoken", "pydantic")


SMOKE_TOKENS = 4


SMOKE_SECONDS = 900.0
"""Longest time that a smoke test may take; a model of 3M parameters takes about ten seconds."""


TRIES = 3
"""So often a process is started that ends without an answer."""


def write_served(folder: Path) -> None:
    """Write MLflow's files into the new `folder`; the model itself is then put into `folder`/model."""
    import mlflow.pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    signature = ModelSignature(
        inputs=Schema([ColSpec("string", "prompt")]),
        outputs=Schema([ColSpec("string", "text")]),
        params=ParamSchema(
            [
                ParamSpec("max_tokens", "long", 80),
                ParamSpec("temperature", "double", 0.8),
                ParamSpec("top_p", "double", 1.0),
                ParamSpec("seed", "long", 0),
                ParamSpec("stop", "string", [], shape=(-1,)),
            ]
        ),
    )
    needed = [f"{name}=={importlib.metadata.version(name)}" for name in REQUIREMENTS]
    code = Path(__file__).with_name(SERVED)
    logging.getLogger("mlflow.pyfunc").setLevel(logging.ERROR)  # it asks for type hints where a signature is given
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example was not provided")
        mlflow.pyfunc.save_model(str(folder), python_model=str(code), signature=signature, pip_requirements=needed)
    saved = Model.load(str(folder))
    saved.flavors["python_function"]["model_code_path"] = SERVED  # MLflow wrote where this file lies on this machine
    saved.save(str(folder / "MLmodel"))


def smoke(model: Path, seconds: float = SMOKE_SECONDS) -> str | None:
    """Return None if the model folder `model` loads and writes in a fresh process as it would be served, else why not.

    Pickles are forbidden to that process. Nothing is copied: the folder to serve is a temporary one of links. Only what
    the process answers is said of the model; one that is killed, takes longer than `seconds` or finds no memory is
    started again. Raises Unfinished if none answers.
    """
    with tempfile.TemporaryDirectory(prefix="herd-smoke-") as place:
        folder = Path(place) / "served"
        write_served(folder)
        (folder / MODEL).symlink_to(model.resolve(), target_is_directory=True)
        answer, ended = Path(place) / "answer.txt", ""
        for _ in range(TRIES):
            ended = _ask(folder, answer, seconds)
            if answer.exists():
                return answer.read_text() or None
    raise Unfinished(f"serving: the process that was to load the model {TRIES} times gave no answer; {ended}")


def _ask(folder: Path, answer: Path, seconds: float) -> str:
    """Have a process write its answer; return how it ended."""
    environment = {**os.environ, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    command = [sys.executable, "-m", "tasks.models.export", str(folder), str(answer)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"it took longer than {seconds:,.0f} s"
    if done.returncode < 0:
        return f"it was killed by {signal.Signals(-done.returncode).name}"
    return (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]


def _answer(folder: str, answer: Path) -> None:
    """Write into `answer` why what is in `folder` cannot be served, or nothing. Raises what says nothing of it."""
    try:
        _write_some(folder)
        said = ""
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        from llama3.export.checks import is_of_the_machine

        if is_of_the_machine(error):
            raise
        words = (str(error).strip().splitlines() or [""])[-1]
        said = f"serving: the model does not load or write: {type(error).__name__}: {words}"
    write_atomic(answer, said)


def _write_some(folder: str) -> None:
    """Load what is in `folder` as a server does and let it write a few tokens."""
    import mlflow.pyfunc

    model = mlflow.pyfunc.load_model(folder)
    params = {"max_tokens": SMOKE_TOKENS, "temperature": 0.0}
    text = model.predict([{"prompt": "The"}], params=params)["text"][0]
    assert isinstance(text, str)
