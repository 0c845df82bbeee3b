"""What a newcomer does first: the commands and files of the tutorials as printed, on the systems they may have."""

from __future__ import annotations

import copy
import importlib
import os
import re
import shlex
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import typer
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from herd.flows.cli.main import app
from herd.flows.recipe_form import PipelineParameters
from herd.flows.setup import deployment_files
from herd.llama3.hardware.specs import preset_text
from herd.llama3.hardware.topology import load_fabric
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.data_schema import ConversationSource, Source, TokenizerConfig, TrainTokenizer
from herd.llama3.recipe.load import load_recipe, parse_recipe
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Stage
from herd.llama3.studies.checks import check_study
from herd.llama3.studies.expand import load_study
from herd.storage.filesystem import PACKAGE
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, load_cluster
from herd.tasks.operate.preflight import check_run
from tests.dist import Forked

STUDIES = Path("recipes/experiments")

ELSEWHERE = """
import os, sys
del os.sched_getaffinity
import herd.tasks.operate.preflight
from herd.flows.cli.main import app
sys.platform = {platform!r}
app({arguments!r})
"""


@pytest.mark.slow
def test_a_system_that_is_not_linux_can_plan_and_is_refused_a_run_in_one_sentence(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HERD_ROOT": str(tmp_path / "root")}
    (tmp_path / "text.jsonl").write_text('{"text": "a b"}\n')
    sources = ", ".join(f"{domain}: [{{uri: {tmp_path}/text.jsonl}}]" for domain in DOMAINS)
    words = ["tests/e2e/tiny.yaml", "--set", f"sources={{{sources}}}"]
    printed = {}
    for command, status in (("plan", 0), ("run", 2)):
        script = ELSEWHERE.format(platform="darwin", arguments=[command, *words])
        process = Forked("-c", script, environment=environment)
        printed[command], _ = process.communicate(300)
        assert process.returncode == status, printed[command]
    assert "98.3K tokens in 56 steps" in printed["plan"]
    assert printed["run"].startswith("error  machine: it runs macOS, and a run needs Linux;")
    assert len(printed["run"].splitlines()) == 1
    assert not (tmp_path / "root").exists()


def test_windows_is_refused_before_its_first_import_fails() -> None:
    script = "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; import herd.flows.cli.main"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "error  herd needs Linux; on Windows use WSL 2\n")


PAGES = sorted(Path("docs/tutorials").glob("*.md"))
PROGRAM = re.compile(r"(?:\$ )?(\.venv/bin/)?(herd|prefect|python|mlflow|pytest)( .*)")
FENCE = re.compile(r"```(\w*)\n(.*?)```\n", re.DOTALL)
CREATED = {"place.yaml", "mine.yaml", "chosen.yaml", "corpus.yaml", "acme.yaml", "kinds.yaml"}
"""Files that a command before them writes."""


def lines(page: Path) -> list[str]:
    """Return the lines of a page's code, without indent; one that ends in a backslash goes on in the next."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    fenced = [line for _, block in FENCE.findall(text) for line in block.splitlines()]
    return [*fenced, *(line[4:] for line in FENCE.sub("", text).splitlines() if line.startswith("    "))]


def commands(page: Path) -> list[list[str]]:
    """Return the command lines of a page as words."""
    found = []
    for line in lines(page):
        match = PROGRAM.fullmatch(line)
        if match and not re.match(r" +(up|down) ", match[3]):  # what a program prints begins with its name, too
            found.append(shlex.split(f"{match[1] or ''}{match[2]}{match[3].partition('<<')[0]}", comments=True))
    return found


def blocks(page: Path) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == "yaml"]


def parsed(words: list[str]) -> Any:
    """Return what herd makes of the words after its name. Raises click's errors as the command line does."""
    context: Any = typer.main.get_command(app).make_context("herd", words)
    while hasattr(context.command, "resolve_command"):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context


MARK = re.compile(r"<!-- (?:run|not run: (.+)) -->")
COMMAND = re.compile(r"    (\.venv/bin/|make |docker |git |apt-get |openssl |curl |tail |export )")


def marked_blocks(page: Path) -> list[tuple[str, list[str]]]:
    """Return the mark (`` if it has none) and the lines of each block of commands: its own mark, or the page's."""
    parts = [part for part in re.split(r"\n\n+", FENCE.sub("", page.read_text())) if part.strip()]
    whole = parts[1] if MARK.match(parts[1]) else ""
    found = []
    for before, part in pairwise(parts):
        if COMMAND.match(part):
            own = before if MARK.fullmatch(before.strip()) else ""
            found.append(((own or whole).partition("\n")[0], [line[4:] for line in part.splitlines()]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_commands_is_run_or_says_why_not(page: Path) -> None:
    for mark, block in marked_blocks(page):
        match = MARK.fullmatch(mark)
        assert match, f"{page}: {block[0]}: has no mark"
        named = re.findall(r"tests/[\w/.]*\w", match[1] or "")
        assert all(Path(name).exists() for name in named), f"{page}: {mark}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- run -->" in page.read_text()], ids=lambda p: p.stem)
def test_what_is_marked_to_run_runs(page: Path, tmp_path: Path) -> None:
    """In a folder with the page's files, the recipes, and a root without runs: commands print what the page says."""
    for name in ("recipes", ".venv"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    for kind, text in FENCE.findall(page.read_text()):
        if match := re.match(r"[#%] (\S+\.\w+)\n", text):
            (tmp_path / match[1]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / match[1]).write_text(text if kind == "yaml" else text[match.end() :])
    (tmp_path / "herd-data").mkdir()
    environment = {**os.environ, "HERD_ROOT": str(tmp_path / "herd-data")}
    printed = ""
    for line in [line for mark, block in marked_blocks(page) if mark == "<!-- run -->" for line in block]:
        ended = subprocess.run(shlex.split(line), cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
        assert ended.stdout
        printed += ended.stdout
    for before, part in pairwise(re.split(r"\n\n+", page.read_text())):
        if before == "<!-- printed -->":
            assert [line for line in part.splitlines() if line.strip() not in printed] == []
    for line in lines(page):
        assert not line.startswith("takes  ") or line in printed
    for text in blocks(page):  # a command may have written the file anew
        if match := re.match(r"# (\S+\.yaml)\n", text):
            assert (tmp_path / match[1]).read_text().removeprefix(match[0]) == text.removeprefix(match[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_one_that_the_program_takes(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, recipes, changes and layouts of herd's commands; names of deployments and files of the others."""
    monkeypatch.setattr("herd.tasks.operate.preflight.ENVIRONMENT", ())  # a page is for a machine of its kind
    deployments = {entry["name"] for entry in yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]}
    for words in commands(page):
        program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
        assert words[0].startswith(".venv/bin/"), f"{shlex.join(words)}: is not on the PATH of a newcomer"
        if program == "herd":
            check_herd(page, rest[: rest.index(">")] if ">" in rest else rest)
        elif program == "pytest":
            assert all(Path(name).is_file() for name in rest)
        elif program == "prefect":
            named = [word for word in rest if re.fullmatch(r"[a-z]+/[a-z]+", word)]
            assert all(name.partition("/")[2] in deployments for name in named)


def check_herd(page: Path, words: list[str]) -> None:
    context = parsed(words)
    given = context.params
    assert context.info_name != "herd"
    recipe, cluster = given.get("recipe"), given.get("cluster")
    if context.info_name == "rerun":
        recipe = Path({"quickstart": "recipes/quickstart.yaml"}[given["run"].rpartition("-")[0]])
        assert given["from_"] in Schedule(load_recipe(recipe)).names
    if context.info_name in ("run", "rerun", "plan", "fetch") and recipe is not None and recipe.name not in CREATED:
        asked = load_recipe(recipe, given["set_"] or [])
        if context.info_name == "run" and cluster is not None:
            check_layout(asked, load_cluster_of(page, cluster))
        elif context.info_name == "run":
            check_layout(asked, Cluster(threads=2))
    if given.get("file") is not None:
        check_study(load_study(given["file"]))


def check_layout(recipe: Recipe, cluster: Cluster) -> None:
    use = recipe.tokenizer.use or ""
    if "@" in use or use.startswith(PACKAGE):  # a model of an earlier command, or of a package that the page installs
        tokenizer = TokenizerConfig(train=TrainTokenizer(vocab=4096))
        recipe = recipe.model_copy(update={"init_from": None, "tokenizer": tokenizer})
    with TemporaryDirectory() as folder:
        check_run(recipe, cluster, Root.parse(folder))


def load_cluster_of(page: Path, name: Path) -> Cluster:
    """Return the cluster of the block that begins with the file's name."""
    (text,) = [text for text in blocks(page) if text.startswith(f"# {name}\n")]
    with TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(text)
        return load_cluster(Path(folder) / name)


def test_no_command_is_overlooked() -> None:
    """Thirty pages of tutorials have more than fifty commands; a pattern that finds none would test nothing."""
    counts = {page.stem: len(commands(page)) for page in PAGES}
    assert sum(counts.values()) > 50, counts
    assert all(counts.values()), counts


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_every_file_is_one_that_is_taken(page: Path, tmp_path: Path) -> None:
    whole: dict[str, Any] = {}
    for text in blocks(page):
        data = yaml.safe_load(text.partition("    ...\n")[0])
        if "deployments" in data:
            (tmp_path / "prefect.yaml").write_text(text)
            for entry in deployment_files(Root.parse(tmp_path / "root"), tmp_path)[-1].deployments:
                check_deployment(entry)
        elif "question" in data:  # a study that ships
            whole = data
            assert text == (STUDIES / f"{data['name']}.yaml").read_text()
        elif {"mix", "ladder", "annealing", "others"} & set(data) and whole:
            check_part(whole, data, tmp_path)
        elif {"launcher", "data", "processes"} & set(data):
            Cluster.model_validate(data)
        elif "conversations" in data:
            for conversations in data["conversations"]:
                ConversationSource.model_validate(conversations)
        elif "stages" in data and isinstance(data["stages"], list):
            for stage in data["stages"]:
                Stage.model_validate(stage)
        elif "sources" in data:
            parse_recipe(data, page.name)
        elif set(data) <= set(DOMAINS):
            for source in chain(*data.values()):
                Source.model_validate(source)
        elif "tiers" in data:
            load_fabric_with(data, tmp_path)
        else:
            assert data["fabric"] == "roce-24k"
            assert data["stages"]["ramp-4k"]["processes"] == 16384


def check_part(whole: dict[str, Any], part: dict[str, Any], tmp_path: Path) -> None:
    """Lay a part of a study over the whole one of its page, and ask that."""
    made = copy.deepcopy(whole)
    for key, value in part.items():
        made |= {"mix": {**made["mix"], "others": value}} if key == "others" else {key: value}
    made["recipe"] = str((STUDIES / whole["recipe"]).absolute())
    (tmp_path / "part.yaml").write_text(yaml.safe_dump(made))
    load_study(tmp_path / "part.yaml")


def check_deployment(entry: dict[str, Any]) -> None:
    module, _, name = entry["entrypoint"].rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    PipelineParameters.model_validate(entry["parameters"]["config"])


def load_fabric_with(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(preset_text("roce-24k")), **change}))
    assert load_fabric(str(path)).name == "mine"


def test_a_manifest_is_shown_without_a_cluster(tmp_path: Path) -> None:
    """The Python of the page on Kubernetes, on its own file, with quotas of four GPUs a pod."""
    page = Path("docs/tutorials/kubernetes.md")
    (text,) = blocks(page)
    (tmp_path / "kubernetes.yaml").write_text(text)
    code = "\n".join(lines(page)).partition("<<'END'\n")[2].partition("END")[0]
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    shown = yaml.safe_load(ended.stdout)
    model = JobsetV1alpha2JobSet.from_dict(shown)
    assert model is not None
    assert model.to_dict() == shown, "with its overlay it is still what the schema allows"
    assert "priorityClassName: training" in ended.stdout
    assert ended.stdout.count("nvidia.com/gpu") >= 1
