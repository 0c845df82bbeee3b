"""The packages of herd: the checkout is the package `herd`, so its folders are `herd.flows`, `herd.tasks`, ..."""

from setuptools import find_namespace_packages, setup

FOLDERS = ["flows", "tasks", "llama3", "storage", "deploy"]
setup(
    # folders without code, such as tasks/templates, hold data
    packages=["herd", *(f"herd.{name}" for name in find_namespace_packages(include=[f"{name}*" for name in FOLDERS]))],
    exclude_package_data={"herd": ["README.md", "LICENSE"]},
    script_name="setup.py",  # else pip's own, and the wheel would hold this file
)
