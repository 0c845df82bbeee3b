"""The formats of `herd export`.

To add one, write its row of `EXPORT_FORMATS`; the type, errors, the option `--format`, the check of a promotion and the
card derive from it. Writers are imported when they are called, so that `herd --help` needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from herd.llama3.model.files import WeightReader
    from herd.llama3.tokens.tokenizer import Tokenizer

Format = Literal["herd", "hf", "meta", "gguf"]
"""A format that is read."""


class ExportSource(NamedTuple):
    """The model to write."""

    model: WeightReader
    tokenizer: Tokenizer | None
    dtype: torch.dtype | None
    """Of the weights; None: as stored."""
    template: str
    """Chat template; empty: none."""
    parts: int
    """Meta's model-parallel ranks."""


class ExportFormat(NamedTuple):
    """A format to write."""

    name: str
    """What the check of a promotion calls it."""
    title: str
    """What the card calls it."""
    use: str
    """How the card says to use the folder: a template of Jinja with the variable `card`."""
    write: Callable[[Path, ExportSource], None] | None
    """Writes the source into a folder; None: tasks/models/export.py writes it around a folder of format herd."""
    library: str = ""
    """The `library_name` of the Hugging Face Hub; empty: none."""
    checked_as: Format | None = None
    """The format as which a promotion reads an export again, to compare it with the model; None: it does not."""


def _hugging_face(folder: Path, source: ExportSource) -> None:
    from herd.llama3.export.hf import write_hugging_face

    write_hugging_face(folder, source.model, source.tokenizer, source.dtype, source.template)


def _meta(folder: Path, source: ExportSource, pickled: bool = True) -> None:
    from herd.llama3.export.meta import write_meta

    write_meta(folder, source.model, source.tokenizer, source.dtype, pickled=pickled, parts=source.parts)


def _gguf(folder: Path, source: ExportSource) -> None:
    from herd.llama3.export.gguf import write_gguf

    write_gguf(folder, source.model, source.tokenizer, source.dtype, source.template)


HUGGING_FACE_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{% if card.chat %}
messages = [{"role": "user", "content": "What is 7 + 8?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
{% else %}
inputs = tokenizer("The", return_tensors="pt")
{% endif %}
written = model.generate(**inputs, max_new_tokens=40)
print(tokenizer.decode(written[0], skip_special_tokens=True))
```"""
META_USE = "The files have the names and the layout that Meta's own code loads: `params.json` beside the weights."
MLFLOW_USE = r"""```
mlflow models serve -m . --env-manager local --port 5001
curl -H "Content-Type: application/json" localhost:5001/invocations \
  -d '{"dataframe_records": [{"prompt": "The"}], "params": {"max_tokens": 40}}'
```"""
EXPORT_FORMATS = {
    "hf": ExportFormat(
        "Hugging Face", "Hugging Face transformers", HUGGING_FACE_USE, _hugging_face, "transformers", checked_as="hf"
    ),
    "meta": ExportFormat("Meta", "Meta's own files, model-parallel", META_USE, _meta),
    "meta-safetensors": ExportFormat(
        "Meta", "Meta's own names, in safetensors", META_USE, partial(_meta, pickled=False), checked_as="meta"
    ),
    "gguf": ExportFormat(
        "GGUF", "GGUF, for llama.cpp", '```\nllama-cli -m model.gguf -p "The" -n 40\n```', _gguf, "gguf"
    ),
    "mlflow": ExportFormat("MLflow", "an MLflow pyfunc model", MLFLOW_USE, None, "mlflow"),
}
if TYPE_CHECKING:
    Form = str
else:
    Form = Literal[tuple(EXPORT_FORMATS)]  # typer refuses other names
