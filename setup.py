"""The packages of herd: the checkout is the package `herd`, so its folders are `herd.flows`, `herd.tasks`, ..."""

from setuptools import find_packages, setup

FOLDERS = ["flows", "tasks", "llama3", "storage", "deploy"]
setup(packages=["herd", *(f"herd.{name}" for name in find_packages(include=[f"{name}*" for name in FOLDERS]))])
