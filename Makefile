# The targets of this project: each works by itself, on a fresh machine, too.
#
#   make train   install once, get the data, train LeNet with two workers; ARGS="--epochs 1"
#   make test    install once, run the tests
#   make check   ruff and mypy
#   make data    get Fashion-MNIST
#   make paper   make the paper's figures: results/paper.md
#   make scripts run small scripts of every kind under every protocol: docs/scripts.md
#   make venv    install only
#
# PYTHON=python3.12 make train   uses another interpreter (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip -qq --disable-pip-version-check
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
# A test starts many processes: none should have to compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test check data paper scripts venv
.DEFAULT_GOAL := train

# ARGS="--epochs 1" changes a setting: a flag wins over the environment.
train: $(CORE) data
	@echo "== training"
	@PACELINE_WORKERS=2 PACELINE_BATCH_SIZE=256 PACELINE_LR=0.2 PACELINE_EPOCHS=10 \
	  $(BIN)/paceline train lenet $(ARGS)

# Without the images training goes on with the small data set of the package, and says so.
data: $(CORE)
	@echo "== data"
	@$(BIN)/paceline data get fashion-mnist || true

# ARGS="--only 8" makes one figure.
paper: $(CORE)
	@echo "== making the paper's figures"
	@$(BIN)/python -m paper $(ARGS)

# ARGS="NAME ..." runs these and writes nothing.
scripts: $(DEV)
	@cd tests && PYTHONPATH=support ../$(BIN)/python -m scripts $(ARGS)

test: $(DEV)
	@$(BIN)/pytest $(ARGS)

check: $(DEV)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@MYPYPATH=bench:tests/support $(BIN)/mypy --config-file bench/mypy.ini bench

venv: $(CORE)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, $(PYTHON) is older: PYTHON=python3.12 make" >&2; \
	  exit 1; }
	@echo "== installing into $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing torch and paceline: a few minutes, then never again"
	@$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(DEV): $(CORE)
	@echo "== installing the tools for tests and checks"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@for extra in onnx lightning transformers; do \
	  $(PIP) install --constraint constraints.txt --editable ".[$$extra]" || \
	    echo "== no $$extra can be had here: its tests are skipped"; \
	done
	@touch $@
