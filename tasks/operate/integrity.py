"""Verify everything under a root, or the artifacts of a run: read all bytes and compare them with the manifests.

Covers artifacts of every kind, checkpoints of stages in progress, records of runs and studies, promotion logs, and
fetched copies of remote files.
Cached results are ignored: files are read from the disk, and objects are downloaded from the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel

from herd.storage.artifact import LABEL, MANIFEST, DamagedArtifact, Manifest, Store, UntrustedArtifact, wrong_files
from herd.storage.digests import digest_file
from herd.storage.fenced import VERSIONS, DamagedRecord
from herd.storage.fetch import use_fetched
from herd.storage.filesystem import FetchedFile, fetched_copies, fetched_folder, is_local
from herd.storage.object_artifact import PAGES, RemoteArtifact, digest_object, open_store
from herd.storage.objects import get_bytes, list_children
from herd.storage.processes import parallel_map
from herd.storage.root import Root
from herd.tasks.format import format_bytes, format_duration
from herd.tasks.promotion.log import PromotionLog, families
from herd.tasks.runs.records import Runs
from herd.tasks.runs.work_dirs import IN_PROGRESS
from herd.tasks.step import KINDS
from herd.tasks.study.records import Studies


class Damage(BaseModel):
    """One file that differs from what was written."""

    artifact: str
    """Label of the artifact, or the folder below the root."""
    file: str
    problem: str
    untrusted: bool = False
    """Whether no trusted key signed it; then it is not moved."""

    def __str__(self) -> str:
        return f"{self.artifact}: {self.file} {self.problem}"


class Verification(BaseModel):
    """What was read, and the damage found."""

    root: str
    run: str = ""
    """Run whose artifacts were read; empty: all."""
    artifacts: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    damaged: list[Damage] = []
    signed: int = 0
    """Manifests and promotion records that this call signed."""
    set_aside: list[str] = []
    """Labels of quarantined artifacts; their steps make them again."""

    def __str__(self) -> str:
        size = format_bytes(self.bytes)
        read = f"{self.artifacts} artifacts, {self.files:,} files, {size} read in {format_duration(self.seconds)}"
        damaged = f"{len(self.damaged)} damaged" if self.damaged else "none damaged"
        return f"{self.run or self.root}: {read}; {damaged}{f', {self.signed} signed' if self.signed else ''}"


def verify(
    root: Root, run: str = "", set_aside: bool = False, log: Callable[[str], object] = str, sign: bool = False
) -> Verification:
    """Verify the artifacts of run `run`, or everything under `root`; `log` gets each damage as it is found.

    `sign` signs manifests and newest promotion records without a trusted signature; their content is taken as true.
    `set_aside` quarantines damaged artifacts; otherwise the next use on each machine reads them again. Raises
    ValueError for a root or a run that does not exist, and OSError if the root does not answer.
    """
    if root.is_local and not root.local.is_dir():
        raise ValueError(f"root: {root.uri} is not a folder; name the one that holds the runs (--root or HERD_ROOT)")
    began, store, runs, studies = time.monotonic(), open_store(root), Runs(root), Studies(root)
    result = Verification(root=root.uri, run=run)

    def report(artifact: str, file: str, problem: str, untrusted: bool = False) -> None:
        result.damaged.append(Damage(artifact=artifact, file=file, problem=problem, untrusted=untrusted))
        log(str(result.damaged[-1]))

    record = runs.find(run) if run else None
    for label in dict.fromkeys(s.artifact for s in record.steps.values()) if record else _labels(root):
        manifest, problems, untrusted = _read_artifact(store, label, result, sign)
        for file, problem in problems.items():
            report(label, file, problem, untrusted)
        if problems and set_aside and not untrusted:
            store.quarantine(label, manifest)
            result.set_aside.append(label)
    if record is None:
        for damage in _checkpoints(root, result):
            report(*damage)
        for damage in _copies(root, result):
            report(*damage)
        for name in root.names("runs"):
            for file, read in ((VERSIONS, runs.known), ("recipe.yaml", runs.recipe)):
                try:
                    if file == VERSIONS or root.read("runs", name, file) is not None:
                        read(name)
                except ValueError as error:
                    report(f"runs/{name}", file, " ".join(str(error).split())[:300])
                    break
        for name in studies.names():
            try:
                studies.known(name)
            except DamagedRecord as error:
                report(f"studies/{name}", VERSIONS, str(error).partition(" is ")[2])
    for family in [record.family] if record else families(root):
        try:
            decisions = PromotionLog(root, family, trusted=False)
            if decisions.records and sign and decisions.distrusted():
                decisions.sign()
                result.signed += 1
            PromotionLog(root, family)
        except ValueError as error:
            file, _, problem = str(error).partition(": ")
            report(f"promotions/{family}", file.rpartition("/")[2], problem)
    result.seconds = round(time.monotonic() - began, 3)
    return result


def _labels(root: Root) -> Iterator[str]:
    for kind in KINDS:
        names = root.names(kind)
        for name in names if root.is_local else [n.removesuffix(".json") for n in names if n.endswith(".json")]:
            if LABEL.fullmatch(f"{kind}/{name}"):
                yield f"{kind}/{name}"


def artifact_problems(root: Root, label: str) -> dict[str, str]:
    """Return what is wrong with an artifact by file, after reading all of it; empty if it was deleted."""
    return _read_artifact(open_store(root), label, Verification(root=root.uri), False)[1]


def _read_artifact(
    store: Store, label: str, result: Verification, sign: bool
) -> tuple[Manifest | None, dict[str, str], bool]:
    """Return the manifest of an artifact, its problems by file, and whether its signature is not trusted."""
    try:
        try:
            artifact = store.load(label)
        except UntrustedArtifact:
            if not sign:
                raise
            store.sign(label)
            result.signed += 1
            artifact = store.load(label)
    except DamagedArtifact as error:
        return None, {MANIFEST: str(error).partition(": ")[2]}, isinstance(error, UntrustedArtifact)
    except ValueError:  # deleted by garbage collection
        return None, {}, False
    files, problems = artifact.manifest.files, dict[str, str]()
    if isinstance(artifact, RemoteArtifact):
        pages = {f"{PAGES}/{name}": entry for name, entry in artifact.manifest.pages.items()}
        objects = [*files.items(), *pages.items()]
        texts = parallel_map(lambda item: digest_object(f"{artifact.uri}/{item[0]}", item[1]), objects)
        artifact.scrub_copy()  # a wrong local copy is not damage: it is removed and downloaded again
        problems = {name: problem for (name, _), problem in zip(objects, texts, strict=True) if problem}
    else:
        lost = set(artifact.missing())
        for name in wrong_files(artifact.folder, files, artifact.stamp, again=True):
            problems[name] = "is missing or has another size" if name in lost else "has another SHA-256"
        stored = [path for path in artifact.folder.rglob("*") if not path.is_dir()]
        for name in (path.relative_to(artifact.folder).as_posix() for path in stored):
            if name not in {*files, MANIFEST}:
                problems[name] = "is not in the manifest"
    result.artifacts += 1
    result.files += len(files)
    result.bytes += artifact.bytes
    if problems:
        artifact.stamp.forget()
        try:
            store.load(label)
        except ValueError:  # deleted while it was read
            return None, {}, False
    return artifact.manifest, problems, False


def _copies(root: Root, result: Verification) -> Iterator[tuple[str, str, str]]:
    """Yield (folder, file, problem) of fetched copies that differ from what was downloaded."""
    use_fetched(root)
    folder, copies = fetched_folder(), fetched_copies()
    problems = parallel_map(lambda file: _copy_problem(folder, file), copies) if folder else []
    for file, problem in zip(copies, problems, strict=True):
        result.files, result.bytes = result.files + 1, result.bytes + file.size
        if problem:
            yield str(folder), file.path, problem


def _copy_problem(folder: Path, file: FetchedFile) -> str:
    try:
        damaged = digest_file(folder / file.path).sha256 != file.sha256
    except FileNotFoundError:
        return "is missing; run herd fetch again"
    return "has another SHA-256; delete it and run herd fetch again" if damaged else ""


def _checkpoints(root: Root, result: Verification) -> Iterator[tuple[str, str, str]]:
    """Yield (folder, file, problem) of checkpoints of stages in progress; a deleted one is skipped."""
    local = (root.local / "work").glob("*/checkpoints/[0-9]*/manifest.json")
    folders = [(str(path.parent), path.parent.relative_to(root.local).as_posix()) for path in sorted(local)]
    if not root.is_local:
        for work in list_children(root.join(IN_PROGRESS)):
            for position in filter(str.isdigit, list_children(root.join(IN_PROGRESS, work))):
                for attempt in list_children(root.join(IN_PROGRESS, work, position)):
                    name = f"{IN_PROGRESS}/{work}/{position}/{attempt}"
                    folders.append((root.join(name), name))
    if not folders:
        return
    from herd.llama3.train.checkpoint.manifest import CheckpointManifest as Checkpoint
    from herd.llama3.train.checkpoint.manifest import DamagedCheckpoint  # imports torch

    for uri, name in folders:
        try:
            text = Path(uri, MANIFEST).read_bytes() if is_local(uri) else get_bytes(f"{uri}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):  # being written or deleted, or not a checkpoint
            continue
        try:
            manifest = Checkpoint.parse(text, name)
        except DamagedCheckpoint as error:
            yield name, MANIFEST, str(error)
            continue
        for file, entry in manifest.files.items():
            problem = digest_object(f"{uri}/{file}", entry)
            result.files, result.bytes = result.files + 1, result.bytes + entry.bytes
            if problem and (Path(uri).exists() if is_local(uri) else MANIFEST in list_children(uri)):
                yield name, file, problem
