# make demo     what demask does, on real images, on this machine
# make test     lint, types, tests
# make nightly  the slow suites
# make bench    the benchmarks, one after the other; their tables go to benchmarks/results
#
# Each needs Python 3.11 or newer and nothing else: the first run makes .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# DeepSparse 1.8.0, the last one, wants packages of its own and Python 3.11 at most.
DEEPSPARSE := .venv-deepsparse
PIP := $(BIN)/python -m pip install --quiet
# Its networks are Python; its own torch requirement would bring a CUDA build over the one below.
TORCHVISION := "torchvision==0.28.0"

.PHONY: demo test nightly bench clean

demo: $(VENV)/demo.stamp
	$(BIN)/demask demo

test: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

nightly: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m nightly

bench: $(VENV)/bench.stamp $(DEEPSPARSE)/bench.stamp
	set -e; for script in residual encoder cost optimize runtime peers; do echo "$$script"; $(BIN)/python benchmarks/$$script.py; done
	$(BIN)/python benchmarks/cpu_sparse.py $$(test -x $(DEEPSPARSE)/bin/python && echo --deepsparse $(DEEPSPARSE)/bin/python)

clean:
	rm -rf $(VENV) $(DEEPSPARSE)

# Torch first and bounded: the newest releases come with gigabytes of CUDA where a CPU build will do.
$(VENV)/torch.stamp:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "demask needs Python 3.11 or newer, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "torch>=2.11,<2.14"
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) --editable ".[demo]"
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) --editable ".[demo,dev]"
	$(PIP) --no-deps $(TORCHVISION)
	touch $@ $(VENV)/demo.stamp

$(VENV)/bench.stamp: $(VENV)/dev.stamp
	$(PIP) --editable ".[bench]"
	$(PIP) --no-deps $(TORCHVISION) "torch-simplify==1.1.4"
	touch $@

# Without Python 3.11 the benchmark runs without it, and says so.
$(DEEPSPARSE)/bench.stamp:
	mkdir -p $(DEEPSPARSE)
	if command -v python3.11; then python3.11 -m venv $(DEEPSPARSE) && $(DEEPSPARSE)/bin/python -m pip install --quiet --only-binary=:all: "deepsparse==1.8.0"; fi
	touch $@
