"""A model as MLflow serves it: this file and, beside it, the folder `model`; no pickle.

`herd.tasks.models.export` copies this file into an MLflow folder, and MLflow runs it to load the model. It needs only
the installed package herd. An input row is a prompt, an output row its continuation; parameters hold for all rows of a
request. Rows are answered one after the other, in the stored number format, on the first GPU or else the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import torch
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

from herd.llama3.evaluate.generate import stream
from herd.llama3.model.files import load_model
from herd.llama3.tokens.tokenizer import Tokenizer

FOLDER = Path(__file__).with_name("model")


class ServedModel(PythonModel):  # type: ignore[misc]
    """Continues prompts."""

    def load_context(self, context: Any) -> None:
        """Load weights and tokenizer. Raises ValueError if the folder is not whole."""
        self.tokenizer = Tokenizer.load(FOLDER)
        self.model = load_model(FOLDER, device="cuda" if torch.cuda.is_available() else "cpu")

    def predict(
        self, context: Any, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> pandas.DataFrame:
        """Return a table with the continuation of each row's `prompt` as `text`.

        Raises MlflowException (HTTP 400) for a bad parameter.
        """
        options = dict(params or {})
        until = [str(stop) for stop in options.pop("stop", [])]
        try:
            texts = [
                "".join(stream(self.model, self.tokenizer, prompt, **options, until=until))
                for prompt in model_input["prompt"]
            ]
        except ValueError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        return pandas.DataFrame({"text": texts})


set_model(ServedModel())
