"""Records under a lease: which version counts, who may write, and what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.storage.fenced import VERSIONS, DamagedRecord, FencedRecords
from herd.storage.lease import LeaseHeld, LeaseLost, lease
from herd.storage.root import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.parse(tmp_path / "root")


def versions(root: Root) -> list[str]:
    return root.names("runs", "a-1", VERSIONS)


def test_the_last_version_counts_and_the_one_before_stays(root: Root) -> None:
    records = FencedRecords(root, "runs")
    assert records.read("a-1") is None
    records.create("a-1", "first")
    with lease(root, "runs/a-1", "a") as held:
        records.hold("a-1", held)
        for number in range(12):
            records.write("a-1", f"number {number}")
            assert records.read("a-1") == f"number {number}".encode()
    assert [version[:17] for version in versions(root)] == ["00000001-00000011", "00000001-00000012"]


def test_what_a_former_holder_writes_late_hides_nothing(root: Root) -> None:
    """A version that was on its way when the lease was taken over, such as a PUT that timed out."""
    first, second = FencedRecords(root, "runs"), FencedRecords(root, "runs")
    with lease(root, "runs/a-1", "first") as held:
        first.hold("a-1", held)
        first.write("a-1", "one")
        (version,) = versions(root)
        first.write("a-1", "two")
    with lease(root, "runs/a-1", "second") as held:
        second.hold("a-1", held)
        second.write("a-1", "three")
        for number in (1, 2, 99):
            root.write("one", "runs", "a-1", VERSIONS, version.replace("-00000001-", f"-{number:08}-"))
        assert second.read("a-1") == b"three"
        second.write("a-1", "four")
    assert FencedRecords(root, "runs").read("a-1") == b"four"


def test_only_the_holder_writes(root: Root) -> None:
    records, other = FencedRecords(root, "runs"), FencedRecords(root, "runs")
    with records.alone("a-1", "a"):
        records.write("a-1", "one")
        with pytest.raises(LeaseHeld, match="is used by a "):
            other.write("a-1", "two")
        root.file("leases", "runs", "a-1").unlink()
        with pytest.raises(LeaseLost):
            records.write("a-1", "three")
    assert records.read("a-1") == b"one"
    other.write("a-1", "two")  # under the lease, for as long as it takes
    assert records.read("a-1") == b"two"


def test_leases_that_were_deleted_begin_their_fences_again(root: Root) -> None:
    for number in range(3):
        FencedRecords(root, "runs").write("a-1", f"before {number}")
    root.file("leases", "runs", "a-1").unlink()
    FencedRecords(root, "runs").write("a-1", "after")
    assert FencedRecords(root, "runs").read("a-1") == b"after"


@pytest.mark.parametrize("damage", [b"onf", b"", b"one "])
def test_other_bytes_than_were_written_are_no_record(damage: bytes, root: Root) -> None:
    records = FencedRecords(root, "runs")
    records.write("a-1", "one")
    root.write(damage, "runs", "a-1", VERSIONS, versions(root)[0])
    with pytest.raises(DamagedRecord, match=r"runs/a-1/record/.*json is not what was written; restore it from a copy"):
        records.read("a-1")
