# Every target does its own set-up: a virtual environment in .venv, with the versions in constraints.txt.
# `make test PYTHON=python3` uses that interpreter as it is instead, and installs nothing.

VENV := .venv
SYSTEM_PYTHON ?= python3
ARGS ?=

ifdef PYTHON
PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)/src:$(CURDIR)/experiments/src$(if $(PYTHONPATH),:$(PYTHONPATH))
extra =
else
PY := $(VENV)/bin/python
extra = $(VENV)/.with-$(1)
endif

# Bytecode is kept, whatever the caller's shell says: without it every process of the tests compiles all of them and the library anew.
unexport PYTHONDONTWRITEBYTECODE

# One make does one thing at a time, and two makes started side by side wait for each other (where flock exists):
# they would install into the same environment.
.NOTPARALLEL:
LOCK := $(if $(shell command -v flock 2>/dev/null),flock .venv.lock)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu sanitize lint format docs site dist paper bench fuzz clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "PYTHON=python3 uses an interpreter that is already set up; ARGS='-k pcr' is passed on to test, test-all, test-gpu, sanitize, dist, demo, bench and fuzz"

demo: $(call extra,paper) ## a deep network in parallel, in one table; then quick experiments and a page of them (a minute, once it is installed)
	@$(PY) -m deeppcr_paper.demo $(ARGS)

EVERYTHING := $(call extra,dev) $(call extra,paper) $(call extra,diffusers) $(call extra,docs)
SIDE_BY_SIDE = $$($(PY) -c 'import xdist' 2>/dev/null && echo '-n auto --dist worksteal')

test: $(EVERYTHING) ## run the tests of library and experiments on the CPU, doctests and import contracts included
	@$(PY) -m pytest $(SIDE_BY_SIDE) --durations=25 $(ARGS)

# Tracing makes tests half as long again, so coverage is looked at here only. Its threshold holds for the whole suite, not where
# ARGS may select a part of it.
test-all: $(EVERYTHING) ## the same with what is marked thorough, every size of every kernel, and with coverage
	@$(PY) -m pytest $(SIDE_BY_SIDE) --durations=25 --all $(ARGS) --cov $(if $(strip $(ARGS)),,--cov-fail-under=95)

test-gpu: $(EVERYTHING) ## run every test on the GPU
	@$(PY) -m pytest --device=cuda $(ARGS)

# The tests that run on a CPU, too, reach every branch of every kernel; the long ones of a GPU, marked so, would take hours.
# Without PyTorch's own reserve of memory every tensor is an allocation by itself, and what reads past its end is seen.
sanitize: $(call extra,dev) ## run the kernels' tests under NVIDIA's compute-sanitizer (memcheck), on a GPU
	@command -v compute-sanitizer >/dev/null || { \
	echo 'compute-sanitizer is not on the PATH: it comes with the CUDA toolkit (cuda-sanitizer, or conda install cuda-sanitizer-api), not with PyTorch' >&2; exit 1; }
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1 \
	$(PY) -m pytest --device=cuda -m 'not gpu' \
	tests/linear/kernels tests/nn/kernels tests/diffusion/kernels tests/fuse/test_run.py tests/fuse/test_tiles.py $(ARGS)

# With --verifytypes pyright does not look at --pythonpath: it asks the first Python on the PATH. That has to be the one with PyTorch.
lint: $(call extra,dev) $(call extra,paper) ## ruff, pyright on src, types of every public name, import contracts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright --pythonpath "$$($(PY) -c 'import sys; print(sys.executable)')"
	@found=$$(PATH="$$($(PY) -c 'import sys, pathlib; print(pathlib.Path(sys.executable).parent)'):$$PATH" PYTHONPATH="$(CURDIR)/src" \
	$(PY) -m pyright --verifytypes deeppcr --ignoreexternal) && echo "$$found" | grep completeness || { echo "$$found"; exit 1; }
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

format: $(call extra,dev) ## reformat, and fix what ruff can fix
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

docs: $(call extra,docs) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo 'open site/index.html'

site: $(call extra,docs) ## build the documentation of this version into site/, beside those of earlier versions that are there
	@$(PY) .ci/pages.py

dist: $(call extra,dev) ## build the source distribution and the wheel into dist/, check them, and use them in clean environments (ARGS="--python 3.12")
	@$(PY) .ci/dist.py $(ARGS)

paper: $(call extra,paper) ## make every generated page, figure and table of the documentation anew from results/ (on a CPU)
	@$(PY) -m deeppcr_paper.walkthrough
	@$(PY) benchmarks/kernel_report.py results/kernels-*.json --page docs/performance.md
	@$(PY) benchmarks/loop_report.py results/loops-nvidia-*.json --page docs/kernels.md
	@$(PY) benchmarks/recurrent_report.py --page docs/recurrent.md
	@$(PY) benchmarks/real_diffusion_report.py results/real-diffusion-*.json --page docs/diffusion.md
	@$(PY) benchmarks/training_report.py --page docs/recurrent.md

bench: $(call extra,paper) ## compare, then time, then write results/: all that can be measured here (ARGS="--list": how old each result is)
	@$(PY) benchmarks/everything.py $(ARGS)

fuzz: $(call extra,dev) ## random problems against the plain loop: right, told or wrong; a table by family (ARGS="--count 1000", "--only 12", "--device cuda")
	@$(PY) -m benchmarks.fuzz $(ARGS)

clean: ## remove the environment, builds and caches
	rm -rf demo-results $(VENV) .venv.lock site build dist .pytest_cache .hypothesis .ruff_cache .import_linter_cache .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Stamps are written last: what was interrupted is done again. A pip that is killed half-way leaves the environment
# without a stamp for that extra, and the next call completes it; a half-made environment is made anew.
$(VENV)/.created:
	@$(LOCK) sh -c 'test -e $@ || { \
	  echo "setting up $(VENV) with $$($(SYSTEM_PYTHON) --version)"; \
	  rm -rf $(VENV) && $(SYSTEM_PYTHON) -m venv $(VENV) && touch $@; }'

INSTALL = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PRECIOUS: $(VENV)/.with-%
$(VENV)/.with-%: pyproject.toml constraints.txt | $(VENV)/.created
	@echo 'installing deeppcr[$*] into $(VENV) (the first time, torch takes a minute)'
	@$(LOCK) $(INSTALL) -e '.[$*]'
	@touch $@

# The experiments are a package of their own, beside the library.
$(VENV)/.with-paper: experiments/pyproject.toml pyproject.toml constraints.txt | $(VENV)/.created
	@echo 'installing deeppcr and its experiments into $(VENV) (the first time, torch takes a minute)'
	@$(LOCK) $(INSTALL) -e . -e './experiments[dev]'
	@touch $@
