# SPDX-License-Identifier: Apache-2.0
# Everything sets itself up: a complete active virtual environment is used, else .venv is made here.
#
#   make demo     compile fused_moe_120 for SM121, look into its machine code, run a gpt-oss-120b layer on the CPU
#                 backend, by the kernels themselves on the virtual SM121 and, where there is one, on a GPU
#   make test     a few minutes of tests: each operator on CPU tensors and on the virtual SM121, the doctor
#                 (PYTEST_ARGS="-k layer" or PYTEST_ARGS=tests/gemm: of all tests those, without slow ones);
#                 make test-all all tests, make test-slow the slow ones (DAYS=7: today's seventh of them)
#   make test-host   tests that run no kernel: the layer over the wheel, installing, building
#   make mutate   change the code on purpose, line by line, and see which tests notice (MUTATE_ARGS="--help")
#   make kernels  wheels of compiled kernels for x86-64 and aarch64, in dist/ (KERNELS_ARGS="--help")
#   make test-kernels   those wheels: compared, installed, run, also on an emulated aarch64 (not in make test)
#   make test-compilers   the machine code of every kernel by every nvcc of CUDA 13 (not in make test); by some with
#                  COMPILERS="newest" or versions, some kernels with PYTEST_ARGS="-k streamed"
#   make test-upstream-patch   branches for upstream's pull requests: whole modules, all tests (not in make test);
#                  upstream's own tests, too, with UPSTREAM_CHECKOUT=<a git checkout of upstream's>
#   make test-vllm   vLLM 0.33.0's own code with the plugin, in $(VLLM_VENV) beside .venv (not in make test; DAYS=7:
#                 today's seventh of it)
#   make bench    the benchmark; without a GPU, the predicted GB10 table (BENCH_ARGS="--help")
#   make lint     ruff, mypy, clang-format; make format applies them
#   make clean    remove what builds and tools left in the checkout (make distclean: .venv and .venv-vllm too)
#
# Variables: PYTHON (an interpreter, 3.10-3.13), VENV (an environment to use), TORCH (what pip installs as torch).

PYTHON ?= python3
ifeq ($(shell command -v "$(PYTHON)"),)
$(error there is no $(PYTHON). On Debian and Ubuntu: apt-get install python3-venv, or make PYTHON=/path/to/python3.12 ...)
endif
ifndef VENV
# What is wrong with the interpreter, env says.
VENV := $(shell "$(PYTHON)" tools/create_env.py --find 2>/dev/null || echo .venv)
endif
PY := "$(VENV)/bin/python"
# The environment's ninja, ruff and so on, for whatever the commands below start.
export PATH := $(if $(filter /%,$(VENV)),,$(CURDIR)/)$(VENV)/bin:$(PATH)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

PYTEST_ARGS ?=
DAYS ?= 1
ROTATE = $(if $(filter-out 1,$(DAYS)),--rotate $(DAYS))
# Test processes beside each other. Compilers run under them, so not more than cores.
TEST_JOBS ?= $(shell n=$$(nproc); [ $$n -gt 4 ] && echo 4 || echo $$n)
BENCH_ARGS ?=
MUTATE_ARGS ?=
KERNELS_ARGS ?=
COMPILERS ?= all
DEMO_ARGS ?=

CXX_SOURCES = $(shell git ls-files 'include/*.cuh' 'include/*.h' 'csrc/*.cu' 'csrc/*.cpp' 'csrc/*.cuh' 'csrc/*.h' \
	'csrc/*.inl' 'emulator/*.cpp' 'emulator/*.h' 'emulator/*.cu')

# Its packages come before those of $(VENV), which it sees through a .pth file: torch is there once.
VLLM_VENV ?= .venv-vllm
# DAYS=7: today's share of the tests, beside each other; tests/vllm_plugin/days.py says which.
VLLM_SHARE = $(if $(filter-out 1,$(DAYS)),--slow-share=$(shell "$(PYTHON)" -c \
	"import datetime; print(f'{datetime.date.today().toordinal() % $(DAYS)}/$(DAYS)')") -n $(TEST_JOBS) --dist worksteal)
# vLLM asks for nvcc in CUDA_HOME or /usr/local/cuda, and finds none of pip's; README has its user name it so.
VLLM_TESTS = CUDA_HOME="$$($(PY) -c 'from flashinfer.jit.cpp_ext import find_toolkit; print(find_toolkit().root)')" \
	$(if $(VLLM_SHARE),OMP_NUM_THREADS=1 )$(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider $(VLLM_SHARE)

.PHONY: all env compiler emulator test test-slow test-all test-host test-vllm test-kernels test-compilers test-upstream-patch kernels mutate demo bench
.PHONY: lint format clean distclean
all: test

# Quick when nothing is missing.
env:
	@"$(PYTHON)" tools/create_env.py "$(VENV)"

# Before anything is downloaded.
compiler:
	@command -v $(firstword $(CXX)) >/dev/null || \
		{ echo "there is no C++ compiler ($(CXX)). On Debian and Ubuntu: apt-get install g++" >&2; exit 1; }

emulator: compiler
	$(MAKE) -C emulator -j$(TEST_JOBS)

# tests/slow_tests.py decides what is slow. UPSTREAM=1 adds kernels that others wrote on the emulator, a minute or two of
# compiler each.
test: CHOICE = --quick
test-slow: CHOICE = -m slow
test test-slow test-all: compiler env emulator
	@$(PY) tools/run_tests.py --jobs $(TEST_JOBS) $(if $(UPSTREAM),--upstream) $(ROTATE) $(CHOICE) $(PYTEST_ARGS)

test-host: env
	@$(PY) tools/run_tests.py --among $(addprefix tests/,layer install doctor project jit) --jobs $(TEST_JOBS) $(ROTATE) $(PYTEST_ARGS)

mutate: env emulator
	$(PY) tools/mutate.py $(MUTATE_ARGS)

$(VLLM_VENV)/complete: tests/vllm_plugin/requirements.txt tests/vllm_plugin/requirements-no-deps.txt
	$(PY) -m venv --clear $(VLLM_VENV)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile -r tests/vllm_plugin/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile --no-deps -r tests/vllm_plugin/requirements-no-deps.txt
	touch $@

# The virtual SM121 in a process of its own, as in test.
test-vllm: env emulator
	$(MAKE) VENV="$(VENV)" $(VLLM_VENV)/complete
	$(VLLM_TESTS) tests/vllm_plugin --ignore=tests/vllm_plugin/test_vllm_virtual.py $(PYTEST_ARGS)
# pytest's 5: none of them is today's.
	$(VLLM_TESTS) tests/vllm_plugin/test_vllm_virtual.py $(PYTEST_ARGS)$(if $(VLLM_SHARE), || test $$? = 5)

kernels: env
	$(PY) tools/kernels_wheel.py $(KERNELS_ARGS)

test-kernels: env emulator
	$(PY) -m pytest -s tests/kernels/check_wheels.py $(PYTEST_ARGS)

test-compilers: env
	$(PY) tools/compilers.py $(COMPILERS)
	COMPILERS="$(COMPILERS)" $(PY) tools/run_tests.py --jobs $(TEST_JOBS) tests/jit/check_compilers.py $(PYTEST_ARGS)

test-upstream-patch: env emulator
	$(PY) -m pytest -p no:cacheprovider tests/upstream_patch/check_exported.py $(PYTEST_ARGS)

demo: compiler
	@echo "The demo takes about two minutes on two cores, plus, the first time, some GB of packages in $(VENV)."
	@"$(PYTHON)" tools/create_env.py --demo "$(VENV)" -- $(MAKE) -s -C emulator -j$(TEST_JOBS)
	@$(PY) tools/demo.py $(DEMO_ARGS)

bench: env
	$(PY) benchmarks/bench_cutlass_fused_moe_mxfp4.py $(BENCH_ARGS)

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@if [ -n "$(CXX_SOURCES)" ]; then "$(VENV)/bin/clang-format" --dry-run --Werror $(CXX_SOURCES); fi

format: env
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	@if [ -n "$(CXX_SOURCES)" ]; then "$(VENV)/bin/clang-format" -i $(CXX_SOURCES); fi

clean:
	$(MAKE) -C emulator clean
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-vllm
