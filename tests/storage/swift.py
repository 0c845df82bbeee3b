"""OpenStack Swift with its S3 interface as a test server: a real object store on a real disk, on loopback.

moto answers from memory, believes every signature and lets no two writers race; Swift checks signatures and digests,
keeps what it has stored through a kill, and lets several writers win a conditional PUT. One replica, four processes
(proxy, account, container, object), no memcached, no background daemons: what a crashed upload leaves stays there.
Swift needs a file system with extended attributes (ext4, xfs, overlay; tmpfs from Linux 6.6).
It answers 1 to 4 s after the start.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from herd.storage.processes import die_with_parent, free_ports

KEY, SECRET = "herd:tester", "swift-secret"
UP_S = 90.0
"""How long a start may take on a busy machine; alone it takes 1.3 to 4 s."""
PAGE = 100
"""Names in a page of a listing, where S3 has 1,000: what forgets to ask for the next page is found with few objects."""
KINDS = ("account", "container", "object")

_SWIFT_CONF = """[swift-hash]
swift_hash_path_prefix = herd
swift_hash_path_suffix = herd
[storage-policy:0]
name = default
default = yes
"""

_COMMON = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
disable_fallocate = true
log_level = WARNING
"""

_PROXY = """[pipeline:main]
pipeline = catch_errors listing_formats s3api tempauth copy slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
node_timeout = 60
conn_timeout = 10
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
max_bucket_listing = {page}
[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{user} = {secret} .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""

_BACKEND = """[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
node_timeout = 60
conn_timeout = 10
container_update_timeout = 60
"""

_RINGS = """
import sys
from swift.common.ring.builder import RingBuilder
folder, *ports = sys.argv[1:]
for kind, port in zip(("account", "container", "object"), ports):
    builder = RingBuilder(2, 1, 0)
    builder.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "d1", "weight": 1})
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{kind}.ring.gz")
"""


def available() -> bool:
    """Return whether the package `swift` is installed (it is in the `dev` extra)."""
    return importlib.util.find_spec("swift") is not None


@dataclass
class Swift:
    """A server in `folder`, which may be killed and started again with what it has stored."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['proxy']}"

    def start(self) -> None:
        """Start the four processes and wait until S3 answers. Raises RuntimeError with the end of the logs."""
        began = time.monotonic()
        if not self.ports:
            self._install()
        for kind, module in zip((*KINDS, "proxy"), ("account", "container", "obj", "proxy"), strict=True):
            log = (self.folder / f"{kind}.log").open("ab")
            command = [sys.executable, "-m", f"swift.{module}.server", str(self.folder / f"{kind}.conf"), "-v"]
            self.running.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    preexec_fn=lambda: die_with_parent(signal.SIGKILL),
                )
            )
            log.close()
        while not self._answers():
            if time.monotonic() - began > UP_S or any(process.poll() is not None for process in self.running):
                self.kill()
                raise RuntimeError(f"Swift does not start:\n{self.log()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End the four processes by their ids; what is on the disk stays."""
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()
        self.running.clear()

    def log(self) -> str:
        """Return the last lines of what the processes wrote."""
        return "\n".join("\n".join(path.read_text().splitlines()[-12:]) for path in sorted(self.folder.glob("*.log")))

    def _install(self) -> None:
        """Write configuration and ring files: which device, behind which port, holds what."""
        (self.folder / "devices" / "d1").mkdir(parents=True)
        self.ports = dict(zip((*KINDS, "proxy"), free_ports(4), strict=True))
        (self.folder / "swift.conf").write_text(_SWIFT_CONF)
        account, user = KEY.split(":")
        for kind, port in self.ports.items():
            head = _COMMON.format(port=port, user=getpass.getuser(), folder=self.folder)
            proxy = _PROXY.format(account=account, user=user, secret=SECRET, page=PAGE)
            (self.folder / f"{kind}.conf").write_text(head + (proxy if kind == "proxy" else _BACKEND.format(kind=kind)))
        ports = [str(self.ports[kind]) for kind in KINDS]
        subprocess.run([sys.executable, "-c", _RINGS, str(self.folder), *ports], check=True, cwd=self.folder)

    def _answers(self) -> bool:
        """Return whether all four are there; S3 without credentials says 403, a server behind the proxy 405 or so."""
        return all(_status(f"http://127.0.0.1:{port}/") < 500 for port in self.ports.values())


@contextlib.contextmanager
def swift_server(folder: Path) -> Iterator[Swift]:
    """Yield a running server whose data lies under `folder`. Raises RuntimeError if it does not start."""
    server = Swift(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def credentials(endpoint: str, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """Return the environment in which s3fs finds the server."""
    names = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    return {**names, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}


def _status(url: str) -> int:
    """Return the HTTP status of a GET, 999 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 999


if __name__ == "__main__":
    for sign in (signal.SIGINT, signal.SIGTERM):  # a shell lets what it starts with & ignore the first
        signal.signal(sign, signal.default_int_handler)
    with swift_server(Path(sys.argv[1])) as server:
        print(" ".join(f"{name}={value}" for name, value in credentials(server.endpoint).items()), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            os.waitpid(server.running[0].pid, 0)
