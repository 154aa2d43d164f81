# `make train` and `make test` do all the set-up themselves: they need Python >= 3.10 and make, nothing else.
# `make train` installs the `train` extra only; what needs the developers' tools installs them beside it.
#
#   make train                    train a byte-level GPT on two ranks, in two minutes
#   make train ARGS="--steps 50"  the same with other flags; see: .venv/bin/fairshard train --help
#   make test                     all tests but those marked `full`
#   make test WORKERS=0           the same in one process: easier to debug; three are the default
#   make test TORCH=2.6.0         the same on another torch, in a virtual environment of its own (5.6 GB with CUDA)
#   make test-all                 every cell of every matrix
#   make test-sim                 the tests of ranks on the simulated accelerator of tests/sim, in three orders of its work
#   make kill                     kill -9 a training run 1,000 times, in saves and between; ARGS="--kills 99"
#   make drill                    let ranks die, part ways and run dry, 20 times each; ARGS="--times 3"
#   make soak                     5,000 steps with saves and a resume, watched for leaks; ARGS="--steps 1000"
#   make check                    ruff, mypy, imports, the architecture test, the docs with warnings as errors
#   make docs                     docs/_build/html/index.html
#   make screenshots              the pages of `make docs` in a browser, wide and narrow, light and dark; needs chromium
#   make clients                  other people's trainers beside torch's engine, in an environment with their packages
#   make bench                    step time beside FSDP1, FSDP2 and DDP
#   make gpu                      what only a device can show, with PYTHON's torch, which needs pytest and hypothesis
#   make gpu DEVICE=sim RANKS=2   on another device (the simulated one), or with several ranks on each
#   make clean                    remove what make made; the runs stay
#
# PYTHON chooses the interpreter. PIP_FLAGS is passed to pip; "--extra-index-url https://download.pytorch.org/whl/cpu"
# brings the CPU build of torch.

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
WORKERS ?= 3
TORCH ?=
DEVICE ?= cuda
RANKS ?= 1

ifeq ($(TORCH),)
VENV := .venv
EXTRA := dev
else
VENV := .venv-torch-$(TORCH)
EXTRA := test
endif
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(EXTRA)
# Each worker takes whole files, and has ranks of its own.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Hundreds of processes import the package: it is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: train test test-all test-sim kill drill soak clients check docs screenshots bench gpu clean

train: $(VENV)/.installed-train
	$(BIN)/fairshard train $(ARGS)

test: $(INSTALLED)
	$(PYTEST) $(ARGS)

test-all: $(INSTALLED)
	$(PYTEST) -m "full or not full" $(ARGS)

test-sim: $(INSTALLED)
	set -e; for seed in 1 2 3; do FAIRSHARD_SIM_SEED=$$seed $(PYTEST) --device sim $(ARGS); done

kill: $(INSTALLED)
	$(BIN)/python -m tests.checkpoint.kill_loop $(ARGS)

drill: $(INSTALLED)
	$(BIN)/python -m tests.doors.wrapper.drill $(ARGS)

soak: $(INSTALLED)
	$(BIN)/python -m tests.checkpoint.soak $(ARGS)

clients:
	$(MAKE) .venv-clients/.installed-clients VENV=.venv-clients
	.venv-clients/bin/python -m pytest -m full tests/clients/test_all_clients.py $(ARGS)

check: $(INSTALLED) docs
	$(BIN)/ruff check .
	$(BIN)/mypy --strict fairshard
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_architecture.py

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

screenshots: docs
	$(BIN)/python docs/screenshots.py $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py $(ARGS)

gpu:
	$(PYTHON) -m pytest -m gpu --device $(DEVICE) --ranks-per-device $(RANKS) tests/gpu $(ARGS)

$(VENV)/.installed-%: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q $(PIP_FLAGS) -c $(VENV)/constraints.txt -e ".[$*]"
	touch $@

clean:
	rm -rf .venv .venv-clients .venv-torch-* build *.egg-info docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
