# Needs make and Python 3.11 to 3.13. The first call makes the virtual environment; a later one installs again
# only when requirements.txt, requirements.lock or pyproject.toml changed, and else touches no network.
#
#   PYTHON  interpreter that makes the environment      make demo PYTHON=python3.12
#   VENV    folder of the environment                   make test VENV=/scratch/venv
#   ARGS    passed on to the demo, to pytest or W&B     make test ARGS="-k precision -x"
#   WORKERS processes that share the tests, 0 for none  make test WORKERS=0
#   OUTPUTS where runs lie, for review and sync         make review OUTPUTS=/scratch/outputs

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
OUTPUTS ?= outputs

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
WANDB := $(abspath $(VENV))/bin/wandb
STAMP := $(VENV)/.installed
# A GPU machine often brings its own torch and no network: without an environment of ours, use PYTHON as it is.
GPU_PY := $(if $(wildcard $(STAMP)),$(PY),$(PYTHON))

define CHECK_PYTHON
import glob, os, sys
here = "%d.%d" % sys.version_info[:2]
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit("error: Python 3.11 to 3.13 is needed, this one is %s; name another: make setup PYTHON=python3.12" % here)
try:
    import ensurepip, venv
except ImportError:
    sys.exit("error: this Python has no venv module; on Debian and Ubuntu: apt-get install python3-venv")
target = sys.argv[1] if len(sys.argv) > 1 else ""
if not target:
    sys.exit("error: VENV is empty: name a folder, for example VENV=.venv")
made = sorted(os.path.basename(p)[6:] for p in glob.glob(os.path.join(target, "lib", "python*")))
if made and made != [here]:
    sys.exit("error: %s was made with Python %s, not %s: run make clean first" % (target, ", ".join(made), here))
endef
export CHECK_PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo review sync test test-slow test-gpu golden lint lock clean check-python

help: ## list the targets (default)
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-10s  %s\n", $$1, $$2 }' Makefile

# A PYTHON given on the command line is checked against an environment that already exists, not ignored.
setup: $(if $(filter command,$(origin PYTHON)),check-python) $(STAMP) ## make the environment and install into it

demo: setup ## run the demo: no GPU, no account, no download
	$(PY) scripts/demo.py $(ARGS)

test: setup ## run the tests, without the slow ones and those that need a GPU
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: setup ## run the slow tests, one after the other: some are timed
	$(PY) -m pytest -m slow $(ARGS)

test-gpu: ## run the GPU tests; without an environment, with PYTHON and its own torch
	PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PY) -m pytest -m gpu tests/test_gpu.py $(ARGS)

review: setup ## look at all runs, offline ones too, in W&B's terminal viewer
	@ls "$(OUTPUTS)/wandb" > /dev/null 2>&1 || { echo "error: no W&B runs in $(OUTPUTS)/wandb yet; train something first" >&2; exit 1; }
	"$(WANDB)" leet "$(OUTPUTS)/wandb" $(ARGS)

sync: setup ## show which runs are not uploaded to W&B yet, log in, and upload them once confirmed
	@ls "$(OUTPUTS)/wandb" > /dev/null 2>&1 || { echo "error: no W&B runs in $(OUTPUTS)/wandb yet; train something first" >&2; exit 1; }
	cd "$(OUTPUTS)" && "$(WANDB)" sync --dry-run
	"$(WANDB)" login
	cd "$(OUTPUTS)" && "$(WANDB)" sync $(ARGS)

golden: setup ## write the golden losses and op maps anew, after a wanted change of numerics or another torch
	$(PY) tests/test_golden.py --write
	$(PY) tests/test_golden_ops.py --write

lint: setup ## check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

lock: check-python ## resolve requirements.txt anew and write requirements.lock
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip --disable-pip-version-check install -r requirements.txt
	.venv-lock/bin/python -m pip freeze --exclude-editable > .venv-lock/freeze.txt
	sed 's/+[A-Za-z0-9.]*$$//' .venv-lock/freeze.txt | LC_ALL=C sort -f > requirements.lock
	rm -rf .venv-lock

clean: ## remove the environment and the caches, never outputs/
	rm -rf "$(VENV)" .venv-lock .pytest_cache .ruff_cache build src/*.egg-info
	find conf scripts src tests -name __pycache__ -prune -exec rm -rf {} +

check-python:
	@command -v "$(PYTHON)" > /dev/null || { echo "error: $(PYTHON) not found; name a Python 3.11 to 3.13: make setup PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c "$$CHECK_PYTHON" "$(VENV)"

# The stamp is written last, so an install that was interrupted or failed starts again on the next call.
$(STAMP): requirements.txt requirements.lock pyproject.toml
	@$(MAKE) --no-print-directory check-python
	"$(PYTHON)" -m venv "$(VENV)"
	@echo "installing into $(VENV): minutes and several GB where torch comes with CUDA"
	$(PIP) install -r requirements.txt -c requirements.lock
	@touch $@
