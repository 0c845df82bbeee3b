"""The log takes one record a place, loses none, and notices what was changed or lost in it."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from herd.storage.digests import SIGNING
from herd.storage.root import Root
from herd.tasks.promotion.log import (
    CHAMPION,
    FOLDER,
    PROMOTED,
    REJECTED,
    HeadMoved,
    Log,
    Promotion,
    PromotionLog,
    current_aliases,
    current_label,
    families,
    logged_label,
    read_log,
)
from tests.storage.test_digests_signing import key
from tests.tasks.promotion_samples import FAMILY, add, append_to, judged_record


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.parse(tmp_path)


def test_records_are_numbered_chained_and_read_back(root: Root) -> None:
    made = [add(root, number) for number in (1, 2, 3)]
    assert root.names(FOLDER, FAMILY) == ["00000001.json", "00000002.json", "00000003.json"]
    assert [record.n for record in made] == [1, 2, 3]
    assert read_log(root, FAMILY) == made
    assert len({record.previous for record in made}) == 3
    assert families(root) == [FAMILY]
    assert logged_label(root, FAMILY, CHAMPION) == made[-1].artifact
    assert read_log(root, "other") == []


def test_a_decision_by_an_older_head_is_refused_and_decided_again(root: Root) -> None:
    log = PromotionLog(root, FAMILY)
    decision, head = judged_record(2, log=log.records), log.head
    add(root, 1)  # another promoter is faster
    with pytest.raises(HeadMoved, match=r"promotions/tiny/00000001\.json: was appended by another process"):
        log.append(decision, head)
    log.refresh()
    with pytest.raises(HeadMoved, match=r"promotions/tiny/00000001\.json: was appended after the decision"):
        log.append(decision, head)
    assert len(read_log(root, FAMILY)) == 1
    record = log.append(judged_record(2, REJECTED, log.records), log.head)
    assert (record.n, record.kind, record.champion) == (2, REJECTED, judged_record(1).artifact)
    assert read_log(root, FAMILY) == log.records


@pytest.mark.parametrize("place", [1, 2])
def test_a_record_that_was_changed_is_noticed(root: Root, place: int) -> None:
    for number in (1, 2, 3):
        add(root, number)
    name = f"{place:08}.json"
    text = (root.read(FOLDER, FAMILY, name) or b"").replace(b'"position": ', b'"position": 9')
    root.write(text, FOLDER, FAMILY, name)
    with pytest.raises(ValueError, match=rf"{FOLDER}/{FAMILY}/{place + 1:08}.json: does not follow"):
        read_log(root, FAMILY)


def test_a_record_that_was_lost_or_cut_is_noticed(root: Root) -> None:
    for number in (1, 2, 3):
        add(root, number)
    text = root.read(FOLDER, FAMILY, "00000002.json") or b""
    root.write(text[:100], FOLDER, FAMILY, "00000002.json")
    with pytest.raises(ValueError, match=r"00000002\.json: is not a promotion record"):
        read_log(root, FAMILY)
    root.remove(FOLDER, FAMILY, "00000002.json")
    with pytest.raises(ValueError, match=r"00000002\.json: is missing"):
        read_log(root, FAMILY)


def race(root: Root, promoters: int, rounds: int) -> None:
    """Have `promoters` judge a model of equal worth in each round; a champion is only beaten by a later round."""
    gate = threading.Barrier(promoters)

    def promoter(place: int) -> list[Promotion]:
        log, mine = PromotionLog(root, FAMILY), []
        for number in range(1, rounds + 1):
            gate.wait()
            mine.append(append_to(log, partial(judge, 1000 * number + place, number)))
        return mine

    with ThreadPoolExecutor(promoters) as pool:
        made = [record for each in pool.map(promoter, range(promoters)) for record in each]
    log = read_log(root, FAMILY)
    assert sorted(record.n for record in made) == list(range(1, promoters * rounds + 1))
    assert {record.id for record in made} == {record.id for record in log}, "no record is lost"
    winners = Counter(record.position for record in log if record.kind == PROMOTED)
    assert winners == dict.fromkeys(range(1, rounds + 1), 1), "one winner a round"
    for record in log:
        assert record.champion == current_label(log[: record.n - 1], CHAMPION), (
            "judged against the champion of its moment"
        )
    assert current_aliases(log)[CHAMPION] == [record for record in log if record.kind == PROMOTED][-1].artifact


def judge(model: int, round_: int, records: Log) -> Promotion:
    """Promote the model if the champion is of an earlier round; `position` holds the round."""
    reigning_round = next((record.position for record in reversed(records) if record.kind == PROMOTED), 0)
    kind = PROMOTED if round_ > reigning_round else REJECTED
    return judged_record(model, kind, records, position=round_)


@pytest.mark.fault("F26")
def test_promoters_leave_one_winner_a_round_and_every_record(root: Root) -> None:
    race(root, promoters=8, rounds=10)


@pytest.mark.fault("F26")
@pytest.mark.slow
def test_promoters_on_an_object_store_leave_one_winner_a_round(bucket: str, tmp_path: Path) -> None:
    race(Root.parse(f"{bucket}/race", scratch=str(tmp_path)), promoters=4, rounds=5)


def test_with_a_key_the_newest_record_must_be_signed(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(root, 1)
    monkeypatch.setenv(SIGNING, key(tmp_path, "one")[0])
    with pytest.raises(ValueError, match=r"promotions/tiny/00000001\.json: is not signed"):
        read_log(root, FAMILY)
    PromotionLog(root, FAMILY, trusted=False).sign()
    add(root, 2)
    assert [record.artifact for record in read_log(root, FAMILY)] == [judged_record(n).artifact for n in (1, 2)]
    head = hashlib.sha256(root.read(FOLDER, FAMILY, "00000002.json") or b"").hexdigest()
    forged = judged_record(3).model_copy(
        update={"n": 3, "previous": head, "signature": read_log(root, FAMILY)[-1].signature}
    )
    root.write(forged.model_dump_json(), FOLDER, FAMILY, "00000003.json")
    with pytest.raises(ValueError, match=r"promotions/tiny/00000003\.json: is signed by none of the 1 keys"):
        read_log(root, FAMILY)
    with pytest.raises(ValueError, match=r"00000003\.json: is signed by none"):
        add(root, 4)


def test_a_record_of_another_family_is_refused(root: Root) -> None:
    add(root, 1)
    root.write(root.read(FOLDER, FAMILY, "00000001.json") or b"", FOLDER, "other", "00000001.json")
    with pytest.raises(ValueError, match="is a record of the family tiny"):
        read_log(root, "other")
