"""Our paths of a document, each on texts of one kind at a time: MB per CPU second."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from herd.llama3.data.dedup.lines import flags_of
from herd.llama3.data.kernels.arrow import text_buffers
from herd.llama3.data.kernels.paragraphs import join_paragraphs
from herd.llama3.data.readers.files import ReadErrors
from herd.llama3.data.readers.sources import read_source
from herd.llama3.data.text.extract import plain_text
from herd.llama3.data.text.language import detect_language
from herd.llama3.data.text.normalize import normalize_texts
from herd.llama3.data.text.pii import redact
from herd.llama3.data.text.tex import plain_tex
from herd.llama3.recipe.data_schema import Source
from herd.llama3.tokens.encoder import Encoder, encoder_for
from herd.llama3.tokens.tokenizer import Tokenizer

REPEATS = 5
"""The fastest counts."""
DATES = (
    "2024-05-17T08:15:00+02:00",
    "Fri, 17 May 2024 08:15:00 GMT",
    "17 May 2024",
    "1715933700",
    "May 17, 2024 08:15",
)


def work(source: Path, folder: Path, tokenizer: str) -> dict[str, Any]:
    """Return the rate of each path on each kind."""
    kinds: dict[str, list[str]] = json.loads(source.read_text())
    rates: dict[str, dict[str, float]] = {}
    for kind, texts in kinds.items():
        column = pa.array(texts, pa.large_string())
        pages, papers, records = [*map(_page, texts)], [*map(_paper, texts)], folder / f"{kind}.jsonl"
        lines = (json.dumps({"text": text, "date": DATES[i % 5]}, ensure_ascii=False) for i, text in enumerate(texts))
        records.write_text("".join(f"{line}\n" for line in lines))
        paths: dict[str, tuple[list[str], Callable[[], Any]]] = {
            "normalize": (texts, partial(normalize_texts, column)),
            "repair": (texts, partial(normalize_texts, column, True)),
            "redact": (texts, partial(redact, column, ("email", "ip"))),
            "language": (texts, partial(_each, detect_language, texts)),
            "html": (pages, partial(_each, partial(plain_text, form="html", extractor="resiliparse"), pages)),
            "markdown": (papers, partial(_each, partial(plain_text, form="md", extractor=""), papers)),
            "latex": (texts, partial(_each, plain_tex, texts)),
            "records": (texts, partial(_read, records)),
            "paragraphs": (texts, partial(_joined, column)),
            "tokens": (texts, partial(_encoder(tokenizer).encode_flat, column)),
        }
        for path, (given, run) in paths.items():
            rates.setdefault(path, {})[kind] = sum(len(text.encode()) for text in given) / 1e6 / _least(run)
    return {"rates": rates}


def _each(function: Callable[[str], Any], texts: list[str]) -> None:
    for text in texts:
        function(text)


def _least(run: Callable[[], Any]) -> float:
    run()
    spent = []
    for _ in range(REPEATS):
        began = time.process_time()
        run()
        spent.append(time.process_time() - began)
    return min(spent)


def _page(text: str) -> str:
    body = "".join(f"<p>{part}</p>\n<ul><li><a href='/x'>{part[:20]}</a></li></ul>" for part in text.split("\n\n"))
    head = f"<html><head><title>{text[:20]}</title></head><body><nav><a href='/'>{text[:10]}</a></nav>"
    return f"{head}<main><h1>{text[:30]}</h1>{body}</main><footer>{text[:40]}</footer></body></html>"


def _paper(text: str) -> str:
    parts = (f"## {part[:20]}\n\n{part[:30]} **{part[30:40].strip()}** [{part[40:60]}](x.md) {part[60:]}\n\n- `a`\n"
             for part in text.split("\n\n"))  # fmt: skip
    return "\n".join(parts)


def _read(path: Path) -> int:
    source = Source(uri=str(path))
    return sum(len(batch) for batch in read_source(source, "general", 0, ReadErrors()))


def _joined(column: Any) -> None:
    data, offsets = text_buffers(column)
    data = data.copy()
    join_paragraphs(data, offsets, flags_of(data, offsets))


@cache
def _encoder(folder: str) -> Encoder:
    return encoder_for(Tokenizer.load(Path(folder)))
