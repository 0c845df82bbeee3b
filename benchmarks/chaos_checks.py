"""What must hold after chaos: bytes of an undisturbed run, and states that are true everywhere a minute later.

`python -m benchmarks.chaos_checks FILE...` prints the tables of the files of several seeds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.chaos import FAULTS, Lane, World
from benchmarks.rows import CHAOS_TARGETS, Row, measured, number
from herd.llama3.train.metrics import LOST_TOKENS
from herd.storage.root import Root
from herd.tasks.operate.integrity import verify
from herd.tasks.operate.ledgers import ledger_differences
from herd.tasks.promotion.log import CHAMPION, PromotionLog, current_label
from herd.tasks.runs.records import Runs
from tests.e2e.conftest import bytes_made
from tests.storage.swift import SECRET

TRUE_WITHIN_S = 60.0
"""After the last process ended; a deployed herd reconciles every few minutes, so it is asked to here."""
BPB_TOLERANCE = 2e-3
"""Of a model that was trained on a changing number of processes, which adds in another order (fp32)."""
RECONCILE = """
import sys
from herd.flows.local_server import quiet_prefect
quiet_prefect()
from herd.flows.maintenance import reconcile
from herd.flows.recipe_form import RootParameters
for root in sys.argv[1:]:
    reconcile(RootParameters(root=root), full=True, grace_s=0.0)
"""


@dataclass(frozen=True)
class Undisturbed:
    """A run of the same recipe without faults."""

    digests: dict[str, str]
    losses: list[tuple[int, float]]
    """Position in tokens and `train/loss` of each point in MLflow."""
    bpb: float
    seconds: float


def undisturbed(world: World) -> Undisturbed:
    """Run the recipe once on a disk. Raises RuntimeError if it does not end well."""
    root, printed, began = world.folder / "undisturbed", list[str](), time.monotonic()
    words = world.run_words("undisturbed", 1, world.folder / "corpus")
    process = world.command(*words, root=str(root), scratch=root, printed=printed)
    process.process.join(900)
    if process.returncode != 0:
        raise RuntimeError(f"the undisturbed run ended with status {process.returncode}: {''.join(printed)[-400:]}")
    seconds, parsed = time.monotonic() - began, Root.parse(root)
    return Undisturbed(
        bytes_made(parsed, "undisturbed-1"), *_tracked(world, Runs(parsed).find("undisturbed-1").mlflow_run), seconds
    )


def _tracked(world: World, mlflow_run: str) -> tuple[list[tuple[int, float]], float]:
    """Return the loss curve and the last `eval/bpb` of a run in MLflow."""
    from mlflow import MlflowClient

    client = MlflowClient(world.mlflow.uri)
    losses = [(point.step, point.value) for point in client.get_metric_history(mlflow_run, "train/loss")]
    return sorted(losses), client.get_run(mlflow_run).data.metrics["eval/bpb"]


def broken_promises(world: World, reference: Undisturbed) -> tuple[list[str], float]:
    """Return what does not hold, and after how many seconds of quiet all states were true."""
    roots = [
        (lane, family, Root.parse(uri, _scratch(world, family))) for lane in world.lanes for family, uri in lane.ended
    ]
    broken, began = [*world.broken], time.monotonic()
    wrong = [root.uri for _, family, root in roots if _false_states(world, family, root)]
    _reconcile(world, wrong)
    while false := [why for _, family, root in roots for why in _false_states(world, family, root)]:
        if time.monotonic() - began > TRUE_WITHIN_S:
            break
    true_after = time.monotonic() - began
    _reconcile(world, [root.uri for _, _, root in roots if root.uri not in wrong])  # removes what work was left
    broken += false
    for lane, family, root in roots:
        try:
            broken += [f"{family}: {why}" for why in _lost(world, lane, family, root, reference)]
        except Exception as error:  # whatever cannot be looked at is lost
            broken.append(f"{family}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    for process in psutil.process_iter():
        try:
            if process.environ().get("HERD_SCRATCH", "").startswith(str(world.folder)):
                broken.append(f"process {process.pid} ({process.name()}) is left over")
        except psutil.Error:
            continue
    return broken + [f"{path} holds the secret" for path in _with_secret(world.folder)], true_after


def _reconcile(world: World, uris: list[str]) -> None:
    """Reconcile roots, half of them in each of two processes: all at once would be dozens."""
    halves = [half for half in (uris[::2], uris[1::2]) if half]
    reconciling = [
        world.forked("-c", RECONCILE, *half, root=half[0], scratch=Path(_scratch(world, "reconcile")), printed=[])
        for half in halves
    ]
    for process in reconciling:
        process.process.join(300)


def _scratch(world: World, family: str) -> str:
    return str(world.folder / "look" / family)


def _false_states(world: World, family: str, root: Root) -> list[str]:
    """Return where record, MLflow and Prefect do not agree on how a run ended, and whether none ended well."""
    from prefect import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    records = Runs(root).family(family)
    with temporary_settings({PREFECT_API_URL: world.prefect.uri}), get_client(sync_client=True) as client:
        false = list(map(str, ledger_differences(root, client, [record.name for record in records])))
    if not any((record.state, record.verdict) == ("finished", "promoted") for record in records):
        false.append(f"{family}: no run was promoted")
    return false


def _lost(world: World, lane: Lane, family: str, root: Root, reference: Undisturbed) -> Iterator[str]:
    """Yield what differs from the undisturbed run: in each run that ended well, and in the root as a whole."""
    from mlflow import MlflowClient

    finished = [record for record in Runs(root).family(family) if record.state == "finished"]
    for record in finished:
        digests = bytes_made(root, record.name)
        names = digests.keys() | reference.digests.keys()
        differing = {name for name in names if digests.get(name) != reference.digests.get(name)}
        if wrong := {name for name in differing if "/" in name or not lane.elastic}:
            yield f"{record.name}: other bytes: {sorted(wrong)}"
        if record.mlflow_stale:
            words = ("mlflow", "sync", record.name)
            world.command(*words, root=root.uri, scratch=root.local, printed=[]).process.join(300)
        losses, bpb = _tracked(world, record.mlflow_run)
        if [step for step, _ in losses] != [step for step, _ in reference.losses]:
            yield f"{record.name}: points of the loss in MLflow are missing or doubled"
        elif losses != reference.losses and not lane.elastic:
            yield f"{record.name}: other losses in MLflow"
        if abs(bpb / reference.bpb - 1) > (BPB_TOLERANCE if lane.elastic else 0):
            yield f"{record.name}: eval/bpb {bpb}, undisturbed {reference.bpb}"
    champion = current_label(PromotionLog(root, family).records, CHAMPION)
    if champion not in {record.steps["anneal"].artifact for record in finished}:
        yield f"the promotion log names {champion!r}"
    version = MlflowClient(world.mlflow.uri).get_model_version_by_alias(family, CHAMPION)
    if version.tags.get("herd.artifact") != champion:
        yield f"MLflow's champion is {version.tags.get('herd.artifact')}"
    yield from (str(damage) for damage in verify(root).damaged)
    if left := root.names("in-progress"):
        yield f"unfinished work is left: {left}"


def _trained_again(world: World) -> int:
    """Return how many tokens all finished runs trained more than once."""
    from mlflow import MlflowClient

    client, total = MlflowClient(world.mlflow.uri), 0.0
    for lane in world.lanes:
        for family, _ in lane.ended:
            experiment = client.get_experiment_by_name(family)
            runs = client.search_runs([experiment.experiment_id]) if experiment else []
            for run in runs:
                total += sum(point.value for point in client.get_metric_history(run.info.run_id, LOST_TOKENS))
    return int(total)


def _with_secret(folder: Path) -> Iterator[Path]:
    """Yield the files that hold the store's secret, Swift's own configuration apart."""
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path) / name
            if not name.endswith(".conf") and file.is_file() and SECRET.encode() in file.read_bytes():
                yield file


def chaos_rows(world: World, reference: Undisturbed, broken: list[str], true_after: float) -> Iterator[Row]:
    """Yield the totals, and for each kind of fault how often it happened and how long the run took to get further."""
    happened = Counter(injection.kind for injection in world.injections)
    exits = sum((lane.exits for lane in world.lanes), Counter[int]())
    ended = sum(len(lane.ended) for lane in world.lanes)
    yield measured("chaos/violations", len(broken), "; ".join(broken)[:600], broken=broken)
    yield measured("chaos/faults", sum(happened.values()), f"{len(happened)} of {len(FAULTS)} kinds")
    yield measured("chaos/runs", ended, f"undisturbed and alone a run takes {reference.seconds:.0f} s")
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(exits.items()))
    yield measured("chaos/tries", sum(exits.values()) / max(1, ended), f"exit statuses {statuses}")
    yield measured("chaos/true-after", true_after)
    kept, lost = ended * reference.losses[-1][0], _trained_again(world)
    yield measured("chaos/goodput", 100 * kept / max(1, kept + lost), f"{lost:,} tokens were trained again")
    for kind in FAULTS:
        times = sorted(t for i in world.injections if i.kind == kind for t in i.recovered.values())
        note = f"{happened[kind]} times" + (f", longest {times[-1]:.0f} s" if times else "")
        detail = {"count": happened[kind], "seconds": [round(seconds, 1) for seconds in times]}
        yield Row(f"recovery/{kind}", median(times) if times else None, "s", "", None, note, detail)


def page(reports: list[dict[str, Any]]) -> str:
    """Return the tables of several seeds as markdown: totals by seed, and the recovery times of all."""
    rows = [{row["name"]: row for row in report["rows"]} for report in reports]
    lines = ["| | " + " | ".join(f"seed {n}" for n in range(1, len(rows) + 1)) + " |", "|---" * (len(rows) + 1) + "|"]
    for name, target in CHAOS_TARGETS.items():
        values = " | ".join(f"{number(seed[name]['value'])} ({seed[name]['note']})".replace(" ()", "") for seed in rows)
        lines.append(f"| {name.removeprefix('chaos/')}, {target.unit} | {values} |")
    lines += ["", "| fault | times | median, s | longest, s |", "|---|---|---|---|"]
    for name in (name for name in rows[0] if name.startswith("recovery/")):
        details = [seed[name]["detail"] for seed in rows]
        seconds = sorted(value for detail in details for value in detail["seconds"])
        figures = f"{median(seconds):.0f} | {seconds[-1]:.0f}" if seconds else "– | –"
        count = sum(detail["count"] for detail in details)
        lines.append(f"| {name.removeprefix('recovery/')} | {count} | {figures} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page([json.loads(Path(file).read_text()) for file in sys.argv[1:]]), end="")
