"""Programs that nobody has read: the right ones pass, and the hostile ones reach nothing."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
import pytest

from herd.llama3.evaluate import sandbox
from herd.llama3.evaluate.sandbox import THREADS, SandboxResult, run_programs, sandbox_error, seccomp_filter
from tests.conftest import needs_sandbox

pytestmark = needs_sandbox

SECONDS = 2.0
ENDLESS = "while True: pass"
MEMORY = "data = bytearray(8 * 2**30)"
CREATES_THREADS = """
import threading
event = threading.Event()
threads = [threading.Thread(target=event.wait, daemon=True) for number in range({count})]
for thread in threads:
    thread.start()
event.set()
"""
CALLS = {
    "System V shared memory": ("shmget", (29, 194), (0, 1 << 30, 0o1666)),
    "System V message queue": ("msgget", (68, 186), (0, 0o1666)),
    "System V semaphores": ("semget", (64, 190), (0, 1, 0o1666)),
    "memory file": ("memfd_create", (319, 279), ("name", 0)),
    "secret memory": ("memfd_secret", (447, 447), (0,)),
    "io_uring": ("io_uring_setup", (425, 425), (8, "x" * 120)),
    "key": ("add_key", (248, 217), ("user", "name", "value", 5, -3)),
    "key ring": ("keyctl", (250, 219), (0, -3, 1)),
    "userfaultfd": ("userfaultfd", (323, 282), (1,)),
    "bpf": ("bpf", (321, 280), (0, "x" * 128, 72)),
    "performance events": ("perf_event_open", (298, 241), ("x" * 128, 0, -1, -1, 0)),
    "ptrace": ("ptrace", (101, 117), (0, 0, 0, 0)),
    "memory of a process": ("process_vm_readv", (310, 270), (1, "x" * 16, 0, "x" * 16, 0, 0)),
    "process": ("clone", (56, 220), (17, 0, 0, 0, 0)),
    "process by clone3": ("clone3", (435, 435), ("x" * 88, 88)),
    "namespace": ("unshare", (272, 97), (0x10000000,)),
    "personality": ("personality", (135, 92), (0x0400000,)),
    "post-box": ("mq_open", (240, 180), ("name", 66, 0o600, 0)),
}
"""What escapes a limit or reaches much of the kernel: call, its numbers on x86_64 and aarch64, arguments."""
CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
number = {numbers}[["x86_64", "aarch64"].index(os.uname().machine)]
given = [ctypes.create_string_buffer(each.encode()) if isinstance(each, str) else each for each in {arguments}]
result = libc.syscall(number, *given)
if result == 0 and {name!r} == "clone":
    os._exit(0)
assert result == -1, f"{name} gave {{result}}"
assert ctypes.get_errno() in (errno.ENOSYS, errno.EPERM), os.strerror(ctypes.get_errno())
"""
FILLS_SHARED_MEMORY = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
held = 0
while held < 4 * 2**30:
    segment = libc.shmget(0, 2**28, 0o1600)
    if segment < 0:
        break
    place = libc.shmat(segment, None, 0)
    ctypes.memset(place, 1, 2**28)
    libc.shmdt(ctypes.c_void_p(place))
    held += 2**28
assert held < 2**30, f"{held} bytes"
"""
WRITES = "open('big', 'wb').write(bytes(100 * 2**20))"
MANY_WRITES = """
for number in range(100):
    open(f'part{number}', 'wb').write(bytes(2**20))
"""
SECRET = "import os; token = os.environ['TOKEN']"
FLOOD = "import sys\nwhile True: print('x' * 65536); print('y' * 65536, file=sys.stderr)"


def one(program: str, seconds: float = SECONDS) -> SandboxResult:
    return run_programs([program], seconds)[0]


def processes_with(word: str) -> list[int]:
    """Return the processes with `word` on their command line that this process started, and orphans."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            parents = [parent.pid for parent in process.parents()]
            if word in " ".join(process.cmdline()) and (os.getpid() in parents or parents in ([], [1])):
                found.append(process.pid)
    return found


@pytest.fixture(scope="module")
def problems(shared: Path) -> list[dict[str, str]]:
    path = shared / "eval" / "humaneval" / "HumanEval.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no HumanEval at {path}")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def whole(problem: dict[str, str], answer: str) -> str:
    return f"{problem['prompt']}{answer}\n{problem['test']}\ncheck({problem['entry_point']})\n"


@pytest.mark.slow
def test_all_reference_solutions_of_humaneval_pass(problems: list[dict[str, str]]) -> None:
    verdicts = run_programs([whole(problem, problem["canonical_solution"]) for problem in problems])
    assert len(verdicts) == 164
    assert [verdict for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
def test_no_stub_of_humaneval_passes(problems: list[dict[str, str]]) -> None:
    verdicts = run_programs([whole(problem, "    return None\n") for problem in problems])
    assert [verdict.passed for verdict in verdicts] == [False] * 164


def test_every_namespace_is_a_new_one() -> None:
    """Asked of the kernel before anything is mounted: whatever else holds a program back, this does."""
    kinds = ["mnt", "ipc", "net", "pid", *(["user"] if os.geteuid() else [])]
    look = f"import json, os; print(json.dumps([os.readlink(f'/proc/self/ns/{{kind}}') for kind in {kinds}]))"
    enter = "import os; from herd.llama3.evaluate.sandbox_runner import enter_namespaces; enter_namespaces()"
    programs = look, f"{enter}; os.fork() and os.wait() or exec({look!r})"
    here, inside = (
        json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
        for program in programs
    )
    assert [kind for kind, one, other in zip(kinds, here, inside, strict=True) if one == other] == []


def test_a_program_is_process_1_and_mounts_nothing_here() -> None:
    before = Path("/proc/self/mounts").read_text()
    assert one("import os; assert os.getpid() == 1, os.getpid()") == SandboxResult(True, "passed")
    assert Path("/proc/self/mounts").read_text() == before


def test_verdicts_stand_in_the_order_of_the_programs_and_say_why() -> None:
    programs = ["print(1)", "assert 1 == 2, 'sums'", "raise KeyError('x')", "import os; os.abort()", "def f(:", ""]
    verdicts = run_programs(programs, SECONDS, parallel=3)
    assert [verdict.passed for verdict in verdicts] == [True, False, False, False, False, True]
    assert [verdict.reason for verdict in verdicts[:3]] == ["passed", "AssertionError: sums", "KeyError: 'x'"]
    assert verdicts[3].reason.startswith("ended by signal")
    assert verdicts[4].reason.startswith("SyntaxError")


def test_programs_are_unicode_and_may_end_in_a_comment_or_a_block() -> None:
    programs = [
        "assert len('é') == 1 and 'é' == '\u00e9'",
        "x = 1  # the end",
        "if True:\n    x = 1\n    ",
        "x = '\ud800'",
    ]
    assert [verdict.passed for verdict in run_programs(programs, SECONDS)] == [True] * 4


def test_a_program_that_ends_before_its_tests_has_not_passed() -> None:
    ends = ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "import os; os.close(2); 1/0"]
    verdicts = run_programs([f"{end}\nassert False" for end in ends], SECONDS)
    assert [verdict.passed for verdict in verdicts] == [False] * 4


@pytest.mark.fault("F21")
def test_an_endless_program_is_stopped() -> None:
    began = time.monotonic()
    verdicts = run_programs([ENDLESS, "import time; time.sleep(600)"], 0.5)
    assert time.monotonic() - began < 30
    assert verdicts == [
        SandboxResult(False, "more than 0.5 s of processor time"),
        SandboxResult(False, "asleep for more than 1.5 s"),
    ]


@pytest.mark.slow
def test_a_right_program_passes_however_long_the_machine_takes_for_it() -> None:
    """Many programs share the processors: each needs more time on the clock than it might sleep."""
    program, count = "import time\nwhile time.process_time() < 0.2: pass", 6 * (os.cpu_count() or 1)
    began = time.monotonic()
    verdicts = run_programs([program] * count, 0.3, parallel=count)
    assert time.monotonic() - began > 3 * 0.3
    assert verdicts == [SandboxResult(True, "passed")] * count


def test_what_the_clock_stopped_is_tried_once_more_and_then_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a machine had no time is no verdict on a program. A second try that ends in time is one."""
    program = "import time\nwhile time.process_time() < 0.5: pass\nassert False, 'sums'"
    monkeypatch.setattr(sandbox, "WALL", (0.1, 100))
    assert run_programs([program, ""], 2.0) == [
        SandboxResult(False, "AssertionError: sums"),
        SandboxResult(True, "passed"),
    ]
    monkeypatch.setattr(sandbox, "WALL", (0.1, 0.1))
    (verdict,) = run_programs([program], 2.0)
    assert (verdict.passed, verdict.judged) == (False, False)
    assert re.fullmatch(r"0 s gave it 0\.\d s of processor time", verdict.reason)


def test_a_fault_of_the_machine_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "RUNNER", Path("/nowhere/runner.py"))
    (verdict,) = run_programs(["assert False"], SECONDS, network="allowed")
    assert (verdict.passed, verdict.judged) == (False, False)
    assert "No such file" in verdict.reason
    monkeypatch.undo()
    monkeypatch.setattr(sandbox, "LIMITS", {**sandbox.LIMITS, "AS": 2**70})
    (verdict,) = run_programs(["assert False"], SECONDS, network="allowed")
    assert (verdict.passed, verdict.judged) == (False, False)


def test_memory_is_limited() -> None:
    assert one(MEMORY) == SandboxResult(False, "MemoryError")


@pytest.mark.fault("F21")
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        assert run_programs([connect], SECONDS, network="allowed") == [SandboxResult(True, "passed")]
        verdict = one(connect)
        assert not verdict.passed
        assert "Address family not supported" in verdict.reason
    assert one("import socket; socket.socketpair()").passed


def test_threads_are_limited_and_end_with_the_program() -> None:
    word = "program.py"
    before = set(processes_with(word))
    assert one(CREATES_THREADS.format(count=200)).reason == "RuntimeError: can't start new thread"
    assert one(CREATES_THREADS.format(count=THREADS - 2)) == SandboxResult(True, "passed")
    assert set(processes_with(word)) <= before


@pytest.mark.parametrize("network", ["none", "allowed"])
@pytest.mark.fault("F21")
def test_a_program_is_one_process(network: Literal["none", "allowed"]) -> None:
    """So that nothing is left behind, and the limit on address space is one on memory."""
    starts = [
        "os.fork()",
        "import ctypes; assert ctypes.CDLL(None).vfork() >= 0, os.strerror(1)",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "os.posix_spawn('/bin/true', ['true'], {})",
    ]
    for verdict in run_programs([f"import os\n{start}" for start in starts], SECONDS, network=network):
        assert not verdict.passed
        assert "Operation not permitted" in verdict.reason


@pytest.mark.fault("F21")
def test_what_escapes_a_limit_is_refused() -> None:
    calls = [CALL.format(name=name, numbers=numbers, arguments=given) for name, numbers, given in CALLS.values()]
    verdicts = dict(zip(CALLS, run_programs(calls, SECONDS), strict=True))
    assert {what: verdict for what, verdict in verdicts.items() if verdict != SandboxResult(True, "passed")} == {}


def test_sockets_reach_this_program_only() -> None:
    families = ("AF_VSOCK", "AF_NETLINK", "AF_PACKET", "AF_ALG", "AF_INET6")
    calls = ("socket(socket.{}, socket.SOCK_STREAM)", "socketpair(socket.{})")
    programs = [f"import socket; socket.{call.format(family)}" for family in families for call in calls]
    refused = SandboxResult(False, "OSError: [Errno 97] Address family not supported by protocol")
    assert run_programs(programs, SECONDS) == [refused] * len(programs)


@pytest.mark.fault("F21")
def test_memory_is_limited_by_whatever_name() -> None:
    assert one(FILLS_SHARED_MEMORY) == SandboxResult(True, "passed")
    shared = "from multiprocessing import shared_memory; shared_memory.SharedMemory(create=True, size=2**20)"
    assert one(shared).reason.startswith("FileNotFoundError")
    kept = "import mmap; held = [mmap.mmap(-1, 2**28) for number in range(5)]"
    assert one(kept).reason == "OSError: [Errno 12] Cannot allocate memory"


def test_the_calls_of_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters differ by processor; on one that has none nothing runs."""
    assert seccomp_filter("x86_64", network=False) != seccomp_filter("aarch64", network=False)
    assert seccomp_filter("x86_64", network=False) != seccomp_filter("x86_64", network=True)
    with pytest.raises(ValueError, match=r"its processor is riscv64, and system calls are known of x86_64 and aarch64"):
        seccomp_filter("riscv64", network=False)
    other = os.uname_result(("Linux", "host", "6.1", "#1", "riscv64"))
    monkeypatch.setattr(os, "uname", lambda: other)
    sandbox_error.cache_clear()
    with pytest.raises(sandbox.SandboxUnavailable, match="its processor is riscv64"):
        run_programs([""])
    sandbox_error.cache_clear()


def test_files_are_limited_one_by_one_and_in_all() -> None:
    assert one(WRITES).reason == "OSError: [Errno 27] File too large"
    assert one(MANY_WRITES).reason == "OSError: [Errno 28] No space left on device"


def test_a_flood_of_output_is_not_kept() -> None:
    verdict = one(FLOOD)
    assert not verdict.passed
    assert len(verdict.reason) < 300


def test_no_secret_is_in_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKEN", "hush")
    assert one(SECRET).reason == "KeyError: 'TOKEN'"
    secret = tmp_path / "token"
    secret.write_text("hush")
    assert one(f"print(open({str(secret)!r}).read())").reason.startswith("FileNotFoundError")
    look = "import os; assert set(os.environ) <= {'HOME', 'PYTHONHASHSEED', 'LC_CTYPE'}, os.environ"
    assert one(look).passed
    assert one("import os; assert os.listdir('.') == ['program.py'] and os.getcwd() == os.environ['HOME']").passed
    assert not one("import os; os.listdir('/proc')").passed


@pytest.mark.fault("F21")
def test_nothing_outside_home_can_be_written_and_no_privilege_is_gained() -> None:
    for place in ("/x", "/usr/x", "/bin/x", "/dev/x"):
        assert "Read-only file system" in one(f"open({place!r}, 'w')").reason
    gain = """
import ctypes
libc = ctypes.CDLL(None)
assert libc.unshare(0x10000000) == -1, 'a user namespace'
assert libc.umount2(b'/tmp', 2) == -1, 'umount'
assert libc.setuid(0) == -1, 'root'
assert libc.chroot(b'/tmp') == -1, 'chroot'
"""
    assert one(gain) == SandboxResult(True, "passed")


def test_equal_programs_end_equally() -> None:
    program = "words = {str(number) for number in range(50)}\nassert False, ' '.join(words)"
    assert one(program) == one(program)


def test_without_namespaces_the_limits_still_hold() -> None:
    verdicts = run_programs([ENDLESS, MEMORY, WRITES, "import os; os.environ['PATH']"], 0.5, network="allowed")
    assert verdicts[0].reason.startswith("more than")
    assert [verdict.reason.split(":")[0] for verdict in verdicts[1:]] == ["MemoryError", "OSError", "KeyError"]


def test_a_program_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seconds 0 must be above 0 and parallel 2 at least 1"):
        run_programs([""], 0)


def test_where_nothing_can_be_contained_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    sandbox_error.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"code: .* \(it runs darwin, not Linux\); evaluate on Linux 5\.12"):
        run_programs([f"open({str(trace)!r}, 'w')"])
    sandbox_error.cache_clear()
    assert not trace.exists()
