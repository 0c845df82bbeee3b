"""Files and bytes in Swift behind a proxy that does what networks do: each fault is counted, each wait is bounded.

After every fault the result is whole or absent. What is there is looked up at the server itself, past the proxy.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from herd.storage.objects import create_bytes, get_bytes, list_children, put_bytes, put_file
from herd.storage.s3 import ROUNDS, TRIES
from tests.storage import s3
from tests.storage.fault_proxy import Fault, Rule
from tests.storage.fault_world import BURSTS, IN_BODIES, SHORT, World, fails_in_time

DATA = os.urandom(70_000)
BEFORE = 2 * (TRIES + 1) * ROUNDS + 2
"""More tries than a store gets that has never answered: a write is two requests."""


@pytest.fixture
def uri(world: World) -> str:
    world.proxy.use()
    return world.server.fresh()[0]


@pytest.mark.parametrize("fault", ["slow-down", "reset", *IN_BODIES])
@pytest.mark.fault("F4")
def test_a_read_outlasts_a_burst(world: World, uri: str, fault: Fault) -> None:
    with world.faulty():
        put_bytes(f"{uri}/data", DATA)
        (rule,) = world.proxy.use(Rule(fault, "GET", times=3))
        assert get_bytes(f"{uri}/data") == DATA
    assert rule.done == 3


@pytest.mark.parametrize("fault", [*BURSTS, "error-in-200", "flip-sent"])
@pytest.mark.fault("F4")
@pytest.mark.slow
def test_a_write_outlasts_a_burst(world: World, uri: str, fault: Fault) -> None:
    (rule,) = world.proxy.use(Rule(fault, "PUT", times=3))
    with world.faulty():
        put_bytes(f"{uri}/data", DATA)
    assert rule.done == 3
    with world.direct():
        assert get_bytes(f"{uri}/data") == DATA


@pytest.mark.fault("F4")
def test_a_store_that_answered_is_waited_for_longer_than_one_that_never_did(world: World, uri: str) -> None:
    with world.faulty():
        put_bytes(f"{uri}/data", DATA)
        (rule,) = world.proxy.use(Rule("reset", times=BEFORE))
        put_bytes(f"{uri}/data", DATA)
    assert rule.done == BEFORE
    with s3.pointed_at(world.variables()):
        (rule,) = world.proxy.use(Rule("reset", times=None))
        with pytest.raises(OSError, match=rf"{uri}/data: \w*Connection\w*Error: "):
            put_bytes(f"{uri}/data", DATA)
    assert rule.done < BEFORE


@pytest.mark.fault("F4")
def test_a_store_whose_first_answer_is_that_it_is_busy_is_waited_for(world: World, uri: str) -> None:
    with world.direct():
        put_bytes(f"{uri}/data", DATA)
    with s3.pointed_at(world.variables()):
        (rule,) = world.proxy.use(Rule("error", times=BEFORE))
        assert get_bytes(f"{uri}/data") == DATA
    assert rule.done == BEFORE


@pytest.mark.parametrize("fault", ["unavailable", "reset", "hang"])
def test_a_write_to_a_broken_server_ends_and_leaves_nothing(world: World, uri: str, fault: Fault) -> None:
    (rule,) = world.proxy.use(Rule(fault, "PUT", times=None))
    with world.faulty(SHORT), fails_in_time(SHORT):
        put_bytes(f"{uri}/data", DATA)
    assert rule.done
    with world.direct():
        assert list_children(uri) == {}


@pytest.mark.parametrize("fault", ["slow-down", "error", "hang", "truncate"])
def test_a_read_from_a_broken_server_ends(world: World, uri: str, fault: Fault) -> None:
    with world.direct():
        put_bytes(f"{uri}/data", DATA)
    (rule,) = world.proxy.use(Rule(fault, "GET", times=None))
    with world.faulty(SHORT), fails_in_time(SHORT):
        get_bytes(f"{uri}/data")
    assert rule.done


def test_a_slow_server_is_waited_for(world: World, uri: str) -> None:
    (rule,) = world.proxy.use(Rule("delay", "PUT", seconds=0.5))
    with world.faulty():
        put_bytes(f"{uri}/data", DATA)
    assert rule.done == 1


@pytest.mark.fault("F5")
def test_our_own_exclusive_create_is_recognized_when_its_reply_is_lost(world: World, uri: str) -> None:
    (rule,) = world.proxy.use(Rule("drop-reply", "PUT"))
    with world.faulty():
        assert create_bytes(f"{uri}/one", b"writer 1")
        assert not create_bytes(f"{uri}/one", b"writer 2")
    assert (rule.done, rule.seen) == (1, 3), "stored, refused as existing, refused"


def test_a_write_that_is_read_back_changed_is_no_success(world: World, uri: str) -> None:
    """One reply is asked for again, since a bit may flip on the way back; wrong bytes that stay are believed."""
    (once,) = world.proxy.use(Rule("flip", "GET"))
    with world.faulty():
        put_bytes(f"{uri}/data", DATA)
    assert once.done == 1
    (always,) = world.proxy.use(Rule("flip", "GET", times=None))
    with world.faulty(), pytest.raises(OSError, match="other bytes"):
        put_bytes(f"{uri}/data", DATA)
    assert always.done > 1


def test_a_file_in_parts_outlasts_a_reset_part_and_a_lost_completion(world: World, uri: str, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(2**20) * 11)  # in three parts: see `restless`
    part_fault, completion_fault = world.proxy.use(
        Rule("reset", "PUT", query="partNumber=2"), Rule("drop-reply", "POST", query="^uploadId")
    )
    with world.faulty():
        put_file(tmp_path / "big", f"{uri}/big")
    assert (part_fault.done, completion_fault.done) == (1, 1)
    with world.direct():
        assert list_children(uri) == {"big": 11 * 2**20}
    assert not world.server.client.list_multipart_uploads(Bucket=world.server.bucket).get("Uploads")
