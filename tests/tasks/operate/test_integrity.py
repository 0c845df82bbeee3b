"""What `herd verify` reads and names: every kind of artifact, records and logs, on a disk and in an object store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from herd.flows.cli.main import app
from herd.llama3.train.checkpoint.manager import Checkpoints
from herd.storage.digests import SIGNING
from herd.storage.fenced import DamagedRecord, FencedRecords
from herd.storage.object_artifact import open_store
from herd.storage.objects import get_bytes, put_bytes
from herd.storage.root import Root
from herd.tasks.operate.gc import plan_gc
from herd.tasks.operate.integrity import verify
from herd.tasks.runs.records import Runs, now
from herd.tasks.study.records import Studies, StudyRecord
from tests.llama3.train.checkpoint_samples import ALONE, State
from tests.storage.test_digests_signing import key
from tests.tasks.promotion_samples import add
from tests.tasks.standing_root import begun, commit, tiny
from tests.tasks.trained_run import TrainedRun


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a finished run, a promotion, and a stage in progress with a checkpoint."""
    made = TrainedRun(tmp_path_factory.mktemp("original"))
    add(made.root, 1)
    add(made.root, 2)
    work = made.root.file("work", "tiny-main-0")
    Checkpoints(work / "checkpoints", made.recipe.checkpoint.keep, ALONE, work=work).save(State(position=4), "main")
    return made.root.local


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Root:
    shutil.copytree(original, tmp_path / "root")
    return Root.parse(tmp_path / "root")


def flip(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    place = random.randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def test_a_sound_root_is_read_whole(root: Root) -> None:
    done = verify(root)
    assert done.damaged == []
    assert done.artifacts == 5
    kinds = ("tokens", "tokenizer", "checkpoint", "evaluation", "work/tiny-main-0/checkpoints")
    files = [path for kind in kinds for path in root.file(*kind.split("/")).rglob("*") if path.is_file()]
    assert done.files == len([path for path in files if path.name != "manifest.json"])
    assert done.bytes == sum(path.stat().st_size for path in files if path.name != "manifest.json")


def test_every_flipped_bit_in_any_file_is_named(root: Root) -> None:
    random = Random(3)
    assert verify(root).damaged == []  # every file has a stamp now, which must not help
    tops = ("tokens", "tokenizer", "checkpoint", "evaluation", "work", "promotions")
    paths = [path for top in tops for path in sorted(root.file(top).rglob("*")) if path.is_file()]
    last = root.file("promotions", "tiny", "00000002.json")  # of the newest record nothing else holds a digest
    for _ in range(30):
        path = random.choice([path for path in paths if path != last and path.stat().st_size])
        before = path.read_bytes()
        flip(path, random)
        stat = path.stat()
        found = verify(root).damaged
        assert len(found) >= 1, path
        place = path.relative_to(root.local).as_posix()
        if place.startswith("promotions"):
            assert {damage.artifact for damage in found} == {"promotions/tiny"}
        else:
            assert place in {f"{damage.artifact}/{damage.file}" for damage in found}
        path.write_bytes(before)
        assert path.stat().st_size == stat.st_size


def test_what_is_set_aside_is_gone_for_readers_and_kept(root: Root) -> None:
    label = Runs(root).all()[0].steps["tokenize"].artifact
    (root.local / label / "tokens.json").unlink()
    (root.local / label / "math" / "added.bin").write_bytes(b"x")
    done = verify(root, "tiny-1", set_aside=True)
    assert {(damage.file, damage.problem) for damage in done.damaged} == {
        ("tokens.json", "is missing or has another size"),
        ("math/added.bin", "is not in the manifest"),
    }
    assert done.set_aside == [label]
    with pytest.raises(ValueError, match="not found under"):
        open_store(root).load(label)
    assert len(list((root.local / ".damaged").iterdir())) == 1
    assert verify(root, "tiny-1").damaged == []


def test_a_damaged_record_hides_no_other_run_and_stops_only_what_deletes(root: Root) -> None:
    runs = Runs(root)
    second = runs.begin(runs.recipe("tiny-1"), "c0de")
    root.write('{"name": "tiny-1"', "runs", "tiny-1", "record", root.names("runs", "tiny-1", "record")[-1])
    assert [record.name for record in runs.all()] == [second.name]
    with pytest.raises(DamagedRecord, match=r"run tiny-1: .*runs/tiny-1/record/.* is not what was written; restore"):
        runs.find("tiny-1")
    with pytest.raises(DamagedRecord):
        plan_gc(root, 1, 0, [])
    assert [(damage.artifact, damage.file) for damage in verify(root).damaged] == [("runs/tiny-1", "record")]


def test_a_damaged_record_of_a_study_hides_no_other(root: Root) -> None:
    studies = Studies(root)
    given = {"digest": "d", "kind": "compare", "recipe": "r.yaml", "started": now(), "code": "abc"}
    for name in ("one", "two"):
        studies.save(StudyRecord(name=name, **given))
    FencedRecords(root, "studies").write("one", "[")
    assert [record.name for record in studies.all()] == ["two"]
    with pytest.raises(DamagedRecord, match=r"study one: .*studies/one/record is not a valid record"):
        studies.find("one")
    with pytest.raises(DamagedRecord):
        plan_gc(root, 1, 0, [])
    assert [(damage.artifact, damage.file) for damage in verify(root).damaged] == [("studies/one", "record")]


def test_the_command_says_it_by_its_exit_status_and_as_json(root: Root) -> None:
    def herd(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["verify", *words, "--root", str(root.local)])
        return done.exit_code, done.output

    status, text = herd()
    assert (status, text.splitlines()[-1].endswith("; none damaged")) == (0, True)
    label = Runs(root).all()[0].steps["anneal"].artifact
    flip(root.local / label / "model" / "model.safetensors", Random(1))
    status, text = herd("tiny-1", "--json")
    assert status == 1
    assert json.loads(text)["damaged"] == [
        {"artifact": label, "file": "model/model.safetensors", "problem": "has another SHA-256", "untrusted": False}
    ]
    assert herd("tiny-1", "--quarantine")[0] == 1
    assert herd("tiny-1")[0] == 0
    assert herd("nobody-1")[0] == 2
    assert CliRunner().invoke(app, ["verify", "--root", str(root.local / "nowhere")]).exit_code == 2


def test_what_is_not_signed_is_named_left_in_place_and_signed_on_request(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIGNING, key(tmp_path, "one")[0])
    found = verify(root, set_aside=True)
    assert [damage.untrusted for damage in found.damaged] == [True] * 5 + [False]
    assert found.set_aside == []
    done = verify(root, sign=True)
    assert (done.damaged, done.signed) == ([], 6)
    assert verify(root).damaged == []


def test_objects_and_copies_are_read_too(bucket: str, tmp_path: Path) -> None:
    root = Root.parse(f"{bucket}/verify", scratch=str(tmp_path))
    record = begun(root, tiny())
    lost = commit(root, "evaluation", "tiny-main")
    artifact = open_store(root).load(record.steps["tokenize"].artifact)
    copy = artifact.path_of("data.txt")
    copy.write_bytes(b"tokens tinY")
    assert verify(root).damaged == []
    assert artifact.path_of("data.txt").read_bytes() == b"tokens tiny"
    data = get_bytes(f"{artifact.uri}/data.txt")
    put_bytes(f"{artifact.uri}/data.txt", data[:-1] + b"Y")
    put_bytes(root.join(f"{lost.label}.json"), b"{")
    done = verify(root, set_aside=True)
    assert {(damage.artifact, damage.file) for damage in done.damaged} == {
        (artifact.label, "data.txt"),
        (lost.label, "manifest.json"),
    }
    with pytest.raises(ValueError, match="not found under"):
        open_store(root).load(artifact.label)
    assert verify(root).damaged == []
