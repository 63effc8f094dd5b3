# All targets work from a fresh clone: they create the virtual environment that they need.

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

# Tests start many interpreters, which would compile the package again without cached bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-environments check bench golden docs clean

help:
	@echo "make demo    train a small Qwen3, generate text on two ranks, compare with Hugging Face"
	@echo "make test    run lint, type and architecture checks, then the tests"
	@echo "make test-environments  run the tests for other CPUs, terminals and locales, and under load (1 h)"
	@echo "make check   run lint, type and architecture checks only"
	@echo "make bench   run the benchmarks and print their tables"
	@echo "make golden  regenerate the golden files (then read the diff)"
	@echo "make docs    regenerate docs/ir.md and docs/program.md"

$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	@touch $@

demo: $(READY) build/demo
	$(VENV)/bin/tpcompile plan build/demo --tp 2
	$(PYTHON) examples/03_generate_tp2.py build/demo
	$(VENV)/bin/tpcompile compare build/demo --tp 2

build/demo: | $(READY)
	$(VENV)/bin/tpcompile make-demo build/demo

# Each process gets half of the tests in their order, so that shared fixtures are made once.
test: check
	$(PYTHON) -m pytest -n auto --dist worksteal

test-environments: $(READY)
	$(PYTHON) -m tests.environments

check: $(READY)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(READY)
	$(PYTHON) -m benchmarks compile-time
	$(PYTHON) -m benchmarks schedule
	$(PYTHON) -m benchmarks explorer
	$(PYTHON) -m benchmarks mutants
	$(PYTHON) -m benchmarks sum
	$(PYTHON) -m benchmarks load
	$(PYTHON) -m benchmarks decode

golden: $(READY)
	$(PYTHON) -m pytest --update-golden

docs: $(READY)
	$(PYTHON) docs/make_ir_page.py
	$(PYTHON) docs/make_program_page.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
