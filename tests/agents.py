"""Agents forked from the forkserver: importing torch takes a new interpreter four CPU seconds."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import cast

from herd.llama3.train.job import Attempt
from herd.tasks.launch.base import trainer_environment
from herd.tasks.launch.local import Agent, Agents, LocalLaunch
from tests.dist import Forked


class ForkedAgents(Agents):
    """Agents of one thread begin as forks; OpenMP has read the number of threads before it could be another."""

    def start(self, attempt: Attempt, threads: int) -> LocalLaunch:
        agent = self._agents.get(threads)
        if threads == 1 and (agent is None or agent.process.poll() is not None):
            environment = {**os.environ, **trainer_environment(threads)}
            process = Forked("herd.llama3.train.launch", "--serve", environment=environment)
            self._agents[threads] = Agent(cast("subprocess.Popen[bytes]", process), self.log)
        return super().start(attempt, threads)


@cache
def shared_agents() -> Agents:
    """Return what ranks and evaluators are forked from; the kernel ends it with this process."""
    return ForkedAgents(Path("/dev/null"))
