# All targets work from a fresh clone: they create the virtual environment that they need.

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

# Tests start many interpreters, which would compile the package again without cached bytecode.
unexport PYTHONDONTWRITEBYTECODE

NEWEST := .venv-newest
OLDEST := .venv-oldest

.PHONY: help demo test test-environments test-newest test-oldest check bench golden docs clean

help:
	@echo "make demo    train a small Qwen3, generate text on two ranks, compare with Hugging Face"
	@echo "make test    run lint, type and architecture checks, then the tests"
	@echo "make test-environments  run the tests for other CPUs, terminals and locales, and under load (1 h)"
	@echo "make test-newest        run a short list of tests with the newest libraries that are allowed"
	@echo "make test-oldest        run the same list with the oldest ones, and Python 3.12 if it is there"
	@echo "make check   run lint, type and architecture checks only"
	@echo "make bench   run the benchmarks and print their tables"
	@echo "make golden  regenerate the golden files (then read the diff)"
	@echo "make docs    regenerate docs/ir.md and docs/program.md"

$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,clients,bench]'
	@touch $@

demo: $(READY) build/demo
	$(VENV)/bin/tpcompile plan build/demo --tp 2
	$(PYTHON) examples/03_generate_tp2.py build/demo
	$(VENV)/bin/tpcompile compare build/demo --tp 2

build/demo: | $(READY)
	$(VENV)/bin/tpcompile make-demo build/demo

# Each process gets a part of the tests in their order, so that shared fixtures are made once.
test: check
	$(PYTHON) -m pytest -n auto --dist worksteal

test-environments: $(READY)
	$(PYTHON) -m tests.environments

# Both ends of the ranges in pyproject.toml, without constraints.txt; tests/libraries.py lists the tests.
test-newest:
	python3 -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q --disable-pip-version-check --upgrade \
		--upgrade-strategy eager -e '.[test]'
	$(NEWEST)/bin/python -m tests.libraries

test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m tests.libraries

$(OLDEST)/.ready: pyproject.toml
	if python3.12 -c pass 2> /dev/null; then python3.12 -m venv --clear $(OLDEST); \
		else python3 -m venv --clear $(OLDEST); fi
	$(OLDEST)/bin/python -m tests.libraries --oldest > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check \
		-c $(OLDEST)/constraints.txt -e '.[test]'
	@touch $@

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
	$(PYTHON) -m benchmarks proofs
	$(PYTHON) -m benchmarks sum
	$(PYTHON) -m benchmarks load
	$(PYTHON) -m benchmarks decode

golden: $(READY)
	$(PYTHON) -m pytest --update-golden

docs: $(READY)
	$(PYTHON) docs/make_ir_page.py
	$(PYTHON) docs/make_program_page.py

clean:
	rm -rf $(VENV) $(NEWEST) $(OLDEST) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
