"""Read everything under a root, or what a run stands on, and compare it with what was committed.

Artifacts of every kind (token shards, documents, tokenizers, checkpoints, models, evaluations), checkpoints of stages
in progress, records of runs and promotion logs. No stamp is believed: files are read from the disk, objects from the
store. What this gives up: an object is read over the network, so a scrub of a remote root costs its transfer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel

from storage.artifact import LABEL, MANIFEST, Artifact, DamagedArtifact, Manifest, Store, UntrustedArtifact, wrong_files
from storage.cleanup import NO_KINDS
from storage.digests import each
from storage.filesystem import is_local
from storage.object_artifact import PAGES, RemoteArtifact, digest_object, open_store
from storage.objects import children, get_bytes
from storage.root import Root
from tasks.format import clock, format_bytes
from tasks.promotion.log import PromotionLog, families
from tasks.runs.progress import IN_PROGRESS
from tasks.runs.records import DamagedRecord, Runs
from tasks.study.records import RECORD, Studies


class Damage(BaseModel):
    """One file that is not what was written."""

    artifact: str
    """Label of the artifact, else the folder below the root."""
    file: str
    problem: str
    untrusted: bool = False
    """Whether no trusted key signed it; then it is left where it is."""

    def __str__(self) -> str:
        return f"{self.artifact}: {self.file} {self.problem}"


class Verification(BaseModel):
    """What was read and what of it is damaged."""

    root: str
    run: str = ""
    """The run whose artifacts were read; empty: all."""
    artifacts: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    damaged: list[Damage] = []
    signed: int = 0
    """Manifests and promotion records that were signed now."""
    set_aside: list[str] = []
    """Labels that were moved out of sight; the steps that made them make them again."""

    def __str__(self) -> str:
        size = format_bytes(self.bytes)
        read = f"{self.artifacts} artifacts, {self.files:,} files, {size} read in {clock(self.seconds)}"
        harm = f"{len(self.damaged)} damaged" if self.damaged else "none damaged"
        return f"{self.run or self.root}: {read}; {harm}{f', {self.signed} signed' if self.signed else ''}"


def verify(
    root: Root, run: str = "", set_aside: bool = False, say: Callable[[str], object] = str, sign: bool = False
) -> Verification:
    """Verify what run `run` stands on, or everything under `root`; `say` gets each finding as it comes.

    With `sign` manifests and newest promotion records that no trusted key signed are signed; what they say is taken for
    true. Damaged artifacts are moved aside with `set_aside`; else the next use on each machine reads them again. Raises
    ValueError for a root or a run that does not exist, and OSError if the root does not answer.
    """
    if root.is_local and not root.local.is_dir():
        raise ValueError(f"root: {root.uri} is not a folder; name the one that holds the runs (--root or HERD_ROOT)")
    began, store = time.monotonic(), open_store(root)
    made = Verification(root=root.uri, run=run)

    def note(found: list[Damage]) -> None:
        made.damaged += found
        for damage in found:
            say(str(damage))

    record = Runs(root).find(run) if run else None
    for label in dict.fromkeys(s.artifact for s in record.steps.values()) if record else _labels(root):
        manifest, found = _artifact(store, label, made, sign)
        note(found)
        if found and set_aside and not any(damage.untrusted for damage in found):
            store.set_aside(label, manifest)
            made.set_aside.append(label)
    if record is None:
        note([*_checkpoints(root, made), *_runs(root), *_studies(root)])
    for family in [record.family] if record else families(root):
        note([*_log(root, family, made, sign)])
    made.seconds = round(time.monotonic() - began, 3)
    return made


def _labels(root: Root) -> Iterator[str]:
    for kind in root.names():
        if kind not in NO_KINDS and "." not in kind:
            names = root.names(kind)
            for name in names if root.is_local else [n.removesuffix(".json") for n in names if n.endswith(".json")]:
                if LABEL.fullmatch(f"{kind}/{name}"):
                    yield f"{kind}/{name}"


def _artifact(store: Store, label: str, made: Verification, sign: bool) -> tuple[Manifest | None, list[Damage]]:
    try:
        try:
            artifact = store.at(label)
        except UntrustedArtifact:
            if not sign:
                raise
            store.sign(label)
            made.signed += 1
            artifact = store.at(label)
    except UntrustedArtifact as error:
        return None, [Damage(artifact=label, file=MANIFEST, problem=str(error).partition(": ")[2], untrusted=True)]
    except DamagedArtifact as error:
        return None, [Damage(artifact=label, file=MANIFEST, problem=str(error).partition(": ")[2])]
    except ValueError:  # deleted by retention
        return None, []
    problems = _remote_problems(artifact) if isinstance(artifact, RemoteArtifact) else _local_problems(artifact)
    made.artifacts += 1
    made.files += len(artifact.manifest.files)
    made.bytes += artifact.bytes
    if problems:
        artifact.stamp.forget()
        try:
            store.at(label)
        except ValueError:  # deleted while it was read
            return None, []
    found = [Damage(artifact=label, file=name, problem=problem) for name, problem in problems.items()]
    return artifact.manifest, found


def _local_problems(artifact: Artifact) -> dict[str, str]:
    files, folder = artifact.manifest.files, artifact.folder
    lost = set(artifact.missing())
    stored = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return {
        **{
            name: "is missing or has another size" if name in lost else "has another SHA-256"
            for name in wrong_files(folder, files, artifact.stamp, again=True)
        },
        **{name: "is not in the manifest" for name in stored if name not in {*files, MANIFEST}},
    }


def _remote_problems(artifact: RemoteArtifact) -> dict[str, str]:
    """Read the objects of an artifact; a wrong copy on this machine is removed and no damage: it is brought again."""
    pages = {f"{PAGES}/{name}": entry for name, entry in artifact.manifest.pages.items()}
    objects = [*artifact.manifest.files.items(), *pages.items()]
    found = each(lambda item: digest_object(f"{artifact.uri}/{item[0]}", item[1]), objects)
    artifact.scrub_copy()
    return {name: problem for (name, _), problem in zip(objects, found, strict=True) if problem}


def _checkpoints(root: Root, made: Verification) -> Iterator[Damage]:
    """Yield what is damaged of the checkpoints of stages in progress; one that is deleted meanwhile is passed over."""
    local = (root.local / "work").glob("*/checkpoints/[0-9]*/manifest.json")
    places = [(str(path.parent), path.parent.relative_to(root.local).as_posix()) for path in sorted(local)]
    if not root.is_local:
        for work in children(root.join(IN_PROGRESS)):
            for position in filter(str.isdigit, children(root.join(IN_PROGRESS, work))):
                for attempt in children(root.join(IN_PROGRESS, work, position)):
                    name = f"{IN_PROGRESS}/{work}/{position}/{attempt}"
                    places.append((root.join(name), name))
    if not places:
        return
    from llama3.train.checkpoint.manifest import CheckpointManifest as Checkpoint
    from llama3.train.checkpoint.manifest import Damaged  # imports torch

    for uri, name in places:
        try:
            text = Path(uri, MANIFEST).read_bytes() if is_local(uri) else get_bytes(f"{uri}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):  # being written or deleted, or no checkpoint
            continue
        try:
            manifest = Checkpoint.parse(text, name)
        except Damaged as error:
            yield Damage(artifact=name, file=MANIFEST, problem=str(error))
            continue
        for file, entry in manifest.files.items():
            problem = digest_object(f"{uri}/{file}", entry)
            made.files, made.bytes = made.files + 1, made.bytes + entry.bytes
            if problem and (Path(uri).exists() if is_local(uri) else MANIFEST in children(uri)):
                yield Damage(artifact=name, file=file, problem=problem)


def _runs(root: Root) -> Iterator[Damage]:
    for name in root.names("runs"):
        for file in ("run.json", "recipe.yaml"):
            try:
                if root.read("runs", name, file) is not None:
                    Runs(root).find(name) if file == "run.json" else Runs(root).recipe(name)
            except ValueError as error:
                yield Damage(artifact=f"runs/{name}", file=file, problem=" ".join(str(error).split())[:300])
                break


def _studies(root: Root) -> Iterator[Damage]:
    for name in Studies(root).names():
        try:
            Studies(root).known(name)
        except DamagedRecord as error:
            yield Damage(artifact=f"studies/{name}", file=RECORD, problem=str(error).partition(" is ")[2])


def _log(root: Root, family: str, made: Verification, sign: bool) -> Iterator[Damage]:
    try:
        log = PromotionLog(root, family, trusted=False)
        if log.records and sign and log.distrusted():
            log.sign()
            made.signed += 1
        PromotionLog(root, family)
    except ValueError as error:
        file, _, problem = str(error).partition(": ")
        yield Damage(artifact=f"promotions/{family}", file=file.rpartition("/")[2], problem=problem)
