"""Draws mutants at random and says which the tests of `make test` notice: `python -m tests.mutation_sample --help`.

tests/mutants.py makes all mutants; the seed draws some. Each is planted in a copy of the checkout, and the tests that
tests/line_tests.py chooses run. Results stay in build/mutations, in a folder for each state of the files; what was
stopped continues. Verdicts:

caught      a test fails
timeout     the tests take ten times as long as without the mutant: counts as caught
survived    all tests pass
uncovered   no test runs the line: counts as survived
broken      the module does not import, as a program that does not compile: not counted
equivalent  tests/equivalent.yaml says why it changes nothing: not counted
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import re
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

import yaml

from herd.llama3.statistics.estimates import proportion
from tests.line_tests import Record, Tests, choose, digest, population, records
from tests.mutations import ROOT, WORKERS, copies, in_turn, misplaced, planted, run_pytest, run_python
from tests.shards import commit, tree

BUILD, PAGE, EQUIVALENT = ROOT / "build/mutations", ROOT / "docs/mutation-sample.md", ROOT / "tests/equivalent.yaml"
MAKER = [f"{ROOT}/.venv/mutate/bin/python", "tests/mutants.py"]
CORE = ("llama3/recipe", "llama3/tokens", "llama3/train", "llama3/evaluate", "tasks/promotion")
TARGETS = {"all": (("",), 0.85), "recipe, tokens, train, evaluate, promotion": (CORE, 0.9)}
"""The least lower end of the interval, for all mutants and for those of some folders together."""
SLOWER, LEAST_S = 10, 60
CAUGHT, SURVIVED = ("caught", "timeout"), ("survived", "uncovered")


class Mutant(NamedTuple):
    file: str
    start: int
    end: int
    text: str


class Change(NamedTuple):
    """The whole lines of a mutant, with as many before them as make the old text the only one in its file."""

    file: str
    old: str
    new: str
    reason: str = ""

    @classmethod
    def of(cls, mutant: Mutant) -> Change:
        source = (ROOT / mutant.file).read_text()
        start, end = source.rfind("\n", 0, mutant.start) + 1, source.find("\n", mutant.end)
        end = len(source) if end < 0 else end
        while source.count(source[start:end]) > 1:
            start = source.rfind("\n", 0, start - 1) + 1
        return cls(
            mutant.file, source[start:end], source[start : mutant.start] + mutant.text + source[mutant.end : end]
        )

    def applied(self) -> tuple[str, str]:
        return self.file, (ROOT / self.file).read_text().replace(self.old, self.new)

    def diff(self) -> str:
        lines = difflib.unified_diff(self.old.split("\n"), self.new.split("\n"), n=1, lineterm="")
        return "\n".join([f"# {self.file}", *(line for line in lines if not line.startswith(("---", "+++", "@@")))])


def equivalents(path: Path = EQUIVALENT) -> list[Change]:
    """Return the changes that change nothing. Raises SystemExit if a text is not in its file exactly once."""
    changes = [Change(**row) for row in yaml.safe_load(path.read_text()) or []]
    if wrong := [reason for change in changes if (reason := misplaced(change))]:
        raise SystemExit("\n".join(wrong))
    return changes


def all_mutants(files: Sequence[str]) -> list[Mutant]:
    """Return the mutants of the files in their order; those of a file are made once."""
    kept = {file: BUILD / f"made/{file}.{digest(file)}.{digest(MAKER[1])}" for file in files}
    missing = [file for file in files if not kept[file].exists()]

    def make(share: list[str]) -> None:
        made: dict[str, list[str]] = {file: [] for file in share}
        command = [*MAKER, *share]
        for line in subprocess.run(command, cwd=ROOT, check=True, stdout=PIPE, text=True).stdout.splitlines():
            made[json.loads(line)[0]].append(f"{line}\n")
        for file, lines in made.items():
            kept[file].parent.mkdir(parents=True, exist_ok=True)
            kept[file].write_text("".join(lines))

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(make, filter(None, (missing[number::WORKERS] for number in range(WORKERS)))))
    return [Mutant(*json.loads(line)) for file in files for line in kept[file].read_text().splitlines()]


def draw(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants; each is as likely as any other, and a larger count adds to a smaller one."""
    return random.Random(seed).sample(mutants, len(mutants))[:count]


def judge(folder: Path, change: Change, steps: list[Tests], number: int) -> tuple[str, str]:
    """Return the verdict on a mutant that is planted in the copy, and the test or the words that say it."""
    with planted(folder, change, number):
        for tests in steps:
            chosen = folder.parent / "chosen.json"
            chosen.write_text(json.dumps(tests.names))
            files = dict.fromkeys(test.partition("::")[0] for test in tests.names)
            words = ["-p", "tests.line_tests", f"--chosen={chosen}", *files]
            module = "herd." + change.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            try:
                status, said = run_pytest(folder, words, max(LEAST_S, SLOWER * tests.seconds))
                if status in (0, 5):
                    continue
                if status != 1 and run_python(folder, "-c", f"import {module}", timeout_s=LEAST_S).returncode:
                    return "broken", said.strip().split("\n")[-1]
            except subprocess.TimeoutExpired as ended:
                return "timeout", f"more than {ended.timeout:.0f} s"
            if status in (3, 4) and "conftest" not in said:
                raise SystemExit(f"{change.diff()}\npytest does not run: {said}")
            return "caught", said.strip().split("\n")[-1] or f"pytest ends with {status}"
    return "survived", ""


def judge_all(left: Sequence[Mutant], file: Path, known: dict[str, Record]) -> None:
    """Add a line to the file for each mutant."""
    with copies() as places, file.open("a", buffering=1) as lines:

        def one(copy: Path, index: int) -> None:
            began, mutant = time.monotonic(), left[index]
            line = (ROOT / mutant.file).read_text().count("\n", 0, mutant.start) + 1
            steps = choose(mutant.file, line, known)
            verdict, by = judge(copy, Change.of(mutant), steps, index + 1) if steps else ("uncovered", "")
            seconds = round(time.monotonic() - began, 1)
            lines.write(json.dumps({"mutant": mutant, "verdict": verdict, "by": by, "seconds": seconds}) + "\n")
            print(f"{index + 1:4}/{len(left)} {verdict:9} {seconds:5.0f} s  {mutant.file}:{line}  {by}", flush=True)

        in_turn(places, len(left), one)


def verdicts(folder: Path) -> dict[Mutant, str]:
    rows = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {Mutant(*row["mutant"]): row["verdict"] for row in rows}


def rates(judged: Iterable[tuple[str, str]]) -> tuple[str, bool]:
    """Return a table of pairs of file and verdict, and whether the intervals (95 %, Wilson) reach their targets."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for file, verdict in judged:
        folders["/".join(file.split("/")[:2])][verdict] += 1
    lines = ["| folder | caught | of | rate | 95 % | broken | equivalent |", "|---|---|---|---|---|---|---|"]
    enough = True
    for name in [*TARGETS, *sorted(folders)]:
        below, target = TARGETS.get(name, ((name,), 0.0))
        count = sum((folders[folder] for folder in folders if folder.startswith(below)), Counter[str]())
        caught = sum(count[verdict] for verdict in CAUGHT)
        if of := caught + sum(count[verdict] for verdict in SURVIVED):
            rate = proportion(caught, of)
            enough &= rate.low >= target
            interval = f"{rate.low:.0%} to {rate.high:.0%}" + (f"; target {target:.0%}" if target else "")
            cells = [name, caught, of, f"{rate.value:.0%}", interval, count["broken"], count["equivalent"]]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines), enough


def write_page(title: str, text: str) -> None:
    """Replace the section of this title, or add it."""
    head, *sections = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)
    kept = [section for section in sections if not section.startswith(f"## {title}\n")]
    PAGE.write_text("\n".join(f"{part.strip()}\n" for part in [head, *sorted([*kept, f"## {title}\n\n{text}"])]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="only mutants of these files and folders; none: all")
    parser.add_argument("--count", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shard", default="1/1", help="2/5: the second of five shares; the last writes the page")
    parser.add_argument("--tests", nargs="*", default=[""], help="only tests of these files and folders; none: all")
    given = parser.parse_args()
    title = " ".join([f"Seed {given.seed}", *given.paths, *(["by", *given.tests] if given.tests != [""] else [])])
    mutants = all_mutants(population(given.paths or [""]))
    drawn = draw(mutants, given.count, given.seed)
    unchanged = {change.applied() for change in equivalents()}
    equivalent = {mutant: "equivalent" for mutant in drawn if Change.of(mutant).applied() in unchanged}
    folder = BUILD / tree(PAGE, EQUIVALENT) / re.sub(r"\W+", "-", title)
    folder.mkdir(parents=True, exist_ok=True)
    number, shards = map(int, given.shard.split("/"))
    known = verdicts(folder) | equivalent
    left = [mutant for mutant in drawn[number - 1 :: shards] if mutant not in known]
    if left:
        judge_all(left, folder / f"{number}-of-{shards}.jsonl", records(given.tests))
    known = verdicts(folder) | equivalent
    judged = [(mutant, known[mutant]) for mutant in drawn if mutant in known]
    table, enough = rates((mutant.file, verdict) for mutant, verdict in judged)
    survivors = [f"```diff\n{Change.of(mutant).diff()}\n```" for mutant, verdict in judged if verdict in SURVIVED]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{table}\n\n" + "\n\n".join(survivors))
    print(f"{len(judged)} of {len(drawn)} mutants are judged; {used.ru_utime + used.ru_stime:.0f} CPU s.")
    if len(judged) < len(drawn):
        return 0
    counts = Counter(verdict for _, verdict in judged)
    facts = [
        f"- Commit: {commit(PAGE, EQUIVALENT)}",
        f"- Date: {time.strftime('%Y-%m-%d', time.gmtime())}",
        f"- Drawn: {len(drawn)} of {len(mutants)} mutants",
        f"- Verdicts: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}",
    ]
    write_page(title, "\n".join(facts) + f"\n\n{table}\n\nSurvivors:\n\n" + "\n\n".join(survivors or ["None."]))
    return int(not enough)


if __name__ == "__main__":
    sys.exit(main())
