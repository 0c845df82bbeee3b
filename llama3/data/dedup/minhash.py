"""Near-duplicate removal: MinHash bands, verified candidates, connected components, one document kept of each.

Bands alone join many pairs that are not alike (a fifth of the edges, on technical text) and components chain them, so
every edge is verified by true Jaccard (`stars.py`). What this gives up: the shingle sets of all candidates lie on disk
meanwhile, eight bytes a word, and components are found in one place, some 40 bytes per edge (`components.py`).

Steps, all under `near/`: `bands` (by bucket), `candidates` (rows that share a bucket), `sets` (their shingles, from the
text), the rounds of `stars.py`, `components`, `members` (with what the keep rule looks at), `clusters`, `drop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llama3.data.dedup.exact import KEEP, KEEP_COLUMNS
from llama3.data.kernels.arrow import Hashes, Offsets, list_buffers
from llama3.data.kernels.shingles import jaccard_pairs, shingle_sets, smallest_connected, spread
from llama3.data.mapreduce import (
    CurationJob,
    Runner,
    Shard,
    key_range,
    listed,
    quoted,
    replacing,
    rows_of_part,
    run,
    write_by_key,
    write_drops,
    write_table,
)

# Rounds of near-duplicate candidates: each bucket is a star around one centre, each ray is verified by true
# Jaccard.
#
# A star has as many rays as its bucket has other members, so a hot bucket costs its size and not its square.
# Members that are unlike every centre so far stay open; the first of them is the next centre and is compared with
# the whole bucket: of two documents that are alike, only one may be like the last centre. On technical text with
# planted copies, 8 rounds find 99.7 % of the pairs with Jaccard 0.8 or more; centres compared with open members
# alone found 99.1 % in 16.
#
# A ray is verified where its member's shingles are; each centre's set is copied once to every part that wants it,
# so that no work item holds more than twice the sets of its part. Documents are named by `row` and ordered by
# `head`, the first 64 bits of their id, which do not depend on shards. All is NumPy: a DuckDB session costs 15 ms,
# more than most of the items here. What this gives up: nothing spills, so parts must be small, and are made so
# (`PART_BYTES`).

BANDS = "near/bands"
"""Step whose rows (key of the bucket, head, row) the first round reads."""
SETS = "near/sets"
"""Step whose rows are (key, row, shingles), key = keys(row)."""
ROUNDS = 8
"""A bucket is compared against at most so many centres."""
PART_BYTES = 32 << 20
"""Bands or shingle sets in one part of a round; where there are more, rounds are cut into more parts than the job."""
SETS_PER_GROUP = 64
"""A row group of sets is half a megabyte of usual documents, so that a part reads little of what it does not want."""
LISTS = pa.large_list(pa.uint64())
Columns = dict[str, NDArray[Any]]


def verify_candidates(runner: Runner, job: CurationJob) -> None:
    """Run rounds until no bucket has a pair left to compare; `verdict_files` then has every ray.

    Verdicts: key (bucket), head, row (member), centre, jaccard, alike, open (unlike every centre so far).
    """
    held = max(sum(Path(file).stat().st_size for file in job.files(step)) for step in (BANDS, SETS))
    job = replace(job, parts=max(job.parts, -(-held // PART_BYTES)))  # hashes do not compress
    for number in range(ROUNDS):
        for name, work in (("pairs", draw), ("wanted", want), ("centres", copy_centres), ("verdicts", judge)):
            run(runner, job, _step(number, name), partial(work, number), range(job.parts))
            if name == "pairs" and not any(pq.read_metadata(file).num_rows for file in job.files(_step(number, name))):
                return


def verdict_files(job: CurationJob) -> list[str]:
    """Return the files of all rounds' verdicts."""
    return [file for number in range(ROUNDS) for file in job.files(_step(number, "verdicts"))]


def keys(rows: Offsets) -> Hashes:
    """Return the key under which a document's row is shuffled; uint64 like `rows`."""
    return spread(rows.astype(np.uint64))


def write_sets(key: Hashes, row: Offsets, shingles: pa.LargeListArray, path: Path) -> None:
    """Write shingle sets ordered by key. Neither compressed nor with a dictionary: hashes gain nothing from either."""
    table = pa.table({"key": key, "row": row, "shingles": shingles})
    with replacing(path) as part:
        pq.write_table(table, part, row_group_size=SETS_PER_GROUP, compression="none", use_dictionary=False)


def draw(number: int, job: CurationJob, part: int) -> None:
    """Write the rays of the buckets of `part`: key (of the member), bucket, head, member, centre, open."""
    if number == 0:
        rows = _rows_of_part(job, BANDS, part, ("key", "head", "row"))
        rows["open"] = np.ones(len(rows["key"]), bool)
    else:
        rows = _rows_of_part(job, _step(number - 1, "verdicts"), part, ("key", "head", "row", "open"))
    rows = _sorted(_comparable(rows), "key", "head", "row")
    _, bucket = np.unique(rows["key"], return_inverse=True)
    opened = np.flatnonzero(rows["open"])
    _, first = np.unique(bucket[opened], return_index=True)
    centre = opened[first][bucket]
    rays = np.flatnonzero(centre != np.arange(len(centre)))
    member = rows["row"][rays]
    found = {"key": keys(member), "bucket": rows["key"][rays], "head": rows["head"][rays], "member": member}
    found |= {"centre": rows["row"][centre[rays]], "open": rows["open"][rays]}
    _write(found, job, _step(number, "pairs"), part)


def want(number: int, job: CurationJob, part: int) -> None:
    """Write which centres the members in `part` are compared with: key (of the centre), centre, home (this part)."""
    centre = np.unique(_rows_of_part(job, _step(number, "pairs"), part, ("centre",))["centre"])
    found = {"key": keys(centre), "centre": centre, "home": np.full(len(centre), part)}
    _write(found, job, _step(number, "wanted"), part)


def copy_centres(number: int, job: CurationJob, part: int) -> None:
    """Write the sets of the wanted centres of `part`, once for each home: key (the home's first), row, shingles."""
    wanted = _sorted(_rows_of_part(job, _step(number, "wanted"), part, ("home", "centre")), "home", "centre")
    centre = wanted["centre"]
    first = [key_range(home, job.parts)[0] for home in wanted["home"].tolist()]
    rows, sets = _read_sets(job, SETS, keys(centre), centre)
    copies = sets.take(pa.array(_places(rows, centre)))
    write_sets(np.array(first, np.uint64), centre, copies, job.file(_step(number, "centres"), part))


def judge(number: int, job: CurationJob, part: int) -> None:
    """Write the verdict on every ray whose member is in `part`, keyed by bucket."""
    names = ("centre", "member", "bucket", "head", "open")
    rays = _sorted(_rows_of_part(job, _step(number, "pairs"), part, names), "centre", "member", "bucket")
    jaccard = _jaccard(number, job, part, rays["centre"], rays["member"])
    alike = jaccard >= job.recipe.curate.dedup.jaccard
    found = {"key": rays["bucket"], "head": rays["head"], "row": rays["member"], "centre": rays["centre"]}
    found |= {"jaccard": jaccard, "alike": alike, "open": rays["open"] & ~alike}
    _write(found, job, _step(number, "verdicts"), part)


def _step(number: int, name: str) -> str:
    return f"near/{number:02}/{name}"


def _comparable(rows: Columns) -> Columns:
    """Return the rows of buckets with two members or more, one of them open."""
    _, bucket, size = np.unique(rows["key"], return_inverse=True, return_counts=True)
    unsettled = np.zeros(len(size), bool)
    unsettled[bucket[rows["open"]]] = True
    chosen = (unsettled & (size > 1))[bucket]
    return {name: values[chosen] for name, values in rows.items()}


def _jaccard(number: int, job: CurationJob, part: int, centre: Offsets, member: Offsets) -> NDArray[np.float64]:
    """Return the Jaccard of each pair; equal pairs stand together, and the first of them is computed."""
    new = np.ones(len(centre), bool)
    new[1:] = (centre[1:] != centre[:-1]) | (member[1:] != member[:-1])
    ones, twos = member[new], centre[new]
    home = np.full(1, key_range(part, job.parts)[0], np.uint64)
    member_rows, members = _read_sets(job, SETS, keys(ones), ones)
    centre_rows, centres = _read_sets(job, _step(number, "centres"), home, twos)
    places = _places(member_rows, ones), _places(centre_rows, twos)
    verified: NDArray[np.float64] = jaccard_pairs(list_buffers(members), list_buffers(centres), places)
    each: NDArray[np.float64] = verified[np.cumsum(new) - 1]
    return each


def _rows_of_part(job: CurationJob, step: str, part: int, names: Sequence[str]) -> Columns:
    """Return columns of the rows of range `part` that `step` wrote; `partition.rows_of_part` in NumPy."""
    low, high = (pa.scalar(key, pa.uint64()) for key in key_range(part, job.parts))
    inside = [("key", ">=", low), ("key", "<=", high)]
    table = pq.read_table(job.files(step), columns=list(names), filters=inside, use_threads=False)
    return {name: table[name].to_numpy() for name in names}


def _sorted(rows: Columns, *names: str) -> Columns:
    order = np.lexsort([rows[name] for name in reversed(names)])
    return {name: values[order] for name, values in rows.items()}


def _write(rows: Columns, job: CurationJob, step: str, part: int) -> None:
    """Write `rows` ordered by key and then by their other columns."""
    write_table(pa.table(_sorted(rows, *rows)), job.file(step, part))


def _read_sets(job: CurationJob, step: str, wanted: Hashes, rows: Offsets) -> tuple[Offsets, pa.LargeListArray]:
    """Return rows and sets of those of `rows` that `step` has under the keys `wanted`, in no order that matters.

    Only the row groups whose keys may be among `wanted` are read: late rounds want few documents.
    """
    wanted, rows = np.unique(wanted), np.unique(rows)
    found = [pa.table({"row": np.zeros(0, np.int64), "shingles": pa.array([], LISTS)})]
    for path in job.files(step):
        with pq.ParquetFile(path) as file:
            table = file.read_row_groups(_groups_with(file, wanted), columns=["row", "shingles"], use_threads=False)
        found.append(table.filter(pa.array(np.isin(table["row"].to_numpy(), rows))))
    table = pa.concat_tables(found)
    return table["row"].to_numpy(), pa.concat_arrays(table["shingles"].chunks)


def _groups_with(file: pq.ParquetFile, wanted: Hashes) -> list[int]:
    """Return the row groups whose range of keys, the first column, holds one of `wanted` (sorted)."""
    if not file.metadata.num_rows:  # one row group without statistics
        return []
    statistics = [file.metadata.row_group(group).column(0).statistics for group in range(file.num_row_groups)]
    least, most = (np.array(ends, np.uint64) for ends in zip(*((one.min, one.max) for one in statistics), strict=True))
    found = np.flatnonzero(np.searchsorted(wanted, least) < np.searchsorted(wanted, most, "right"))
    return [int(group) for group in found]


def _places(rows: Offsets, wanted: Offsets) -> Offsets:
    """Return where each of `wanted` is in `rows`."""
    order = np.argsort(rows)
    if len(wanted) == 0:
        return order[:0]
    places = order[np.searchsorted(rows, wanted, sorter=order)]
    assert np.array_equal(rows[places], wanted)
    return places


# Connected components of a graph given by its edges: union-find over arrays.
#
# In SQL the same takes one join per step of the longest path, and near-duplicate clusters chain. Here it is near
# linear in the number of edges, and central: some 40 bytes per edge and node in memory, which is what it gives up.
# Documents without an edge cost nothing.


def components(left: Offsets, right: Offsets) -> tuple[Offsets, Offsets]:
    """Return (nodes, labels) of the graph with edges `left[i]` - `right[i]`; all int64.

    `nodes` are the ends of the edges, sorted, each once; `labels[i]` is the smallest node that is connected to
    `nodes[i]`.
    """
    nodes, places = np.unique(np.concatenate((left, right)), return_inverse=True)
    return nodes, nodes[smallest_connected(len(nodes), places[: len(left)], places[len(left) :])]


OUTCOME = "near_duplicate"
_BATCH = 1024
"""Documents whose text is in memory at a time."""
_CLUSTERS = pa.schema(
    {"cluster": pa.string(), "id": pa.string(), "row": pa.int64(), "jaccard": pa.float64(), "size": pa.int64()}
)


def near_duplicates(runner: Runner, job: CurationJob) -> None:
    """Write the drops of the step "near", and the clusters of alike documents as files of the step "near/clusters".

    Clusters: cluster (id of the document that is kept), id, row, jaccard (largest verified one with another of the
    cluster), size (documents of the cluster). Both are empty where the recipe's `dedup.jaccard` is 1.
    """
    shards, parts = range(len(job.shards)), range(job.parts)
    if job.recipe.curate.dedup.jaccard < 1:
        run(runner, job, BANDS, map_bands, shards)
        run(runner, job, "near/candidates", reduce_candidates, parts)
        run(runner, job, SETS, map_sets, shards)
        verify_candidates(runner, job)
        run(runner, job, "near/components", join_components, [0])
        run(runner, job, "near/members", map_members, shards)
    run(runner, job, "near/clusters", reduce_clusters, parts)
    run(runner, job, "near/drop", reduce_drops, parts)


def map_bands(job: CurationJob, item: int) -> None:
    """Write the bands of the documents of shard `item`: key (of the bucket), head (of the id), row."""
    shard = job.shards[item]
    query = job.survivors(shard, before="near", columns='"row", id, language, bands')
    with job.session() as connection:
        found = connection.sql(f'{query} ORDER BY "row"').to_arrow_table()
        bands, offsets = list_buffers(found["bands"])
        each = np.repeat(np.arange(found.num_rows), np.diff(offsets))
        head = _heads(found["id"])
        rows = found["row"].to_numpy()
        exploded = {
            "key": spread(bands[offsets[0] : offsets[-1]] ^ _groups(shard, found["language"])[each]),
            "head": head[each],
            "row": rows[each],
        }
        connection.register("exploded", pa.table(exploded))
        write_by_key(connection, "SELECT * FROM exploded", job, BANDS, item)


def reduce_candidates(job: CurationJob, part: int) -> None:
    """Write the rows of documents that share a bucket of `part` with another."""
    query = f"""SELECT DISTINCT "row" FROM (
        SELECT "row" FROM ({rows_of_part(job, BANDS, part)}) QUALIFY count(*) OVER (PARTITION BY key) > 1)
    ORDER BY "row" """
    with job.session() as connection:
        write_table(connection.sql(query).to_arrow_table(), job.file("near/candidates", part))


def map_sets(job: CurationJob, item: int) -> None:
    """Write the shingle sets of the candidates of shard `item`: key, row, shingles."""
    shard, width = job.shards[item], job.recipe.curate.dedup.shingle
    low, high = shard.rows
    query = f"""SELECT DISTINCT "row" FROM read_parquet({listed(job.files("near/candidates"))})
        WHERE "row" >= {low} AND "row" < {high} ORDER BY "row" """
    with job.session() as connection:
        wanted = connection.sql(query).to_arrow_table()["row"].to_numpy()
    rows, sets = [np.zeros(0, np.int64)], [pa.array([], LISTS)]
    for batch in pq.ParquetFile(shard.text).iter_batches(_BATCH, columns=["row", "text"]):
        here = np.flatnonzero(np.isin(batch["row"].to_numpy(), wanted))
        rows.append(batch["row"].to_numpy()[here])
        sets.append(shingle_sets(batch["text"].take(pa.array(here)), width))
    row = np.concatenate(rows)
    order = np.argsort(keys(row))
    write_sets(keys(row)[order], row[order], pa.concat_arrays(sets).take(pa.array(order)), job.file(SETS, item))


def join_components(job: CurationJob, item: int) -> None:
    """Write, for every document with an edge: key (of its component), label, row, jaccard; ordered by row."""
    left, right, jaccard = _edges(job)
    rows, labels = components(left, right)
    largest = np.zeros(len(rows))
    for end in (left, right):
        np.maximum.at(largest, np.searchsorted(rows, end), jaccard)
    table = {"key": keys(labels), "label": labels, "row": rows, "jaccard": largest}
    write_table(pa.table(table), job.file("near/components", item))


def map_members(job: CurationJob, item: int) -> None:
    """Write the documents of shard `item` that have an edge, with what the keep rule looks at, keyed by component."""
    shard = job.shards[item]
    low, high = shard.rows
    documents = job.survivors(shard, before="near", columns=KEEP_COLUMNS)
    labelled = f"""SELECT * FROM read_parquet({quoted(str(job.file("near/components", 0)))})
        WHERE "row" >= {low} AND "row" < {high}"""
    with job.session() as connection:
        query = f'SELECT * FROM ({documents}) JOIN ({labelled}) USING ("row")'
        write_by_key(connection, query, job, "near/members", item)


def reduce_clusters(job: CurationJob, part: int) -> None:
    """Write the clusters of `part`, each with the document that the keep rule chooses."""
    if job.recipe.curate.dedup.jaccard >= 1:
        write_table(_CLUSTERS.empty_table(), job.file("near/clusters", part))
        return
    query = f"""SELECT first_value(id) OVER (PARTITION BY label ORDER BY {KEEP}) AS cluster, id, "row", jaccard,
            count(*) OVER (PARTITION BY label) AS size
        FROM ({rows_of_part(job, "near/members", part)}) ORDER BY cluster, id"""
    with job.session() as connection:
        table = connection.sql(query).to_arrow_table().cast(_CLUSTERS)
        write_table(table, job.file("near/clusters", part))


def reduce_drops(job: CurationJob, part: int) -> None:
    """Drop all documents of the clusters of `part` but the ones kept, as `near_duplicate`."""
    clusters = quoted(str(job.file("near/clusters", part)))
    query = f"""SELECT "row", '{OUTCOME}' AS outcome, cluster AS kept FROM read_parquet({clusters})
        WHERE id <> cluster"""
    with job.session() as connection:
        write_drops(connection, query, job, "near", part)


def _edges(job: CurationJob) -> tuple[Offsets, Offsets, NDArray[np.float64]]:
    """Return (centre, member, jaccard) of all verified pairs."""
    files = verdict_files(job)
    if not files:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    query = f'SELECT DISTINCT centre, "row", jaccard FROM read_parquet({listed(files)}) WHERE alike ORDER BY ALL'
    with job.session() as connection:
        found = connection.sql(query).to_arrow_table()
    return found["centre"].to_numpy(), found["row"].to_numpy(), found["jaccard"].to_numpy()


def _heads(ids: pa.ChunkedArray) -> Hashes:
    """Return the first 64 bits of each id; two ids that share them would be a collision among alike documents."""
    return np.array([int(one[:16], 16) for one in ids.to_pylist()], np.uint64)


def _groups(shard: Shard, languages: pa.ChunkedArray) -> Hashes:
    """Return a hash of (domain, language) per document: near duplicates are looked for inside one of them."""
    names, each = np.unique(languages.to_numpy().astype(str), return_inverse=True)
    digests = [blake2b(f"{shard.domain}\0{name}".encode(), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)[each]
