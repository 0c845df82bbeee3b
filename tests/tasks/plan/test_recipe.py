from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from herd.llama3.data.mapreduce import held_out_bound
from herd.llama3.data.readers.conversations import ConversationSurvey
from herd.llama3.data.readers.sources import DomainSurvey
from herd.llama3.evaluate import suite
from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.data_schema import HELD_OUT_BYTES, HELD_OUT_CUT
from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.operate.preflight import check_run, layout_faults, preflight
from herd.tasks.plan.recipe import (
    conversation_shortage,
    data_shortage,
    held_out,
    make_plan,
    plan_markdown,
    scarce_held_out,
    stage_rows,
    stage_table,
    summary_lines,
    survey_and_plan,
    tokens_needed,
)
from tests.llama3.train.train_samples import recipe as tiny_recipe

PUBLISHED = load_recipe(Path("recipes/llama3-405b.yaml"))
QUICKSTART = Path("recipes/quickstart.yaml")
REMEDY = " is a placeholder; write your own in its place"


def test_the_published_plan_in_numbers() -> None:
    plan = make_plan(PUBLISHED, [])
    assert plan.parameters == 405_853_388_800
    dense, causal = plan.flops()
    assert dense == pytest.approx(6 * 403.75e9 * 15.6e12, rel=0.01)
    assert causal > dense
    assert len(plan.warnings) == 3


OWN_BUCKET = [f'sources.{domain}=[{{uri: "s3://<your-bucket>/{domain}/*.parquet"}}]' for domain in DOMAINS]


@pytest.mark.parametrize(
    ("name", "words", "fields"),
    [
        (
            "llama3-8b",
            [*OWN_BUCKET, "evaluate.data=s3://<your-bucket>/eval"],
            {"<your-bucket>": ["sources.general.0.uri", "sources.multilingual.0.uri", "evaluate.data"]},
        ),
        (
            "domain-adaptation",
            [],
            {
                "<your-bucket>": ["sources.general.0.uri", "sources.multilingual.0.uri"],
                "<folder of Llama-3.1-8B>": ["init_from.path", "tokenizer.use"],
            },
        ),
    ],
)
def test_a_placeholder_is_warned_of_in_a_plan_and_refused_in_a_run(
    name: str, words: list[str], fields: dict[str, list[str]], tmp_path: Path
) -> None:
    recipe = load_recipe(Path(f"recipes/{name}.yaml"), words)
    warned = [line for line in make_plan(recipe, []).warnings if "is a placeholder" in line]
    with pytest.raises(RecipeError) as refused:
        check_run(recipe, Cluster(), Root.parse(tmp_path))
    assert str(refused.value).splitlines() == warned
    told = {words.removesuffix(REMEDY): names.split(", ") for names, words in (line.split(": ") for line in warned)}
    assert told.keys() == fields.keys()
    assert all(set(fields[placeholder]) <= set(told[placeholder]) for placeholder in fields)


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_ships_to_be_run_has_no_placeholder(path: Path) -> None:
    recipe = load_recipe(path)
    assert bool([line for line in make_plan(recipe, []).warnings if "placeholder" in line]) == (
        path.stem == "domain-adaptation"  # a shop of the user's own
    )


def test_the_table_fits_a_terminal_and_names_every_stage() -> None:
    console = Console(width=80, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(stage_table(make_plan(PUBLISHED, [])))
    lines = console.export_text().rstrip().splitlines()
    assert [line.split()[0] for line in lines] == ["stage", "ramp-4k", "ramp-8k", "main", "long", "anneal"]
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_markdown_and_summary_hold_the_same_facts() -> None:
    plan = make_plan(load_recipe(QUICKSTART), [DomainSurvey("math", 10, 4_000_000, 1_000_000, True)])
    text = plan_markdown(plan)
    assert all(line in text for line in summary_lines(plan))
    assert "math: 4.0 MB in 10 documents, about 3 (1.2 MB) held out, 25% of it generated problems" in text


def test_the_plan_prints_the_rules_that_each_domain_and_language_gets() -> None:
    recipe = load_recipe(QUICKSTART, ["curate.quality_for.de={min_words: 9}"])
    rules = [line for line in summary_lines(make_plan(recipe, [])) if line.startswith("rules")]
    assert rules == [
        "rules    general: repetition, max_divergence 6.0",
        "rules    math, multilingual: repetition, no max_duplicate_ngrams, max_divergence 6.0",
        "rules    code: max_symbol_chars 0.8, max_duplicate_lines 0.75, no max_top_ngram",
        "rules    general in de: repetition, min_words 9, max_divergence 6.0",
        "rules    multilingual in de: repetition, min_words 9, no max_duplicate_ngrams, max_divergence 6.0",
    ]


def test_tokens_needed_add_up_to_the_run() -> None:
    recipe = load_recipe(QUICKSTART)
    assert sum(tokens_needed(recipe, domain) for domain in DOMAINS) == pytest.approx(Schedule(recipe).tokens, abs=4)


def test_a_stage_says_what_it_adds_and_needs_it_beside_its_domain() -> None:
    new = "sources.math=[{uri: installed}, {uri: installed, name: gsm}]"
    plain, recipe = (
        load_recipe(QUICKSTART, [new, f"stages.anneal.extra_sources={add}"]) for add in ("{}", "{gsm: 30%}")
    )
    assert stage_rows(make_plan(plain, []))[-1][-1] == "30/40/22/8"
    assert stage_rows(make_plan(recipe, []))[-1][-1] == "21/58/15.4/5.6 with 30% gsm"
    anneal = Schedule(recipe).span("anneal").tokens
    assert tokens_needed(recipe, "math", "gsm") == round(anneal * 0.3)
    assert tokens_needed(plain, "math") - tokens_needed(recipe, "math") == pytest.approx(anneal * 0.4 * 0.3, abs=1)
    fault = data_shortage(recipe, DomainSurvey("math", 3, 1000, 0, True, "gsm"), 1 / 4)
    assert re.search(r"sources\.math \(gsm\): .* lower the share of math \(gsm\)", fault)


def test_a_short_domain_is_told_with_what_to_do() -> None:
    recipe = load_recipe(QUICKSTART)
    fault = data_shortage(recipe, DomainSurvey("code", 3, 1000, 0, True), 1 / 4)
    assert re.search(r"sources\.code: .* about 250 tokens; .*max_epochs 4 allows; add text, lower the share", fault)
    assert not data_shortage(recipe, DomainSurvey("code", 3, 10**9, 0, True), 1 / 4)
    assert not data_shortage(recipe, DomainSurvey("code", 0, 0, 0, False), 1 / 4), (
        "a remote source is not judged unseen"
    )


def test_too_many_passes_over_conversations_are_told_before_work() -> None:
    chat = "{name: chat, kind: sft, for: 400Ki, seq_len: 256, batch: 2Ki, mix: base, replay: 20%}"
    words = [f"stages=[{chat}]", "conversations=[{uri: x}]", "evaluate.after=[]", "curate.validation_fraction=0%"]
    recipe = load_recipe(QUICKSTART, words)

    def found(tokens: int, **more: bool) -> list[ConversationSurvey]:
        return [ConversationSurvey("x", 10, 20, 9, tokens, **more)]

    (fault,) = conversation_shortage(recipe, found(20 * 1024))  # 16 passes
    assert fault.startswith("stages.chat.for: 400Ki tokens are about 16 passes over the conversations, at most tokens.")
    assert "write for: 100Ki, add conversations" in fault
    assert fault in make_plan(recipe, [], conversations=found(20 * 1024)).warnings
    assert conversation_shortage(recipe, found(20 * 1024), 3.0), "surely too many"
    assert not conversation_shortage(recipe, found(80 * 1024))
    assert not conversation_shortage(recipe, found(1, complete=False))


@pytest.mark.parametrize(
    ("overrides", "processes", "fault"),
    [
        ([], 3, r"stages.ramp-1.batch: 512 tokens is not a multiple of sequence 128 x data-parallel size 3; write"),
        (["evaluate.tasks=[none.jsonl]"], 1, r"none: .*none.jsonl: is not a file; put it there"),
        (["tokenizer={use: none.model}"], 1, r"tokenizer.use: 'none.model' is not a file; give a tiktoken"),
        (["precision=fp8"], 1, r"cluster.layout.compile: false makes precision: fp8 slower than bf16; write compile"),
    ],
)
def test_what_cannot_work_here_is_refused(tmp_path: Path, overrides: list[str], processes: int, fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        check_run(load_recipe(QUICKSTART, overrides), Cluster(processes=processes), Root.parse(tmp_path))


NODES = {"launcher": "slurm", "processes": 8, "slurm": {"processes_per_node": 4}}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"layout": {"tp": 8}}, "8 does not divide slurm.processes_per_node 4, .* write tp: 4, or a multiple of 8"),
        ({"layout": {"tp": 8}, "launcher": "local"}, "8 does not divide slurm.processes_per_node 4"),
        ({"stages": {"main": {"layout": {"tp": 8}}}}, "8 does not divide slurm.processes_per_node 4"),
        ({"layout": {"tp": 4}}, ""),
        ({"layout": {"tp": 2}, "processes": 2, "slurm": {"processes_per_node": 3}}, ""),  # on one node
        ({"layout": {"tp": 8}, "slurm": {"processes_per_node": 4, "gpus": False}}, ""),
        ({"layout": {"tp": 8}, "launcher": "local", "slurm": {"partition": "h100"}}, ""),
    ],
)
def test_tensor_parallelism_stays_in_a_node(changes: dict[str, object], fault: str) -> None:
    """Over more than one node the step would take several times as long as planned."""
    eight, cluster = load_recipe(Path("recipes/llama3-8b.yaml")), Cluster.model_validate({**NODES, **changes})
    faults = [line for line in layout_faults(eight, cluster, 128_256) if "processes_per_node" in line]
    assert bool(faults) == bool(fault)
    assert all(re.match(f"cluster.layout.tp: {fault}", line) for line in faults)


def test_each_length_of_each_stage_is_checked_with_the_layout_of_that_stage() -> None:
    """Sequences 16 and 36 split into 4 pieces (cp 2), and only the first into 8 (cp 4)."""
    stage: dict[str, object] = {"name": "main", "for": "9216 tokens", "seq_len": 16, "batch": "2304 tokens"}
    stages = [stage | {"mix": "base"}, stage | {"mix": "base", "name": "long", "seq_len": [16, 36]}]
    two_lengths = tiny_recipe(stages=stages)

    def faults(**cluster: object) -> list[str]:
        return [line.partition(": ")[2] for line in layout_faults(two_lengths, Cluster.model_validate(cluster), 512)]

    four, two = {"processes": 4, "layout": {"cp": 4}}, {"processes": 2, "layout": {"cp": 2}}
    (fault,) = faults(**four)
    assert fault.startswith("sequence 36 does not split into 8 pieces")
    assert faults(**four, stages={"long": two}) == []
    assert faults(**two, stages={"long": four}) == faults(**four)
    assert faults(**two, stages={"main": four}) == []
    odd = faults(**two, stages={"long": {"processes": 10}})
    assert [line.partition(";")[0].partition("of sequence ")[2] for line in odd] == [
        f"{length} x data-parallel size 5" for length in (16, 36)
    ]


def test_a_layout_is_checked_against_the_tokenizer_that_conversations_need(tmp_path: Path) -> None:
    Tokenizer([bytes([value]) for value in range(256)] + [b"th"]).save(tmp_path)
    chat = "{name: chat, kind: sft, for: 80K, seq_len: 128, batch: 512 tokens, mix: base}"
    overrides = [f"stages=[{chat}]", "conversations=[{uri: problems, limit: 9}]", "evaluate.after=[]"]
    recipe = load_recipe(QUICKSTART, [*overrides, f"tokenizer={{use: {tmp_path}/tokenizer.model}}"])
    with pytest.raises(RecipeError, match=r"cluster.layout.tp: 2 does not divide vocab_size 513; use one of 1"):
        check_run(recipe, Cluster(processes=2, layout=Layout(tp=2)), Root.parse(tmp_path))


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(RecipeError, match=r"root: .* cannot be written \(File exists\); choose another with --root"):
        check_run(load_recipe(QUICKSTART), Cluster(), Root.parse(tmp_path / "root"))


def test_evaluation_data_is_looked_at_in_full_once_and_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, words = Root.parse(tmp_path / "root"), ["evaluate.suite=core", "evaluate.data=memory://none"]
    remote = load_recipe(QUICKSTART, words)
    assert check_run(remote, Cluster(), root) == []
    with pytest.raises(RecipeError, match=r"hellaswag: memory://none/.* is not a file; put it there"):
        preflight(remote, Cluster(), root)
    looks: list[int | None] = []
    look = suite.check_rows
    monkeypatch.setattr(suite, "check_rows", lambda file, at, rows: (looks.append(rows), look(file, at, rows)))
    left_out = check_run(
        load_recipe(QUICKSTART, [*words, "evaluate.on_missing_data=skip"]), Cluster(), root, thorough=True
    )
    assert len(left_out) == 20
    assert looks == [None] * 20
    plan = make_plan(remote, [], left_out)
    assert [line for line in plan.warnings if line.startswith("evaluate: leaves out hellaswag: memory://none")]
    assert len(looks) == 20


def test_sources_are_looked_at_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.txt").write_text("A page.")
    places = {**dict.fromkeys(DOMAINS, "page.txt"), "code": "empty"}
    words = [f"sources.{domain}=[{{uri: {tmp_path}/{place}}}]" for domain, place in places.items()]
    recipe = load_recipe(QUICKSTART, words)
    with pytest.raises(RecipeError, match=r"sources\.code\.0\.uri: .* is an empty folder"):
        preflight(recipe, Cluster(), Root.parse(tmp_path / "root"))


def test_a_plan_warns_of_local_sources_without_text_and_looks_at_no_others(tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text("A page.")
    root, (first, *others) = Root.parse(tmp_path / "root"), DOMAINS

    def warnings(recipe: Recipe) -> list[str]:
        return survey_and_plan(recipe, root).warnings

    pages = [f"sources.{domain}=[{{uri: {tmp_path}/page.txt}}]" for domain in others]
    nowhere = load_recipe(QUICKSTART, [f"sources.{first}=[{{uri: {tmp_path}/none*.jsonl}}]", *pages])
    assert re.match(rf"sources\.{first}\.0\.uri: .* matches no file; correct the path", warnings(nowhere)[0])
    unseen = "[{uri: '<folder>/page.txt'}, {uri: 's3://nowhere/none.jsonl'}]"
    plan = survey_and_plan(load_recipe(QUICKSTART, [f"sources.{first}={unseen}", *pages]), root)
    assert "source   math: 7 B in 1 documents" in summary_lines(plan)
    assert "sources.math: no held-out document, so it is not scored; add text or raise curate.validation_fraction" in (
        plan.warnings
    )
    nothing = load_recipe(QUICKSTART, ["curate.validation_fraction=0%"])
    expected = (
        "curate.validation_fraction: 0% holds out no document, and an evaluation scores held-out text; write e.g. 2%"
    )
    assert warnings(nothing)[0] == expected
    with pytest.raises(RecipeError, match=expected):
        preflight(nothing, Cluster(), root)
    preflight(nothing, Cluster(), root, "tokenize")


@pytest.mark.parametrize(
    ("documents", "size", "complete", "name", "line"),
    [
        (38, 3_000_000, True, "", ""),
        (29, 3_000_000, True, "", "sources.math: 9 held-out documents with 931.0 kB, too little to judge a model by"),
        (4000, 150_000, True, "", "sources.math: 400 held-out documents with 15.0 kB, too little"),
        (4000, 250_000, True, "", ""),
        (3, 100, False, "", ""),
        (3, 100, True, "gsm", ""),
    ],
)
def test_a_plan_warns_of_a_domain_that_is_too_small_to_judge_by(
    documents: int, size: int, complete: bool, name: str, line: str
) -> None:
    recipe = load_recipe(QUICKSTART, ["curate.validation_fraction=2%"])
    found = scarce_held_out(recipe, [DomainSurvey("math", documents, size, 0, complete, name)])
    assert [each[: len(line)] for each in found] == [line] * bool(line)


@given(st.integers(1, 3000), st.integers(1, 5000), st.sampled_from(["0.5%", "2%", "20%"]))
def test_a_plan_holds_out_as_many_as_curation_does(documents: int, size: int, share: str) -> None:
    """With documents of one size and evenly spread draws."""
    recipe = load_recipe(QUICKSTART, [f"curate.validation_fraction={share}"])
    draws = [2**64 * place // documents for place in range(documents)]
    rows = [(draw, 1, size, min(size, HELD_OUT_CUT)) for draw in draws]
    bound = held_out_bound(recipe.curate.validation_fraction, rows, documents, documents * size, HELD_OUT_BYTES)
    survey = DomainSurvey("math", documents, documents * size, 0, complete=True)
    assert held_out(recipe, survey)[0] == pytest.approx(sum(draw < bound for draw in draws), abs=1)


def test_conversations_are_looked_at_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text("A page.")
    sources = ", ".join(f"{domain}: [{{uri: {tmp_path}/page.txt}}]" for domain in DOMAINS)
    chat = "{name: chat, kind: sft, for: 80K, seq_len: 128, batch: 512 tokens, mix: base}"
    words = [f"sources={{{sources}}}", f"stages=[{chat}]", "conversations=[{uri: problems, limit: 9}]"]
    with pytest.raises(RecipeError, match=r"passes over the conversations, at most tokens.max_epochs 4; write for: "):
        preflight(load_recipe(QUICKSTART, [*words, "evaluate.after=[]"]), Cluster(), Root.parse(tmp_path / "root"))
