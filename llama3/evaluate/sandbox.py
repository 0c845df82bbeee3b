"""Run untrusted programs that a model wrote, and report whether they pass their tests.

Each program is one process in Linux namespaces (`sandbox_runner`), behind a seccomp filter, with limits on processor
time, memory, files and threads. It has the standard library, a home of 16 MiB in memory, no network and no file of the
user. docs/explanations/sandbox.md says what is protected and what is not. Needs Linux 5.12 on x86_64 or aarch64.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

MEMORY = 2**30
"""Bytes of address space of a program."""
FILE = 2**20
"""Bytes of the largest file, and of stderr."""
FILES = 64
"""Open files of a program."""
THREADS = 16
"""Threads of a program, including the first."""
ASLEEP = 3
"""Seconds that a program may sleep per second of processor time. Waiting for a processor does not count."""
WALL = (12, 60)
"""Wall-clock seconds per second of processor time: of the first try, and of the second, which runs alone."""
RUNNER = Path(__file__).with_name("sandbox_runner.py")
LIMITS = {"AS": MEMORY, "FSIZE": FILE, "NOFILE": FILES, "NPROC": THREADS, "CORE": 0, "MSGQUEUE": 0}
REASON = 200
"""Most characters of a reason."""
Network = Literal["none", "allowed"]

# The seccomp filter is an allow-list: any other call returns "not implemented", so that the C library falls back to
# something older. A program is one process with threads, so the limit on address space is a limit on memory. Left out:
# shared memory, memfd_create, io_uring, keyrings, bpf, perf, ptrace, userfaultfd, namespaces, mounts and modules.

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine (`os.uname`) -> AUDIT_ARCH of its system calls."""
EPERM, ENOTTY, ENOSYS, EAFNOSUPPORT = 1, 25, 38, 97
UNIX, INET, INET6 = 1, 2, 10
THREAD = 0x10900
"""CLONE_VM, CLONE_SIGHAND and CLONE_THREAD: the flags that make a thread of this process."""
THREAD_OPTIONS = 0x17D0F00
"""All flags with which C libraries start a thread."""

BOTH = """
read=0,63 write=1,64 readv=19,65 writev=20,66 pread64=17,67 pwrite64=18,68 preadv=295,69 pwritev=296,70
preadv2=327,286 pwritev2=328,287 openat=257,56 openat2=437,437 close=3,57 close_range=436,436 fstat=5,80
newfstatat=262,79 statx=332,291 statfs=137,43 fstatfs=138,44 lseek=8,62 faccessat=269,48 faccessat2=439,439
readlinkat=267,78 getdents64=217,61 getcwd=79,17 chdir=80,49 fchdir=81,50 mkdirat=258,34 renameat=264,38
renameat2=316,276 linkat=265,37 unlinkat=263,35 symlinkat=266,36 fchmod=91,52 fchmodat=268,53 utimensat=280,88
truncate=76,45 ftruncate=77,46 fallocate=285,47 fsync=74,82 fdatasync=75,83 umask=95,166 dup=32,23 dup3=292,24
fcntl=72,25 flock=73,32 pipe2=293,59 sendfile=40,71 copy_file_range=326,285 fadvise64=221,223 mmap=9,222
munmap=11,215 mremap=25,216 mprotect=10,226 brk=12,214 madvise=28,233 mincore=27,232 msync=26,227
rt_sigaction=13,134 rt_sigprocmask=14,135 rt_sigreturn=15,139 rt_sigpending=127,136 rt_sigsuspend=130,133
rt_sigtimedwait=128,137 sigaltstack=131,132 kill=62,129 tkill=200,130 tgkill=234,131 setitimer=38,103
getitimer=36,102 restart_syscall=219,128 clock_gettime=228,113 clock_getres=229,114 clock_nanosleep=230,115
nanosleep=35,101 gettimeofday=96,169 times=100,153 getpid=39,172 gettid=186,178 getppid=110,173 getuid=102,174
geteuid=107,175 getgid=104,176 getegid=108,177 getresuid=118,148 getresgid=120,150 getgroups=115,158
getpgid=121,155 getsid=124,156 setsid=112,157 getpriority=140,141 getrlimit=97,163 setrlimit=160,164
prlimit64=302,261 getrusage=98,165 sysinfo=99,179 uname=63,160 getcpu=309,168 sched_yield=24,124
sched_getaffinity=204,123 sched_setaffinity=203,122 sched_getparam=143,121 sched_getscheduler=145,120
sched_get_priority_max=146,125 sched_get_priority_min=147,126 set_tid_address=218,96 set_robust_list=273,99
get_robust_list=274,100 rseq=334,293 futex=202,98 futex_waitv=449,449 membarrier=324,283 exit=60,93
exit_group=231,94 wait4=61,260 waitid=247,95 execve=59,221 getrandom=318,278 pselect6=270,72 ppoll=271,73
epoll_create1=291,20 epoll_ctl=233,21 epoll_pwait=281,22 epoll_pwait2=441,441 eventfd2=290,19 bind=49,200
listen=50,201 accept=43,202 accept4=288,242 connect=42,203 getsockname=51,204 getpeername=52,205 sendto=44,206
recvfrom=45,207 sendmsg=46,211 recvmsg=47,212 sendmmsg=307,269 recvmmsg=299,243 setsockopt=54,208
getsockopt=55,209 shutdown=48,210
"""
"""Name=number on x86_64, on aarch64."""
OLD = """
open=2 creat=85 stat=4 lstat=6 access=21 readlink=89 getdents=78 mkdir=83 rmdir=84 rename=82 link=86 unlink=87
symlink=88 chmod=90 utime=132 utimes=235 futimesat=261 dup2=33 pipe=22 pause=34 alarm=37 time=201 getpgrp=111
arch_prctl=158 select=23 poll=7 epoll_create=213 epoll_wait=232 eventfd=284
"""
"""System calls of x86_64 alone."""


class ArgumentRule(NamedTuple):
    """A system call that is allowed for some values of one argument."""

    numbers: tuple[int, int]
    argument: int
    allowed: tuple[int, ...]
    otherwise: int
    """The error number for other values."""


PRCTL = ArgumentRule((157, 167), 0, (15, 16, 0x53564D41), EPERM)
"""PR_SET_NAME, PR_GET_NAME, PR_SET_VMA."""
IOCTL = ArgumentRule((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), ENOTTY)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
CLONE, NO_PROCESS = (56, 220), {"x86_64": (57, 58), "aarch64": ()}
"""`clone`, which also starts threads; `fork` and `vfork`."""

_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
Instruction = tuple[int, int, int, int]


def seccomp_filter(machine: str, network: bool) -> bytes:
    """Return the filter as an array of `struct sock_filter`; `network` allows internet sockets.

    Raises ValueError for a machine whose numbers are unknown.
    """
    if machine not in ARCHITECTURES:
        raise ValueError(f"its processor is {machine}, and system calls are known of {' and '.join(ARCHITECTURES)}")
    column = list(ARCHITECTURES).index(machine)
    families = (UNIX, INET, INET6) if network else (UNIX,)
    checked = [
        PRCTL,
        IOCTL,
        ArgumentRule((41, 198), 0, families, EAFNOSUPPORT),
        ArgumentRule((53, 199), 0, (UNIX,), EAFNOSUPPORT),
    ]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    numbers = [int(word.partition("=")[2].split(",")[column]) for word in BOTH.split()]
    numbers += [int(word.partition("=")[2]) for word in OLD.split()] if machine == "x86_64" else []
    for number in numbers:
        code += _when(number, [(_RETURN, 0, 0, _ALLOW)])
    for number in NO_PROCESS[machine]:
        code += _when(number, [(_RETURN, 0, 0, _ERROR | EPERM)])
    for call in checked:
        body: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * call.argument)]
        for value in call.allowed:
            body += _when(value, [(_RETURN, 0, 0, _ALLOW)])
        code += _when(call.numbers[column], [*body, (_RETURN, 0, 0, _ERROR | call.otherwise)])
    only_threads: list[Instruction] = [
        (_LOAD, 0, 0, _ARGUMENTS),
        (_AND, 0, 0, 0xFFFFFFFF ^ THREAD_OPTIONS),
        (_EQUAL, 0, 4, 0),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_AND, 0, 0, THREAD),
        (_EQUAL, 0, 1, THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | EPERM),
    ]
    code += _when(CLONE[column], only_threads)
    code.append((_RETURN, 0, 0, _ERROR | ENOSYS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _when(value: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Return code that runs `body`, which returns, if the loaded number is `value`."""
    return [(_EQUAL, 0, len(body), value), *body]


@dataclass(frozen=True)
class SandboxResult:
    """The result of one program."""

    passed: bool
    reason: str
    """`passed`, or why not: `AssertionError: ...`, `more than 5 s of processor time`, ..."""
    judged: bool = True
    """False if it failed because of this machine, so nothing is known about the program."""


def run_programs(
    programs: Sequence[str], seconds: float = 5.0, parallel: int = 2, network: Network = "none"
) -> list[SandboxResult]:
    """Return the results of `programs` (complete Python sources) in their order; `parallel` run at once.

    `seconds` is the processor time of each. A program that could not be judged is run once more, alone. Raises
    ValueError before any runs if this machine cannot contain them and `network` is `none`. To pass, a program must
    reach its last line and exit with 0.
    """
    if seconds <= 0 or parallel < 1:
        raise ValueError(f"seconds {seconds:g} must be above 0 and parallel {parallel} at least 1")
    if network == "none":
        check_sandbox()
    run = partial(_run, seconds=seconds, namespaces=network == "none")
    with ThreadPoolExecutor(parallel) as pool:
        results = list(pool.map(partial(run, wall=WALL[0]), programs))
    pairs = zip(programs, results, strict=True)
    return [result if result.judged else run(program, wall=WALL[1]) for program, result in pairs]


class SandboxUnavailable(ValueError):
    """This machine cannot contain untrusted programs."""


def check_sandbox() -> None:
    """Raise SandboxUnavailable, with what to do, if this machine cannot contain a program."""
    if obstacle := sandbox_error():
        raise SandboxUnavailable(
            f"code: this machine cannot contain programs that a model wrote ({obstacle}); evaluate on Linux 5.12 or "
            "later where namespaces are permitted (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a container "
            "--cap-add SYS_ADMIN --security-opt seccomp=unconfined), or leave the code tasks out"
        )


@cache
def sandbox_error() -> str:
    """Return why this machine cannot contain a program, or an empty text if it can. Tried once per process."""
    if sys.platform != "linux":
        return f"it runs {sys.platform}, not Linux"
    try:
        result = _run("", seconds=5.0, namespaces=True, wall=WALL[0])
    except ValueError as error:
        return str(error)
    return "" if result.passed else result.reason


def _run(program: str, *, seconds: float, namespaces: bool, wall: float) -> SandboxResult:
    task = {
        "seconds": seconds,
        "asleep": ASLEEP * seconds,
        "wall": wall * seconds,
        "namespaces": namespaces,
        "limits": {f"RLIMIT_{name}": most for name, most in LIMITS.items()},
        "calls": seccomp_filter(os.uname().machine, network=not namespaces).hex(),
    }
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        ended = subprocess.run(
            [os.path.realpath(sys.executable), "-I", "-S", "-B", str(RUNNER), json.dumps({"folder": folder, **task})],
            input=program.encode("utf-8", "replace"),
            capture_output=True,
            env={},
            start_new_session=True,
            check=False,
        )
    if ended.returncode:
        fault = _last_line(ended.stderr.decode(errors="replace")) or f"the runner ended with {ended.returncode}"
        return SandboxResult(False, fault, judged=False)
    return _parse_report(json.loads(ended.stdout), seconds, namespaces)


def _parse_report(ended: dict[str, Any], seconds: float, namespaces: bool) -> SandboxResult:
    """Return the result of a program from the report of `sandbox_runner.main`."""
    status = ended["status"]
    if ended["fault"]:
        return SandboxResult(False, ended["fault"][:REASON], judged=False)
    if ended["stopped"] == "cpu" or ended["cpu"] > seconds:
        return SandboxResult(False, f"more than {seconds:g} s of processor time")
    if ended["stopped"] == "asleep":
        return SandboxResult(False, f"asleep for more than {ASLEEP * seconds:g} s")
    if ended["stopped"] == "wall":
        return SandboxResult(
            False, f"{ended['clock']:.0f} s gave it {ended['cpu']:.1f} s of processor time", judged=False
        )
    if status == 0:
        return (
            SandboxResult(True, "passed")
            if ended["finished"]
            else SandboxResult(False, "it ended before its last line")
        )
    if status == -signal.SIGKILL and namespaces:  # process 1 of a namespace cannot kill itself
        return SandboxResult(False, "it was killed from outside; is this machine short of memory?", judged=False)
    if status < 0:
        return SandboxResult(False, f"ended by signal {-status}")
    return SandboxResult(False, _last_line(ended["errors"]) or f"exit code {status}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:REASON] if lines else ""
