"""What is loaded, what is refused by name, and what is kept."""

from __future__ import annotations

import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from herd.llama3.model.flops import parameter_count
from herd.llama3.recipe.sections import Keep, Model
from herd.llama3.recipe.units import Tokens
from herd.llama3.train.checkpoint.dcp import save_state
from herd.llama3.train.checkpoint.manager import Checkpoints, NoGoodCheckpoint, load_state
from herd.llama3.train.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from herd.llama3.train.checkpoint.storage import Pins
from herd.storage.digests import digest_file
from tests.dist import run
from tests.llama3.train.checkpoint_samples import (
    ALONE,
    State,
    assert_holds,
    opened,
    parts_written,
    resume,
    resume_and_list,
    save_in_the_background,
)
from tests.storage.memory_store import MemoryStore
from tests.storage.simulation import ROOT


def saved(folder: Path, *positions: int, **more: Any) -> Checkpoints:
    checkpoints = opened(folder, **{"last": 9, **more})
    for position in positions:
        checkpoints.save(State(position=position), "main")
    return checkpoints


def flip(file: Path, at: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int((len(data) - 1) * at)] ^= 1
    file.write_bytes(data)


def vouch(file: Path) -> None:
    """Let the manifest say that `file` is as it was written."""
    manifest = CheckpointManifest.parse((file.parent / "manifest.json").read_bytes(), "")
    files = {**manifest.files, file.name: digest_file(file)}
    manifest.model_copy(update={"files": files}).write(file.parent)


def without_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    vouch(file)


def change_wide(file: Path, tensor: Tensor | None) -> None:
    """Let the checkpoint of `file` hold another tensor `wide`, or none."""
    for path in file.parent.glob("*.safetensors"):
        with safe_open(path, "pt") as stored:
            tensors, facts = {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata()  # noqa: SIM118
        if tensors.pop("wide", None) is not None:
            save_file(tensors | ({} if tensor is None else {"wide": tensor}), path, facts)
            vouch(path)


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.path),)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flip": (flip, "has changed since it was written"),
    "flip in the header": (lambda file: flip(file, 0.1), "has changed since it was written"),
    "truncated": (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes, "),
    "missing": (lambda file: file.unlink(), "is missing"),
    "extra": (lambda file: shutil.copy(file, file.with_name("x.safetensors")), "x.safetensors: is not in the manifest"),
    "broken link": (lambda file: file.with_name("x").symlink_to("nowhere"), "/x: is not in the manifest"),
    "manifest flipped": (lambda file: flip(file.with_name("manifest.json")), "manifest.json: "),
    "no manifest": (lambda file: file.with_name("manifest.json").unlink(), "manifest.json: cannot be read"),
    "pickle": (
        lambda file: file.with_name(".metadata").write_bytes(pickle.dumps(Canary(file.parents[2] / "canary"))),
        ".metadata: is not in the manifest",
    ),
    "vouched without a header": (without_header, ".safetensors: its header cannot be read ("),
    "vouched without a tensor": (
        lambda file: change_wide(file, None),
        "tensor wide is missing",
    ),
    "vouched with another shape": (
        lambda file: change_wide(file, torch.zeros(3, 2)),
        "tensor wide has the shape [3, 2], not [12, 6]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(damage: str, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "checkpoints", 3, 6)
    newest = tmp_path / "checkpoints" / f"{6:018}"
    do, reason = DAMAGE[damage]
    do(sorted(newest.glob("*.safetensors"))[0])
    state = State()
    found = checkpoints.resume(state)
    assert found.path == newest.with_name(f"{3:018}")
    assert_holds(state.arrays(), 3)
    (told,) = found.skipped
    assert told.startswith(f"{newest}")
    assert reason in told
    assert newest.with_name(f".damaged-{newest.name}").is_dir()
    assert not (tmp_path / "canary").exists()


def test_where_none_is_good_nothing_is_begun_until_it_is_asked_for(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3, 6)
    for file in tmp_path.glob("*/*00.safetensors"):
        flip(file)
    state = State(position=1)
    for _ in range(2):  # what was refused once is refused again
        with pytest.raises(NoGoodCheckpoint, match=f"(?s){6:018}/.*{3:018}/.*restart-damaged"):
            opened(tmp_path).resume(state)
    found = checkpoints.resume(state, restart=True)
    assert (found.path, found.manifest, len(found.skipped)) == (None, None, 2)
    assert state.position == 1
    assert opened(tmp_path).resume(state).skipped == ()  # they are set aside
    assert len(list(tmp_path.glob(".damaged-*"))) == 2


def test_where_one_is_good_nothing_begins_anew(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6)
    assert opened(tmp_path).resume(State(), restart=True).path == tmp_path / f"{6:018}"


def test_what_one_of_four_finds_wrong_all_refuse(tmp_path: Path) -> None:
    run(4, save_in_the_background, tmp_path, [3, 6])
    flip(tmp_path / f"{6:018}" / "00003-00.safetensors")
    for position, skipped, arrays in run(4, resume, tmp_path):
        assert position == 3
        assert "00003-00.safetensors: has changed since it was written" in skipped[0]
        assert_holds(arrays, 3)


def test_in_the_layout_that_wrote_it_each_opens_its_own_files(tmp_path: Path) -> None:
    run(4, save_in_the_background, tmp_path, [3])
    for rank, (opened_files, _, arrays) in enumerate(run(4, resume_and_list, tmp_path)):
        assert opened_files == [rank]
        assert_holds(arrays, 3)


def test_a_large_part_of_two_replicas_is_in_the_files_of_one(tmp_path: Path) -> None:
    """Tensor `wide` has replicas on processes 0 and 2, and on 1 and 3; 0 and 1 write it."""
    run(4, save_in_the_background, tmp_path, [3], None, 80)
    for rank, (opened_files, _, arrays) in enumerate(run(4, resume_and_list, tmp_path, 80)):
        assert opened_files == sorted({rank, rank % 2})
        assert_holds(arrays, 3)


@pytest.mark.parametrize("layout", [{"dp_replicate": 4}, {"tp": 2, "pp": 2, "dp_replicate": 2}])
def test_each_part_is_written_once_and_processes_write_about_as_much(layout: dict[str, int]) -> None:
    written = run(8, parts_written, layout)
    parts = Counter(part for _, mine in written for part in mine)
    assert set(parts.values()) == {1}
    config = Model(layers=4, dim=64, ffn=224, heads=8, kv_heads=4, max_seq_len=64)
    assert sum(size for _, mine in written for size in mine.values()) == 4 * parameter_count(config, 512)
    for stage in range(layout.get("pp", 1)):
        loads = [sum(mine.values()) for pp, mine in written if pp == stage]
        assert max(loads) <= 1.3 * min(loads)


def test_in_another_layout_all_headers_are_read_once(tmp_path: Path) -> None:
    run(4, save_in_the_background, tmp_path, [3])
    found = run(2, resume_and_list, tmp_path)
    assert [opened_files for opened_files, *_ in found] == [[0, 1, 2, 3], []]
    for *_, arrays in found:
        assert_holds(arrays, 3)


@pytest.mark.fault("F18")
def test_a_pickle_that_the_manifest_vouches_for_is_still_not_opened(tmp_path: Path) -> None:
    save_state(tmp_path / "state", State(position=4), "main", ALONE)
    manifest = CheckpointManifest.read(tmp_path / "state")
    pickled = tmp_path / "state" / "00000.metadata"
    pickled.write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    files = {**manifest.files, pickled.name: digest_file(pickled)}
    manifest.model_copy(update={"files": files}).write(tmp_path / "state")
    state = State()
    load_state(tmp_path / "state", CheckpointManifest.read(tmp_path / "state"), state, ALONE)
    assert_holds(state.arrays(), 4)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", ".metadata", "a/b"])
def test_a_manifest_names_nothing_outside_its_folder(name: str, tmp_path: Path) -> None:
    save_state(tmp_path / "state", State(), "main", ALONE)
    manifest = CheckpointManifest.read(tmp_path / "state")
    digest = next(iter(manifest.files.values()))
    manifest.model_copy(update={"files": {name: digest}}).write(tmp_path / "state")
    with pytest.raises(DamagedCheckpoint, match="is not a manifest"):
        CheckpointManifest.read(tmp_path / "state")


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    other = State(config=Model(layers=1, dim=16, ffn=8, heads=1, kv_heads=1, max_seq_len=8))
    with pytest.raises(ValueError, match="holds a model of shape"):
        opened(tmp_path).resume(other)


def test_a_model_continues_with_longer_sequences(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    shape = State().config.model_copy(update={"max_seq_len": 16, "embedding_std": 1.0, "preset": "longer"})
    longer = State(config=shape)
    opened(tmp_path).resume(longer)
    assert_holds(longer.arrays(), 3)


def test_the_files_are_safetensors_that_anybody_reads(tmp_path: Path) -> None:
    state = State(position=8)
    save_state(tmp_path / "state", state, "main", ALONE)
    found = {}
    for path in (tmp_path / "state").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    assert found.keys() == state.tensors().keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in state.tensors().items())


def test_a_parent_without_its_average(tmp_path: Path) -> None:
    before = State(position=2)
    before.make_average(3)
    save_state(tmp_path / "state", before, "main", ALONE)
    state = State()
    load_state(tmp_path / "state", CheckpointManifest.read(tmp_path / "state"), state, ALONE, average=False)
    assert (state.averaged, state.position) == (0, 2)
    assert_holds(state.arrays(), 2)


def test_the_newest_the_milestones_and_the_pinned_are_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "checkpoints", 30, 60)
    checkpoints.store.pins.add(30, "stage main ends here")
    checkpoints.store.pins.add(60, "alias champion")
    checkpoints.store.pins.add(60, "alias challenger")
    checkpoints.keep = Keep(last=2, every=Tokens(100))
    for position in (90, 120, 150, 180):
        checkpoints.save(State(position=position), "main")
    assert checkpoints.positions() == [30, 60, 120, 150, 180]
    checkpoints.store.pins.remove(60, "alias champion")
    checkpoints.save(State(position=190), "main")
    assert checkpoints.positions() == [30, 60, 120, 180, 190]
    checkpoints.store.pins.remove(60, "alias challenger")
    checkpoints.store.pins.remove(60, "alias challenger")
    checkpoints.save(State(position=195), "main")
    assert checkpoints.positions() == [30, 120, 190, 195]


def test_a_checkpoint_that_is_being_loaded_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While a second reader loads, the trainer saves and deletes: the reader's checkpoint stays until it is done."""
    trainer = saved(tmp_path / "checkpoints", 3, last=1)

    def train_on(state: State, averaged: int) -> None:
        trainer.save(State(position=6), "main")
        assert trainer.positions() == [3, 6]
        state.averaged = averaged

    monkeypatch.setattr(State, "make_average", train_on)
    state = State()
    opened(tmp_path / "checkpoints").resume(state)
    assert_holds(state.arrays(), 3)
    trainer.save(State(position=7), "main")
    assert trainer.positions() == [7]


def test_a_pin_with_an_end_lapses(tmp_path: Path) -> None:
    pins = Pins(str(tmp_path))
    pins.add(5, "a reader that was killed", seconds=-1)
    pins.add(5, "a reader", seconds=60)
    pins.add(7, "alias")
    assert pins.all() == {5: ["a reader"], 7: ["alias"]}
    assert len(list((tmp_path / "pins").iterdir())) == 2
    with pins.pinned(9, "copying"):
        assert pins.all()[9] == ["copying"]
    assert 9 not in pins.all()


def test_going_back_before_a_spike(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "checkpoints", 3, 6, 9)
    state = State()
    assert checkpoints.resume(state, before=7).path == tmp_path / "checkpoints" / f"{6:018}"
    assert state.position == 6
    assert checkpoints.positions() == [3, 6]
    assert [Path(path).name for path in checkpoints.store.superseded()] == [f".superseded-{9:018}"]
    checkpoints.save(state, "main")
    assert checkpoints.store.superseded() == []
    checkpoints.store.pins.add(6, "alias")
    with pytest.raises(ValueError, match=r"checkpoint 6 is pinned \(alias\)"):
        checkpoints.resume(state, before=4)


@pytest.mark.parametrize("where", ["disk", "object store"])
@pytest.mark.parametrize(
    ("positions", "damaged", "untouched"),
    [
        ((3, 4, 5), 3, "those at 4, 5 are untouched"),
        ((5,), None, "those at 5 are untouched"),
        ((), None, "there is none"),
    ],
)
def test_going_back_to_nothing_good_leaves_all_checkpoints(
    where: str, positions: tuple[int, ...], damaged: int | None, untouched: str, tmp_path: Path
) -> None:
    memory = MemoryStore() if where == "object store" else None
    with memory.in_place() if memory else nullcontext():
        more = {"uri": f"{ROOT}/stage"} if memory else {}
        checkpoints = saved(tmp_path / "checkpoints", *positions, **more)
        if damaged is not None and memory:
            key = next(key for key in memory.objects if f"{damaged:018}/" in key and key.endswith(".safetensors"))
            memory.objects[key].data = b"x" + memory.objects[key].data[1:]
        elif damaged is not None:
            flip(next((tmp_path / f"checkpoints/{damaged:018}").glob("*.safetensors")))
        with pytest.raises(NoGoodCheckpoint, match=f"(?s)none up to 3, .*{untouched}.*policy=skip.*restart-damaged"):
            checkpoints.resume(State(), before=3)
        assert checkpoints.positions() == [*positions]
        assert checkpoints.store.superseded() == []
        state = State()
        if positions:
            checkpoints.resume(state)
            assert_holds(state.arrays(), positions[-1])
        restarted = checkpoints.resume(state, before=3, restart=True)
        assert (restarted.path, checkpoints.positions()) == (None, [])
        assert len(checkpoints.store.superseded()) == sum(position > 3 for position in positions)


def test_a_position_reached_again_replaces_what_was_there(tmp_path: Path) -> None:
    """After a roll-back other data are trained; killed between the two renames, the old one is put back."""
    checkpoints = saved(tmp_path, 3, 6)
    again = State(position=7)
    again.position = 6
    checkpoints.save(again, "main")
    assert_holds(resume(tmp_path)[2], 7)
    (tmp_path / f"{6:018}").rename(tmp_path / f".replaced-{6:018}")
    assert_holds(resume(tmp_path)[2], 7)
    assert not list(tmp_path.glob(".*"))
