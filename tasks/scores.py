"""The scores among the facts of an artifact: of an evaluation, or of a gate within a run."""

from __future__ import annotations

from storage.artifact import Artifact

SCORE = "eval/"
"""Beginning of the name of every score."""


def scores_of(artifact: Artifact) -> dict[str, float]:
    """Return the scores of the artifact, each under its whole name (`eval/bpb/math`)."""
    return {key: value for key, value in artifact.facts.items() if key.startswith(SCORE)}
