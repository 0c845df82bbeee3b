"""What the forkserver of tests/dist.py does last before it forks: the agent of a node does the same."""

from herd.llama3.train.launch import preload

preload()
