"""The rows of `python -m benchmarks data`: the cost of data production beside datatrove, datasketch and two tokenizers.

Both sides of a ratio are measured in the same run, on the same machine, one after the other, on the same documents and
thresholds; where they cannot do the same thing, the module of the measured side says what differs. What this gives up:
nothing here runs on more than one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import copies, curation, curation_15t, curation_near, curation_scale, languages, scripts, streams, texts
from benchmarks.curation_near import NearJob
from benchmarks.curation_scale import Place
from benchmarks.rows import TARGETS, Row, rows_of
from benchmarks.session import Session

MEASURES: dict[str, Callable[[Session, str], Row]] = {
    "pipeline/datatrove": copies.pipeline,
    "minhash/datatrove": copies.minhash_datatrove,
    "minhash/datasketch": copies.minhash_datasketch,
    "near/recall": copies.near_recall,
    "near/precision": copies.near_precision,
    "lines/datatrove": copies.lines_by_sentence,
    "lines/datatrove-lines": copies.lines_by_line,
    "lines/exact": copies.lines_exact,
    "filters/datatrove": texts.filters_cost,
    "filters/exact": texts.filters_exact,
    "filters/agreement": texts.filters_agreement,
    "rules/default": curation.dropped(),
    "rules/repetition": curation.dropped("repetition"),
    "drops/cpu": curation.drops_cost,
    "decontaminate/questions": curation.questions_found,
    "language/accuracy": languages.accuracy,
    **{f"scripts/{path}": scripts.slowest for path in scripts.PATHS},
    "scripts/addresses": scripts.address,
    "tokens/huggingface": texts.tokens_huggingface,
    "tokens/tiktoken": texts.tokens_tiktoken,
    "tokens/pattern": texts.tokens_pattern,
    "tokens/equal": texts.tokens_equal,
    "mix/documents": streams.mix,
    "stream/rate": streams.stream,
    "memory/peak": streams.memory,
    "scale/cpu": curation_scale.cpu,
    "scale/memory": curation_scale.memory,
    "scale/written": curation_scale.grows("written"),
    "scale/reads": curation_scale.grows("reads"),
    "scale/requests": curation_scale.requests,
    "scale/peers/datatrove": curation_near.beside("datatrove"),
    "scale/peers/daft": curation_near.beside("daft"),
    "scale/peers/memory": curation_near.near_memory,
    "scale/peers/recall": curation_near.near_found(NearJob.recall),
    "scale/peers/precision": curation_near.near_found(NearJob.precision),
    "scale/count/small": curation_scale.counted(8_000_000),
    "scale/count/large": curation_scale.counted(128_000_000),
    "scale/15t": curation_15t.money,
    "scale/15t/requests": curation_15t.requests_share,
    "scale/same-bytes/threads": curation_scale.same_bytes(Place("threads", 4, killed=True)),
    "scale/same-bytes/dask": curation_scale.same_bytes(Place("dask", 2, killed=True)),
    "scale/same-bytes/ray": curation_scale.same_bytes(Place("ray", 2, killed=True)),
    "scale/same-bytes/bucket": curation_scale.same_bytes(Place("threads", 4, bucket=True, killed=True)),
    "scale/same-bytes/bucket-dask": curation_scale.same_bytes(Place("dask", 2, bucket=True, killed=True)),
    "scale/same-bytes/bucket-ray": curation_scale.same_bytes(Place("ray", 2, bucket=True, killed=True)),
}


def data_rows(run: Session) -> Iterator[Row]:
    """Yield the wanted rows as they are measured; what a missing library or an error prevents says so.

    Rows of `scale` take an hour and are measured only if the user names them. Raises ValueError if the user asked for a
    row that there is not.
    """
    usual = [name for name in TARGETS if run.settings.only or not name.startswith("scale/")]
    return rows_of(run, usual, MEASURES)
