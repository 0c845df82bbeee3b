"""Coverage-guided fuzzing: `python -m tests.fuzz PARSER RUNS` has atheris look for bytes that reach new branches.

It starts from the good sample of tests/test_fuzz.py, and ends with a failure and the bytes at the first fault.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["herd.llama3.data", "herd.llama3.recipe", "herd.llama3.evaluate", "herd.storage", "herd.tasks", "yaml"]
):
    from tests.test_fuzz import PARSERS, fault


def main(name: str, runs: str) -> None:
    """Fuzz the parser `name`; libFuzzer ends the process."""
    file, sample, read = PARSERS[name]
    folder = Path(tempfile.mkdtemp(prefix="herd-fuzz-"))
    (folder / "corpus").mkdir()
    (folder / "corpus" / "sample").write_bytes(sample)
    path = folder / file

    def once(data: bytes) -> None:
        path.write_bytes(data)
        if why := fault(read, path):
            raise AssertionError(f"{name}: {why}\n{data[:500]!r}")

    options = [f"-runs={runs}", "-max_len=4096", "-timeout=20", f"-artifact_prefix={folder}/", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(folder / "corpus")], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
