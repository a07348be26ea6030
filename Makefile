# The three commands: make demo · make lab · make test. Another Python: make demo PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# One more than there are cores took no less time, and 2 GB more.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() or 1))")
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
# Jupyter refuses root without it, and in a container the user is root.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: demo lab test tests lint chromium bench pictures clean
demo:
	@$(PYTHON) tools/bootstrap.py
	@$(BIN)/labkit tune --demo

lab:
	@$(PYTHON) tools/bootstrap.py
	$(BIN)/jupyter lab --ip=127.0.0.1 $(AS_ROOT) --ServerApp.root_dir=notebooks

test: chromium
	@$(PYTHON) tools/bootstrap.py --tests
	$(MAKE) -j2 --output-sync=line lint tests

tests:
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --nbmake --nbmake-timeout=300 tests notebooks

lint:
	@$(PYTHON) tools/bootstrap.py --tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/nbstripout --verify $(NOTEBOOKS)

chromium:
	@command -v chromium >/dev/null || { echo "installing Chromium from apt …"; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

bench:
	@$(PYTHON) tools/bootstrap.py --tests
	$(BIN)/labkit bench engine && $(BIN)/labkit bench planner && $(BIN)/labkit bench panel

pictures: chromium
	@$(PYTHON) tools/bootstrap.py --tests
	$(BIN)/python tools/make_pictures.py

clean:
	rm -rf .venv build dist *.egg-info
