# `make demo` and `make test` install everything they need into $(VENV) first.

VENV ?= .venv
# The first Python that the pinned packages have wheels for.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1 && echo $$p && break; done)
DEMO ?=
TESTS ?=

.PHONY: help install demo test lint clean

help:
	@echo "make demo     train a language model on the tpu device with tpukern's kernels, and compile them for TPUs"
	@echo "make test     lint, type check and run the tests"
	@echo "make install  what both do first: everything they need, into $(VENV)"
	@echo "make clean    remove $(VENV) and what the tools left behind"

install:
	@$(if $(PYTHON),,$(error No Python 3.11 to 3.14 found: install one, or name it with make PYTHON=...))$(PYTHON) tools/bootstrap.py --venv "$(VENV)"

demo: install
	@"$(VENV)/bin/python" tools/demo.py $(DEMO)

lint: install
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/mypy"

test: lint
	"$(VENV)/bin/pytest" -n 2 --dist worksteal $(TESTS)

clean:
	rm -rf "$(VENV)" "$(VENV).lock" .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
