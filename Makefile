# Everything from a fresh clone: `make demo` and `make test` set up what they need.

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help demo test test-environments check bench golden docs clean

help:
	@echo "make demo    train a small Qwen3, generate text on two ranks, compare with Hugging Face"
	@echo "make test    lint, types, architecture and tests"
	@echo "make test-environments  the tests again: other CPUs, widths, locales, load (an hour)"
	@echo "make check   lint, types and architecture only"
	@echo "make bench   the benchmark tables"
	@echo "make golden  write the golden files again (then read the difference)"
	@echo "make docs    write the generated parts of docs/ again"

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

test: check
	$(PYTHON) -m pytest -n auto

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
	$(PYTHON) -m benchmarks mutants
	$(PYTHON) -m benchmarks load
	$(PYTHON) -m benchmarks decode

golden: $(READY)
	$(PYTHON) -m pytest --update-golden

docs: $(READY)
	$(PYTHON) docs/make_ir_page.py
	$(PYTHON) docs/make_program_page.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
