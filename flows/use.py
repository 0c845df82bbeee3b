"""Commands for those who use a model: `herd generate | export`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.terminal import RootOption, mistakes, out, problems
from storage.root import DEFAULT_ROOT, Root

if TYPE_CHECKING:
    from tasks.models import Written

_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
"""Control characters -> pictures of them."""


def add_uses(app: typer.Typer) -> None:
    """Give `app` the commands of this file."""
    for command in (generate, export):
        app.command()(command)


def generate(
    model: Annotated[str, typer.Argument(help="A run, FAMILY@ALIAS such as quickstart@champion, or a model folder.")],
    prompt: Annotated[
        str, typer.Option(help="Text to continue; - takes standard input, without the newline at its end.")
    ] = "The",
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 80,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share, up to 1.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text to end before; may be given several times.")] = None,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Continue a text with a model, as it is written.

    A model that was only pretrained continues text and knows no chat: there is no template. The text goes to
    standard output, how fast it came to standard error.
    """
    from tasks.models import generate_text, model_folder

    with mistakes():
        given = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        folder = model_folder(Root.of(root), model)
        pieces, written = generate_text(folder, given, tokens, temperature, top_p, seed, stop or ())
        _show(given, dim=True)
        with suppress(KeyboardInterrupt):  # what was written stays, and counts
            for piece in pieces:
                _show(piece)
        _show("\n")
    problems.print(f"[dim]{_told(written)}[/]")


def _show(text: str, dim: bool = False) -> None:
    """Print `text` as it is, tabs too; on a terminal without the characters by which it could steer that."""
    if out.is_terminal:
        shown = text.translate(_VISIBLE)
        text = typer.style(shown, dim=True) if dim else shown
    out.file.write(text)
    out.file.flush()


def _told(written: Written) -> str:
    from llama3.bench.meter import peak_memory

    speed = f", {written.tokens_per_s:.1f} tokens/s" if written.tokens > 1 else ""
    size = peak_memory() / 2**30
    return f"{written.tokens} tokens{speed}, first after {written.first_s:.2f} s, peak memory {size:.2f} GiB"


def export(
    model: Annotated[str, typer.Argument(help="A run, FAMILY@ALIAS, or a model folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    format_: Annotated[
        Literal["hf", "meta", "meta-safetensors", "gguf", "mlflow"], typer.Option("--format", help="Who is to read it.")
    ] = "hf",
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Number format of the weights.")] = "bf16",
    parts: Annotated[int, typer.Option(min=1, help="Model-parallel files; format meta only.")] = 1,
    licence: Annotated[str, typer.Option(help="Of the weights, for the card, such as apache-2.0.")] = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Write a model, with its card, as others read it: Hugging Face, Meta, GGUF, or MLflow to serve."""
    from tasks.export import export_model

    with mistakes():
        export_model(Root.of(root), model, target, format_, dtype, parts, licence)
        out.print(f"wrote {target}")
