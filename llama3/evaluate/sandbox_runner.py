"""Run one untrusted program in its own namespaces and report how it ended. A script, started by `sandbox`.

Imports only the standard library, so that a program starts in hundredths of a second. The program comes by stdin, the
report goes to stdout as one line of JSON. In its namespaces the program is process 1, has no network device, and sees
the interpreter and the system's libraries read-only and an empty /tmp in memory. Started by root it becomes a user that
owns nothing; by another user it is in a user namespace, without any capability after exec.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, HERE, WHOLE_TREE, READ_ONLY = 442, -100, 0x8000, 1
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
SHARED = ("shmmax", "shmall", "shmmni", "msgmax", "msgmnb", "msgmni", "sem")
"""Limits of System V shared memory, queues and semaphores in the IPC namespace."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
NOBODY = 64_000
"""First of a thousand user ids for programs started by root, so that their processes are counted apart."""
TMPFS = b"size=16m,nr_inodes=1024,mode=1777"
TAIL = 2000
"""Last bytes of stderr that are kept."""
PERIOD = 0.05
"""Seconds between two checks of the program."""
CPU_CLOCK = 2
"""CPUCLOCK_SCHED: of all threads; exact, unlike the ticks behind RLIMIT_CPU."""
# System calls by ctypes: `os.unshare` needs Python 3.12, and the `unshare` tool cannot build the file tree below.
libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace"))


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def main(
    folder: str, seconds: float, asleep: float, wall: float, namespaces: bool, limits: dict[str, int], calls: str
) -> dict[str, Any]:
    """Run the program on stdin; return the report.

    `status`: its exit status. `stopped`: the limit that stopped it, or empty: `cpu` (`seconds` of processor time),
    `asleep` (seconds in which it neither ran nor waited for a processor), `wall` (wall-clock seconds). `finished`:
    whether it reached its last line. `cpu`, `clock`: seconds. `errors`: the end of its stderr. `fault`: why it did not
    start. `folder` is an empty directory, where the new file tree is mounted, or the program's own without namespaces.
    `calls` is the seccomp filter, as hex.
    """
    errors, nobody = os.memfd_create("stderr"), NOBODY + os.getpid() % 1000
    done, marker = os.pipe()
    unstarted, fault = os.pipe()
    word = os.urandom(8).hex()  # secret: the program cannot claim to have reached its last line
    program = sys.stdin.buffer.read() + f"\n\n__import__('os').write({marker}, b'{word}')\n".encode()
    os.set_inheritable(marker, True)
    if namespaces:
        enter_namespaces()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        limits = {**limits, "RLIMIT_CPU": 2 * round(seconds) + 2}
        exec_program(folder, program, errors, fault, nobody if namespaces else None, limits, bytes.fromhex(calls))
    os.close(marker)
    os.close(fault)
    stopped, status = wait_for_child(child, seconds, asleep, wall)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    end = os.lseek(errors, 0, os.SEEK_END)
    return {
        "status": status,
        "stopped": stopped,
        "finished": os.read(done, 64) == word.encode(),
        "cpu": cpu.ru_utime + cpu.ru_stime,
        "clock": time.monotonic() - began,
        "fault": os.read(unstarted, TAIL).decode(errors="replace"),
        "errors": os.pread(errors, TAIL, max(0, end - TAIL)).decode(errors="replace"),
    }


def enter_namespaces() -> None:
    """Move this process into new namespaces; its first child is process 1."""
    user, group, root = os.getuid(), os.getgid(), os.geteuid() == 0
    libc_call("unshare", NEW_MOUNTS | NEW_IPC | NEW_PIDS | NEW_NETWORK | (0 if root else NEW_USER))
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")


def exec_program(
    folder: str, program: bytes, errors: int, fault: int, nobody: int | None, limits: dict[str, int], calls: bytes
) -> NoReturn:
    """Become the program; `nobody` is the user id for root, None without namespaces.

    An error before the start is written to the pipe `fault`, which the program does not inherit.
    """
    namespaces = nobody is not None
    try:
        os.setsid()
        if namespaces:
            for name in SHARED:  # no System V IPC, if this user may set that: the filter forbids its calls as well
                try:
                    Path("/proc/sys/kernel", name).write_text("0 0 0 0" if name == "sem" else "0")
                except OSError:
                    break
            mount_tree(folder)
            os.chroot(folder)
        home = "/tmp" if namespaces else folder
        os.chdir(home)
        Path("program.py").write_bytes(program)
        nothing = os.open("/dev/null", os.O_RDWR)
        for source, target in ((nothing, 0), (nothing, 1), (errors, 2)):
            os.dup2(source, target)
        if nobody is not None and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(nobody, nobody, nobody)
            os.setresuid(nobody, nobody, nobody)
        libc_call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        for name, most in limits.items():
            resource.setrlimit(getattr(resource, name), (most, most))
        known = FilterProgram(len(calls) // 8, calls)
        libc_call("prctl", SECCOMP, FILTER, ctypes.byref(known), 0, 0)
        environment = {"HOME": home, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-s", "-P", "-S", "-B", f"{home}/program.py"], environment)
    except BaseException as error:
        os.write(fault, f"{error}".encode())
    finally:
        os._exit(126)


def mount_tree(folder: str) -> None:
    """Mount the program's file tree at `folder`."""
    libc_call("mount", None, b"/", None, ctypes.c_ulong(RECURSIVE | PRIVATE), None)
    libc_call("mount", b"none", folder.encode(), b"tmpfs", ctypes.c_ulong(0), b"size=1m,mode=755")
    prefix = os.path.realpath(sys.base_prefix)
    in_system = any(prefix == path or prefix.startswith(f"{path}/") for path in SYSTEM)
    for path in (*SYSTEM, *DEVICES, *([] if in_system else [prefix])):
        bind(Path(path), Path(folder + path))
    home = Path(folder, "tmp")
    home.mkdir()
    attributes = MountAttributes(set=READ_ONLY)
    size = ctypes.sizeof(attributes)
    libc_call(
        "syscall", MOUNT_SETATTR, HERE, folder.encode(), WHOLE_TREE, ctypes.byref(attributes), ctypes.c_size_t(size)
    )
    libc_call("mount", b"none", bytes(home), b"tmpfs", ctypes.c_ulong(0), TMPFS)


def bind(source: Path, target: Path) -> None:
    """Bind-mount the file or folder `source`, if it exists, at `target`; copy it if it is a link."""
    if not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        return
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    libc_call("mount", bytes(source), bytes(target), None, ctypes.c_ulong(BIND | RECURSIVE), None)


def wait_for_child(child: int, seconds: float, asleep: float, wall: float) -> tuple[str, int]:
    """Wait for `child`; return the limit that stopped it, or an empty text, and its exit status."""
    watched, clock = os.pidfd_open(child), (~child << 3) | CPU_CLOCK
    began = last = time.monotonic()
    slept, stopped = 0.0, ""
    while not stopped and not select.select([watched], [], [], PERIOD)[0]:
        now = time.monotonic()
        slept += min(now - last, 2 * PERIOD) if is_asleep(child) else 0.0
        last = now
        if time.clock_gettime(clock) > seconds:
            stopped = "cpu"
        elif slept > asleep:
            stopped = "asleep"
        elif now - began > wall:
            stopped = "wall"
    if stopped:
        os.kill(child, signal.SIGKILL)
    return stopped, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_asleep(process: int) -> bool:
    """Return whether every thread of `process` sleeps: none runs or waits for a processor or a disk."""
    try:
        threads = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
    except OSError:  # a thread ended in between
        return False
    return all(text.rpartition(")")[2].split()[0] in "STt" for text in threads)


def libc_call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError with its name if it fails."""
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
