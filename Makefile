# Two commands matter: `make run` and `make test`. Both create .venv and install what is pinned.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Where there is no GPU, torch's own index has a CPU build without gigabytes of CUDA; it is used if it can be reached.
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(shell command -v nvidia-smi >/dev/null || $(PYTHON) -c \
    'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=3); print("$(CPU_INDEX)")' 2>/dev/null)

.PHONY: run test test-long check install clean
run: .venv/installed
	@$(BIN)/herd run recipes/quickstart.yaml

# Two workers: one takes the end-to-end tests, which wait a lot, the other the rest.
test: .venv/installed check
	@$(BIN)/pytest --numprocesses 2 --no-loadscope-reorder

test-long: .venv/installed
	@$(BIN)/pytest -m long

check: .venv/installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "herd needs Python 3.11, 3.12 or 3.13 on the PATH, or: make PYTHON=/path/to/python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (about two minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@touch $@

clean:
	rm -rf .venv herd-data build *.egg-info
