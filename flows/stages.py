"""A part of the chain as a deployment of its own: `curate`, `tokenise`, `pretrain`.

Each runs the same chain and stops early: what comes before the part is found or made, what comes after is left to
another run, which then finds it. So a schedule can curate every night and a person can train when they want to.
"""

from __future__ import annotations

from prefect import flow

from flows.hooks import HOOKS
from flows.outcome import told
from flows.parameters import PRETRAIN, StageParameters
from flows.pipeline import run_recipe


@flow(name="curate", persist_result=False, **HOOKS)
def curate(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Read the sources of a recipe and decide which documents to train on; return the run's name.

    Args:
        config: What to run and where.
    """
    return told(lambda: run_recipe(config.settled(until="curate")))


@flow(name="tokenise", persist_result=False, **HOOKS)
def tokenise(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Turn the curated documents of a recipe into token shards; return the run's name.

    Args:
        config: What to run and where.
    """
    return told(lambda: run_recipe(config.settled(until="tokenise")))


@flow(name="pretrain", persist_result=False, **HOOKS)
def pretrain(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Train every stage of a recipe, without judging the model; return the run's name.

    Args:
        config: What to run and where.
    """
    return told(lambda: run_recipe(config.settled(until=PRETRAIN)))
