"""Near-duplicate removal: MinHash LSH, verification by true Jaccard, clusters, and in each a choice of who stays.

LSH alone joins many unlike pairs (a fifth of the edges, on technical text), so every edge is verified. A cluster is a
connected component; it may be a chain, so a document leaves only if it is similar to one that stays. The shuffles, all
under `minhash/`: `bands` by bucket; in rounds `pairs` and `centers` by shard and `verdicts` by bucket; `edges` and the
rounds of `stars` by document; `labels` by shard; `members` and `similar` by cluster.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from herd.llama3.data.accounting import CLUSTERS as SHOWN
from herd.llama3.data.accounting import LARGEST
from herd.llama3.data.dedup.exact import KEEP, KEEP_COLUMNS
from herd.llama3.data.kernels.arrow import Offsets, list_buffers
from herd.llama3.data.kernels.shingles import jaccard_pairs, keep_first, mix_hashes, shingle_sets
from herd.llama3.data.mapreduce import CurationJob, CurationStage, aggregate, schema_of, write_drops
from herd.llama3.data.shuffle import Shuffle
from herd.llama3.data.work_items import Runner, Work, open_parquet, piece_groups, write_table
from herd.llama3.recipe.data_schema import Curate

ROUNDS = 8
"""Maximum number of centers that a bucket is compared with."""
CLOSING_ROUNDS = 4
"""Maximum number of rounds that compare documents of a cluster which would all stay."""
SETS = "minhash/sets"
"""Step with the shingle sets of the documents that share a bucket: row, shingles; 8 bytes a word."""
CLUSTERS = "minhash/clusters"
"""Step of the partitions with the clusters: cluster (id of its first document in KEEP order), id, row, size (documents
of the cluster), kept (id of the document that stays instead; its own if it stays), jaccard (with `kept`)."""
ORDERED = "minhash/ordered"
"""Step of the partitions with the documents of clusters: row, id, label; by label, in KEEP order."""
SETS_PER_GROUP = 64
"""A row group of sets takes half a megabyte for usual documents, so late rounds read little that they do not need."""
LISTS = pa.large_list(pa.uint64())
_BATCH = 1024
"""Documents whose text is in memory at a time."""
_CLUSTERS = schema_of("cluster string, id string, row int64, size int64, kept string, jaccard float64")
_MOST = f"FROM rows ORDER BY documents DESC, cluster LIMIT {SHOWN}"
Columns = dict[str, NDArray[Any]]


class MinHash(CurationStage):
    """Drop the near duplicates of documents that stay."""

    name, title, section = "minhash", "near duplicates", ("dedup",)
    reasons: ClassVar = {"near_duplicate": "Nearly the same text exists elsewhere in its domain and language."}

    def enabled(self, curate: Curate) -> bool:
        return curate.dedup.jaccard < 1

    def passes(self, runner: Runner, job: CurationJob) -> None:
        job.each_shard(runner, _bands(job).step(), map_bands)
        _bands(job).merge(runner, job)
        rounds = verify_candidates(runner, job)
        job.each_partition(runner, _edges(job).step(), partial(send_edges, rounds))
        _edges(job).merge(runner, job)
        last = join_components(runner, job)
        job.each_partition(runner, _labels(job).step(), partial(send_labels, last))
        _labels(job).merge(runner, job)
        _similar(job).merge(runner, job)
        job.each_shard(runner, _members(job).step(), map_members)
        _members(job).merge(runner, job)
        job.each_partition(runner, job.by_partition(ORDERED), order_members)
        closed = close_clusters(runner, job)
        job.each_partition(runner, _drops(job).step(), partial(write_clusters, closed))
        largest = aggregate(runner, job, job.by_partition(LARGEST), job.partitions, _MOST)
        write_table(largest, job.file(LARGEST, 0))
        self.apply_drops(runner, job, _drops(job))


def _bands(job: CurationJob) -> Shuffle:
    return job.by_key("minhash/bands")


def _edges(job: CurationJob) -> Shuffle:
    return job.by_key("minhash/edges", job.partitions)


def _labels(job: CurationJob) -> Shuffle:
    return job.by_shard("minhash/labels")


def _members(job: CurationJob) -> Shuffle:
    return job.by_key("minhash/members")


def _similar(job: CurationJob) -> Shuffle:
    return job.by_key("minhash/similar", job.partitions)


def _drops(job: CurationJob) -> Shuffle:
    return job.by_shard("minhash/drops")


def map_bands(job: CurationJob, index: int) -> None:
    """Send the bands of the documents of a piece to their buckets: key (of the bucket), order, id_prefix, row."""
    documents = job.survivors(index, "minhash", ("row", "id", "rank", "date", "language", "bands"))
    bands, offsets = list_buffers(documents["bands"])
    document = np.repeat(np.arange(documents.num_rows), np.diff(offsets))
    # A document is compared only within its domain and language, so their hash goes into the key.
    names, language = np.unique(documents["language"].to_numpy().astype(str), return_inverse=True)
    domain = job.shard(index).domain
    digests = [blake2b(f"{domain}\0{name}".encode(), digest_size=8).digest() for name in names]
    groups = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)[language]
    id_prefix = np.array([int(document_id[:16], 16) for document_id in documents["id"].to_pylist()], np.uint64)
    key = mix_hashes(bands[offsets[0] : offsets[-1]] ^ groups[document])
    columns = {"order": keep_order(documents), "id_prefix": id_prefix, "row": documents["row"].to_numpy()}
    table = pa.table({"key": key} | {name: values[document] for name, values in columns.items()})
    _bands(job).write(job, index, table, job.partition_of(key))


def keep_order(documents: pa.Table) -> NDArray[np.uint64]:
    """Return numbers that ascend in KEEP order, up to the precision of float32 for `rank` and of an hour for `date`."""
    rank = (documents["rank"].to_numpy().astype(np.float32) + np.float32(0)).view(np.uint32)  # -0 becomes 0
    rank = np.where(rank >> 31, rank, ~rank & np.uint32(0x7FFFFFFF))  # IEEE 754: sign and magnitude
    dates = documents["date"].combine_chunks().dictionary_encode()
    digits = ("".join(filter(str.isdigit, date))[:10].ljust(10, "0") for date in dates.dictionary.to_pylist())
    hours = np.array([min(int(digit), 0xFFFFFFFF) for digit in digits], np.uint64)
    hour = hours[dates.indices.to_numpy()]
    order: NDArray[np.uint64] = (rank.astype(np.uint64) << np.uint64(32)) | (np.uint64(0xFFFFFFFF) - hour)
    return order


# Verification rounds. In each round the first open member of a bucket, in KEEP order, is its center, and all other
# members of the bucket are compared with it by true Jaccard; a member stays open until it is like a center. So a hot
# bucket costs its size and not its square. All members are compared, not only open ones: of two similar documents,
# perhaps only one is like an earlier center. On technical text with planted copies, 8 rounds find 99.7 % of the pairs
# with Jaccard >= 0.8; comparing open members alone found 99.1 % in 16 rounds.
#
# Pairs are verified in the piece of the member, which computes the sets of its documents once. Each center's set is
# copied once to every piece that needs it, so a work item holds the sets of a piece and those of its centers.


def verify_candidates(runner: Runner, job: CurationJob) -> int:
    """Run rounds until no bucket has a pair left to compare; return their number.

    Verdicts: key (bucket), place (in KEEP order), row (member), center, jaccard, edge (the first verdict on a similar
    pair), open (unlike every center so far).
    """
    for number in range(ROUNDS):
        if not verify_round(runner, job, number, partial(choose_pairs, number)):
            return number
    return ROUNDS


def verify_round(runner: Runner, job: CurationJob, number: int, choose: Work) -> bool:
    """Verify the pairs that `choose` sends for the partitions; return whether there were any."""
    shuffles = round_shuffles(job, number)
    job.each_partition(runner, shuffles.pairs.step(), choose)
    if not job.files(job.by_partition(_open(number))):
        return False
    shuffles.pairs.merge(runner, job)
    if number == 0:
        job.each_shard(runner, SETS, write_sets)
    job.each_shard(runner, shuffles.centers.step(), partial(copy_centers, number))
    shuffles.centers.merge(runner, job)
    job.each_shard(runner, shuffles.verdicts.step(), partial(verify_pairs, number))
    shuffles.verdicts.merge(runner, job)
    return True


class RoundShuffles(NamedTuple):
    """The shuffles of a round of verification."""

    pairs: Shuffle
    """Pairs for the shards of their members, and requests for those of their centers."""
    centers: Shuffle
    verdicts: Shuffle


def round_shuffles(job: CurationJob, number: int) -> RoundShuffles:
    """Return the shuffles of round `number`."""
    name = f"minhash/{number:02}"
    return RoundShuffles(
        job.by_shard(f"{name}/pairs"),
        job.by_shard(f"{name}/centers", len(job.shards)),
        job.by_key(f"{name}/verdicts"),
    )


def _open(number: int) -> str:
    return f"minhash/{number:02}/open"


def choose_pairs(number: int, job: CurationJob, partition: int) -> None:
    """Send the pairs of the buckets of `partition` to the shards of their members, and request their centers' sets."""
    members = _columns((_bands(job) if number == 0 else round_shuffles(job, number - 1).verdicts).read(job, partition))
    if number == 0:
        members["open"] = np.ones(len(members["key"]), bool)
    # Keep buckets with two members or more, one of them open.
    _, bucket, size = np.unique(members["key"], return_inverse=True, return_counts=True)
    has_open = np.zeros(len(size), bool)
    has_open[bucket[members["open"]]] = True
    comparable = (has_open & (size > 1))[bucket]
    members = {name: values[comparable] for name, values in members.items()}
    if number == 0:
        members = _sorted(members, "key", "order", "id_prefix", "row")
        members["place"] = np.arange(len(members["key"]))
    else:
        members = _sorted(members, "place")
    _, bucket = np.unique(members["key"], return_inverse=True)
    open_members = np.flatnonzero(members["open"])
    _, first = np.unique(bucket[open_members], return_index=True)
    center = open_members[first][bucket]
    chosen = np.flatnonzero(center != np.arange(len(center)))
    columns = {
        "bucket": members["key"][chosen],
        "place": members["place"][chosen],
        "member": members["row"][chosen],
        "center": members["row"][center[chosen]],
        "open": members["open"][chosen],
    }
    send_pairs(number, job, partition, columns)


def send_pairs(number: int, job: CurationJob, partition: int, columns: Columns) -> None:
    """Send pairs (bucket, place, member, center, open) to the pieces of their members; request their centers' sets.

    A request goes to the piece of its center. Its member is the piece that needs the set, its place is -1.
    """
    pieces = job.piece_of(columns["member"])
    center, needed_by = _distinct(columns["center"], pieces)
    requests = {"bucket": np.zeros(len(center), np.uint64), "place": np.full(len(center), -1)}
    requests |= {"member": needed_by, "center": center, "open": np.zeros(len(center), bool)}
    if len(center):
        job.write(job.by_partition(_open(number)), partition, pa.table({}))
    table = pa.concat_tables([pa.table(columns), pa.table(requests)])
    pieces = np.concatenate([pieces, job.piece_of(center)])
    round_shuffles(job, number).pairs.write(job, partition, table, pieces)


def _read_pairs(number: int, job: CurationJob, index: int) -> tuple[Columns, Columns]:
    """Return the pairs and the requests for a piece."""
    columns = _columns(round_shuffles(job, number).pairs.read(job, index))
    is_pair = columns["place"] >= 0
    pairs, requests = ({name: values[which] for name, values in columns.items()} for which in (is_pair, ~is_pair))
    return pairs, requests


def copy_centers(number: int, job: CurationJob, index: int) -> None:
    """Send the sets of the centers in a piece to the pieces that requested them: row, shingles."""
    _, requests = _read_pairs(number, job, index)
    center, piece = _distinct(requests["center"], requests["member"])  # several partitions may request the same
    rows, sets = read_sets(job, index, center)
    table = pa.table({"row": center, "shingles": sets.take(pa.array(np.searchsorted(rows, center)))})
    round_shuffles(job, number).centers.write(job, index, table, piece)


def write_sets(job: CurationJob, index: int) -> None:
    """Write the shingle sets of the documents of a piece that the first round compares, ordered by row."""
    pairs, requests = _read_pairs(0, job, index)
    rows, width = np.union1d(pairs["member"], requests["center"]), job.recipe.curate.dedup.shingle
    row_batches, sets = [np.zeros(0, np.int64)], [pa.array([], LISTS)]
    for batch in job.texts(index, ["row", "text"], _BATCH) if len(rows) else ():
        members = np.flatnonzero(np.isin(batch["row"].to_numpy(), rows))
        row_batches.append(batch["row"].to_numpy()[members])
        sets.append(shingle_sets(batch["text"].take(pa.array(members)), width))
    table = pa.table({"row": np.concatenate(row_batches), "shingles": pa.concat_arrays(sets)})
    # Hashes gain nothing from compression or dictionary.
    job.write(SETS, index, table, SETS_PER_GROUP, compression="none", use_dictionary=False)


def read_sets(job: CurationJob, index: int, rows: Offsets) -> tuple[Offsets, pa.LargeListArray]:
    """Return (rows, sets) for those of `rows` that are in piece `index` of SETS, ordered by row."""
    rows = np.unique(rows)
    with open_parquet(job.file(SETS, index // job.shard_pieces)) as file:
        groups = piece_groups(file, index % job.shard_pieces) if file.metadata.num_rows else []
        if groups:  # an empty file has one row group without statistics
            stats = [file.metadata.row_group(group).column(0).statistics for group in groups]
            low, high = np.array([(stat.min, stat.max) for stat in stats], np.int64).T
            chosen = np.flatnonzero(np.searchsorted(rows, low) < np.searchsorted(rows, high, "right")).tolist()
            groups = [groups[place] for place in chosen]
        table = file.read_row_groups(groups, columns=["row", "shingles"], use_threads=False)
    table = table.filter(pa.array(np.isin(table["row"].to_numpy(), rows)))
    return table["row"].to_numpy(), pa.concat_arrays([pa.array([], LISTS), *table["shingles"].chunks])


def verify_pairs(number: int, job: CurationJob, index: int) -> None:
    """Send the verdict on every pair whose member is in a piece to its bucket."""
    shuffles = round_shuffles(job, number)
    pairs = _sorted(_read_pairs(number, job, index)[0], "center", "member", "bucket")
    center, member = pairs["center"], pairs["member"]
    # A pair may occur in several buckets; equal pairs are adjacent, and the first of them is computed.
    first = np.ones(len(center), bool)
    first[1:] = (center[1:] != center[:-1]) | (member[1:] != member[:-1])
    member_rows, members = read_sets(job, index, member[first])
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
    pair = np.cumsum(first) - 1
    columns = {"key": pairs["bucket"], "place": pairs["place"], "row": member, "center": center}
    columns |= {"jaccard": jaccard[pair], "edge": similar[pair] & first, "open": pairs["open"] & ~similar[pair]}
    shuffles.verdicts.write(job, index, pa.table(columns), job.partition_of(pairs["bucket"]))


def send_edges(rounds: int, job: CurationJob, partition: int) -> None:
    """Send the similar pairs of all rounds to both documents: node, other, jaccard."""
    verdicts = (round_shuffles(job, number).verdicts.read(job, partition) for number in range(rounds))
    empty = schema_of("row int64, center int64, jaccard float64").empty_table()
    names = empty.column_names
    edges = [table.filter(table["edge"].combine_chunks()).select(names) for table in verdicts]
    row, center, jaccard = _columns(pa.concat_tables([empty, *edges])).values()
    node = np.concatenate((row, center))
    table = {"node": node, "other": np.concatenate((center, row)), "jaccard": np.tile(jaccard, 2)}
    _edges(job).write(job, partition, pa.table(table), _node_partitions(job, node))


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


def join_components(runner: Runner, job: CurationJob) -> int:
    """Replace the edges by stars; return the number of the last round of stars."""
    number = 0
    while True:
        large, small = _stars(job, number)
        job.each_partition(runner, large.step(), partial(join_larger, number))
        large.merge(runner, job)
        job.each_partition(runner, small.step(), partial(join_smaller, number))
        small.merge(runner, job)
        if not job.files(job.by_partition(_changed(number))):
            return number
        number += 1


def _stars(job: CurationJob, number: int) -> tuple[Shuffle, Shuffle]:
    name = f"minhash/stars-{number:02}"
    return job.by_key(f"{name}/large", job.partitions), job.by_key(f"{name}/small", job.partitions)


def _changed(number: int) -> str:
    return f"minhash/stars-{number:02}/changed"


def join_larger(number: int, job: CurationJob, partition: int) -> None:
    """Do the large stars of the nodes of a partition."""
    edges = (_stars(job, number - 1)[1] if number else _edges(job)).read(job, partition)
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
        job.write(job.by_partition(_changed(number)), partition, pa.table({}))
    shuffle.write(job, partition, pa.table({"node": node, "other": other}), _node_partitions(job, node))


def _node_partitions(job: CurationJob, rows: Offsets) -> Offsets:
    return job.partition_of(mix_hashes(rows.astype(np.uint64)))


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


def send_labels(last: int, job: CurationJob, partition: int) -> None:
    """Send row and label (smallest row of its component) of the nodes of a partition to their shards.

    Their edges (label, node, other, jaccard; node > other) go to the partition of their component.
    """
    edges = _sorted(_columns(_edges(job).read(job, partition)), "node", "other")
    nodes, node_index = np.unique(edges["node"], return_inverse=True)
    stars = _columns(_stars(job, last)[1].read(job, partition))
    label = nodes.copy()
    np.minimum.at(label, np.searchsorted(nodes, stars["node"]), stars["other"])
    once = edges["node"] > edges["other"]
    once[1:] &= (np.diff(edges["node"]) != 0) | (np.diff(edges["other"]) != 0)
    similar = {"label": label[node_index][once]} | {name: values[once] for name, values in edges.items()}
    _similar(job).write(job, partition, pa.table(similar), _node_partitions(job, similar["label"]))
    _labels(job).write(job, partition, pa.table({"row": nodes, "label": label}), job.piece_of(nodes))


def map_members(job: CurationJob, index: int) -> None:
    """Send the documents of a piece with an edge, with the columns of KEEP, to the partition of their component."""
    tables = {"documents": job.survivors(index, "minhash", KEEP_COLUMNS), "labels": _labels(job).read(job, index)}
    table = job.query('SELECT * FROM documents JOIN labels USING ("row")', **tables)
    _members(job).write(job, index, table, _node_partitions(job, table["label"].to_numpy()))


# Who stays. In each component, documents are taken in KEEP order, and one stays unless it is similar to one that stays.
# Only verified edges count, so two documents that are both similar to a third were perhaps never compared: usually the
# third stays, but if it leaves for a fourth, both would stay. So rounds of verification compare those that stay among
# the neighbors of one that leaves, like the members of a bucket.


def order_members(job: CurationJob, partition: int) -> None:
    """Write row, id and label of the documents of a partition by component, in KEEP order."""
    query = f'SELECT "row", id, label FROM members ORDER BY label, {KEEP}'
    ordered = job.query(query, members=_members(job).read(job, partition))
    job.write(job.by_partition(ORDERED), partition, ordered)


class Selection(NamedTuple):
    """The documents of a partition, by component in KEEP order, and who stays. Numbers are places in this order."""

    documents: pa.Table
    """row, id, label"""
    left: Offsets
    right: Offsets
    """The similar pairs, left < right, sorted by both."""
    jaccard: NDArray[np.float64]
    """Of each similar pair."""
    unlike: Offsets
    """The pairs that closing rounds found unlike, as `left * len(documents) + right`."""
    kept: Offsets
    """For each document the first one that stays and is similar to it; itself if it stays."""


def choose_kept(job: CurationJob, closed: int, partition: int) -> Selection:
    """Choose who stays by all verified pairs, those of `closed` closing rounds among them."""
    documents = job.read(job.by_partition(ORDERED), partition)
    pairs = [_similar(job).read(job, partition).select(["node", "other", "jaccard"])]
    for number in range(ROUNDS, ROUNDS + closed):
        verdicts = round_shuffles(job, number).verdicts.read(job, partition)
        pairs.append(verdicts.select(["row", "center", "jaccard"]).rename_columns(pairs[0].column_names))
    node, other, jaccard = _columns(pa.concat_tables(pairs)).values()
    rows, size = documents["row"].to_numpy(), len(documents)
    by_row = np.argsort(rows)
    ends = [by_row[np.searchsorted(rows, end, sorter=by_row)] for end in (node, other)]
    pair, first = np.unique(np.minimum(*ends) * size + np.maximum(*ends), return_index=True)
    similar = jaccard[first] >= job.recipe.curate.dedup.jaccard
    left, right = np.divmod(pair[similar], max(size, 1))
    kept = keep_first(np.searchsorted(left, np.arange(size + 1)), right)
    return Selection(documents, left, right, jaccard[first][similar], pair[~similar], kept)


def close_clusters(runner: Runner, job: CurationJob) -> int:
    """Compare documents that stay although they are similar to the same one; return the number of rounds.

    They are numbered from ROUNDS on: the last round of verification may have found nothing, and its step is done.
    """
    for closed in range(CLOSING_ROUNDS):
        if not verify_round(runner, job, ROUNDS + closed, partial(choose_closing, closed)):
            return closed
    return CLOSING_ROUNDS


def choose_closing(closed: int, job: CurationJob, partition: int) -> None:
    """Send the pairs of documents of a partition to compare in the closing round `closed`."""
    choice = choose_kept(job, closed, partition)
    center, member = closing_pairs(choice)
    rows, labels = (choice.documents[name].to_numpy() for name in ("row", "label"))
    columns = {"bucket": mix_hashes(labels[center].astype(np.uint64)), "place": center}  # verdicts: to the component
    columns |= {"member": rows[member], "center": rows[center], "open": np.zeros(len(center), bool)}
    send_pairs(ROUNDS + closed, job, partition, columns)


def closing_pairs(choice: Selection) -> tuple[Offsets, Offsets]:
    """Return the pairs of staying neighbors of leaving documents to compare next: two numbers each, the smaller first.

    All pairs of up to ROUNDS neighbors; of more, those of the first neighbor that was not compared with all.
    """
    size = len(choice.kept)
    stays = choice.kept == np.arange(size)
    hub, neighbor = np.concatenate((choice.left, choice.right)), np.concatenate((choice.right, choice.left))
    hub, neighbor = _distinct(*(ends[stays[neighbor] & ~stays[hub]] for ends in (hub, neighbor)))
    _, start, group, count = np.unique(hub, return_index=True, return_inverse=True, return_counts=True)
    place = np.arange(len(hub)) - start[group]
    chosen, ended = [np.zeros(0, np.int64)], np.zeros(len(start), bool)
    for first in range(ROUNDS):
        later = np.flatnonzero((place > first) & ~ended[group])
        pair = neighbor[start[group[later]] + first] * size + neighbor[later]
        new = ~np.isin(pair, choice.unlike)
        chosen.append(pair[new])
        ended[group[later[new]]] = True
        ended[count <= ROUNDS] = False
    center, member = np.divmod(np.unique(np.concatenate(chosen)), max(size, 1))
    return center, member


def write_clusters(closed: int, job: CurationJob, partition: int) -> None:
    """Write the clusters of a partition, and drop the documents that do not stay."""
    choice = choose_kept(job, closed, partition)
    size, kept, ids = len(choice.kept), choice.kept, choice.documents["id"]
    _, first, component, count = np.unique(
        choice.documents["label"].to_numpy(), return_index=True, return_inverse=True, return_counts=True
    )
    gone = np.flatnonzero(kept != np.arange(size))
    jaccard = np.ones(size)
    pairs = choice.left * size + choice.right
    jaccard[gone] = choice.jaccard[np.searchsorted(pairs, kept[gone] * size + gone)]
    columns = {"cluster": ids.take(pa.array(first[component])), "id": ids, "row": choice.documents["row"]}
    columns |= {"size": count[component], "kept": ids.take(pa.array(kept)), "jaccard": jaccard}
    clusters = pa.table(columns).cast(_CLUSTERS).sort_by([("cluster", "ascending"), ("id", "ascending")])
    job.write(job.by_partition(CLUSTERS), partition, clusters)
    query = f"""SELECT kept AS cluster, count(*) AS documents, min("row") FILTER (id = kept) AS kept_row,
            min_by("row", (jaccard, id)) FILTER (id <> kept) AS copy_row,
            min(jaccard) FILTER (id <> kept) AS jaccard
        FROM clusters GROUP BY kept HAVING count(*) > 1 ORDER BY documents DESC, cluster LIMIT {SHOWN}"""
    job.write(job.by_partition(LARGEST), partition, job.query(query, clusters=clusters))
    query = """SELECT "row", 'near_duplicate' AS outcome, kept FROM clusters WHERE id <> kept"""
    write_drops(job, _drops(job), partition, job.query(query, clusters=clusters))
