"""A real Slurm on loopback: munged, slurmctld and a slurmd for each of two emulated nodes, in a folder of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from herd.storage.processes import die_with_parent, free_ports

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
NODES = ("n1", "n2")
UP_S = 60.0
CONFIG = """\
ClusterName=herd
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=0
KillWait=20
PropagateResourceLimits=NONE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=train Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(RuntimeError):
    """Slurm is not installed, or does not start here; the text says which."""


@contextmanager
def slurm(folder: Path) -> Iterator[Path]:
    """Yield the configuration file of a running Slurm; its daemons are stopped by process id. Raises NoSlurm."""
    missing = [name for name in NEEDED if not shutil.which(name, path=_path())]
    if missing:
        raise NoSlurm(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)")
    config = _configure(folder)
    environment = {**os.environ, "SLURM_CONF": str(config), "PATH": _path()}
    with ExitStack() as daemons:
        munge = ["munged", "--foreground", "--force", "--num-threads=2"]
        for name in ("key-file=munge.key", "socket=munge.socket", "pid-file=munge.pid", "seed-file=munge.seed"):
            option, file = name.split("=")
            munge.append(f"--{option}={folder / file}")
        daemons.enter_context(_daemon([*munge, f"--log-file={folder / 'munge.log'}"], folder, environment))
        _await(lambda: (folder / "munge.socket").exists(), folder, "munged")
        daemons.enter_context(_daemon(["slurmctld", "-D", "-f", str(config)], folder, environment))
        for node in NODES:
            daemons.enter_context(_daemon(["slurmd", "-D", "-N", node, "-f", str(config)], folder, environment))
        _await(lambda: _idle(environment) == len(NODES), folder, "Slurm")
        yield config


@contextmanager
def slurm_for_children() -> Iterator[Path]:
    """Run a Slurm that the environment names, in a folder of its own. Skips the test, aloud, where there is none."""
    folder = Path(tempfile.mkdtemp(prefix="herd-slurm-"))  # munged refuses a path with folders that others cannot enter
    folder.chmod(0o755)
    try:
        with slurm(folder) as config, pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(config))
            yield config
    except NoSlurm as error:
        pytest.skip(f"NOT TESTED: no Slurm here: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> Path:
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    user = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, host=socket.gethostname(), user=user, ports=free_ports(3)))
    return config


@contextmanager
def _daemon(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--responding", "--states=idle"]
    return len(subprocess.run(command, env=environment, capture_output=True, text=True).stdout.splitlines())


def _await(condition, folder: Path, what: str) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    deadline = time.monotonic() + UP_S
    while not condition():
        if time.monotonic() > deadline:
            raise NoSlurm(f"{what} did not start: {(folder / 'daemons.log').read_text()[-600:]}")
        time.sleep(0.2)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
