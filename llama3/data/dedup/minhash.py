"""Near-duplicate removal: MinHash LSH, verification by true Jaccard, connected components, one document kept of each.

LSH alone joins many unlike pairs (a fifth of the edges, on technical text) and components chain them, so every edge is
verified. The shuffles, all under `minhash/`: `bands` by bucket; in rounds `pairs`, `center_requests` and `centers` by
shard and `verdicts` by bucket; `edges` and the rounds of `stars` by document; `labels` by shard; `members` by cluster.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from herd.llama3.data.accounting import CLUSTERS as SHOWN
from herd.llama3.data.accounting import LARGEST
from herd.llama3.data.dedup.exact import KEEP, KEEP_COLUMNS
from herd.llama3.data.kernels.arrow import Offsets, list_buffers
from herd.llama3.data.kernels.shingles import jaccard_pairs, mix_hashes, shingle_sets
from herd.llama3.data.mapreduce import (
    CurationJob,
    CurationStage,
    Runner,
    Shuffle,
    aggregate,
    key_partitions,
    open_parquet,
    read_table,
    run_step,
    schema_of,
    write_drops,
    write_table,
)
from herd.llama3.recipe.data_schema import Curate
from herd.storage.files import atomic_file

ROUNDS = 8
"""Maximum number of centers that a bucket is compared with."""
SETS = "minhash/sets"
"""Step with the shingle sets of the documents that share a bucket: row, shingles; 8 bytes a word."""
CLUSTERS = "minhash/clusters"
"""Step of the partitions with the clusters: cluster (id of the kept document), id, row, jaccard (largest verified one
with another document of the cluster), size (documents of the cluster)."""
SETS_PER_GROUP = 64
"""A row group of sets takes half a megabyte for usual documents, so late rounds read little that they do not need."""
LISTS = pa.large_list(pa.uint64())
_BATCH = 1024
"""Documents whose text is in memory at a time."""
_CLUSTERS = schema_of("cluster string, id string, row int64, jaccard float64, size int64")
_MOST = f"FROM rows ORDER BY documents DESC, cluster LIMIT {SHOWN}"
Columns = dict[str, NDArray[Any]]


class MinHash(CurationStage):
    """Keep one document of each cluster of near duplicates."""

    name, title, section = "minhash", "near duplicates", ("dedup",)
    reasons: ClassVar = {"near_duplicate": "Nearly the same text exists elsewhere in its domain and language."}

    def enabled(self, curate: Curate) -> bool:
        return curate.dedup.jaccard < 1

    def passes(self, runner: Runner, job: CurationJob) -> None:
        shards, partitions = range(len(job.shards)), range(job.partitions)
        run_step(runner, job, _bands(job).step(), map_bands, shards)
        _bands(job).merge(runner, job)
        rounds = verify_candidates(runner, job)
        run_step(runner, job, job.by_partition("minhash/jaccard"), partial(largest_jaccard, rounds), partitions)
        last = join_components(runner, job, rounds)
        run_step(runner, job, _labels(job).step(), partial(send_labels, last, rounds), partitions)
        _labels(job).merge(runner, job)
        run_step(runner, job, _members(job).step(), map_members, shards)
        _members(job).merge(runner, job)
        run_step(runner, job, _drops(job).step(), reduce_clusters, partitions)
        largest = aggregate(runner, job, job.by_partition(LARGEST), job.partitions, _MOST)
        write_table(largest, job.file(LARGEST, 0))
        self.apply_drops(runner, job, _drops(job))


def _bands(job: CurationJob) -> Shuffle:
    return job.by_key("minhash/bands")


def _labels(job: CurationJob) -> Shuffle:
    return job.by_shard("minhash/labels")


def _members(job: CurationJob) -> Shuffle:
    return job.by_key("minhash/members")


def _drops(job: CurationJob) -> Shuffle:
    return job.by_shard("minhash/drops")


def map_bands(job: CurationJob, index: int) -> None:
    """Send the bands of the documents of a shard to their buckets: key (of the bucket), id_prefix, row."""
    documents = job.survivors(index, "minhash", ("row", "id", "language", "bands"))
    bands, offsets = list_buffers(documents["bands"])
    document = np.repeat(np.arange(documents.num_rows), np.diff(offsets))
    # A document is compared only within its domain and language, so their hash goes into the key.
    names, language = np.unique(documents["language"].to_numpy().astype(str), return_inverse=True)
    domain = job.shards[index].domain
    digests = [blake2b(f"{domain}\0{name}".encode(), digest_size=8).digest() for name in names]
    groups = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)[language]
    id_prefix = np.array([int(document_id[:16], 16) for document_id in documents["id"].to_pylist()], np.uint64)
    key = mix_hashes(bands[offsets[0] : offsets[-1]] ^ groups[document])
    table = pa.table({"key": key, "id_prefix": id_prefix[document], "row": documents["row"].to_numpy()[document]})
    _bands(job).write(job, index, table, key_partitions(key, job.partitions))


# Verification rounds. In each round the first open member of a bucket is its center, and all other members of the
# bucket are compared with it by true Jaccard; a member stays open until it is like a center. So a hot bucket costs its
# size and not its square. All members are compared, not only open ones: of two similar documents, perhaps only one is
# like an earlier center. On technical text with planted copies, 8 rounds find 99.7 % of the pairs with Jaccard >= 0.8;
# comparing open members alone found 99.1 % in 16 rounds.
#
# Pairs are verified in the shard of the member, which computes the sets of its documents once. Each center's set is
# copied once to every shard that needs it, so a work item holds the sets of a shard and those of its centers.


def verify_candidates(runner: Runner, job: CurationJob) -> int:
    """Run rounds until no bucket has a pair left to compare; return their number.

    Verdicts: key (bucket), id_prefix, row (member), center, jaccard, similar, open (unlike every center so far).
    """
    shards, partitions = range(len(job.shards)), range(job.partitions)
    for number in range(ROUNDS):
        shuffles = round_shuffles(job, number)
        run_step(runner, job, shuffles.pairs.step(), partial(choose_pairs, number), partitions)
        if not job.files(job.by_partition(_open(number))):
            return number
        shuffles.pairs.merge(runner, job)
        shuffles.center_requests.merge(runner, job)
        run_step(runner, job, shuffles.centers.step(), partial(copy_centers, number), shards)
        shuffles.centers.merge(runner, job)
        run_step(runner, job, shuffles.verdicts.step(), partial(verify_pairs, number), shards)
        shuffles.verdicts.merge(runner, job)
        shuffles.edges.merge(runner, job)
    return ROUNDS


class RoundShuffles(NamedTuple):
    """The shuffles of a round of verification."""

    pairs: Shuffle
    center_requests: Shuffle
    centers: Shuffle
    verdicts: Shuffle
    edges: Shuffle


def round_shuffles(job: CurationJob, number: int) -> RoundShuffles:
    """Return the shuffles of round `number`."""
    name = f"minhash/{number:02}"
    return RoundShuffles(
        job.by_shard(f"{name}/pairs"),
        job.by_shard(f"{name}/center_requests"),
        job.by_shard(f"{name}/centers", len(job.shards)),
        job.by_key(f"{name}/verdicts"),
        job.by_key(f"{name}/edges"),
    )


def _open(number: int) -> str:
    return f"minhash/{number:02}/open"


def choose_pairs(number: int, job: CurationJob, partition: int) -> None:
    """Send the pairs of the buckets of `partition` to the shards of their members, and request their centers' sets.

    Pairs: bucket, id_prefix, member, center, open. Requests: center, shard (of a member, which needs the set).
    """
    pairs, center_requests, *_ = round_shuffles(job, number)
    members = _columns((_bands(job) if number == 0 else round_shuffles(job, number - 1).verdicts).read(job, partition))
    if number == 0:
        members["open"] = np.ones(len(members["key"]), bool)
    # Keep buckets with two members or more, one of them open.
    _, bucket, size = np.unique(members["key"], return_inverse=True, return_counts=True)
    has_open = np.zeros(len(size), bool)
    has_open[bucket[members["open"]]] = True
    comparable = (has_open & (size > 1))[bucket]
    members = _sorted({name: values[comparable] for name, values in members.items()}, "key", "id_prefix", "row")
    _, bucket = np.unique(members["key"], return_inverse=True)
    open_members = np.flatnonzero(members["open"])
    _, first = np.unique(bucket[open_members], return_index=True)
    center = open_members[first][bucket]
    chosen = np.flatnonzero(center != np.arange(len(center)))
    member, center = members["row"][chosen], members["row"][center[chosen]]
    shard = job.shard_of(member)
    needed, needed_by = _distinct(center, shard)
    center_requests.write(job, partition, pa.table({"center": needed, "shard": needed_by}), job.shard_of(needed))
    columns = {
        "bucket": members["key"][chosen],
        "id_prefix": members["id_prefix"][chosen],
        "member": member,
        "center": center,
    }
    if len(chosen):
        write_table(pa.table({}), job.file(job.by_partition(_open(number)), partition))
    pairs.write(job, partition, pa.table(columns | {"open": members["open"][chosen]}), shard)


def copy_centers(number: int, job: CurationJob, index: int) -> None:
    """Send the sets of the centers in a shard to the shards that requested them: row, shingles.

    The first round computes all sets.
    """
    pairs, center_requests, centers, *_ = round_shuffles(job, number)
    requests = _columns(center_requests.read(job, index))
    center, shard = _distinct(requests["center"], requests["shard"])  # several partitions may request the same
    if number == 0:
        write_sets(job, index, np.union1d(pairs.read(job, index)["member"].to_numpy(), center))
    rows, sets = read_sets(job.file(SETS, index), center)
    table = pa.table({"row": center, "shingles": sets.take(pa.array(np.searchsorted(rows, center)))})
    centers.write(job, index, table, shard)


def write_sets(job: CurationJob, index: int, rows: Offsets) -> None:
    """Write the shingle sets of the documents `rows` (sorted) of a shard, ordered by row."""
    width = job.recipe.curate.dedup.shingle
    row_batches, sets = [np.zeros(0, np.int64)], [pa.array([], LISTS)]
    if len(rows):
        with open_parquet(job.shards[index].text) as file:
            for batch in file.iter_batches(_BATCH, columns=["row", "text"], use_threads=False):
                members = np.flatnonzero(np.isin(batch["row"].to_numpy(), rows))
                row_batches.append(batch["row"].to_numpy()[members])
                sets.append(shingle_sets(batch["text"].take(pa.array(members)), width))
    table = pa.table({"row": np.concatenate(row_batches), "shingles": pa.concat_arrays(sets)})
    with atomic_file(job.file(SETS, index)) as temporary:  # hashes gain nothing from compression or dictionary
        pq.write_table(table, temporary, row_group_size=SETS_PER_GROUP, compression="none", use_dictionary=False)


def read_sets(uri: str, rows: Offsets) -> tuple[Offsets, pa.LargeListArray]:
    """Return (rows, sets) for those of `rows` that the file `uri` has, ordered by row."""
    rows = np.unique(rows)
    with open_parquet(uri) as file:
        groups: list[int] = []
        if file.metadata.num_rows:  # an empty file has one row group without statistics
            stats = [file.metadata.row_group(group).column(0).statistics for group in range(file.num_row_groups)]
            low, high = np.array([(stat.min, stat.max) for stat in stats], np.int64).T
            groups = np.flatnonzero(np.searchsorted(rows, low) < np.searchsorted(rows, high, "right")).tolist()
        table = file.read_row_groups(groups, columns=["row", "shingles"], use_threads=False)
    table = table.filter(pa.array(np.isin(table["row"].to_numpy(), rows)))
    return table["row"].to_numpy(), pa.concat_arrays([pa.array([], LISTS), *table["shingles"].chunks])


def verify_pairs(number: int, job: CurationJob, index: int) -> None:
    """Send the verdict on every pair whose member is in a shard to its bucket, and similar pairs to both documents."""
    shuffles = round_shuffles(job, number)
    pairs = _sorted(_columns(shuffles.pairs.read(job, index)), "center", "member", "bucket")
    center, member = pairs["center"], pairs["member"]
    # A pair may occur in several buckets; equal pairs are adjacent, and the first of them is computed.
    first = np.ones(len(center), bool)
    first[1:] = (center[1:] != center[:-1]) | (member[1:] != member[:-1])
    member_rows, members = read_sets(job.file(SETS, index), member[first])
    copies = shuffles.centers.read(job, index)
    copied = copies["row"].to_numpy()
    order = np.argsort(copied)
    center_sets = pa.concat_arrays([pa.array([], LISTS), *copies["shingles"].chunks])
    set_indices = (
        np.searchsorted(member_rows, member[first]),
        order[np.searchsorted(copied, center[first], sorter=order)],
    )
    jaccard = jaccard_pairs(list_buffers(members), list_buffers(center_sets), set_indices)
    similar = jaccard >= job.recipe.curate.dedup.jaccard
    left, right, similarity = center[first][similar], member[first][similar], jaccard[similar]
    ends = np.concatenate((left, right))
    table = {"node": ends, "other": np.concatenate((right, left)), "jaccard": np.tile(similarity, 2)}
    shuffles.edges.write(job, index, pa.table(table), _node_partitions(job, ends))
    pair = np.cumsum(first) - 1
    columns = {"key": pairs["bucket"], "id_prefix": pairs["id_prefix"], "row": member, "center": center}
    columns |= {"jaccard": jaccard[pair], "similar": similar[pair], "open": pairs["open"] & ~similar[pair]}
    shuffles.verdicts.write(job, index, pa.table(columns), key_partitions(pairs["bucket"], job.partitions))


def _columns(table: pa.Table) -> Columns:
    return {name: table[name].to_numpy() for name in table.column_names}


def _distinct(left: Offsets, right: Offsets) -> tuple[Offsets, Offsets]:
    """Return the distinct pairs, sorted."""
    order = np.lexsort((right, left))
    left, right = left[order], right[order]
    first = np.ones(len(left), bool)
    first[1:] = (left[1:] != left[:-1]) | (right[1:] != right[:-1])
    return left[first], right[first]


def _sorted(columns: Columns, *names: str) -> Columns:
    order = np.lexsort([columns[name] for name in reversed(names)])
    return {name: values[order] for name, values in columns.items()}


# Clusters: connected components of the verified pairs, by alternating stars (Kiveris et al., SoCC 2014)
#
# An edge is known to the partitions of both its ends. A large star moves the larger neighbors of a node to its smallest
# neighbor, a small star the smaller ones. Both keep the components; once neither changes an edge, each component is a
# star around its smallest node. The number of rounds grows with the logarithm of the longest path.


def join_components(runner: Runner, job: CurationJob, rounds: int) -> int:
    """Replace the edges of all rounds by stars; return the number of the last round of stars."""
    number, partitions = 0, range(job.partitions)
    while True:
        large, small = _stars(job, number)
        run_step(runner, job, large.step(), partial(join_larger, number, rounds), partitions)
        large.merge(runner, job)
        run_step(runner, job, small.step(), partial(join_smaller, number), partitions)
        small.merge(runner, job)
        if not job.files(job.by_partition(_changed(number))):
            return number
        number += 1


def _stars(job: CurationJob, number: int) -> tuple[Shuffle, Shuffle]:
    name = f"minhash/stars-{number:02}"
    return job.by_key(f"{name}/large", job.partitions), job.by_key(f"{name}/small", job.partitions)


def _changed(number: int) -> str:
    return f"minhash/stars-{number:02}/changed"


def join_larger(number: int, rounds: int, job: CurationJob, partition: int) -> None:
    """Do the large stars of the nodes of a partition."""
    edges = _edges(job, rounds, partition) if number == 0 else _stars(job, number - 1)[1].read(job, partition)
    left, right, changed = large_star(edges["node"].to_numpy(), edges["other"].to_numpy())
    _write_stars(job, number, partition, _stars(job, number)[0], left, right, changed)


def join_smaller(number: int, job: CurationJob, partition: int) -> None:
    """Do the small stars of the nodes of a partition; each edge goes to both its ends."""
    large, small = _stars(job, number)
    edges = large.read(job, partition)
    left, right, changed = small_star(edges["node"].to_numpy(), edges["other"].to_numpy())
    ends = np.concatenate((left, right)), np.concatenate((right, left))
    _write_stars(job, number, partition, small, *ends, changed)


def _write_stars(
    job: CurationJob, number: int, partition: int, shuffle: Shuffle, node: Offsets, other: Offsets, changed: bool
) -> None:
    if changed:
        write_table(pa.table({}), job.file(job.by_partition(_changed(number)), partition))
    shuffle.write(job, partition, pa.table({"node": node, "other": other}), _node_partitions(job, node))


def _edges(job: CurationJob, rounds: int, partition: int) -> pa.Table:
    """Return the edges of all rounds of the nodes of a partition (node, other, jaccard); edges may repeat."""
    empty = schema_of("node int64, other int64, jaccard float64").empty_table()
    return pa.concat_tables(
        [empty, *(round_shuffles(job, number).edges.read(job, partition) for number in range(rounds))]
    )


def _node_partitions(job: CurationJob, rows: Offsets) -> Offsets:
    return key_partitions(mix_hashes(rows.astype(np.uint64)), job.partitions)


def large_star(node: Offsets, other: Offsets) -> tuple[Offsets, Offsets, bool]:
    """Return edges (larger, smaller) that replace those from each `node` to its larger neighbors, and if any differs.

    All neighbors of a node are among the edges `node[i]` - `other[i]`.
    """
    node, other, first = _neighbors(node, other)
    least = np.minimum(other[first], node[first])[np.cumsum(first) - 1]
    larger = other > node
    return other[larger], least[larger], bool((least[larger] != node[larger]).any())


def small_star(node: Offsets, other: Offsets) -> tuple[Offsets, Offsets, bool]:
    """Return edges (larger, smaller) that replace those from each `node` to its smaller ones, and if any differs.

    The smaller neighbors of a node are among the edges `node[i]` - `other[i]`; all of them are smaller.
    """
    node, other, first = _neighbors(node, other)
    least = other[first][np.cumsum(first) - 1]
    return np.where(first, node, other), least, not first.all()


def _neighbors(node: Offsets, other: Offsets) -> tuple[Offsets, Offsets, NDArray[np.bool_]]:
    """Return the distinct edges, sorted, and whether each is the first of its node."""
    node, other = _distinct(node, other)
    return node, other, np.diff(node, prepend=node[:1] - 1) != 0


def largest_jaccard(rounds: int, job: CurationJob, partition: int) -> None:
    """Write node and jaccard, the largest of its edges, for the nodes of a partition, ordered by node."""
    edges = _columns(_edges(job, rounds, partition))
    nodes, node_indices = np.unique(edges["node"], return_inverse=True)
    largest = np.zeros(len(nodes))
    np.maximum.at(largest, node_indices, edges["jaccard"])
    write_table(pa.table({"node": nodes, "jaccard": largest}), job.file(job.by_partition("minhash/jaccard"), partition))


def send_labels(last: int, rounds: int, job: CurationJob, partition: int) -> None:
    """Send row, label (smallest row of its component) and jaccard of the nodes of a partition to their shards."""
    stars = _columns(_stars(job, last)[1].read(job, partition))
    known = _columns(read_table(job.file(job.by_partition("minhash/jaccard"), partition)))
    label = known["node"].copy()
    np.minimum.at(label, np.searchsorted(known["node"], stars["node"]), stars["other"])
    table = pa.table({"row": known["node"], "label": label, "jaccard": known["jaccard"]})
    _labels(job).write(job, partition, table, job.shard_of(known["node"]))


def map_members(job: CurationJob, index: int) -> None:
    """Send the documents of a shard with an edge, with the columns of KEEP, to the partition of their component."""
    tables = {"documents": job.survivors(index, "minhash", KEEP_COLUMNS), "labels": _labels(job).read(job, index)}
    table = job.query('SELECT * FROM documents JOIN labels USING ("row")', **tables)
    _members(job).write(job, index, table, _node_partitions(job, table["label"].to_numpy()))


def reduce_clusters(job: CurationJob, partition: int) -> None:
    """Write the clusters of a partition, each with the document that comes first in KEEP order, and drop all others."""
    query = f"""SELECT first_value(id) OVER (PARTITION BY label ORDER BY {KEEP}) AS cluster, id, "row", jaccard,
            count(*) OVER (PARTITION BY label) AS size
        FROM members ORDER BY cluster, id"""
    clusters = job.query(query, members=_members(job).read(job, partition)).cast(_CLUSTERS)
    write_table(clusters, job.file(job.by_partition(CLUSTERS), partition))
    query = f"""SELECT cluster, any_value(size) AS documents, min("row") FILTER (id = cluster) AS kept_row,
            min_by("row", (jaccard, id)) FILTER (id <> cluster) AS copy_row,
            min(jaccard) FILTER (id <> cluster) AS jaccard
        FROM clusters GROUP BY cluster ORDER BY documents DESC, cluster LIMIT {SHOWN}"""
    write_table(job.query(query, clusters=clusters), job.file(job.by_partition(LARGEST), partition))
    query = """SELECT "row", 'near_duplicate' AS outcome, cluster AS kept FROM clusters WHERE id <> cluster"""
    write_drops(job, _drops(job), partition, job.query(query, clusters=clusters))
