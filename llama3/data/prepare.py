"""Raw documents made ready to be judged: markup removed, decoding repaired, normalised, identified, told by language.

Works on whole columns; single texts are touched only where they are HTML, Markdown, garbled or not composed. Per 4.5 KB
of ASCII text this costs about 9 us, most of it for the hash, and 20 us more where the language has to be told.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llama3.data.dates import UNREAD
from llama3.data.document import Batch
from llama3.data.kernels.arrow import text_buffers
from llama3.data.language import UNDETERMINED, detect, primary
from llama3.data.markup import plain_text
from llama3.data.normalise import normalise_texts, replaced
from llama3.data.skips import EMPTY, Fault, Skips
from llama3.data.split import draw_and_id
from llama3.recipe.curation import Curate
from llama3.recipe.section import Domain

_primary = cache(primary)


def prepare(batch: Batch, domain: Domain, source: str, index: int, curate: Curate, skips: Skips) -> pa.Table:
    """Return the documents of `batch` that have any text as rows of a shard but `row`; the others go to `skips`."""
    sizes, batch = _without_markup(batch, curate.extractor, skips)
    batch = batch.with_text(normalise_texts(batch.text, curate.repair))
    full = batch.sizes > 0
    for place in np.flatnonzero(~full).tolist():
        skips.count(batch.place[place].rpartition(":")[0], batch.place[place], EMPTY, int(sizes[place]))
    batch = batch.keep(full)
    draws, ids = _hashes(batch.text, domain)
    count = len(batch)
    skips.unread_dates += batch.date.count(UNREAD)
    columns = {
        "id": pa.array(ids, pa.string()),
        "text": batch.text,
        "domain": pa.repeat(pa.scalar(domain), count),
        "source": pa.repeat(pa.scalar(source), count),
        "source_index": pa.repeat(pa.scalar(index, pa.int32()), count),
        "language": pa.array(_languages(batch, domain), pa.string()),
        "url": pa.array(batch.url, pa.string()),
        "licence": pa.array(batch.licence, pa.string()),
        "date": pa.array(["" if date == UNREAD else date for date in batch.date], pa.string()),
        "bytes": pa.array(batch.sizes),
        "draw": pa.array(draws, pa.uint64()),
    }
    return pa.table(columns)


def _without_markup(batch: Batch, extractor: str, skips: Skips) -> tuple[NDArray[np.int64], Batch]:
    """Return the documents as plain text, and their sizes as found; what cannot be converted goes to `skips`."""
    places = [place for place, form in enumerate(batch.format) if form != "text"]
    if not places:
        return batch.sizes, batch
    sizes, good, following = batch.sizes, np.ones(len(batch), np.bool_), iter(places)

    def plain(text: str) -> str:
        place = next(following)
        found = plain_text(text, batch.format[place], extractor)
        if isinstance(found, Fault):
            name, good[place] = batch.place[place], False
            skips.fault(name.rpartition(":")[0], name, found, int(sizes[place]))
            return ""
        return found

    text, _ = replaced(batch.text, places, plain)
    return sizes[good], batch.with_text(text).keep(good)


def _hashes(text: Any, domain: Domain) -> tuple[list[int], list[str]]:
    data, offsets = text_buffers(text)
    view, ends, key = memoryview(data.data), offsets.tolist(), domain.encode()
    pairs = [draw_and_id(view[start:stop], key) for start, stop in pairwise(ends)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _languages(batch: Batch, domain: Domain) -> list[str]:
    """Return what the source says, else what is detected; code is not asked about."""
    return [
        _primary(named) if named else UNDETERMINED if domain == "code" else detect(batch.text[place].as_py())
        for place, named in enumerate(batch.language)
    ]
