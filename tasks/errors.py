"""Errors that are not the user's; separate, so that a command that trains nothing imports no trainer."""

from __future__ import annotations

import errno

REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "ask the owner for the permission, or choose another folder (--root)"),
    errno.EROFS: "the file system is mounted read-only: choose another folder (--root)",
    errno.EMFILE: "too many files are open: raise the limit with ulimit -n 65536",
    errno.ENOLCK: "the file system has no locks (flock): choose another folder (--root), or mount it with locks",
}
"""Number of a system error -> what to do."""


class TrainingFailed(RuntimeError):
    """The trainer died without getting further; the text holds its last words."""


class EvaluationFailed(RuntimeError):
    """A process that scores a model died; the text holds its last words."""


class InferenceFailed(RuntimeError):
    """A process of a model that is split died; the text says which and why."""


class GateFailed(ValueError):
    """A gate between two sequence lengths failed; the text holds the numbers and the remedies."""


class SchedulerRefused(RuntimeError):
    """Slurm or Kubernetes refused a command, or does not answer; the text is its message."""


class StudyIncomplete(RuntimeError):
    """Runs of a study did not come to their end; the text names them."""
