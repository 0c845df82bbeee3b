"""Checkpoints in an object store, through s3fs, against a server on loopback: nothing but whole ones is ever loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import herd.llama3.train.checkpoint.storage as remote
from herd.llama3.train.checkpoint import manager
from herd.llama3.train.checkpoint.dcp import COPIED
from herd.llama3.train.checkpoint.manager import Checkpoints, SaveFailed
from herd.storage.filesystem import filesystem_of
from herd.storage.processes import free_port
from tests.dist import run
from tests.llama3.train.checkpoint_samples import (
    State,
    assert_holds,
    opened,
    resume_and_list,
    resume_with,
    save_with,
)

BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The environment in which s3fs finds the server."""
    moto = pytest.importorskip("moto.server")
    port = free_port()
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port)
    running.start()
    names = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in names.items():
            environment.setenv(name, value)
        environment.setattr("herd.storage.filesystem._filesystem", _uncached(f"http://127.0.0.1:{port}"))
        filesystem_of(f"s3://{BUCKET}").mkdir(BUCKET)
        yield names
    running.stop()


def _uncached(endpoint: str) -> Callable[[str, int], Any]:
    """A file system of this module's server, whatever server another module has used in this process."""
    import fsspec

    def made(protocol: str, pid: int) -> Any:
        if protocol != "s3":
            return fsspec.filesystem(protocol)
        return fsspec.filesystem(protocol, use_listings_cache=False, endpoint_url=endpoint)

    return made


@pytest.fixture
def uri(server: dict[str, str], request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{abs(hash(request.node.name))}"


def store(uri: str, folder: Path, *positions: int, last: int = 9, **more: Any) -> Checkpoints:
    checkpoints = opened(folder, last=last, uri=uri, **more)
    for position in positions:
        checkpoints.save(State(position=position), "main")
    return checkpoints


def load(uri: str, folder: Path) -> tuple[State, tuple[str, ...]]:
    state = State()
    return state, opened(folder, uri=uri).resume(state).skipped


def objects(uri: str) -> list[str]:
    return sorted(filesystem_of(uri).find(uri))


def only(uri: str, position: int, ending: str) -> str:
    """Return the first object of a checkpoint whose name ends so."""
    return next(name for name in objects(f"{uri}/{position:018}") if name.endswith(ending))


def test_saved_and_loaded(uri: str, tmp_path: Path) -> None:
    store(uri, tmp_path, 3, 6)
    state, skipped = load(uri, tmp_path)
    assert skipped == ()
    assert_holds(state.arrays(), 6)
    assert [path for path in (tmp_path / ".staging").rglob("*") if path.is_file()] == []


def test_checkpoints_are_found_without_listing_their_files(
    uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of 16K processes has 65,536 files, which are 66 listings."""
    checkpoints, listed = store(uri, tmp_path, 3, 6), list[str]()
    checkpoints.store.quarantine(checkpoints.store.refs()[0], "why")
    original = remote.list_children
    monkeypatch.setattr(remote, "list_children", lambda folder: listed.append(folder) or original(folder))
    assert checkpoints.positions() == [6]
    assert sorted(listed) == [uri, f"{uri}/{3:018}", f"{uri}/{6:018}"]


def test_an_attempt_that_another_one_followed_commits_nothing_and_ends(uri: str, tmp_path: Path) -> None:
    """Its machine was given up, and was not dead."""
    first, second = (opened(tmp_path / name, uri=uri) for name in ("first", "second"))
    first.resume(State())
    first.save(State(position=3), "main")
    second.resume(State())
    with pytest.raises(remote.SupersededError, match=r"attempt 000002 trains this stage now, .* is number 1"):
        first.save(State(position=6), "main")
    assert not [name for name in objects(uri) if f"{6:018}" in name]
    second.save(State(position=9), "main")
    assert load(uri, tmp_path / "third")[0].position == 9


def test_a_rollback_sets_nothing_aside_once_another_attempt_has_begun_while_it_loads(
    uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = (opened(tmp_path / name, uri=uri) for name in ("first", "second"))
    first.resume(State())
    first.save(State(position=3), "main")
    first.save(State(position=6), "main")
    original = manager.load_state

    def load_state(*arguments: Any, **more: Any) -> None:
        monkeypatch.undo()
        original(*arguments, **more)
        second.resume(State())

    monkeypatch.setattr(manager, "load_state", load_state)
    with pytest.raises(remote.SupersededError):
        first.resume(State(), before=3)
    assert second.positions() == [3, 6]


def flip(uri: str) -> None:
    place = only(uri, 6, "02.safetensors")
    data = bytearray(filesystem_of(uri).cat_file(place))
    data[-1] ^= 1
    filesystem_of(uri).pipe_file(place, bytes(data))


def truncate(uri: str) -> None:
    place = only(uri, 6, "02.safetensors")
    filesystem_of(uri).pipe_file(place, filesystem_of(uri).cat_file(place)[:-1])


DAMAGE: dict[str, tuple[Callable[[str], object], str]] = {
    "flip": (flip, "02.safetensors: has changed since it was written"),
    "truncated": (truncate, "02.safetensors: has "),
    "missing": (lambda uri: filesystem_of(uri).rm_file(only(uri, 6, "01.safetensors")), "01.safetensors: is missing"),
    "extra": (
        lambda uri: filesystem_of(uri).pipe_file(only(uri, 6, "01.safetensors") + "x", b"x"),
        "safetensorsx: is not in the manifest",
    ),
    "manifest": (
        lambda uri: filesystem_of(uri).pipe_file(only(uri, 6, "manifest.json"), b"{}"),
        "manifest.json: is not a manifest",
    ),
}


@pytest.mark.parametrize(
    "damage", ["flip", *(pytest.param(name, marks=pytest.mark.slow) for name in DAMAGE if name != "flip")]
)
@pytest.mark.fault("F3")
def test_damage_is_named_and_marked_and_passed_over(damage: str, uri: str, tmp_path: Path) -> None:
    store(uri, tmp_path, 3, 6)
    do, reason = DAMAGE[damage]
    do(uri)
    state, (told,) = load(uri, tmp_path)
    assert reason in told
    assert_holds(state.arrays(), 3)
    state, skipped = load(uri, tmp_path)  # it is not brought a second time
    assert skipped == ()
    assert_holds(state.arrays(), 3)
    assert filesystem_of(uri).cat_file(only(uri, 6, "damaged.txt")).decode() == told


@pytest.mark.fault("F24")
def test_without_a_manifest_it_is_no_checkpoint(uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store(uri, tmp_path, 3, 6)
    filesystem_of(uri).rm_file(only(uri, 6, "manifest.json"))
    assert store(uri, tmp_path).positions() == [3]
    state, skipped = load(uri, tmp_path)
    assert skipped == ()
    assert_holds(state.arrays(), 3)
    assert objects(f"{uri}/{6:018}"), "its manifest may be stored late"
    monkeypatch.setattr(remote, "LATE_S", -1.0)
    load(uri, tmp_path)
    assert objects(f"{uri}/{6:018}") == [], "a prefix that an earlier attempt left is removed"


def test_a_later_attempt_is_left_alone(uri: str, tmp_path: Path) -> None:
    """Two trainers should not run at once; if they do, none takes the other's files from under it."""
    early = store(uri, tmp_path, 3)
    filesystem_of(uri).pipe_file(f"{uri}/{6:018}/99990101T000000-later-0001/00000-00.safetensors", b"half")
    early.resume(State())
    assert len(objects(f"{uri}/{6:018}")) == 1


def test_two_attempts_at_one_position_leave_two_whole_checkpoints(uri: str, tmp_path: Path) -> None:
    first, second = store(uri, tmp_path / "a"), store(uri, tmp_path / "b")
    state = State(position=6)
    second.save(state, "main")
    state.train_to(7)
    state.position = 6
    first.save(state, "main")  # the earlier attempt commits last, and is deleted as the older of the two
    found, _ = load(uri, tmp_path)
    assert_holds(found.arrays(), 6)
    third = store(uri, tmp_path / "c")
    third.save(State(position=9), "main")
    assert len({name.split("/")[-2] for name in objects(f"{uri}/{6:018}")}) == 1
    assert first.attempt < second.attempt < third.attempt


@pytest.mark.parametrize("uploads", [3, 4, *(pytest.param(count, marks=pytest.mark.slow) for count in (0, 1, 2, 5))])
def test_an_upload_that_breaks_leaves_nothing_to_choose(
    uploads: int, uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The save at 6 breaks after so many requests: four files, the manifest, and the look at what was stored."""
    checkpoints, left = store(uri, tmp_path, 3), uploads

    def counted(name: str) -> None:
        original = getattr(remote, name)

        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise ConnectionError("connection lost")
            return original(*arguments)

        monkeypatch.setattr(remote, name, call)

    counted("put_file")
    counted("put_bytes")
    state = State(position=6)
    if uploads == 5:
        checkpoints.save(state, "main")
        assert checkpoints.positions() == [3, 6]
        return
    with pytest.raises(SaveFailed, match="connection lost"):
        checkpoints.save(state, "main")
    left = 99
    assert checkpoints.positions() == [3]
    assert bool(objects(f"{uri}/{6:018}")) == (uploads == 4), "the manifest may be stored late"
    assert_holds(load(uri, tmp_path)[0].arrays(), 3)
    checkpoints.save(state, "main")
    assert_holds(load(uri, tmp_path)[0].arrays(), 6)


def test_a_commit_that_reads_back_otherwise_is_none(uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoints, filesystem = store(uri, tmp_path, 3), filesystem_of(uri)
    pipe = filesystem.pipe_file

    def lossy(path: str, value: bytes) -> None:
        pipe(path, value[:-1] if path.endswith("manifest.json") else value)

    monkeypatch.setattr(filesystem, "pipe_file", lossy)
    with pytest.raises(SaveFailed, match="holds other bytes than were sent"):
        checkpoints.save(State(position=6), "main")
    assert checkpoints.positions() == [3]


def test_a_bit_that_flips_on_the_way_is_fetched_again(
    uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store(uri, tmp_path, 3)
    flips, get = 1, remote.get_file

    def noisy(place: str, path: Path) -> None:
        nonlocal flips
        get(place, path)
        if place.endswith("01.safetensors") and flips:
            flips = 0
            path.write_bytes(path.read_bytes()[:-1] + b"!")

    monkeypatch.setattr(remote, "get_file", noisy)
    state, skipped = load(uri, tmp_path)
    assert skipped == ()
    assert flips == 0
    assert_holds(state.arrays(), 3)


def test_a_network_that_is_down_condemns_no_checkpoint(
    uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store(uri, tmp_path, 3)

    def down(place: str, path: Path) -> None:
        raise ConnectionError("connection refused")

    with monkeypatch.context() as broken:
        broken.setattr(remote, "get_file", down)
        with pytest.raises(ConnectionError):
            load(uri, tmp_path)
    assert_holds(load(uri, tmp_path)[0].arrays(), 3)


def test_retention_keeps_what_is_pinned_and_deletes_the_manifest_first(
    uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints = store(uri, tmp_path, 3, last=1)
    checkpoints.store.pins.add(3, "alias champion")
    for position in (6, 9):
        checkpoints.save(State(position=position), "main")
    assert checkpoints.positions() == [3, 9]
    checkpoints.store.pins.remove(3, "alias champion")

    def die(prefix: str) -> None:
        raise ConnectionError

    with monkeypatch.context() as broken:
        broken.setattr(remote, "remove_all", die)
        checkpoints.save(State(position=12), "main")
    left = objects(f"{uri}/{3:018}")
    assert left
    assert not [name for name in left if name.endswith("manifest.json")]


def test_two_processes_save_and_one_loads(uri: str, server: dict[str, str], tmp_path: Path) -> None:
    """Files on their way lie in a folder of the machine, which its processes share."""
    assert run(2, save_with, server, tmp_path, [3, 6], uri) == [[3, 6]] * 2
    ((position, skipped, arrays),) = run(1, resume_with, server, tmp_path, uri)
    assert (position, skipped) == (6, ())
    assert_holds(arrays, 6)


def test_a_machine_downloads_what_its_processes_read(uri: str, server: dict[str, str], tmp_path: Path) -> None:
    run(4, save_with, server, tmp_path, [3], uri)
    for rank, (_, on_machine, arrays) in enumerate(run(4, resume_and_list, tmp_path, COPIED, uri, server)):
        assert on_machine == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert_holds(arrays, 3)


def test_what_fails_after_the_download_condemns_no_checkpoint(
    uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store(uri, tmp_path, 3)

    def fail(*arguments: object) -> None:
        raise OSError("disk failed")

    with monkeypatch.context() as broken:
        broken.setattr("herd.llama3.train.checkpoint.dcp.read_file", fail)
        with pytest.raises(RuntimeError, match="disk failed"):
            load(uri, tmp_path)
    assert_holds(load(uri, tmp_path)[0].arrays(), 3)


def test_a_path_is_not_a_uri(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the URI of an object store"):
        opened(tmp_path, uri=str(tmp_path))
