# flakit: `make lab` opens the notebooks, `make test` runs what a change needs, `make test-all` every test there is.
# Nothing but Python 3.10+ with venv is needed; everything lands in .venv.

PYTHON    ?= python3
# Extra flags for JupyterLab, e.g. make lab LAB_FLAGS="--no-browser --port=8899"
LAB_FLAGS ?=
# Extra flags for pytest, e.g. make test TEST_FLAGS="-k rwkv6 -x"
TEST_FLAGS ?=

VENV      := .venv
PY        := $(VENV)/bin/python
# Python compiles what is imported, when it is: compiling all that is installed would take pip as long as installing it.
INSTALL   := $(PY) -m pip install --no-compile --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help lab test test-rest test-all release-check notebooks site lint dist clean

help:  ## list the targets
	@echo "flakit: an interactive laboratory for the numerics of linear-attention kernels"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

$(PY):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.10 or newer, or name one: make lab PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "flakit needs Python 3.10 or newer and $(PYTHON) is $$($(PYTHON) -V 2>&1): name a newer one, e.g. make lab PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module. On Debian and Ubuntu: apt-get install python3-venv (python3.12-venv for python3.12)"; exit 1; }
	@echo "== making $(VENV) with $$($(PYTHON) -V)"
	$(PYTHON) -m venv $(VENV)

# pip runs again only when what it installs from has changed. Its own variables reach it from either side of `make`:
# `PIP_EXTRA_INDEX_URL=... make lab` and `make lab PIP_EXTRA_INDEX_URL=...` are the same.
$(VENV)/.lab: pyproject.toml constraints.txt | $(PY)
	@echo "== installing flakit with JupyterLab (some minutes)"
	@$(PY) flakit/torch_build.py
	$(INSTALL) --editable ".[lab]"
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(PY)
	@echo "== installing flakit with JupyterLab and the test tools (some minutes)"
	@$(PY) flakit/torch_build.py
	$(INSTALL) --editable ".[test]"
	@touch $(VENV)/.lab $@

$(VENV)/.site: pyproject.toml constraints.txt | $(PY)
	@echo "== installing flakit with what builds its site (some minutes)"
	@$(PY) flakit/torch_build.py
	$(INSTALL) --editable ".[site]"
	@touch $(VENV)/.lab $@

# flash-linear-attention's own layers are run with flakit's operators in them, and a sweep with Ray's workers: some
# 450 MB more, and only where all is tested.
$(VENV)/.rest: pyproject.toml constraints.txt | $(PY)
	@echo "== installing flakit with all that its tests use: flash-linear-attention, whose layers run on its operators, Ray,"
	@echo "   what builds the site (some minutes)"
	@$(PY) flakit/torch_build.py
	$(INSTALL) --editable ".[test,fla,ray,site]"
	@touch $(VENV)/.lab $(VENV)/.test $(VENV)/.site $@

lab: $(VENV)/.lab  ## install what is missing, check it, open JupyterLab at the first notebook
	@exec $(PY) -m flakit.cli lab notebooks $(LAB_FLAGS)

test: $(VENV)/.test  ## every operator, gradient, dtype, packing, notebook and panel, on what this machine has
	@$(PY) tests/run.py $(TEST_FLAGS)

test-rest: $(VENV)/.rest  ## the tests that `make test` leaves out
	@$(PY) tests/run.py --rest $(TEST_FLAGS)

test-all: $(VENV)/.rest  ## both: every test this machine can run
	@$(PY) tests/run.py --all $(TEST_FLAGS)
	@$(PY) -m tests.gpu.summary --check || echo "(a warning: make release-check fails)"

release-check: $(VENV)/.test  ## whether every GPU test has passed for the code as it is (python -m tests.gpu on a GPU)
	@$(PY) -m tests.gpu.summary --check

notebooks: $(VENV)/.test  ## run all notebooks (or NOTEBOOKS="00 04") and store their outputs, small
	@$(PY) -m docs.execute $(NOTEBOOKS)

site: $(VENV)/.site  ## build the notebooks as pages into build/site (NOTEBOOKS="00 04": run no others)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m docs.build $(NOTEBOOKS)

lint: $(VENV)/.test  ## check style in .py and .ipynb, and the types of what others build on
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

dist: $(VENV)/.test  ## build the sdist and the wheel, into dist/
	rm -rf dist
	$(PY) -m hatchling build

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
