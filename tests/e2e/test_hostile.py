"""A machine that is set up badly in all ways at once: herd works there, or says in a sentence why not."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from herd.storage.processes import free_ports
from herd.storage.root import Root
from herd.tasks.runs.records import Runs
from herd.tasks.tracking.mlflow import MLflowTracker

pytestmark = pytest.mark.slow

NAMESPACES = ["unshare", "--mount", "--uts", "--fork", "--kill-child", "sh", "-ec"]
BARE = "PATH", "PYTHONPATH", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HERD_TEST_RUN", "MLFLOW_DISABLE_TELEMETRY"
DEAD = "http://127.0.0.1:9"
MOUNTS = """
mount -t tmpfs -o size=1m tmpfs /dev/shm
mount --bind . . && mount -o remount,bind,ro . && cd .
! touch written 2>/dev/null
hostname no-such-host.invalid
"""
UP_AND_RUN = """
umask 077
ulimit -n 256
$herd up --prefect-port $prefect --mlflow-port $mlflow > $logs/up 2>&1 & up=$!
until grep -q 'Ctrl-C stops' $logs/up; do kill -0 $up; sleep 1; done
status=0
(. $HERD_ROOT/prefect.env; $herd run $recipe --processes 2 --until ramp > $logs/run 2>&1) || status=$?
kill $up
wait $up || :
exit $status
"""


def test_proxies_no_home_plain_ascii_few_files_and_a_read_only_checkout(recipe: str, tmp_path: Path) -> None:
    """Prefect, MLflow, a worker and a run of two processes; none asks the proxy."""
    may_mount = subprocess.run([*NAMESPACES, MOUNTS], capture_output=True, text=True)
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # what programs take without HOME
    hidden = not may_mount.returncode and not Path(sys.executable).resolve().is_relative_to(home)
    prefect, mlflow = map(str, free_ports(2))
    environment = {
        **{name: os.environ[name] for name in BARE if name in os.environ},
        **dict.fromkeys(("http_proxy", "HTTPS_PROXY", "all_proxy"), DEAD),
        **{"no_proxy": ".corp.example", "LANG": "C", "LC_ALL": "C", "HERD_THREADS": "1"},
        **{"herd": f"{sys.executable} -P -m herd.flows.cli.main", "recipe": recipe, "logs": str(tmp_path)},
        **{"prefect": prefect, "mlflow": mlflow, "HERD_ROOT": str(tmp_path / "root")},
        **({} if hidden else {"PREFECT_HOME": str(tmp_path / "prefect")}),
    }
    script = (f"mount -t tmpfs tmpfs {home}\n" if hidden else "") + (
        UP_AND_RUN if may_mount.returncode else MOUNTS + UP_AND_RUN
    )
    command = ["sh", "-ec", script] if may_mount.returncode else [*NAMESPACES, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    printed = {name: (tmp_path / name).read_text() if (tmp_path / name).exists() else "" for name in ("up", "run")}
    assert done.returncode == 0, (done.stdout, done.stderr, printed)
    root = Root.parse(tmp_path / "root")
    assert Runs(root).find("tiny-1").state == "finished"
    assert (root.local / "runs" / "tiny-1" / "report.html").stat().st_size > 0
    assert "Traceback" not in "".join(printed.values())
    assert "MLflow cannot be reached" not in printed["run"]
    tracker = MLflowTracker(root, "tiny")
    (run,) = tracker.client.search_runs([tracker.experiment], "tags.kind = 'run'")
    assert run.info.status == "FINISHED"
    assert {oct(path.stat().st_mode & 0o077) for path in (tmp_path / "root").rglob("*") if not path.is_symlink()} == {
        "0o0"
    }
    if may_mount.returncode:
        pytest.skip(f"passed without tiny /dev/shm, read-only checkout and a strange name: {may_mount.stderr.strip()}")
