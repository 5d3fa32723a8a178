PYTHON ?= python3
BIN := .venv/bin

.PHONY: install quickstart test lint types clean

install: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[eval,dev]'
	touch $@

quickstart: install
	$(BIN)/tokendrop compare jobs/pretrain/quickstart_baseline.yaml jobs/pretrain/quickstart.yaml

test: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: install
	$(BIN)/basedpyright

clean:
	rm -rf .venv runs mlflow.db mlruns
