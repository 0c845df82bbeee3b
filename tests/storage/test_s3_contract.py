"""What our storage code relies on of an S3 server, checked on each that we test with; what one lacks is listed here.

A gap is an expected failure with its reason, and a gap that has closed fails the test: the list is exact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from botocore.exceptions import ClientError

from herd.storage.filesystem import filesystem_of
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
)
from tests.storage import s3
from tests.storage.fault_world import restless
from tests.storage.s3_servers import Server, mortal_swift, moto, openstack_swift

MIB = 2**20


class Gap(NamedTuple):
    reason: str
    always: bool = True
    """False: a race that is not lost every time."""


GAPS: dict[str, dict[str, Gap]] = {
    "moto": {
        "test_a_wrong_secret_is_refused": Gap("believes every signature"),
        "test_a_wrong_digest_of_the_body_is_refused": Gap("compares no Content-MD5"),
    },
    "swift": {
        "test_a_stored_checksum_comes_back_with_the_object": Gap("stores no checksums: a flipped bit is not noticed"),
        "test_a_race_of_exclusive_creates_has_one_winner": Gap("the condition is not atomic: 1 to 4 of 16", False),
        "test_put_if_match": Gap("501 Not Implemented"),
    },
}
"""Server -> test -> what it does not do. Nothing of ours may rest on these."""


@pytest.fixture(scope="module", params=["moto", pytest.param("swift", marks=pytest.mark.slow)])
def running(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "moto":
        context: AbstractContextManager[Server] = moto(request.getfixturevalue("moto_endpoint"))
    else:
        swift = request.getfixturevalue("swift_of_run")
        context = nullcontext(openstack_swift(swift["endpoint"], Path(swift["folder"])))
    with context as server, s3.pointed_at(server.variables), restless():
        yield server


on_both = pytest.mark.parametrize("running", list(GAPS), indirect=True)
"""Runs a test that moto cannot pass on Swift as well, not only in `make test-all`."""


@pytest.fixture
def server(running: Server, request: pytest.FixtureRequest) -> Server:
    gap = GAPS[running.name].get(request.function.__name__)
    if gap:
        reason = f"{running.name}: {gap.reason}"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=gap.always, raises=(AssertionError, ClientError)))
    return running


def refused(call: Callable[..., Any], **arguments: Any) -> int:
    """Return the HTTP status with which a request is refused, 0 if it is not."""
    try:
        call(**arguments)
    except ClientError as error:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
    return 0


def test_every_gap_names_a_test() -> None:
    assert {name for gaps in GAPS.values() for name in gaps} <= set(globals())


# What storage/objects.py offers


def test_files_and_bytes_come_back_as_they_were(server: Server, tmp_path: Path) -> None:
    uri, _ = server.fresh()
    sent = os.urandom(3 * MIB)
    (tmp_path / "sent").write_bytes(sent)
    put_file(tmp_path / "sent", f"{uri}/file")
    get_file(f"{uri}/file", tmp_path / "came")
    assert (tmp_path / "came").read_bytes() == sent
    put_bytes(f"{uri}/bytes", sent[:1000])
    put_bytes(f"{uri}/bytes", sent[:999])
    assert get_bytes(f"{uri}/bytes") == sent[:999]


def test_a_file_of_several_parts_comes_back_as_it_was(server: Server, tmp_path: Path) -> None:
    uri, key = server.fresh()
    block = os.urandom(MIB)
    with (tmp_path / "sent").open("wb") as file:
        for number in range(11):  # in three parts: see `restless`
            file.write(number.to_bytes(4, "big") + block[4:])
    put_file(tmp_path / "sent", f"{uri}/big")
    for number in (0, 4, 5, 10):
        at = number * MIB
        assert (
            filesystem_of(uri).cat_file(f"{uri}/big", start=at, end=at + MIB) == number.to_bytes(4, "big") + block[4:]
        )
    etag = server.client.head_object(Bucket=server.bucket, Key=f"{key}/big")["ETag"]
    assert etag.strip('"').endswith("-3"), "it was not sent in parts"
    remove_all(uri)


def test_ranges_are_the_bytes_that_were_asked_for(server: Server) -> None:
    uri, _ = server.fresh()
    data = os.urandom(100_000)
    put_bytes(f"{uri}/data", data)
    cat = filesystem_of(uri).cat_file
    for start, end in ((0, 1), (0, 100_000), (4_096, 8_192), (99_999, 100_000), (50_000, None)):
        assert cat(f"{uri}/data", start=start, end=end) == data[start:end]


def test_what_is_not_there_is_file_not_found(server: Server, tmp_path: Path) -> None:
    uri, _ = server.fresh()
    with pytest.raises(FileNotFoundError):
        get_bytes(f"{uri}/none")
    with pytest.raises(FileNotFoundError):
        get_file(f"{uri}/none", tmp_path / "none")
    assert (list_children(uri), list_objects(uri), list_objects_in(uri, "a")) == ({}, {}, {})
    remove(f"{uri}/none")
    remove_all(uri)


def test_an_exclusive_create_is_refused_when_something_is_there(server: Server) -> None:
    uri, key = server.fresh()
    assert create_bytes(f"{uri}/one", b"writer 1")
    assert not create_bytes(f"{uri}/one", b"writer 2")
    assert get_bytes(f"{uri}/one") == b"writer 1"
    put = server.client.put_object
    assert refused(put, Bucket=server.bucket, Key=f"{key}/one", Body=b"3", IfNoneMatch="*") == 412


def test_a_race_of_exclusive_creates_has_one_winner(server: Server) -> None:
    uri, _ = server.fresh()
    with ThreadPoolExecutor(16) as pool:
        for race in range(3):

            def create(writer: int, race: int = race) -> bool:
                return create_bytes(f"{uri}/{race}", f"writer {writer}".encode())

            assert sum(pool.map(create, range(16))) == 1, f"race {race}"


def test_children_and_files_are_listed_with_size_and_time(server: Server) -> None:
    uri, _ = server.fresh()
    for name, size in (("b", 2), ("a", 1), ("folder/c", 3), ("folder/deep/d", 4), ("ab", 5)):
        put_bytes(f"{uri}/{name}", b"x" * size)
    assert list_children(uri) == {"a": 1, "ab": 5, "b": 2, "folder": 0}
    below = list_objects(uri)
    assert {name: stored.bytes for name, stored in below.items()} == {
        "a": 1, "ab": 5, "b": 2, "folder/c": 3, "folder/deep/d": 4,
    }  # fmt: skip
    assert all(abs(stored.modified - time.time()) < 60 for stored in below.values())
    assert list(list_objects_in(uri, "a")) == ["a", "ab"]


def test_a_listing_has_more_than_one_page(server: Server) -> None:
    uri, _ = server.fresh()
    count = server.page + 3
    filesystem_of(uri).pipe({f"{uri}/{number:04}.json": b"x" for number in range(count)})
    assert len(list_children(uri)) == len(list_objects(uri)) == count
    remove_all(uri)
    assert list_children(uri) == {}


def test_names_may_hold_what_people_write(server: Server) -> None:
    uri, _ = server.fresh()
    names = ["with space", "plus+and&", "ümläut", "equal=1", "per%20cent", "tilde~", "star*", "quote'"]
    for name in names:
        put_bytes(f"{uri}/{name}", name.encode())
    assert list(list_children(uri)) == sorted(names)
    assert [get_bytes(f"{uri}/{name}").decode() for name in names] == names
    remove_all(uri)
    assert list_children(uri) == {}


def test_what_another_client_writes_and_deletes_is_seen_at_once(server: Server) -> None:
    uri, key = server.fresh()
    put_bytes(f"{uri}/ours", b"1")
    assert list(list_children(uri)) == ["ours"]
    for number in range(20):
        name = f"theirs-{number}"
        server.client.put_object(Bucket=server.bucket, Key=f"{key}/{name}", Body=b"2")
        assert name in list_children(uri)
        assert get_bytes(f"{uri}/{name}") == b"2"
        server.client.delete_object(Bucket=server.bucket, Key=f"{key}/{name}")
        assert list(list_children(uri)) == ["ours"]
        with pytest.raises(FileNotFoundError):
            get_bytes(f"{uri}/{name}")


def test_a_reader_sees_the_old_object_or_the_new_one(server: Server) -> None:
    uri, _ = server.fresh()
    whole = [bytes([65 + number]) * 50_000 for number in range(10)]
    filesystem_of(uri).pipe_file(f"{uri}/one", whole[0])

    def write() -> None:
        for data in whole:
            filesystem_of(uri).pipe_file(f"{uri}/one", data)

    with ThreadPoolExecutor(3) as pool:
        writing = pool.submit(write)
        while not writing.done():
            assert all(data in whole for data in pool.map(get_bytes, [f"{uri}/one"] * 2))
        writing.result()


# Unfinished multipart uploads


def test_an_unfinished_upload_is_invisible_listed_and_can_be_aborted(server: Server) -> None:
    uri, key = server.fresh()
    address = {"Bucket": server.bucket, "Key": f"{key}/half"}
    upload = server.client.create_multipart_upload(**address)["UploadId"]
    server.client.upload_part(**address, UploadId=upload, PartNumber=1, Body=b"x" * 5 * MIB)
    assert list_children(uri) == {}
    listed = filesystem_of(uri).list_multipart_uploads(server.bucket)
    assert (f"{key}/half", upload) in [(entry["Key"], entry["UploadId"]) for entry in listed]
    server.client.abort_multipart_upload(**address, UploadId=upload)
    assert not [
        entry for entry in filesystem_of(uri).list_multipart_uploads(server.bucket) if entry["Key"] == address["Key"]
    ]


def test_a_part_that_was_not_sent_cannot_be_completed(server: Server) -> None:
    _, key = server.fresh()
    address = {"Bucket": server.bucket, "Key": f"{key}/half"}
    upload = server.client.create_multipart_upload(**address)["UploadId"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": f'"{"0" * 32}"'}]}
    assert refused(server.client.complete_multipart_upload, **address, UploadId=upload, MultipartUpload=parts) == 400
    assert refused(server.client.head_object, **address) == 404
    server.client.abort_multipart_upload(**address, UploadId=upload)


# What a server may lack


@on_both
def test_a_wrong_secret_is_refused(server: Server) -> None:
    assert refused(server.client_with("wrong").list_objects_v2, Bucket=server.bucket) == 403


@on_both
def test_a_wrong_digest_of_the_body_is_refused(server: Server) -> None:
    _, key = server.fresh()
    wrong = "1B2M2Y8AsgTpgAmY7PhCfg=="  # MD5 of nothing
    put = server.client.put_object
    assert refused(put, Bucket=server.bucket, Key=key, Body=b"something", ContentMD5=wrong) == 400


def test_a_stored_checksum_comes_back_with_the_object(server: Server) -> None:
    _, key = server.fresh()
    server.client.put_object(Bucket=server.bucket, Key=key, Body=b"something", ChecksumAlgorithm="CRC32")
    reply = server.client.get_object(Bucket=server.bucket, Key=key, ChecksumMode="ENABLED")
    assert "ChecksumCRC32" in reply


def test_put_if_match(server: Server) -> None:
    _, key = server.fresh()
    address = {"Bucket": server.bucket, "Key": key}
    etag = server.client.put_object(**address, Body=b"1")["ETag"]
    server.client.put_object(**address, Body=b"2", IfMatch=etag)
    assert refused(server.client.put_object, **address, Body=b"3", IfMatch=etag) == 412


@pytest.mark.slow
def test_what_was_stored_survives_kill_9(tmp_path: Path) -> None:
    """Of Swift; moto keeps everything in memory."""
    with mortal_swift(tmp_path) as server, s3.pointed_at(server.variables):
        uri, _ = server.fresh()
        put_bytes(f"{uri}/kept", b"kept")
        assert server.kill_and_start is not None
        server.kill_and_start()
        assert get_bytes(f"{uri}/kept") == b"kept"
        assert list_children(uri) == {"kept": 4}
