"""`herd data try`: what curation would drop from a sample, before a long run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from herd.flows.cli.main import app

PROSE = "The lighthouse keeper counted ships at dusk and wrote number {n} into a book of blue paper. "


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with two files of general text: every tenth is too short, and the second copies the first."""
    monkeypatch.chdir(tmp_path)
    texts = [PROSE.format(n=n) * 3 if n % 10 else "tiny" for n in range(40)]
    other = {name: [f"In {name}, {text}" for text in texts[1:10]] for name in ("math", "code", "multilingual")}
    for name, part in {"general/a": texts, "general/b": texts[:10], **other}.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"text": text, "url": f"{name}/{n}"}) + "\n" for n, text in enumerate(part)))
    recipe = {
        "name": "sampled",
        "sources": {"general": [{"uri": "general"}], **{name: [{"uri": f"{name}.jsonl"}] for name in other}},
        "curate": {"quality": {"rules": [], "min_chars": 50}, "dedup": {"jaccard": 1}, "lines": {"max_copies": None}},
        "tokenizer": {"train": {"vocab": 300}},
        "mix": {"base": {"general": "50%", "math": "25%", "code": "17%", "multilingual": "8%"}},
        "model": {"preset": "tiny"},
        "lr": {"peak": 1e-3, "warmup": "1 steps", "cosine": {"to": 1e-4, "over": "4Ki"}},
        "stages": [{"name": "main", "for": "4Ki", "seq_len": 64, "batch": "1Ki", "mix": "base"}],
    }
    (tmp_path / "sampled.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def ask(*words: object) -> Result:
    return CliRunner().invoke(app, ["data", "try", *map(str, words)], env={"COLUMNS": "120"})


def test_each_rule_is_shown_with_what_it_drops(workspace: Path) -> None:
    found = ask("sampled.yaml", "--sample", 30)
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("general")) :]
    assert lines[0].startswith("general  30 documents"), "one of two files ends after 10, the other gives the rest"
    (short,) = [line for line in lines[: lines.index("")] if " too_short " in line and "characters" in line]
    assert short.split()[:2] == ["3", "10.0%"]
    assert lines[lines.index("  too_short general/a/0") + 1] == "    tiny"
    assert not (workspace / "herd-data").exists(), "nothing is left"


def test_what_cannot_be_read_is_counted(workspace: Path) -> None:
    with (workspace / "general/a.jsonl").open("a") as file:
        file.write("not JSON\n" * 3)
    found = ask("sampled.yaml", "--sample", 100, "--set", "curate.on_error=skip", "--set", "curate.max_lost=50%")
    assert found.exit_code == 0, found.output
    (line,) = [line for line in found.stdout.splitlines() if " bad_json " in line]
    assert line.split()[0] == "3"
    assert "max_lost" not in found.output
    found = ask("sampled.yaml", "--sample", 100, "--set", "curate.on_error=skip", "--set", "curate.max_lost=0.1%")
    told = "general: 0.2% of the bytes cannot be read, more than curate.max_lost 0.1%; a run refuses that"
    assert told in " ".join(found.output.split())


def test_an_outcome_of_several_sources_has_one_line(workspace: Path) -> None:
    small = "sources.general=[{uri: general}, {uri: code.jsonl}]"
    found = ask("sampled.yaml", "--set", small, "--set", "curate.validation_fraction=40%", "--examples", 0)
    assert found.exit_code == 0, found.output
    general = found.stdout[found.stdout.index("general  ") :].partition("\n\n")[0]
    counts = {outcome: number for number, _, outcome in re.findall(r"(\d+) +[\d.]+% +(\S+ k?B) +(\w+) ", general)}
    assert counts.keys() >= {"kept", "held_out", "too_short"}
    assert sum(map(int, counts.values())) == int(general.split()[1])


def test_what_holds_out_too_little_to_judge_by_is_named(workspace: Path) -> None:
    few = "held-out documents with 0.9 kB, too little to judge a model by"
    assert few in " ".join(ask("sampled.yaml", "--examples", 0).output.split())
    assert "to judge" not in ask("sampled.yaml", "--set", "curate.validation_fraction=0%", "--examples", 0).output


def test_one_rule_is_shown_at_length_and_an_idle_one_is_refused(workspace: Path) -> None:
    found = ask("sampled.yaml", "--rule", "exact_duplicate", "--examples", 1)
    assert found.exit_code == 0, found.output
    assert "too_short" not in found.output
    assert PROSE.format(n=1).strip() in " ".join(found.output.split())
    refused = ask("sampled.yaml", "--rule", "top_gram")
    assert refused.exit_code == 2
    assert "--rule top_gram: drops nothing of the sample; those that do are" in " ".join(refused.output.split())
    kept = ask("sampled.yaml", "--rule", "top_gram", "--set", "sources.general=[{uri: math.jsonl}]")
    assert "--rule top_gram: drops nothing of the sample; no rule does" in " ".join(kept.output.split())
    assert "--rule: 'kept' is not a rule; rules: " in ask("sampled.yaml", "--rule", "kept").output


def test_a_domain_that_keeps_nothing_is_shown_and_is_a_fault(workspace: Path) -> None:
    found = ask("sampled.yaml", "--set", "curate.quality.min_chars=5000")
    assert found.exit_code == 1
    assert "100.0%" in found.output
    assert "sources.code: nothing is left to train on (too_short 9)" in " ".join(found.output.split())


def test_what_is_not_read_is_named_or_refused_as_by_plan(workspace: Path) -> None:
    for name in ("general/a.pdf", "general/b.pdf", "general/c.yml", "general/_temporary/a.jsonl"):
        path = workspace / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    refused = ask("sampled.yaml")
    assert refused.exit_code == 2
    told = "sources.general.0.uri: 'general' also holds what cannot be read: '%s/general/a.pdf' and 2 more: 1 .pdf, "
    assert told % workspace in re.sub(r"\s+", " ", refused.output)
    found = ask("sampled.yaml", "--set", "curate.on_error=skip", "--sample", 30)
    assert found.exit_code == 0, found.output
    output = re.sub(r"\s+", " ", found.output)
    assert f"sources.general.0: cannot read '{workspace}/general/a.pdf' and 2 more: 1 .pdf, 1 .yml" in output
    assert "sources.general.0: passed over: 1 (names with" in output
    assert "general 30 documents" in output
    none = ask("sampled.yaml", "--set", "sources.general=[{uri: 'general/*.{kt,rs}'}]")
    assert "'general/*.{kt,rs}' matches no file; correct the path" in re.sub(r"\s+", " ", none.output)


def test_an_example_has_its_path_below_the_source_and_its_text_on_a_line(workspace: Path) -> None:
    folder = workspace / ("a folder with a long name " * 3).strip()
    for name in ("part/a.txt", "b.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"tiny words of {name}")
    (workspace / "c.txt").write_text("tiny, too")
    sources = ["{uri: general}", "{uri: c.txt}", f"{{uri: '{folder}/**/*.txt'}}"]
    command = ["data", "try", "sampled.yaml", "--set", f"sources.general=[{', '.join(sources)}]", "--examples", "8"]
    found = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    shown = {line.split()[1]: lines[at + 1] for at, line in enumerate(lines) if line.startswith("  too_short ")}
    assert shown["part/a.txt"] == "    tiny words of part/a.txt"
    assert shown["b.txt"] == "    tiny words of b.txt"
    assert shown["c.txt"] == "    tiny, too"


def test_a_size_without_count_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["data", "quickstart", "--size", "60TB", "--root", str(tmp_path)])
    assert found.exit_code == 2
    assert "--size 60TB: says for which size --count counts; give both" in found.output


def test_a_count_prints_every_step_and_what_it_costs(workspace: Path) -> None:
    found = CliRunner().invoke(app, ["data", "sampled.yaml", "--count", "--size", "60TB"], env={"COLUMNS": "120"})
    assert found.exit_code == 0, found.output
    lines = {line.split()[0]: line.split() for line in found.stdout.splitlines() if line.split()}
    assert {"collect", "annotate", "exact", "output", "ledger", "in"} <= lines.keys()
    assert 10 < float(lines["in"][-1]) < 1000
    assert not (workspace / "herd-data").exists(), "nothing is left"
