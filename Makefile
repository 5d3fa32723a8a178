PYTHON ?= python3
BIN := .venv/bin

.PHONY: install quickstart ui dashboards lint types clean \
	test test-all test-with-ray test-without-ray test-long long-with-ray long-without-ray test-alone test-oldest chaos goldens

install: .venv/installed

.venv/installed: pyproject.toml Makefile .ci/newest.txt .ci/pins.txt .ci/repair_torchvision.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint .ci/newest.txt --editable '.[bench,eval,report,study,vision,dev]'
	$(BIN)/python .ci/repair_torchvision.py
	touch $@

quickstart: install
	$(BIN)/tokendrop compare jobs/pretrain/quickstart_baseline.yaml jobs/pretrain/quickstart.yaml
	@echo && $(BIN)/tokendrop generate $$(ls -td runs/quickstart-random-ltd-* | head -1) \
		--prompt 'This function returns' --tokens 60 --temperature 0.7

# the runs of this folder in MLflow, on http://127.0.0.1:5000; without its job runner, which takes 1.5 GB
ui: install
	MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db --workers 1

# the JSON that Grafana reads, from the Python beside it
dashboards: install
	PYTHONPATH=platform $(BIN)/python dashboards/make.py

# in two lanes: tests that start Ray wait a lot, and those that don't leave the cores to them; each is shown at its end
test: install
	$(MAKE) --jobs 2 --keep-going --output-sync test-with-ray test-without-ray

test-with-ray:
	$(BIN)/pytest -m 'ray and not long and not alone and not golden and not chaos'

test-without-ray:
	nice -n 19 $(BIN)/pytest -m 'not ray and not long and not alone'

test-long: install
	$(BIN)/pytest -m 'long and not alone'

# those that hold a run to seconds, with the machine to themselves
test-alone: install
	$(BIN)/pytest -m alone

# all of these, with one Ray at a time; the short ones first
test-all: test
	$(MAKE) --jobs 2 --keep-going --output-sync long-with-ray long-without-ray
	$(MAKE) test-alone

long-with-ray:
	$(BIN)/pytest -m 'ray and long and not alone and not chaos'

long-without-ray:
	nice -n 19 $(BIN)/pytest -m 'not ray and long and not alone'

# the tests of what runs on Ray, less scaling.mode=schedule and drains, on the oldest Ray that will do
test-oldest: .venv-oldest/installed
	PYTHONPATH=platform .venv-oldest/bin/pytest tests/launch -m 'not alone and not golden and not schedule and not chaos' \
		--ignore tests/launch/test_autoscaling.py

.venv-oldest/installed: pyproject.toml Makefile .ci/oldest.txt .ci/pins.txt .ci/repair_torchvision.py
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check --constraint .ci/oldest.txt --editable '.[eval,study,vision,dev]'
	.venv-oldest/bin/python .ci/repair_torchvision.py
	touch $@

# the tests that kill processes, KILLS times each, and those of nodes that come and go; an hour and more
KILLS ?= 50
chaos: install
	TOKENDROP_KILLS=$(KILLS) $(BIN)/pytest -m chaos

# whole runs against their recorded losses; a quarter of an hour
goldens: install
	$(BIN)/pytest tests/launch/test_goldens.py

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: install
	$(BIN)/basedpyright

clean:
	rm -rf .venv .venv-oldest runs mlflow.db mlruns
