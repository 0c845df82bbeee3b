"""Export a model as other programs read it, and test that MLflow can serve it.

The MLflow folder holds `MLmodel`, `served_model.py` (a model from code) and `model` (safetensors, tokenizer), without
pickle, so it loads with MLFLOW_ALLOW_PICKLE_DESERIALIZATION=false. Serve it with `mlflow models serve -m FOLDER
--env-manager local` where herd is installed. `python -m herd.tasks.models.export FOLDER ANSWER` is the smoke test's
process.
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
from typing import TYPE_CHECKING

from herd.llama3.evaluate.gate import CheckUnfinished
from herd.llama3.export.formats import Form
from herd.storage.filesystem import write_atomic
from herd.storage.root import Root

if TYPE_CHECKING:
    from herd.llama3.export.convert import Number

SERVED = "served_model.py"
MODEL = "model"
"""Folder of weights and tokenizer."""
REQUIREMENTS = ("mlflow", "torch", "safetensors", "tiktoken", "pydantic")
"""Without herd: public registries have another package of that name."""
SMOKE_TOKENS = 4
SMOKE_SECONDS = 900.0
"""Longest time of a smoke test; a model of 3M parameters takes about ten seconds."""
TRIES = 3
"""Processes that are started until one answers."""


def export_model(
    root: Root, name: str, target: Path, form: Form = "hf", dtype: Number = "bf16", parts: int = 1, license: str = ""
) -> None:
    """Write the model `name` (a run, FAMILY@ALIAS or a model folder), with its card, as the new folder `target`.

    `parts` are Meta's model-parallel ranks, `license` that of the weights. The folder appears whole or not at all.
    Raises ValueError if the model does not exist or does not fit the form, or `target` exists or is not a local path.
    """
    from herd.llama3.export.card import write_card
    from herd.llama3.export.convert import convert, staging_folder
    from herd.tasks.models.card import make_card
    from herd.tasks.models.lookup import model_folder

    if "://" in str(target) or ":/" in str(target):
        raise ValueError(f"{target}: is not a local folder; export to one, then copy it there (aws s3 cp)")
    model = model_folder(root, name)

    def add(folder: Path) -> None:
        write_card(folder, make_card(root, name, model, folder, form, dtype, license))

    if form != "mlflow":
        convert(model, "herd", target, form, dtype, parts=parts, add=add)
        return
    with staging_folder(target) as folder:
        write_served(folder)
        convert(model, "herd", folder / MODEL, "herd", dtype, parts=parts)
        add(folder)


def write_served(folder: Path) -> None:
    """Write MLflow's files into the new `folder`; the caller puts the model itself into `folder`/model."""
    import mlflow.pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    numbers = (
        ("max_tokens", "long", 80),
        ("temperature", "double", 0.8),
        ("top_p", "double", 1.0),
        ("top_k", "long", 0),
        ("repetition_penalty", "double", 1.0),
        ("seed", "long", 0),
    )
    params = ParamSchema([*(ParamSpec(*number) for number in numbers), ParamSpec("stop", "string", [], shape=(-1,))])
    inputs, outputs = (Schema([ColSpec("string", name)]) for name in ("prompt", "text"))
    signature = ModelSignature(inputs=inputs, outputs=outputs, params=params)
    requirements = [f"{name}=={importlib.metadata.version(name)}" for name in REQUIREMENTS]
    code = str(Path(__file__).with_name(SERVED))
    logging.getLogger("mlflow.pyfunc").setLevel(logging.ERROR)  # it asks for type hints though a signature is given
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example was not provided")
        mlflow.pyfunc.save_model(str(folder), python_model=code, signature=signature, pip_requirements=requirements)
    saved = Model.load(str(folder))
    saved.flavors["python_function"]["model_code_path"] = SERVED  # MLflow wrote the file's path on this machine
    saved.save(str(folder / "MLmodel"))


def smoke_test(model: Path, seconds: float = SMOKE_SECONDS) -> str | None:
    """Return None if the model folder `model` loads and generates in a fresh process as served, else why not.

    The process may not load pickles. Nothing is copied: the served folder is temporary and links to `model`. Only an
    answer of the process says something about the model; a process that is killed, takes longer than `seconds` or runs
    out of memory is started again. Raises Unfinished if none answers.
    """
    with tempfile.TemporaryDirectory(prefix="herd-smoke-") as temporary:
        folder, answer = Path(temporary) / "served", Path(temporary) / "answer.txt"
        write_served(folder)
        (folder / MODEL).symlink_to(model.resolve(), target_is_directory=True)
        environment = {**os.environ, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
        command = [sys.executable, "-m", "herd.tasks.models.export", str(folder), str(answer)]
        end = ""
        for _ in range(TRIES):
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
            except subprocess.TimeoutExpired:
                end = f"it took longer than {seconds:,.0f} s"
            else:
                end = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
                if done.returncode < 0:
                    end = f"it was killed by {signal.Signals(-done.returncode).name}"
            if answer.exists():
                return answer.read_text() or None
    raise CheckUnfinished(f"serving: the process that was to load the model {TRIES} times gave no answer; {end}")


def _answer(folder: str, answer: Path) -> None:
    """Load `folder` as a server does and generate; write into `answer` why it failed, or nothing.

    Raises errors that say nothing about the model, such as too little memory.
    """
    import mlflow.pyfunc

    import herd.llama3.evaluate.generate  # noqa: F401  (imports torch: a failed import is not the model's fault)
    from herd.llama3.export.checks import is_machine_error

    try:
        served = mlflow.pyfunc.load_model(folder)
        params = {"max_tokens": SMOKE_TOKENS, "temperature": 0.0}
        assert isinstance(served.predict([{"prompt": "The"}], params=params)["text"][0], str)
        failure = ""
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        if is_machine_error(error):
            raise
        message = (str(error).strip().splitlines() or [""])[-1]
        failure = f"serving: the model does not load or write: {type(error).__name__}: {message}"
    write_atomic(answer, failure)


if __name__ == "__main__":
    _answer(sys.argv[1], Path(sys.argv[2]))
