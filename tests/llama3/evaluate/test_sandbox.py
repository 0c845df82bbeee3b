"""Programs that nobody has read: the right ones pass, and the hostile ones reach nothing."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from llama3.evaluate.sandbox import PROCESSES, Verdict, run_programs, why_not_contained

if why_not_contained():
    pytest.skip(f"this machine contains no programs: {why_not_contained()}", allow_module_level=True)

SECONDS = 2.0
ENDLESS = "while True: pass"
MEMORY = "data = bytearray(8 * 2**30)"
FORKS = """
import os, time
for number in range(200):
    if os.fork() == 0:
        time.sleep(600)
"""
WRITES = "open('big', 'wb').write(bytes(100 * 2**20))"
MANY_WRITES = """
for number in range(100):
    open(f'part{number}', 'wb').write(bytes(2**20))
"""
SECRET = "import os; token = os.environ['TOKEN']"
FLOOD = "import sys\nwhile True: print('x' * 65536); print('y' * 65536, file=sys.stderr)"


def one(program: str, seconds: float = SECONDS) -> Verdict:
    return run_programs([program], seconds)[0]


def processes_with(word: str) -> list[str]:
    """Return the processes of this machine that have `word` on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "cmdline").read_text() and int(folder.name) != os.getpid():
                found.append(folder.name)
        except OSError:
            continue
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


def test_all_reference_solutions_of_humaneval_pass(problems: list[dict[str, str]]) -> None:
    verdicts = run_programs([whole(problem, problem["canonical_solution"]) for problem in problems])
    assert len(verdicts) == 164
    assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_no_stub_of_humaneval_passes(problems: list[dict[str, str]]) -> None:
    verdicts = run_programs([whole(problem, "    return None\n") for problem in problems])
    assert [verdict.passed for verdict in verdicts] == [False] * 164


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


@pytest.mark.parametrize(
    "program", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "import os; os.close(2); 1/0"]
)
def test_a_program_that_ends_before_its_tests_has_not_passed(program: str) -> None:
    assert not one(f"{program}\nassert False").passed


def test_an_endless_program_is_stopped() -> None:
    began = time.monotonic()
    verdicts = run_programs([ENDLESS, "import time; time.sleep(600)"], 1.0)
    assert time.monotonic() - began < 30
    assert [verdict.reason.split(" s ")[0] for verdict in verdicts] in (
        ["more than 1", "more than 3"],
        ["more than 3", "more than 3"],  # a machine so busy that the program got a third of a processor
    )


def test_memory_is_limited() -> None:
    assert one(MEMORY) == Verdict(False, "MemoryError")


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        assert run_programs([connect], SECONDS, network="allowed") == [Verdict(True, "passed")]
        verdict = one(connect)
        assert not verdict.passed
        assert "unreachable" in verdict.reason
    look = "import socket; assert [name for _, name in socket.if_nameindex()] in (['lo'], [])"
    assert one(look).passed


def test_processes_are_limited_and_end_with_the_program() -> None:
    word = "program.py"
    before = set(processes_with(word))
    assert one(FORKS).reason == "BlockingIOError: [Errno 11] Resource temporarily unavailable"
    assert one(FORKS.replace("200", str(PROCESSES - 2))).passed
    assert set(processes_with(word)) <= before


@pytest.mark.parametrize("network", ["none", "allowed"])
def test_a_daemonised_grandchild_ends_with_the_program(network: str, tmp_path: Path) -> None:
    sleeper = f"import time; time.sleep(600)  # {tmp_path.name}"
    program = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', {sleeper!r}])
    os._exit(0)
os.wait()
"""
    verdict = run_programs([program], SECONDS, network="allowed" if network == "allowed" else "none")
    assert verdict == [Verdict(True, "passed")]
    assert processes_with(tmp_path.name) == []


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
    assert one(gain) == Verdict(True, "passed")


def test_equal_programs_end_equally() -> None:
    program = "words = {str(number) for number in range(50)}\nassert False, ' '.join(words)"
    assert one(program) == one(program)


def test_without_namespaces_the_limits_still_hold() -> None:
    verdicts = run_programs([ENDLESS, MEMORY, WRITES, "import os; os.environ['PATH']"], 1.0, network="allowed")
    assert verdicts[0].reason.startswith("more than")
    assert [verdict.reason.split(":")[0] for verdict in verdicts[1:]] == ["MemoryError", "OSError", "KeyError"]


def test_a_program_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seconds 0 must be above 0 and parallel 2 at least 1"):
        run_programs([""], 0)


def test_where_nothing_can_be_contained_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    why_not_contained.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"code: .* \(it runs darwin, not Linux\); .* network=\"allowed\""):
        run_programs([f"open({str(trace)!r}, 'w')"])
    why_not_contained.cache_clear()
    assert not trace.exists()
