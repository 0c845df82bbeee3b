"""Run `herd` as a user does: a process of its own, its own root, its own Prefect home.

One Prefect server serves the session, because starting a temporary one for each run takes seconds; processes are forked
from one that has imported the libraries. The newcomer's way is `server=False, forked=False`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import yaml
from prefect import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from herd.llama3.data.readers.sources import open_source
from herd.llama3.recipe.load import load_recipe
from herd.storage.object_artifact import open_store
from herd.storage.processes import die_with_parent
from herd.storage.root import Root
from herd.tasks.operate.ledgers import ledger_differences
from herd.tasks.operate.owners import unfinished_flow_runs
from herd.tasks.runs.records import RunRecord, Runs
from tests.dist import Forked

Found = TypeVar("Found")
Started = Forked | subprocess.Popen[str]

TINY = Path("tests/e2e/tiny.yaml")
"""The tiny recipe on text found on the machine."""


@dataclass
class Herd:
    """The command line on one root."""

    root: Path
    home: Path
    api: str
    recipe: str
    """The tiny recipe on the session's files."""
    printed: str = ""
    """What the first run of the session's root printed."""
    started: list[Started] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    """More environment: an object store's address, its root."""
    folder: Path = Path()
    """Where commands are given."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PREFECT_HOME": str(self.home),
            "HERD_ROOT": str(self.root),
            "COLUMNS": "200",
            "HERD_THREADS": "1",
            **self.variables,
        }

    def start(self, *words: str, server: bool = True, forked: bool = True) -> Started:
        """Start `herd words...` in a process group of its own; without `forked` in an interpreter of its own, too."""
        environment = {**self.environment, **({"PREFECT_API_URL": self.api} if server else {})}
        if forked:
            self.started.append(Forked("herd.flows.cli.main", *words, environment=environment, folder=self.folder))
            return self.started[-1]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "herd.flows.cli.main", *words],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        self.started.append(process)
        return process

    def __call__(self, *words: str, status: int = 0, server: bool = True, forked: bool = True) -> str:
        """Run `herd words...` to its end, check its exit status and return what it printed."""
        process = self.start(*words, server=server, forked=forked)
        printed, _ = process.communicate(timeout=560)
        assert process.returncode == status, printed
        return printed

    def stop_all(self) -> None:
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


NewHerd = Callable[[Path], Herd]
"""Makes a command line on a root."""


@pytest.fixture(scope="session")
def prefect_home(prefect_server: dict[str, str]) -> Path:
    return Path(prefect_server["home"])


@pytest.fixture(scope="session")
def prefect_api(prefect_server: dict[str, str]) -> str:
    return prefect_server["api"]


def write_recipe(folder: Path) -> str:
    """Write the tiny recipe on files, and what it finds on the machine into them, because finding it takes seconds."""
    folder.mkdir(exist_ok=True)
    data = yaml.safe_load(TINY.read_text())
    for domain, (source,) in load_recipe(TINY).sources.items():
        texts = [{"text": document.text, "url": document.url} for document in open_source(source, domain, seed=1)]
        (folder / f"{domain}.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
        data["sources"][domain] = [{"uri": str(folder / f"{domain}.jsonl")}]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(data))
    return str(folder / "tiny.yaml")


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny recipe on the session's files."""
    return write_recipe(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def new_herd(prefect_home: Path, prefect_api: str, recipe: str) -> Iterator[NewHerd]:
    """Makes a command line on a root; whatever it leaves running is killed at the end."""
    made: list[Herd] = []

    def make(root: Path) -> Herd:
        made.append(Herd(root, prefect_home, prefect_api, recipe))
        return made[-1]

    yield make
    for herd in made:
        herd.stop_all()


@pytest.fixture(scope="session")
def herd(tmp_path_factory: pytest.TempPathFactory, new_herd: NewHerd) -> Herd:
    """A root on which the tiny recipe has run once, undisturbed, as `tiny-1`; only test_chain.py runs more on it.

    It is run as a newcomer does: by a new interpreter, which starts a temporary Prefect server.
    """
    made = new_herd(tmp_path_factory.mktemp("root"))
    made.printed = made("run", made.recipe, server=False, forked=False)
    return made


@pytest.fixture(scope="session")
def undisturbed(herd: Herd) -> dict[str, str]:
    """The bytes that every run of the tiny recipe must end in."""
    return bytes_made(Root.parse(herd.root), "tiny-1")


def copy_artifacts(herd: Herd, root: Path, *patterns: str) -> None:
    """Give a new root some artifacts of the undisturbed run, so that a test begins where it matters."""
    for pattern in ("collected/*", "annotated/*", "curated/*", "tokenizer/*", "tokens/*", *patterns):
        for path in herd.root.glob(pattern):
            shutil.copytree(path, root / path.relative_to(herd.root))


def read_until(process: Started, text: str) -> str:
    """Return what `process` prints up to the line that holds `text`."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if text in line:
            return printed
    raise AssertionError(f"ended without {text!r}:\n{printed}")


def wait_for(condition: Callable[[], Found | None], what: str, seconds: float = 120, every_s: float = 0.05) -> Found:
    """Return what `condition` returns once that is something."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(every_s)
    return found


def trainers(pid: int) -> list[psutil.Process]:
    """Return the trainer processes below `pid`, without the agent that forked them."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.name().startswith("herd-rank-"):
                found.append(process)
    return found


def kill_all(pid: int) -> None:
    """SIGKILL a process and everything it started, all at once; some of it may have left already."""
    with suppress(psutil.NoSuchProcess):
        everything = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everything, 10)


def journal_lines(root: Path, stage: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (root / "work").glob(f"{stage}-*/journal.jsonl"))


def record(herd: Herd, name: str) -> RunRecord:
    return Runs(Root.parse(herd.root)).find(name)


def lies(herd: Herd) -> list[str]:
    """Return where record, MLflow and Prefect differ about the runs of a root, and its flow runs that never end."""
    root = Root.parse(herd.root)
    with temporary_settings({PREFECT_API_URL: herd.api}), get_client(sync_client=True) as client:
        differences = ledger_differences(root, client, [run.name for run in Runs(root).all()])
        unended = [flow_run for flow_run in unfinished_flow_runs(client) if root.uri in str(flow_run.parameters)]
    of_records = [str(difference) for difference in differences if difference.text.startswith("record")]
    return [*of_records, *(f"{flow_run.name} {flow_run.state_name}" for flow_run in unended)]


def bytes_made(root: Root, run: str) -> dict[str, str]:
    """Return a digest of everything that the result of `run` consists of."""
    steps, store = Runs(root).find(run).steps, open_store(root)
    made = {step: store.load(entry.artifact) for step, entry in steps.items()}
    digests: dict[str, str] = {}
    for step in ("collect", "annotate", "curate", "tokenizer", "tokenize"):
        digests |= {f"{step}/{name}": entry.sha256 for name, entry in made[step].manifest.files.items()}
    return digests | {stage: made[stage].metadata["model_sha256"] for stage in ("ramp", "main", "anneal")}
