# make            a list of the targets
# make demo       the main job on real data
# make test       the tests of behaviour; make test-slow the rest
# Each target first creates .venv, installs the pinned packages and builds the kernels in place.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# A Python of 3.10 or later; `make PYTHON=/path/to/python test` chooses another.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.10 python3,$(shell command -v $(name))))

bin := .venv/bin
pip := $(bin)/python -m pip --disable-pip-version-check
run_tests := $(bin)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
sources := setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)

# Tests that run a second time without the native kernels: those of what then differs.
core := $(wildcard $(addprefix tests/,ops/test_quantize*.py ops/test_pack*.py ops/test_sparsify.py ops/test_ops*.py ops/test_fused*.py \
	formulas/test_fused*.py conversion/test_conversion.py engine/test_sharing.py))

# The tests of the ops, and the two libraries that must be loaded before a sanitized extension.
ops := $(wildcard $(addprefix tests/,ops/test_quantize*.py ops/test_pack*.py ops/test_sparsify.py ops/test_ops*.py ops/test_fused*.py \
	formulas/test_fused*.py codecs/test_codecs.py codecs/test_codec_drop.py codecs/test_codec_mixed.py codecs/test_codec_running.py))
preloaded = $(shell $(or $(CXX),c++) -print-file-name=libasan.so) $(shell $(or $(CXX),c++) -print-file-name=libstdc++.so)

.PHONY: help demo docs test test-slow test-all sweep lint cuda-check bench gpu sanitize wheel-check format install

help:
	@echo 'make demo         profiles, searches, verifies, trains and reports on real data; writes mesa-run/report.html'
	@echo 'make test         runs the tests of behaviour, those of the kernels again without the native ones'
	@echo 'make test-slow    runs the rest: long trainings, other processes, servers, a browser, sweeps'
	@echo 'make test-all     runs both'
	@echo 'make sweep        runs every operator, module and architecture, plain beside converted; a second run resumes'
	@echo 'make lint         runs ruff, mypy, pyright and clang-format'
	@echo 'make cuda-check   compiles the CUDA kernels if there is nvcc, and looks for spilled registers'
	@echo 'make docs         writes the documentation site to build/site'
	@echo 'make bench        runs every benchmark, and adds to benchmarks/results/'
	@echo 'make gpu          tests and measures on one NVIDIA GPU, in 25 minutes; a second run goes on'
	@echo 'make sanitize     runs the tests of the ops on kernels built with AddressSanitizer and UBSan (gcc)'
	@echo 'make wheel-check  builds the wheel in dist/, and tests it without source, compiler and AVX'
	@echo 'make format       formats the code with ruff and clang-format'
	@echo 'make install      only creates .venv, installs its packages and builds the kernels'
	@echo 'Each target first creates or updates .venv. Needs Python >= 3.10 and a C++ compiler.'

install: .venv/.kernels

demo: .venv/.kernels
	$(bin)/mesa-tune demo

test: .venv/.kernels
	@echo '== tests'
	$(run_tests) -m 'not slow'
	@echo '== the tests of the kernels again, without the native ones'
	MESA_TUNE_REFERENCE=1 $(run_tests) -m 'not slow' $(core)

test-slow: .venv/.kernels
	@echo '== slow tests'
	$(run_tests) -m slow

test-all: test test-slow

# Results are in build/sweeps/. A second run repeats only cases without a result of the same code.
sweep: .venv/.kernels
	OMP_NUM_THREADS=1 $(bin)/python -m benchmarks.sweeps

lint: .venv/.kernels
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/pyright
	@files=$$(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'); \
	echo "clang-format --dry-run -Werror $$files"; $(bin)/clang-format --dry-run -Werror $$files

cuda-check: .venv/.packages
	$(bin)/python csrc/cuda/nvcc.py

docs: .venv/.kernels
	$(bin)/python -m sphinx -q -W --keep-going docs build/site

format: .venv/.packages
	$(bin)/ruff format .
	$(bin)/ruff check --fix .
	find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs -r $(bin)/clang-format -i

bench: .venv/.kernels
	@for file in $(filter-out benchmarks/gpu.py,$(wildcard benchmarks/[a-z]*.py)); do echo "== $$file"; $(bin)/python "$$file"; done

# Where there is no package registry: build the kernels with `python setup.py build_ext --inplace`, then run the
# program itself with the Python that has torch.
gpu: .venv/.kernels
	$(bin)/python benchmarks/gpu.py

# The sanitized build is a separate package, so the kernels built in place stay; `cd` makes Python import it.
# Leaks are not detected, because torch and Python never free some memory.
sanitize: .venv/.kernels
	@echo '== building the kernels with AddressSanitizer and UBSan'
	CFLAGS='-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1' \
	LDFLAGS='-fsanitize=address,undefined' \
	$(bin)/python setup.py -q build --build-base build/sanitized --build-lib build/sanitized/lib
	@echo '== tests of the ops'
	export LD_PRELOAD='$(preloaded)' ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc; \
	(cd build/sanitized/lib && ../../../$(bin)/python -c 'from mesa_tune import ops; assert ops.native(), ops.LIBRARY'); \
	PYTHONPATH=build/sanitized/lib $(bin)/pytest --import-mode=append -p no:cacheprovider -m 'not slow' $(ops)

# Delete build/lib.*: an earlier build may have copied files that the source no longer has.
wheel-check: .venv/.kernels
	@echo '== building the wheel'
	rm -rf build/lib.* dist
	$(pip) wheel --quiet --no-build-isolation --no-deps -w dist .
	@echo '== the wheel, by itself'
	$(bin)/python tests/check_wheel.py dist/*.whl $(ops)

.venv/bin/python:
	@[ -n '$(PYTHON)' ] && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo 'mesa-tune needs Python 3.10 or later; name one: make PYTHON=/path/to/python' >&2; exit 1; }
	@echo "== making .venv with $$($(PYTHON) --version)"
	$(PYTHON) -m venv .venv

# torch is installed first and alone: the extension is built against it, and no other package may replace it.
.venv/.packages: requirements/constraints.txt requirements/runtime.txt requirements/dev.txt | .venv/bin/python
	@echo '== installing torch, then the other packages (minutes, the first time)'
	$(pip) install --quiet -c requirements/constraints.txt torch
	$(pip) install --quiet -c requirements/constraints.txt -r requirements/dev.txt
	@touch $@

.venv/.kernels: .venv/.packages $(sources)
	@echo '== building the kernels'
	$(pip) install --quiet --no-build-isolation --no-deps -e .
	@touch $@
