from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.flows import Flow
from prefect.utilities.schema_tools import validation
from prefect.utilities.schema_tools.validation import is_valid_schema, validate
from pydantic import ValidationError

from herd.flows.checkpoint import evaluate, promote
from herd.flows.maintenance import gc, report, verify
from herd.flows.pipeline import pipeline, rerun
from herd.flows.prefect_app import explain_refusals
from herd.flows.recipe_form import (
    CADENCE,
    NOTHING,
    SHARE,
    SPAN,
    TOKENS,
    MixChange,
    PipelineParameters,
    RecipeChange,
    RerunParameters,
    StageChange,
    chosen_recipe,
)
from herd.flows.study import StudyParameters, study
from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.units import Cadence, Duration, Share, Span, Tokens
from herd.tasks.cluster import Cluster
from herd.tasks.pipeline_steps import first_step, last_step, step_names

FLOWS: list[Flow[Any, Any]] = [
    pipeline,
    rerun,
    evaluate,
    promote,
    report,
    gc,
    study,
    verify,
]
QUICKSTART = Path("recipes/quickstart.yaml")


def schema_of(flow: Flow[Any, Any]) -> dict[str, Any]:
    return flow.parameters.model_dump()


def form(flow: Flow[Any, Any]) -> dict[str, Any]:
    """Return the fields of the flow's form, as the UI gets them."""
    schema = schema_of(flow)
    assert set(schema["properties"]) == {"config"}
    (model,) = {name for name in schema["definitions"] if name.endswith("Parameters")}
    fields: dict[str, Any] = schema["definitions"][model]["properties"]
    return fields


def title_of(flow: Flow[Any, Any], field: dict[str, Any]) -> str:
    """Return the heading that the UI draws: the field's own, or that of the section it opens."""
    section = field.get("$ref", "").removeprefix("#/definitions/")
    return str(field["title"] if not section else schema_of(flow)["definitions"][section]["title"])


def refused(flow: Flow[Any, Any], config: dict[str, Any]) -> list[str]:
    """Return what the server says to `config`: the check that it makes before it accepts a flow run."""
    schema = schema_of(flow)
    assert is_valid_schema(schema, preprocess=False) is None
    return [error.message for error in validate({"config": config}, schema, raise_on_error=False, preprocess=True)]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_a_quick_run_is_one_click(flow: Flow[Any, Any]) -> None:
    """The UI sends back every default; one that the schema does not know makes the form useless."""
    schema = schema_of(flow)
    assert schema.get("required", []) == []
    assert all(not model.get("required") for model in schema["definitions"].values())
    assert refused(flow, {}) == []
    assert refused(flow, schema["properties"]["config"]["default"]) == []


def test_the_form_draws_few_fields_of_a_cluster_and_takes_all() -> None:
    section = schema_of(pipeline)["definitions"]["Cluster"]
    assert list(section["properties"]) == ["processes", "threads", "micro_batch", "device", "launcher", "memory"]
    assert set(section["properties"]) < set(Cluster.model_fields)
    sent = {"cluster": {"launcher": "slurm", "slurm": {"partition": "gpu"}, "layout": {"tp": 2}, "processes": 2}}
    assert refused(pipeline, sent) == []
    assert PipelineParameters.model_validate(sent).model_dump(mode="json")["cluster"]["layout"]["tp"] == 2
    assert refused(pipeline, {"cluster": {"launcher": "slum"}})
    assert PipelineParameters().model_dump()["cluster"] == {}


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_every_field_has_a_title_a_place_and_a_word_of_help(flow: Flow[Any, Any]) -> None:
    fields = form(flow)
    places = [field["position"] for field in fields.values()]
    assert len(set(places)) == len(places)
    assert all(field["description"] and title_of(flow, field) for field in fields.values())
    assert sorted(fields, key=lambda name: fields[name]["position"])[-1] in ("root", "cluster")


def test_the_form_of_a_rerun_reads_in_this_order_and_offers_the_steps() -> None:
    fields = form(rerun)
    assert fields["change"]["$ref"] == "#/definitions/RecipeChange"
    assert schema_of(rerun)["definitions"]["RecipeChange"]["title"] == "Change the recipe"
    assert sorted(fields, key=lambda name: fields[name]["position"]) == [
        "run", "from_step", "stage", "change", "overrides", "until", "restart_damaged", "root", "cluster"
    ]  # fmt: skip
    offered = fields["from_step"]["enum"]
    assert offered[0] == fields["from_step"]["default"] == NOTHING
    assert {"curate", "tokenize", "pretrain", "ramp-1", "main", "anneal", "promote"} < set(offered)


def test_the_pipeline_does_not_draw_what_the_deployment_rerun_is_for() -> None:
    assert not {"rerun_of", "from_step"} & set(form(pipeline))
    assert (
        PipelineParameters(rerun_of="quickstart-7", from_step="main").resolved_parameters().rerun_of == "quickstart-7"
    )


NONSENSE = [
    (pipeline, {"recepie": "x"}, "recepie"),
    (pipeline, {"change": {"every": "10 minutes"}}, "10 minutes"),
    (pipeline, {"change": {"every": "10"}}, "10"),
    (pipeline, {"change": {"jaccard": "1.7"}}, "1.7"),
    (pipeline, {"change": {"stages": [{"name": "main", "until": "840"}]}}, "840"),
    (pipeline, {"change": {"stages": [{"name": "main", "batch": "4 MB"}]}}, "4 MB"),
    (pipeline, {"change": {"mixes": [{"name": "base", "math": "0.25"}]}}, "0.25"),
    (rerun, {"from_step": "curat"}, "curat"),
    (pipeline, {"fresh": "yes"}, "yes"),
    (report, {"cluster": {}}, "cluster"),
]


def test_the_server_refuses_nonsense_before_there_is_a_run() -> None:
    for flow, config, message in NONSENSE:
        found = refused(flow, config)
        assert len(found) == 1, config
        assert message in found[0]


def with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check forms as herd's own Prefect server does; restored afterwards."""
    rules = validation._VALIDATOR.VALIDATORS
    for name in ("pattern", "properties"):
        monkeypatch.setitem(rules, name, rules[name])
    explain_refusals()


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_a_parameter_beside_config_is_refused_before_there_is_a_run(
    flow: Flow[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow run would crash before it has a state, and be started again."""
    with_words(monkeypatch)
    sent, schema = {"config": {}, "recepie": "x"}, schema_of(flow)
    (error,) = validate(sent, schema, raise_on_error=False, preprocess=True)
    assert error.message == "'recepie' is not a parameter; write it below config: {config: {recepie: ...}}"
    assert refused(flow, {}) == []


@pytest.mark.parametrize("name", ["until", "batch", "seq_len", "lr"])
def test_a_field_refuses_with_its_help_and_not_with_a_regular_expression(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_words(monkeypatch)
    field = StageChange.model_fields[name]
    sentence = f"{field.title}: 'fast' is not taken; expected: {field.description}"
    assert refused(pipeline, {"change": {"stages": [{"name": "main", name: "fast"}]}}) == [sentence]
    with pytest.raises(ValidationError) as raised:
        StageChange.model_validate({"name": "main", name: "fast"})
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ("1e-3", "constant at 0.001"),
        (0.001, "constant at 0.001"),
        (" 5E-4 ", "constant at 0.0005"),
        ("1", "constant at 1"),
    ]
    + [
        (text, text)
        for text in ("constant", "constant at 1e-05", "linear to 0", "linear from 1e-05 to 0", "linear to 0.1")
    ],
)
def test_a_number_is_a_constant_learning_rate(given: str | float, rate: str) -> None:
    change = {"stages": [{"name": "anneal", "lr": given}]}
    assert isinstance(given, float) or refused(pipeline, {"change": change}) == []
    recipe = chosen_recipe(PipelineParameters.model_validate({"change": change}).resolved_parameters())
    assert str(recipe.stages[-1].lr) == rate
    as_yaml = chosen_recipe(PipelineParameters(overrides=[f"stages.anneal.lr={str(given).strip()}"]))
    assert as_yaml.stages[-1].lr == recipe.stages[-1].lr


def test_numbers_by_api_are_taken_as_they_are_typed() -> None:
    change = RecipeChange.model_validate({"seed": 7, "peak": 0.002, "jaccard": 0.7, "stages": [{"seq_len": 256}]})
    assert change.overrides() == ["stages.main.seq_len=256", "lr.peak=0.002", "curate.dedup.jaccard=0.7", "seed=7"]


def test_a_filled_in_form_is_accepted_by_the_server_and_changes_the_recipe() -> None:
    change = {
        "stages": [
            {"name": "main", "until": "900K", "batch": "4Ki", "lr": "constant"},
            {"name": "anneal", "seq_len": "256"},
        ],
        "mixes": [{"name": "base", "math": "35%", "general": "40%"}],
        "peak": "1e-3",
        "warmup": "40 steps",
        "jaccard": "70%",
        "validation_fraction": "2.5 %",
        "every": "10 min",
        "seed": "7",
    }
    assert refused(pipeline, {"change": change, "overrides": ["evaluate.questions=40"]}) == []
    wanted = PipelineParameters.model_validate({"change": change, "overrides": ["evaluate.questions=40"]})
    recipe = chosen_recipe(wanted.resolved_parameters())

    main, anneal = recipe.stages[-2:]
    assert (main.until, main.batch, str(main.lr)) == (Tokens.parse("900K"), Tokens.parse("4Ki"), "constant")
    assert (anneal.seq_len, str(anneal.length)) == (256, "240K")
    assert {domain: str(share) for domain, share in recipe.mix["base"].items()} == {
        "general": "40%", "math": "35%", "code": "17%", "multilingual": "8%"
    }  # fmt: skip
    assert (recipe.lr.peak, str(recipe.lr.warmup), recipe.seed) == (1e-3, "40 steps", 7)
    assert (recipe.curate.dedup.jaccard, str(recipe.curate.validation_fraction)) == (0.7, "2.5%")
    assert (str(recipe.checkpoint.every), recipe.evaluate.questions) == ("10 min", 40)


def test_a_new_end_takes_the_place_of_the_other_kind() -> None:
    change = RecipeChange(stages=[StageChange(name="anneal", until="1M"), StageChange(name="main", length="540K")])
    recipe = chosen_recipe(PipelineParameters(change=change).resolved_parameters())
    assert [(stage.until, stage.length) for stage in recipe.stages[-2:]] == [
        (None, Tokens.parse("540K")),
        (Tokens.parse("1M"), None),
    ]
    with pytest.raises(ValidationError, match="either 'Ends at' or 'Or trains for'"):
        StageChange(name="main", until="1M", length="1M")


def test_what_the_schema_cannot_know_the_recipe_says_in_one_line() -> None:
    short = PipelineParameters(change=RecipeChange(mixes=[MixChange(name="base", math="20%")]))
    with pytest.raises(RecipeError, match=r"mix: the shares of base sum to 95%; change them until they sum to 100%"):
        chosen_recipe(short.resolved_parameters())
    unknown = PipelineParameters(change=RecipeChange(stages=[StageChange(name="mian", until="1M")]))
    with pytest.raises(RecipeError, match=r"there is no element 'mian' in that list"):
        chosen_recipe(unknown.resolved_parameters())


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        (TOKENS, st.integers(0, 10**15).map(Tokens)),
        (SPAN, st.builds(Span, st.integers(0, 10**12), st.sampled_from(["tokens", "steps"]))),
        (SHARE, st.integers(0, 10_000).map(lambda share: Share.parse(f"{share / 100}%"))),
        (CADENCE, st.builds(Cadence, st.integers(1, 10**9), st.sampled_from(["tokens", "seconds"]))),
        (CADENCE, st.integers(1, 10**7).map(Duration)),
    ],
)
@given(data=st.data())
def test_a_pattern_takes_every_quantity_as_it_is_printed(pattern: str, values: Any, data: st.DataObject) -> None:
    import re

    text = str(data.draw(values))
    assert re.search(pattern, text), text
    assert re.search(pattern, f" {text} "), text


def test_settling_folds_the_form_into_one_list_of_overrides_and_leaves_the_rest() -> None:
    config = PipelineParameters(change=RecipeChange(seed="3"), overrides=["seed=4"], until=" main ", root="/data")
    settled = config.resolved_parameters()
    assert (settled.overrides, settled.until, settled.root) == (["seed=3", "seed=4"], "main", "/data")
    assert settled.resolved_parameters() == settled


def test_a_rerun_redoes_from_the_list_or_from_a_stage_of_ones_own() -> None:
    assert RerunParameters().resolved_parameters("quickstart-7").from_step == ""
    assert RerunParameters(from_step="curate").resolved_parameters("quickstart-7").from_step == "curate"
    assert RerunParameters(stage="cooldown").resolved_parameters("quickstart-7").from_step == "cooldown"
    with pytest.raises(ValueError, match="fill in one of them"):
        RerunParameters(from_step="curate", stage="cooldown").resolved_parameters("quickstart-7")


def test_an_empty_root_is_the_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert PipelineParameters().root_at.local == Path("herd-data").absolute()
    monkeypatch.setenv("HERD_ROOT", str(tmp_path))
    assert PipelineParameters().root_at.local == tmp_path
    assert PipelineParameters(root="s3://bucket/herd").root_at.uri == "s3://bucket/herd"


def test_general_words_name_the_first_or_last_step_of_their_kind() -> None:
    recipe = load_recipe(QUICKSTART)
    assert (first_step(recipe, "pretrain"), last_step(recipe, "pretrain")) == ("ramp-1", "anneal")
    assert (first_step(recipe, "evaluate"), last_step(recipe, "evaluate")) == ("evaluate-main", "evaluate-anneal")
    assert (first_step(recipe, "main"), last_step(recipe, "")) == ("main", "")


def test_steps_are_named_in_order() -> None:
    assert step_names(load_recipe(QUICKSTART)) == [
        "collect", "annotate", "curate", "tokenizer", "tokenize",
        "ramp-1", "ramp-2", "main", "evaluate-main", "anneal", "evaluate-anneal", "promote",
    ]  # fmt: skip


def test_overrides_change_the_chosen_recipe() -> None:
    config = PipelineParameters(overrides=["curate.dedup.jaccard=0.7"])
    assert chosen_recipe(config).curate.dedup.jaccard == 0.7


def test_the_form_of_a_study_takes_variants_as_a_list() -> None:
    sent = {
        "variants": [
            {"name": "short", "change": {"warmup": "10 steps"}},
            {"name": "long", "overrides": ["lr.warmup=90 steps"]},
        ],
        "only": ["short"],
    }
    assert refused(study, sent) == []
    assert refused(study, {"variants": [{"name": "Two Words"}]})
    assert refused(study, {"variants": [{"name": "short", "change": {"warmup": "ten"}}]})
    config = StudyParameters.model_validate(sent)
    expanded = config.expanded()
    assert [run.variant.name for run in expanded.runs if run.repeat == 1] == [
        "steady",
        "ramp",
        "no-warmup",
        "short",
        "long",
    ]
    assert {run.variant.name for run in config.chosen(expanded)} == {"steady", "short"}  # the control in any case
    warmups = {run.variant.name: str(run.recipe.lr.warmup) for run in expanded.runs}
    assert (warmups["short"], warmups["long"]) == ("10 steps", "90 steps")
    with pytest.raises(ValueError, match="only: 'shorter' is not a variant of ramp-cpu"):
        StudyParameters(only=["shorter"]).chosen(expanded)
