"""Artifacts in Swift behind a proxy that does what networks do.

After every fault an artifact is whole or absent, and the same commit without the fault succeeds. What is there is
looked up at the server itself, past the proxy.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from herd.storage.artifact import DamagedArtifact
from herd.storage.cleanup import clean_up_root
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from tests.storage.commit_samples import AT_ONCE, FILES, KINDS, artifact_spec, attempts, commit, contents, in_scratch
from tests.storage.fault_proxy import Fault, Rule
from tests.storage.fault_world import BURSTS, SHORT, World, fails_in_time

SLOW = pytest.mark.slow
"""What test_s3_faults.py shows of one object, or test_object_artifact.py with a server that answers faster."""
OTHERS: tuple[Fault, ...] = (*BURSTS, "reset-in-body", "flip")


@pytest.fixture
def root(world: World, tmp_path: Path) -> Root:
    world.proxy.use()
    return Root.parse(world.server.fresh()[0], str(tmp_path / "scratch"))


@pytest.mark.parametrize("fault", [*(pytest.param(fault, marks=SLOW) for fault in BURSTS), "flip-sent"])
@pytest.mark.fault("F4")
def test_a_commit_outlasts_a_burst(world: World, root: Root, fault: Fault, tmp_path: Path) -> None:
    method = "PUT" if fault == "flip-sent" else ""
    (rule,) = world.proxy.use(Rule(fault, method, skip=1, times=4))
    with world.faulty():
        commit(root, artifact_spec())
    assert rule.done == 4
    with world.direct():
        assert_whole(in_scratch(root, tmp_path / "other"))


@pytest.mark.parametrize("skip", [pytest.param(0, marks=SLOW), 4])
@pytest.mark.parametrize("fault", ["reset", *(pytest.param(fault, marks=SLOW) for fault in ("error", "hang"))])
def test_a_commit_to_a_broken_server_ends_and_can_be_done_again(
    world: World, root: Root, fault: Fault, skip: int
) -> None:
    (rule,) = world.proxy.use(Rule(fault, skip=skip, times=None))
    size = len(FILES["weights.bin"]) / 2**20
    with world.faulty(SHORT), fails_in_time(SHORT + size):
        commit(root, artifact_spec())
    assert rule.done
    with world.direct():
        assert open_store(root).find(artifact_spec()) is None
        commit(root, artifact_spec())
        assert_whole(root)


@pytest.mark.slow
@pytest.mark.fault("F5")
def test_a_commit_is_ours_when_the_reply_to_its_manifest_is_lost(world: World, root: Root) -> None:
    (rule,) = world.proxy.use(Rule("drop-reply", "PUT", path=r"\.json$", skip=0))
    with world.faulty():
        committed = commit(root, artifact_spec())
    assert rule.done == 1
    with world.direct():
        artifact = open_store(root).find(artifact_spec())
        assert artifact is not None
        assert (artifact.uri, attempts(root, artifact_spec())) == (committed.uri, {committed.uri.rsplit("/", 1)[1]})


@pytest.mark.slow
@pytest.mark.fault("F14")
def test_writers_who_race_through_faults_leave_one_whole_artifact(world: World, root: Root, tmp_path: Path) -> None:
    rules = world.proxy.use(
        Rule("slow-down", times=3, skip=5), Rule("drop-reply", "PUT", path=r"\.json$", times=2), Rule("reset", skip=9)
    )
    roots = [in_scratch(root, tmp_path / f"writer-{number}") for number in range(4)]
    with world.faulty(), ThreadPoolExecutor(len(roots)) as pool:
        committed = list(pool.map(lambda mine: commit(mine, artifact_spec()), roots))
    assert all(rule.done for rule in rules)
    with world.direct():
        assert all(contents(artifact) == FILES for artifact in committed)
        clean_up_root(root, AT_ONCE, KINDS)
        attempt = assert_whole(in_scratch(root, tmp_path / "reader"))
        assert attempts(root, artifact_spec()) == {attempt}


# Bringing


@pytest.mark.parametrize("fault", ["truncate", *(pytest.param(fault, marks=SLOW) for fault in OTHERS)])
def test_what_is_brought_is_what_was_committed(world: World, root: Root, fault: Fault, tmp_path: Path) -> None:
    with world.faulty():
        commit(root, artifact_spec())
        (rule,) = world.proxy.use(Rule(fault, "GET", path="weights.bin$", times=2))
        assert_whole(in_scratch(root, tmp_path / "other"))
    assert rule.done == 2


@pytest.mark.slow
def test_a_manifest_that_comes_changed_is_read_again_and_stays(world: World, root: Root) -> None:
    for flips in (1, 2):
        with world.faulty():
            commit(root, artifact_spec(flips=flips))
            (rule,) = world.proxy.use(Rule("flip", "GET", path=r"\.json$", times=flips))
            first = open_store(root).find(artifact_spec(flips=flips))
            assert (first is not None) == (flips == 1), "two in a row look like a damaged one: made again"
            assert rule.done == flips
            assert open_store(root).find(artifact_spec(flips=flips)) is not None


@pytest.mark.parametrize(
    "fault", ["flip", *(pytest.param(fault, marks=SLOW) for fault in ("truncate", "hang", "error"))]
)
def test_a_file_that_never_comes_right_is_never_there(world: World, root: Root, fault: Fault, tmp_path: Path) -> None:
    other = in_scratch(root, tmp_path / "other")
    with world.direct():
        commit(root, artifact_spec())
        artifact = open_store(other).find(artifact_spec())
        assert artifact is not None
    (rule,) = world.proxy.use(Rule(fault, "GET", path="weights.bin$", times=None))
    with world.faulty(SHORT):
        with fails_in_time(SHORT + 1, DamagedArtifact if fault == "flip" else OSError):
            artifact.path  # noqa: B018
        assert rule.done
        assert not (artifact.folder / "weights.bin").exists()
    with world.direct():
        assert contents(artifact) == FILES


def test_a_bit_that_flips_on_the_servers_disk_is_found(world: World, root: Root, tmp_path: Path) -> None:
    other = in_scratch(root, tmp_path / "other")
    with world.direct():
        rotten = os.urandom(2**20 + 99)
        commit(root, artifact_spec(), {**FILES, "weights.bin": rotten})
        paths = [path for path in world.server.folder.rglob("*.data") if path.stat().st_size == len(rotten)]
        (path,) = [path for path in paths if path.read_bytes() == rotten]
        with path.open("r+b") as file:
            file.seek(500_000)
            file.write(bytes([rotten[500_000] ^ 1]))
        artifact = open_store(other).find(artifact_spec())
        assert artifact is not None
        with pytest.raises(DamagedArtifact, match="weights"):
            artifact.path  # noqa: B018
        assert not (artifact.folder / "weights.bin").exists()


def assert_whole(root: Root) -> str:
    """Check the artifact of `artifact_spec()` as a machine finds it that has nothing yet; return its attempt."""
    artifact = open_store(root).find(artifact_spec())
    assert artifact is not None
    assert contents(artifact) == FILES
    return artifact.uri.rsplit("/", 1)[1]
