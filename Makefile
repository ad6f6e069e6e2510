# Start with `make demo` and `make test`. Both create or update .venv if needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SOURCES := pyproject.toml hatch_build.py src/papa/core/kernels.c

.PHONY: help demo test lint types unit audit docs results format bench soak soak-async rows clean

help:
	@echo "make demo    compare populations with one longer training, on 150 handwritten digits (a minute or two)"
	@echo "make test    lint, type check and all tests"
	@echo "make audit   look the installed packages up in the database of known vulnerabilities"
	@echo "make docs    build the documentation into build/site; a warning is an error"
	@echo "make results write RESULTS.md, and the README's table and figure, from the records in results/"
	@echo "make format  format the sources with ruff"
	@echo "make bench   run every benchmark and write BENCHMARKS.md"
	@echo "make soak    an hour of kills, averagings and altered files (MINUTES=5 for less, PROCESSES=4 at once)"
	@echo "make soak-async  ten minutes of asynchronous members that are slowed, stopped and killed (MINUTES=2 for less)"
	@echo "make rows    every row of the paper's tables, seconds each (DATA=folder; missing data is replaced by noise)"
	@echo "make clean   remove $(VENV) and the caches of tools"

$(BIN)/python:
	@echo "papa: creating a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	@echo "papa: installing papa with command line, lab and reports into $(VENV) (PyTorch is large: a few minutes)"
	@$(BIN)/python -m pip install --quiet -e '.[cli,lab]'
	@touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	@echo "papa: installing papa with its test tools into $(VENV) (PyTorch is large: a few minutes)"
	@$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	@echo "papa: four ways to use the same compute on 150 of scikit-learn's handwritten digits, three seeds each"
	@$(BIN)/papa compare digits-150 --methods independent,longer,papa,papa-all --seeds 1,2,3 --parallel 2 --out runs/demo --overwrite

# The type checker uses one processor, and would leave the others idle.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types unit

lint: $(VENV)/.installed-dev
	@echo "papa: lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	@echo "papa: type check"
	@$(BIN)/mypy

unit: $(VENV)/.installed-dev
	@echo "papa: tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

audit: $(VENV)/.installed-dev
	@$(BIN)/python .ci/audit.py

docs: $(VENV)/.installed-dev
	@echo "papa: documentation"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "papa: open build/site/index.html"

results: $(VENV)/.installed-dev
	@$(BIN)/python -m results.make write

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	@echo "papa: running every benchmark three times (about an hour), and writing BENCHMARKS.md"
	@PYTHON=$(BIN)/python benchmarks/run --repeats 3 --out BENCHMARKS.md

soak: $(VENV)/.installed-dev
	@echo "papa: killing and resuming runs, averaging, altering files"
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --minutes $(or $(MINUTES),60) --processes $(or $(PROCESSES),2)

soak-async: $(VENV)/.installed-dev
	@echo "papa: slowing, stopping and killing asynchronous members"
	@OMP_NUM_THREADS=1 $(BIN)/python tests/soak_async.py --minutes $(or $(MINUTES),10)

rows: $(VENV)/.installed-dev
	@$(BIN)/python tests/every_row.py $(or $(DATA),data) runs/every-row

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
