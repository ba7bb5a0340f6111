# The commands of this repository. Each makes the virtual environment .venv first if it is missing or out of date.
# `make help` lists them. PYTHON=python3.12 picks the interpreter, ARGS adds arguments: make test ARGS='-k advantages'

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
BIN  := $(VENV)/bin
# the first of these that is recent enough for the package, not too recent for the pinned torch, and can make environments
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14 python
SUITABLE    = import sys, ensurepip, venv; sys.exit(not (3,11) <= sys.version_info < (3,15))
PYTHON     ?= $(shell for p in $(CANDIDATES); do $$p -c '$(SUITABLE)' >/dev/null 2>&1 && echo $$p && break; done)
# quiet, but one line for each package that is fetched
INSTALL     = $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt --editable $(1) \
              | sed -unE 's/^(Collecting [^ ;<>=!~]+).*/  \1/p'

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lab notebooks experiments bench export docs preview dist baselm

help:        ## list these commands
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(VENV)/.run        ## train the small model with GRPO and show held-out prompts before and after
	@$(BIN)/g2c-rl train arithmetic $(ARGS)

test: $(VENV)/.dev        ## all the tests: notebooks, package, exercises, site
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

test-slow: $(VENV)/.dev   ## the tests that need the package index and minutes: the real model
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

lab: $(VENV)/.dev         ## open the notebooks in JupyterLab
	@$(BIN)/jupyter lab nbs

notebooks: $(VENV)/.dev   ## run the notebooks and save their outputs (ARGS=nbs/05_loss.ipynb for one)
	@$(BIN)/python tools/run_nbs.py $(ARGS)

experiments: $(VENV)/.dev ## run every experiment whose history is missing (ARGS=sloppy_verifier for one)
	@$(BIN)/g2c-rl experiment $(or $(ARGS),all)

bench: $(VENV)/.bench     ## measure where the time goes, beside TRL and the machine (long; ARGS=--quick for a look)
	@$(BIN)/python tools/bench.py $(ARGS)

export: $(VENV)/.docs     ## write the package and README.md from the notebooks, and clean the notebooks
	@$(BIN)/nbdev_clean && $(BIN)/nbdev_export && $(BIN)/python tools/readme.py && $(BIN)/python tools/exercise.py && $(BIN)/python tools/colab.py

docs: $(VENV)/.docs       ## build the site in _docs
	@$(BIN)/python tools/build_site.py

preview: $(VENV)/.docs    ## build the site, serve it, and build it again on every change
	@$(BIN)/python tools/build_site.py --preview $(ARGS)

dist: $(VENV)/.docs       ## build the archives that PyPI gets, in dist
	@rm -rf dist && $(BIN)/python setup.py -q sdist
	@$(BIN)/python -m pip --disable-pip-version-check -q wheel dist/*.tar.gz --no-deps --no-build-isolation --wheel-dir dist

baselm: $(VENV)/.run      ## pretrain the bundled model again, into runs/baselm (a quarter of an hour)
	@$(BIN)/g2c-rl baselm --out runs/baselm $(ARGS)

# ---------- the environment: one, in stages, each redone only when what it is made of has changed

RECIPE := settings.ini setup.py pyproject.toml constraints.txt

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No suitable Python found: 3.11 to 3.14 with venv is needed. Name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c '$(SUITABLE)' || { echo "$(PYTHON) will not do: Python 3.11 to 3.14 with venv is needed" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(RECIPE) | $(BIN)/python
	@echo "Installing the package and torch into $(VENV) (once; a few minutes)"
	@$(call INSTALL,.)
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	@echo "Installing what notebooks and the site need (once; a minute)"
	@$(call INSTALL,'.[docs]')
	@touch $@

$(VENV)/.dev: $(VENV)/.docs
	@echo "Installing what the tests need besides (once; a minute)"
	@$(call INSTALL,'.[dev]')
	@touch $@

$(VENV)/.bench: $(VENV)/.docs
	@echo "Installing what the benchmark is against (once; a minute)"
	@$(call INSTALL,'.[bench]')
	@touch $@
