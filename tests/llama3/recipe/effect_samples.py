"""Documents, and what they become, in which each field of a recipe can have an effect."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from tests.llama3.evaluate.task_samples import CHOICE, quiz, write_lines
from tests.llama3.recipe.recorded import recorded_fields
from tests.llama3.train.train_samples import train

WORDS = """the of and to in is that it was for on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made over did
down only way find use may water long little very after words called just where most know"""


def prose(seed: int, sentences: int) -> str:
    """Return English-like text that hardly repeats itself."""
    rng = random.Random(seed)
    return " ".join(f"{' '.join(rng.sample(WORDS.split(), 11)).capitalize()}." for _ in range(sentences))


def write_sources(folder: Path) -> None:
    """Write what tests/llama3/recipe/rich.yaml names, and the files that changes of it name, into `folder`."""
    shared = [f"This line of many pages has number {number}." for number in range(3)]
    pages: list[dict[str, Any]] = [
        {"text": prose(seed, 6 + seed % 5), "url": f"https://w{seed % 4}.org/{seed}", "date": f"2024-01-{seed + 1:02}"}
        for seed in range(24)
    ]
    for number, line in ((1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 2)):
        pages[number]["text"] += f"\n{shared[line]}"
    pages[7]["url"] = pages[8]["url"]  # two versions of a page
    pages.append({**pages[9], "url": "https://copy.org", "text": pages[9]["text"].replace("the", "some", 1)})  # a copy
    once = " ".join(prose(60 + number, 1) for number in range(4))
    odd = [
        "\n".join(f"* {prose(seed, 1)}" for seed in range(100, 106)),  # bullets
        "\n".join(f"{prose(seed, 1)[:-1]}..." for seed in range(110, 116)),  # ellipses, not punctuated
        "\n".join(["short line", "one more", *(prose(seed, 1) for seed in range(120, 124))]),
        "\n".join([*(prose(seed, 1) for seed in range(130, 139)), prose(130, 1)]),  # a line twice
        "\n\n".join([*(prose(seed, 1) for seed in range(140, 149)), prose(140, 1)]),  # a paragraph twice
        f"{prose(150, 5)} {' '.join(prose(151, 1) for _ in range(2))} {prose(152, 5)}",  # n-grams twice
        f"{prose(160, 6)} {{ x }} lorem ipsum # # darn 12 34 56 78",
        f"{prose(165, 6)} Ask ann@mail.org or 91.12.0.7 for internationalization and counterrevolutionaries.",
        f"{prose(170, 6)} Itâ€™s an old cafÃ© where we meet.",  # wrongly decoded
        "zyx wvu tsr qpo nml " * 4 + prose(180, 5),
        once,
        f"{prose(66, 3)} What is 3 plus one? The answer of the own set is a rare green elephant under forty moons.",
        "\n".join(
            [prose(190, 4), "log entry five of seven log entry five of seven log entry five of seven", prose(191, 4)]
        ),
    ]
    pages += [{"text": text, "url": f"https://odd.org/{number}", "date": ""} for number, text in enumerate(odd)]
    for page in pages:
        page["title"] = f"Title of {page['text']}"
    write_lines(folder / "web/a.jsonl", pages[:20])
    write_lines(folder / "web/b.jsonl", pages[20:])
    write_lines(folder / "shop/a.jsonl", [{"text": prose(seed, 7)} for seed in range(200, 206)])
    write_lines(folder / "math.jsonl", [{"text": f"{prose(seed, 5)} 2 + 2 = 4."} for seed in range(210, 218)])
    write_lines(folder / "gsm.jsonl", [{"text": f"{prose(seed, 5)} 3 + 3 = 6."} for seed in range(220, 226)])
    write_lines(
        folder / "code.jsonl", [{"text": f"def f():\n    return 1\n# {prose(seed, 5)}"} for seed in range(230, 237)]
    )
    write_lines(folder / "more.jsonl", [{"text": f"x = 1\n# {prose(seed, 5)}"} for seed in range(240, 252)])
    german = "Der Hund läuft durch den Wald und sucht nach seinem Stock, den er gestern verloren hat"
    french = "Le chien court dans la forêt et cherche le bâton qu'il a perdu hier soir près du lac"
    world = [f"{text} ({number}). {text[::-1]}." for number in range(4) for text in (german, french)]
    write_lines(folder / "world.jsonl", [{"text": text} for text in world])
    write_lines(
        folder / "own.jsonl", [{"text": "a rare green elephant under forty moons of the own set", "more": once}]
    )
    write_lines(folder / "other.jsonl", [{"text": prose(3, 2)}])
    write_lines(folder / "broken/a.jsonl", [{"text": prose(seed, 6)} for seed in range(250, 256)])
    with (folder / "broken/a.jsonl").open("a") as file:
        file.write('{"text": "cut off\n')
    (folder / "pages").mkdir()
    for seed in range(260, 264):
        links = "".join(f'<li><a href="/{n}">menu {n}</a></li>' for n in range(9))
        body = "".join(f"<p>{prose(seed + 10 * n, 3)}</p>" for n in range(4))
        main = f"<nav><ul>{links}</ul></nav><article>{body}</article><p>the end of the page</p>"
        html = f"<html><body>{main}<footer>imprint</footer></body></html>"
        (folder / f"pages/{seed}.html").write_text(html)
    for name, seed in (("good", 300), ("a", 320), ("b", 340), ("c", 360)):
        write_lines(
            folder / f"{name}.jsonl", [{"text": f"{name} {prose(number, 6)}"} for number in range(seed, seed + 12)]
        )
    for name, count in (("a", 9), ("b", 5)):
        chats = [{"prompt": f"{name} {number}?", "response": prose(number, 1)} for number in range(count)]
        write_lines(folder / f"chats/{name}.jsonl", chats)
    (folder / "blocked.txt").write_text("w1.org\n")
    (folder / "dirty.txt").write_text("darn\nwater\n")


def write_suites(folder: Path) -> None:
    """Write suites, their tasks and two sets of their data into `folder`."""
    for name, data in (("quiz", "quiz.jsonl"), ("one-task", "one.jsonl"), ("gone", "gone.jsonl")):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**CHOICE, "name": name, "data": data}))
        if name != "gone":
            write_lines(folder / "data" / data, quiz(5))
            write_lines(folder / "other" / data, quiz(6))
    for suite, tasks in {
        "suite": ["quiz.yaml"],
        "last": ["quiz.yaml", {"task": "quiz.yaml", "as": "quiz_3", "shots": 3}, "gone.yaml"],
        "late": [],
        "one": ["one-task.yaml"],
    }.items():
        (folder / f"{suite}.yaml").write_text(
            yaml.safe_dump({"built_in": ["bits", "arithmetic", "needle"], "tasks": tasks})
        )


def digest(path: Path) -> str:
    """Return a digest of what a file says: of a Parquet file its rows, whatever wrote them."""
    if path.suffix == ".parquet":
        return hashlib.sha256(json.dumps(pq.read_table(path).to_pylist(), default=str).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Return a digest of each file below `folder` whose name matches `pattern`."""
    return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob(pattern)) if path.is_file()}


def outcome(make: Callable[[], Any]) -> Any:
    """Return what `make` returns, or the error that it raises for what it got."""
    try:
        return make()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def train_recorded(path: Path) -> tuple[int, set[str]]:
    """Train the job file in this process; return the exit status and the fields that were read."""
    with recorded_fields() as read:
        status = train(path)
    return status, read
