"""Downloads of remote addresses: the same bytes and listings as the store has, whatever happens on the way."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from herd.storage import fetch, filesystem
from herd.storage.fetch import FetchRefused, Target, check_space, download, missing_bytes, prepare
from herd.storage.filesystem import (
    FETCHED,
    RedirectRefused,
    StoreError,
    check_redirect,
    filesystem_of,
    list_files,
    source_state,
)
from tests.storage.fault_proxy import Rule
from tests.storage.fault_world import before_moto
from tests.storage.hub import MODEL, TOKEN, Hub, stand_in_hub

DATA = "hf://datasets/people/words/data/*"
BIG = b"".join(b"line %09d of a large file\n" % number for number in range(8_000))  # four writes
FILES = {
    "data/a.parquet": BIG,
    "data/b.jsonl": b'{"text": "b"}\n' * 300,
    "data/c.txt": b"c",
    "data/deep/d.txt": b"d\n",
    "data/empty.txt": b"",
    "README.md": b"words\n",
}


@pytest.fixture(scope="module")
def running() -> Iterator[Hub]:
    with stand_in_hub() as hub:
        yield hub


@pytest.fixture
def hub(running: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.delenv(FETCHED, raising=False)
    monkeypatch.setattr(fetch, "CHUNK", 1 << 16)
    running.repositories = {"datasets/people/words": dict(FILES), MODEL: {"config.json": b"{}", "w.safetensors": BIG}}
    running.history, running.headers = {}, {}
    running.gated = running.open = False
    running.at_request = lambda number: None
    running.use()
    return running


def get(
    folder: Path, uri: str = DATA, update: bool = False, jobs: int = 3, progress: Any = lambda count: None
) -> Target:
    """Download all files of `uri`."""
    target = prepare(folder, uri, lambda listed: [name for name, _ in listed], update)
    download(folder, [target], jobs, progress)
    return target


def contents(uri: str) -> dict[str, bytes]:
    return {name: filesystem_of(name).cat_file(name) for name, _ in list_files(uri)}


@contextmanager
def copies(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FETCHED, str(folder))
        yield


@pytest.mark.parametrize(
    "uri",
    [
        DATA,
        "hf://datasets/people/words",
        "hf://datasets/people/words@main/data/**",
        "hf://datasets/people/words@COMMIT/data/b.jsonl",
        "hf://people/weights",
        "hf://models/people/weights@main/*.json",
    ],
)
def test_copies_are_listed_and_read_as_the_hub_would_be(hub: Hub, tmp_path: Path, uri: str) -> None:
    uri = uri.replace("COMMIT", hub.commit())
    state, bytes_there = source_state(uri), contents(uri)
    assert bytes_there
    get(tmp_path, uri)
    hub.use()
    with copies(tmp_path):
        assert source_state(uri) == state
        assert contents(uri) == bytes_there
        for name, data in bytes_there.items():
            assert source_state(name) == [[name, len(data), version] for [n, _, version] in state if n == name]
            assert filesystem_of(name).cat_file(name, start=1, end=5) == data[1:5]
            filesystem_of(name).get_file(name, str(tmp_path / "one"))
            assert (tmp_path / "one").read_bytes() == data
    assert hub.log == []
    assert not list(tmp_path.glob(".partial/*"))
    assert not list(tmp_path.glob(".pending/*"))


FAULTS = ("cut", "short", "reset", "html", 500, 429, 403)


@pytest.mark.parametrize(
    ("fault", "step"), [("cut", 4), *(pytest.param(fault, 1, marks=pytest.mark.slow) for fault in FAULTS)]
)
def test_a_fault_at_any_request_costs_a_request_or_names_itself(
    hub: Hub, tmp_path: Path, fault: int | str, step: int
) -> None:
    get(tmp_path / "whole")
    requests, state, there, failed = len(hub.log), source_state(DATA), contents(DATA), 0
    for number in range(1, requests + 1, step):
        hub.use(fault, first=number)
        if fault == 403:  # the Hub refuses; a store behind it may only have lost patience with a signed address
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fetch, "TRIES", 2)
                with suppress(FetchRefused):
                    get(tmp_path / f"once-{number}", jobs=1)
        else:
            get(tmp_path / f"once-{number}", jobs=1)
        hub.use(fault, first=number, times=10**6)
        folder = tmp_path / f"always-{number}"
        try:
            get(folder, jobs=1)
        except (StoreError, FetchRefused) as error:
            message = str(error)
            assert DATA[:26] in message
            assert TOKEN not in message
            assert "Signature=secret" not in message
            assert not list(folder.glob("listings/*"))
            failed += 1
        hub.use()
        get(folder)
        with copies(folder):
            assert (source_state(DATA), contents(DATA)) == (state, there)
    assert failed > requests // step // 3


def test_wrong_bytes_never_become_a_copy(hub: Hub, tmp_path: Path) -> None:
    """A flipped bit of a file with a SHA-256 and of one with a blob id; a file longer than listed."""
    for uri, fault, message in (
        ("hf://datasets/people/words/data/a.parquet", "flip", "do not have the stated sha256:"),
        ("hf://datasets/people/words/data/b.jsonl", "flip", "do not have the stated git:"),
        ("hf://datasets/people/words/data/b.jsonl", "longer", "4,201 bytes, its store lists 4,200"),
    ):
        hub.use()
        folder = tmp_path / f"{fault}-{uri[-7:]}"
        prepare(folder, uri, lambda listed: [], False)
        hub.use(fault, first=len(hub.log) + 1, times=10**6)
        with pytest.raises(StoreError, match=message):
            get(folder, uri)
        assert not [path for path in folder.glob("hf/**/*") if path.is_file()]
        hub.use()
        get(folder, uri)
        assert [path for path in folder.glob("hf/**/*") if path.is_file()]


def stopped(count: int) -> None:
    raise KeyboardInterrupt


def killed(work: Callable[[], object]) -> int:
    """Do `work` in a fork that something kills; return its exit code."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_request_it_goes_on(hub: Hub, tmp_path: Path, step: int) -> None:
    get(tmp_path / "whole")
    requests, there = len(hub.log), contents(DATA)
    ends = []
    for number in range(1, requests + 1, step):
        folder, pids = tmp_path / str(number), list[int]()

        def kill(request: int, number: int = number, pids: list[int] = pids) -> None:
            if request == number:
                while not pids:
                    time.sleep(0.001)
                os.kill(pids[0], signal.SIGKILL)

        hub.use()
        hub.at_request = kill
        process = multiprocessing.get_context("fork").Process(target=get, args=(folder,), kwargs={"jobs": 2})
        process.start()
        pids.append(process.pid or 0)
        process.join(60)
        ends.append(process.exitcode)
        hub.at_request = lambda number: None
        assert not list(folder.glob("listings/*"))
        get(folder)
        with copies(folder):
            assert contents(DATA) == there
    assert set(ends) == {-signal.SIGKILL}


def test_a_killed_file_goes_on_at_its_last_byte(hub: Hub, tmp_path: Path) -> None:
    uri, received = "hf://datasets/people/words/data/a.parquet", list[int]()

    def kill(count: int) -> None:
        received.append(count)
        if len(received) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    assert killed(lambda: get(tmp_path, uri, progress=kill)) == -signal.SIGKILL
    (partial_copy,) = tmp_path.glob(".partial/*")
    begun = partial_copy.stat().st_size
    assert 0 < begun < len(BIG)
    hub.use()
    target = prepare(tmp_path, uri, lambda listed: [name for name, _ in listed], False)
    assert missing_bytes(tmp_path, [target]) == len(BIG) - begun
    get(tmp_path, uri, progress=received.append)
    assert hub.ranges == [f"bytes={begun}-"] * 2  # the Hub, and the store that it leads to
    assert sum(received) == len(BIG) - begun
    with copies(tmp_path):
        assert contents(uri) == {uri: BIG}


def test_a_revision_stays_until_it_is_asked_to_move(hub: Hub, tmp_path: Path) -> None:
    first = get(tmp_path)
    old = source_state(DATA)
    hub.files["data/b.jsonl"] = b'{"text": "new"}\n'
    hub.files["data/e.txt"] = b"e"
    hub.use()
    again = prepare(tmp_path, DATA, lambda listed: [name for name, _ in listed], False)
    assert (again.commit, again.newer_commit, again.missing) == (first.commit, hub.commit(), [])
    with copies(tmp_path):
        assert source_state(DATA) == old
    hub.use()
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, update=True, progress=stopped)
    with copies(tmp_path):
        assert source_state(DATA) == old
    newer = get(tmp_path, update=True)
    assert newer.commit == hub.commit()
    assert {line.rpartition("/")[2] for line in hub.log if "/resolve/" in line} == {"b.jsonl", "e.txt"}
    with copies(tmp_path):
        new = source_state(DATA)
        assert [state[0] for state in new if state not in old] == [DATA[:-1] + name for name in ("b.jsonl", "e.txt")]
        assert contents(DATA)["hf://datasets/people/words/data/e.txt"] == b"e"
    same = [next(tmp_path.glob(f"hf/**/words@{commit[:12]}/data/a.parquet")) for commit in (first.commit, newer.commit)]
    assert same[0].samefile(same[1])


def test_a_repository_is_at_one_commit_for_all_addresses(hub: Hub, tmp_path: Path) -> None:
    file_uri, both = "hf://datasets/people/words/data/b.jsonl", "hf://datasets/people/words/data/*.jsonl"
    first = get(tmp_path, both)
    hub.files["data/b.jsonl"] = b"newer"
    assert get(tmp_path, file_uri).commit == first.commit
    time.sleep(1)  # the newest wins, by the second
    assert get(tmp_path, file_uri, update=True).commit == hub.commit()
    with copies(tmp_path):
        assert contents(file_uri) == {file_uri: b"newer"}
        with pytest.raises(StoreError, match=r"b\.jsonl of another revision; run herd fetch --update"):
            list_files(both)
        get(tmp_path, both, update=True)
        assert contents(both) == {file_uri: b"newer"}


def test_a_branch_that_moves_while_it_is_read_gives_one_commit(hub: Hub, tmp_path: Path) -> None:
    commit = hub.commit()

    def move(number: int) -> None:
        if number == 3:
            hub.files = {"data/other.txt": b"other"}

    hub.at_request = move
    assert get(tmp_path).commit == commit
    with copies(tmp_path):
        assert contents(DATA)["hf://datasets/people/words/data/b.jsonl"] == FILES["data/b.jsonl"]


def test_what_the_hub_refuses_is_said_with_the_remedy(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = f"{hub.endpoint}/datasets/people/words"
    for uri, message in (
        (DATA.replace("words", "wrods"), f"shows no such repository to you; .*{hub.endpoint}/datasets/people/wrods"),
        (DATA.replace("words", "words@v9"), "has no revision v9"),
        (DATA.replace("*", "absent.txt"), "matches no file"),
        ("hf://people", "write hf://datasets/OWNER/NAME"),
    ):
        with pytest.raises(FetchRefused, match=message):
            get(tmp_path, uri)
    hub.gated = True
    with pytest.raises(FetchRefused, match=f"is gated; accept its terms at {page} and wait until its owner accepts"):
        get(tmp_path)
    hub.at_request = lambda number: hub.history.clear() if "/resolve/" in hub.log[-1] else None
    hub.gated = False
    with pytest.raises(FetchRefused, match=r"has no revision main .any more.*--update"):
        get(tmp_path / "gone", jobs=1)
    hub.at_request = lambda number: None
    monkeypatch.setattr(filesystem.remote_filesystem(DATA), "token", False)
    hub.gated = True
    with pytest.raises(FetchRefused, match=f"accept its terms at {page} and set HF_TOKEN"):
        get(tmp_path / "new")


def test_a_rate_limit_is_waited_for_and_a_long_one_is_named(hub: Hub, tmp_path: Path) -> None:
    get(tmp_path / "whole", jobs=1)
    first = next(number for number, line in enumerate(hub.log, 1) if "/resolve/" in line)
    for headers in ({"Retry-After": "1"}, {"RateLimit": '"resolvers";r=0;t=1'}):
        hub.use(429, first=first)
        hub.headers, began = headers, time.monotonic()
        get(tmp_path / next(iter(headers)), jobs=1)
        assert time.monotonic() - began >= 1
    hub.use(429, first=first, times=10**6)
    hub.headers = {"Retry-After": "7200"}
    with pytest.raises(StoreError, match=r"429.*it asks for a pause of 7,200 s"):
        get(tmp_path / "quota", jobs=1)
    hub.use()
    get(tmp_path / "quota")


def test_a_file_of_two_addresses_comes_once(hub: Hub, tmp_path: Path) -> None:
    uris = (DATA, f"{DATA[:-1]}a.parquet", f"{DATA[:-1]}**")
    targets = [prepare(tmp_path, uri, lambda listed: [name for name, _ in listed], False) for uri in uris]
    assert missing_bytes(tmp_path, targets) == sum(len(data) for name, data in FILES.items() if name != "README.md")
    download(tmp_path, targets, 4, lambda count: None)
    assert sum("/resolve/" in line and line.endswith("a.parquet") for line in hub.log) == 1
    with copies(tmp_path):
        assert all(contents(uri)[uris[1]] == BIG for uri in uris)


@pytest.mark.slow
def test_two_at_once_download_each_file_once(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("herd.storage.filesystem.HUB_ANSWER_S", 20)  # two processes on a busy machine
    hub.at_request = lambda number: time.sleep(0.02)  # so that both have begun

    def work(number: int) -> None:
        try:
            get(tmp_path / "copies")
        except BaseException:
            (tmp_path / f"{number}.txt").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)  # without what other tests of this process do at its exit

    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=work, args=(number,)) for number in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0], [path.read_text() for path in tmp_path.glob("*.txt")]
    assert sum("/resolve/" in line and line.endswith("a.parquet") for line in hub.log) == 1
    with copies(tmp_path / "copies"):
        assert contents(DATA)[f"{DATA[:-1]}a.parquet"] == BIG


def test_a_killed_first_download_goes_on_at_its_commit(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, progress=stopped)
    commit = hub.commit()
    hub.files["data/b.jsonl"] = b"newer"
    assert get(tmp_path).commit == commit
    with copies(tmp_path):
        assert contents(DATA)[f"{DATA[:-1]}b.jsonl"] == FILES["data/b.jsonl"]


def test_a_listing_cannot_name_files_outside(hub: Hub, tmp_path: Path) -> None:
    hub.files["data/../../../../evil.txt"] = b"evil"
    with pytest.raises(FetchRefused, match="is not a name below a folder"):
        get(tmp_path / "copies", "hf://datasets/people/words")
    assert not list(tmp_path.rglob("evil*"))


def test_a_copy_that_is_lost_is_named_and_comes_again(hub: Hub, tmp_path: Path) -> None:
    get(tmp_path)
    (copy,) = tmp_path.glob("hf/**/b.jsonl")
    for damage in (copy.unlink, lambda: copy.write_bytes(b"short")):
        damage()
        with copies(tmp_path), pytest.raises(StoreError, match=r"b\.jsonl: its fetched copy .* is missing or damaged"):
            list_files(DATA)
        get(tmp_path)
        with copies(tmp_path):
            assert contents(DATA)["hf://datasets/people/words/data/b.jsonl"] == FILES["data/b.jsonl"]


@pytest.mark.fault("F6")
def test_a_full_disk_is_named_before_and_survived_in_the_middle(hub: Hub, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        target = prepare(disk, DATA, lambda listed: [name for name, _ in listed], False)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        lacking = missing_bytes(disk, [target]) - free
        with pytest.raises(FetchRefused, match=f"{free:,} are free, {lacking:,} too few"):
            check_space(disk, [target])
        with pytest.raises(OSError, match="No space left on device"):
            download(disk, [target], 2, lambda count: None)
        assert not list(disk.glob("listings/*"))
        subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
        hub.use()
        get(disk)
        assert hub.ranges  # what had come was not asked for again
        with copies(disk):
            assert contents(DATA)["hf://datasets/people/words/data/a.parquet"] == BIG
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_file_size_limit_is_a_full_disk_too(hub: Hub, tmp_path: Path) -> None:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            get(tmp_path, jobs=1)
        except OSError as error:
            os._exit(error.errno or 0)

    assert killed(limited) in fetch.FULL
    get(tmp_path)
    with copies(tmp_path):
        assert contents(DATA)["hf://datasets/people/words/data/a.parquet"] == BIG


# Object stores.


def test_objects_are_copied_and_read_without_their_store(bucket: str, tmp_path: Path) -> None:
    store, uri = filesystem_of(bucket), f"{bucket}/text/*.jsonl"
    for name, data in (("a", BIG), ("b", b"b\n")):
        store.pipe_file(f"{bucket}/text/{name}.jsonl", data)
    state = source_state(uri)
    get(tmp_path, uri)
    for name in "ab":
        store.rm_file(f"{bucket}/text/{name}.jsonl")
    with copies(tmp_path):
        assert source_state(uri) == state
        assert list(contents(uri).values()) == [BIG, b"b\n"]


def test_an_object_that_changes_while_it_comes_begins_again(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, uri, newer = filesystem_of(bucket), f"{bucket}/moving/a.jsonl", BIG.upper() + b"more"
    store.pipe_file(uri, BIG)
    monkeypatch.setattr(fetch, "PIECE", 1 << 16)
    received = list[int]()

    def change(count: int) -> None:
        received.append(count)
        if len(received) == 1:
            store.pipe_file(uri, newer)

    get(tmp_path, uri, progress=change)
    state = source_state(uri)
    with copies(tmp_path):
        assert (source_state(uri), contents(uri)) == (state, {uri: newer})
    assert sum(received) == len(newer)


def test_a_store_that_sends_nothing_is_given_up(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, ranges_sent = f"{bucket}/silent/a.jsonl", list[int]()
    filesystem_of(uri).pipe_file(uri, BIG)

    def nothing(file: Any, begin: int) -> Iterator[bytes]:
        ranges_sent.append(begin)
        assert len(ranges_sent) < 20, "it asks without end"
        yield b""

    monkeypatch.setattr(fetch, "_get_object", nothing)
    monkeypatch.setattr(fetch, "TRIES", 2)
    with pytest.raises(StoreError, match=r"a\.jsonl: StoreError: the store sends no more bytes \(2 tries\)"):
        get(tmp_path, uri)
    assert ranges_sent == [0, 0]


@pytest.mark.slow
def test_faults_on_the_way_to_a_bucket_end_in_the_object(
    moto_endpoint: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "PIECE", 1 << 16)  # a range of an object has no checksum
    with before_moto(moto_endpoint) as proxy:
        uri = f"{proxy.uri}/set/a.jsonl"
        filesystem_of(uri).pipe_file(uri, BIG)
        for fault in ("flip", "slow-down", "reset-in-body", "truncate"):
            proxy.use(Rule(fault, method="GET", path="a.jsonl", times=2))
            get(tmp_path / fault, uri)
            assert proxy.rules[0].done == 2
            with copies(tmp_path / fault):
                assert contents(uri) == {uri: BIG}
        proxy.use(Rule("flip", method="GET", path="a.jsonl", times=None))
        with pytest.raises(StoreError, match=r"do not have the stated md5:"):
            get(tmp_path / "wrong", uri)
        assert not list(tmp_path.glob("wrong/s3/**/*.jsonl"))


# Plain servers.


@contextmanager
def web(ranges: bool, etag: bool) -> Iterator[SimpleNamespace]:
    """Serve `files` by path; `cut`: how many of the next bodies end after half; `change` runs after such a cut.

    `moved`: where a request (method, path) is sent.
    """
    state = SimpleNamespace(
        files={}, cut=0, change=lambda: None, ranges_sent=[], kind="application/octet-stream", url="", moved={}
    )

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = state.files.get(self.path)
            if location := state.moved.get((self.command, self.path)):
                self.send_response(302)
                self.send_header("Location", location)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if data is None:
                self.send_error(404)
                return
            tag, begin, range_header = f'"{hash(data)}"', 0, self.headers.get("Range", "")
            if self.command == "GET":
                state.ranges_sent.append(range_header)
            if ranges and range_header and self.headers.get("If-Range", tag) == tag:
                begin = int(range_header.removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if begin else 200)
            self.send_header("Content-Type", state.kind)
            self.send_header("Content-Length", str(len(data) - begin))
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            if etag:
                self.send_header("ETag", tag)
            self.end_headers()
            if self.command == "GET" and state.cut:
                state.cut -= 1
                self.wfile.write(data[begin : begin + (len(data) - begin) // 2])
                self.close_connection = True
                state.change()
            elif self.command == "GET":
                self.wfile.write(data[begin:])

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("ranges", "etag"), [(True, True), (False, True), (True, False)])
def test_a_web_server_is_read_on_if_it_can_and_from_the_start_if_not(
    hub: Hub, tmp_path: Path, ranges: bool, etag: bool
) -> None:
    with web(ranges, etag) as server:
        uri = f"{server.url}/set/a.jsonl"
        server.files["/set/a.jsonl"] = BIG
        state = source_state(uri)
        server.cut = 2
        get(tmp_path, uri)
        assert [bool(range_header) for range_header in server.ranges_sent] == [False, etag, etag]
        newer = BIG.upper()
        server.cut, server.change = 1, lambda: server.files.update({"/set/a.jsonl": newer})
        server.ranges_sent.clear()
        if etag:
            get(tmp_path / "changed", uri)
            with copies(tmp_path / "changed"):
                assert contents(uri) == {uri: newer}
    with copies(tmp_path):
        assert (source_state(uri), contents(uri)) == (state, {uri: BIG})


def test_a_login_page_is_not_a_file(hub: Hub, tmp_path: Path) -> None:
    with web(True, True) as server:
        server.files["/a.jsonl"] = b"<html>log in</html>"
        server.kind = "text/html; charset=utf-8"
        with pytest.raises(FetchRefused, match="an HTML page"):
            get(tmp_path, f"{server.url}/a.jsonl")
        with pytest.raises(FetchRefused, match="matches no file"):
            get(tmp_path, f"{server.url}/absent.jsonl")
    assert not list(tmp_path.rglob("*.jsonl"))


INSIDE = "http://169.254.169.254/latest/meta-data/a.jsonl"


@pytest.mark.parametrize("methods", [("HEAD", "GET"), ("GET",)])
def test_a_server_cannot_lead_to_an_address_inside(hub: Hub, tmp_path: Path, methods: tuple[str, ...]) -> None:
    """Also one that does so only for the content."""
    with web(True, True) as server:
        uri = f"{server.url}/a.jsonl"
        server.files["/a.jsonl"] = server.files["/b.jsonl"] = BIG
        server.moved = {(method, "/a.jsonl"): "/b.jsonl" for method in ("HEAD", "GET")}
        assert contents(uri) == {uri: BIG}  # its own
        server.moved |= {(method, "/a.jsonl"): INSIDE for method in methods}
        for read in (lambda: get(tmp_path, uri), lambda: contents(uri)):
            with pytest.raises(RedirectRefused, match=r"redirects to http://169\.254\.169\.254/latest"):
                read()
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("address", "location", "refused"),
    [
        ("http://93.184.215.14/a", "http://127.0.0.1:4200/", True),
        ("http://93.184.215.14/a", "http://localhost/", True),
        ("http://93.184.215.14/a", "http://[::1]/", True),
        ("http://93.184.215.14/a", "http://[::ffff:10.0.0.1]/", True),
        ("http://93.184.215.14/a", "//192.168.0.9/x", True),
        ("http://93.184.215.14/a", "http://[fd00:ec2::254]/", True),
        ("http://93.184.215.14/a", "http://0.0.0.0/", True),
        ("http://93.184.215.14/a", "http://2130706433/", True),
        ("http://10.0.0.1/a", "http://169.254.169.254/", True),
        ("http://10.0.0.1/a", "http://127.0.0.1/", True),
        ("http://10.0.0.1/a", "http://10.0.0.2/b", False),
        ("http://127.0.0.1/a", "https://93.184.215.14/b", False),
        ("http://93.184.215.14/a", "https://93.184.215.15/b", False),
        ("http://93.184.215.14/a", "/b", False),
    ],
)
def test_a_redirect_never_leads_to_a_more_private_place(address: str, location: str, refused: bool) -> None:
    with pytest.raises(RedirectRefused, match="name that address itself") if refused else nullcontext():
        check_redirect(address, location)
