PYTHON ?= python

.PHONY: check format lint types test slow results

check: lint types test

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m slow

results:
	$(PYTHON) benchmarks/render_readme.py
