"""Small objects and bounded waits, through s3fs, against moto on loopback and a server that never answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from herd.storage.filesystem import StoreTimeout, filesystem_of
from herd.storage.objects import (
    create_bytes,
    get_bytes,
    get_file,
    list_children,
    list_objects,
    list_objects_in,
    put_bytes,
    put_file,
    remove,
    remove_all,
    size_of,
)
from herd.storage.processes import parallel_map
from tests.storage.fault_proxy import FaultProxy, Rule
from tests.storage.s3 import PAGE, environment, pointed_at


@pytest.fixture
def uri(proxy: FaultProxy, tmp_path: Path) -> str:
    proxy.use()
    return f"{proxy.uri}/{tmp_path.name}"


def test_objects_come_and_go(uri: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    put_file(tmp_path / "file", f"{uri}/a")
    put_bytes(f"{uri}/deep/b", b"12")
    put_bytes(f"{uri}/deep.json", b"123")
    assert list_children(uri) == {"a": 5, "deep": 0, "deep.json": 3}
    assert {name: stored.bytes for name, stored in list_objects(uri).items()} == {"a": 5, "deep/b": 2, "deep.json": 3}
    assert list(list_objects_in(uri, "deep")) == ["deep.json"]
    assert abs(list_objects(uri)["a"].modified - time.time()) < 60
    assert (size_of(f"{uri}/a"), size_of(f"{uri}/deep"), size_of(f"{uri}/b")) == (5, None, None)
    get_file(f"{uri}/a", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"12345"
    for _ in range(2):
        remove(f"{uri}/a")
        remove_all(f"{uri}/deep")
    assert list_children(uri) == {"deep.json": 3}, "a name that begins alike stays"
    assert list_objects(f"{uri}/none") == list_children(f"{uri}/none") == {}
    with pytest.raises(FileNotFoundError):
        get_file(f"{uri}/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_listings_of_several_pages_are_whole(proxy: FaultProxy, uri: str) -> None:
    names = [f"web-{number:08x}.json" for number in range(PAGE + 3)]
    filesystem_of(uri).pipe({f"{uri}/{name}": b"{}" for name in names})
    proxy.use()
    assert list(list_objects_in(uri, "web-")) == names
    assert len(proxy.log) == 2
    assert len(list_objects_in(uri, "web-0000001")) == 16
    assert list(list_children(uri)) == list(list_objects(uri)) == names
    remove_all(uri)
    assert list_children(uri) == {}


def test_what_another_process_wrote_is_seen_at_once(uri: str) -> None:
    assert list_children(uri) == {}
    other = filesystem_of(uri).__class__(skip_instance_cache=True)
    other.pipe_file(f"{uri}/new", b"1")
    assert list_children(uri) == {"new": 1}
    assert filesystem_of(uri).exists(f"{uri}/new")


def test_of_writers_that_create_the_same_one_wins(uri: str) -> None:
    for number in range(3):
        names = [b"writer %d" % n for n in range(8)]
        won = parallel_map(lambda data, number=number: create_bytes(f"{uri}/{number}", data), names, 8)
        assert [name for name, mine in zip(names, won, strict=True) if mine] == [get_bytes(f"{uri}/{number}")]
    assert create_bytes(f"{uri}/0", get_bytes(f"{uri}/0")), "our own, stored before the reply was lost"


@pytest.mark.parametrize("fault", ["drop-reply", "reset", "error", "slow-down", "unavailable"])
def test_creating_survives_a_bad_moment(proxy: FaultProxy, uri: str, fault: Any) -> None:
    (rule,) = proxy.use(Rule(fault, "PUT", times=4 if fault != "drop-reply" else 1))
    assert create_bytes(f"{uri}/{fault}", b"me")
    assert rule.done in (1, 4)
    assert not create_bytes(f"{uri}/{fault}", b"you")


def test_one_lost_size_or_flipped_bit_of_an_answer_is_no_failure(proxy: FaultProxy, uri: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with pointed_at({"HERD_S3_CHECKSUMS": "when_required"}):
        for fault in ("no-size", "size-0"):
            (lost,) = proxy.use(Rule(fault, "HEAD"))  # type: ignore[arg-type]
            put_file(tmp_path / "file", f"{uri}/{fault}")
            assert lost.done == 1
        for flips in (1, 2):  # of two in a row, equal ones: what is stored is sent again
            (flipped,) = proxy.use(Rule("flip", "GET", times=flips))
            put_bytes(f"{uri}/bytes", b"me")
            assert flipped.done == flips
        (flipped,) = proxy.use(Rule("flip", "GET"))
        assert create_bytes(f"{uri}/created", b"me")
        assert flipped.done == 1
        proxy.use()
        assert not create_bytes(f"{uri}/created", b"you")


DENIED: dict[str, tuple[str, str, Callable[[str, Path], object]]] = {
    "ListBucket": ("GET", "list-type", lambda uri, path: list_children(uri)),
    "GetObject": ("GET|HEAD", "", lambda uri, path: get_bytes(f"{uri}/a")),
    "PutObject": ("PUT", "", lambda uri, path: put_bytes(f"{uri}/b", b"b")),
    "DeleteObject": ("DELETE|POST", "", lambda uri, path: remove_all(f"{uri}/a")),
}


@pytest.mark.parametrize("right", DENIED)
def test_a_right_that_is_missing_is_named_with_its_object(
    proxy: FaultProxy, uri: str, tmp_path: Path, right: str
) -> None:
    put_bytes(f"{uri}/a", b"a")
    method, query, call = DENIED[right]
    proxy.use(Rule("denied", method=method, query=query, times=None))
    with pytest.raises(PermissionError, match=f"its key needs s3:{right} here") as caught:
        call(uri, tmp_path)
    proxy.use()
    assert str(caught.value.filename).startswith(proxy.uri)
    assert get_bytes(f"{uri}/a") == b"a"


def test_a_size_that_stays_wrong_is_an_error(proxy: FaultProxy, uri: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (lost,) = proxy.use(Rule("size-0", "HEAD", times=None))
    with pytest.raises(OSError, match="0 bytes are stored, 5 were sent, 3 times"):
        put_file(tmp_path / "file", f"{uri}/file")
    assert lost.done == 9


def test_creating_a_file_is_exclusive_too(tmp_path: Path) -> None:
    assert create_bytes(f"{tmp_path}/deep/a", b"me")
    assert not create_bytes(f"{tmp_path}/deep/a", b"you")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a"]
    assert (tmp_path / "deep" / "a").read_bytes() == b"me"


CALLS: dict[str, Callable[[str, Path], object]] = {
    "get": lambda uri, path: get_bytes(f"{uri}/x"),
    "put": lambda uri, path: put_bytes(f"{uri}/x", b"1"),
    "create": lambda uri, path: create_bytes(f"{uri}/x", b"1"),
    "list": lambda uri, path: list_children(uri),
    "find": lambda uri, path: list_objects(uri),
    "remove": lambda uri, path: remove(f"{uri}/x"),
    "remove all": lambda uri, path: remove_all(uri),
    "put file": lambda uri, path: put_file(path, f"{uri}/x"),
    "get file": lambda uri, path: get_file(f"{uri}/x", path),
    "open": lambda uri, path: filesystem_of(uri).open(f"{uri}/x").read(),
    "glob": lambda uri, path: filesystem_of(uri).glob(f"{uri}/*"),
    "exists": lambda uri, path: filesystem_of(uri).exists(f"{uri}/x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_never_answers_is_given_up(call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The deadline is below all other limits here; the test's own limit is what fails if nothing bounds the call."""
    (tmp_path / "file").write_bytes(b"1")
    monkeypatch.setenv("HERD_S3_DEADLINE_S", "0.2")
    message = r"s3://nowhere.* within 0\.2 s; check that it is up .*HERD_S3_DEADLINE_S"
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pointed_at(environment(f"http://127.0.0.1:{silent.getsockname()[1]}")),
        pytest.raises(StoreTimeout, match=message),
    ):
        CALLS[call]("s3://nowhere/at/all", tmp_path / "file")


@pytest.mark.parametrize("text", ["soon", "0", "-1"])
def test_a_deadline_that_is_none_is_refused(text: str) -> None:
    message = f"HERD_S3_DEADLINE_S: '{text}' is not a number of seconds above 0"
    with pointed_at({"HERD_S3_DEADLINE_S": text}), pytest.raises(ValueError, match=message):
        filesystem_of("s3://bucket")


def test_checksums_in_trailers_can_be_switched_off(uri: str) -> None:
    with pointed_at({"HERD_S3_CHECKSUMS": "when_required"}):
        filesystem_of(uri).connect()
        assert filesystem_of(uri).s3.meta.config.request_checksum_calculation == "when_required"
        put_bytes(f"{uri}/plain", b"1")


def test_an_answer_with_a_flipped_bit_is_asked_for_again(proxy: FaultProxy, uri: str, tmp_path: Path) -> None:
    """Checksums that come with an answer are checked, and the caller sees nothing of it."""
    put_bytes(f"{uri}/bytes", b"12345")
    (flipped,) = proxy.use(Rule("flip", "GET"))
    assert get_bytes(f"{uri}/bytes") == b"12345"
    assert flipped.done == 1
    (flipped,) = proxy.use(Rule("flip", "GET"))
    get_file(f"{uri}/bytes", tmp_path / "back")
    assert ((tmp_path / "back").read_bytes(), flipped.done) == (b"12345", 1)
