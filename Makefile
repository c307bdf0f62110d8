# Every target makes its own virtual environment first: nothing needs to be installed beforehand but Python.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready-
SUDO   := $(shell command -v sudo)

# bytecode is kept even where Python is told not to: tests and workers start many processes that import the package
export PYTHONDONTWRITEBYTECODE :=

SLOW   := browser or simulation or deployment or convergence or long
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --dist loadgroup --no-loadscope-reorder

.PHONY: help demo test test-fast docs bench browser lint format clean all-tests
help:            ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/ -/'

# without compiling all that is installed: most of it is never imported
$(READY)%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) [$*] (once; a minute or two) ..."
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(READY)cli     ## two clients fit sin(2 pi x): FedAvg against FIPA, about a minute
	$(BIN)/fipa run demo --out runs/demo --force

test:            ## all tests, lint and types
	@$(MAKE) --no-print-directory -j 2 browser $(READY)kernels lint
	@$(MAKE) --no-print-directory all-tests

# four workers on two processors: two of them wait for processes of Flower and Ray most of the time
all-tests: $(READY)kernels
	$(PYTEST) -n 4

test-fast: $(READY)kernels  ## tests without browser, Ray, deployments and long runs
	$(PYTEST) -n 2 -m 'not ($(SLOW))'

# once, or every process of the tests would compile them
$(READY)kernels: $(READY)dev src/fipa/kernels/loops.py src/fipa/kernels/tanh_loops.py
	@echo "compiling loops ..."
	@$(BIN)/python -m fipa.kernels
	@touch $@

# not --quiet: that drops warnings before they are counted
docs: $(READY)docs    ## the documentation site, into build/site; any warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

bench: $(READY)bench  ## measure speed, memory and capture as ratios; writes build/bench.json
	$(BIN)/python -m bench

browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  echo "installing chromium for the tests of the report page ..."; \
	  $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; \
	} || { echo "the tests of the report page need chromium and chromedriver: install them first"; exit 1; }

lint: $(READY)dev     ## ruff and mypy only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)dev   ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:           ## remove the environment and everything that was built
	rm -rf $(VENV) build runs dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
