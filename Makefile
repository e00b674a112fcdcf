# Everything runs in .venv, which the first target that needs it creates and later ones reuse.
# What has to be there before: python3 (3.10 or newer) with venv, g++ with C++20, a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two workers: the suite is sized for a machine of two cores.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard -- \
	'include/*.cuh' 'emulator/src/*.h' 'emulator/src/*.cpp')
PYTHON_PATHS := setup.py conftest.py deep_moe heuristics jit emulator tests benchmarks examples

.PHONY: demo test test-fast lint format types clean venv emulator-library

demo: emulator-library
	$(BIN)/python examples/demo.py

test: emulator-library
	$(PYTEST)

test-fast: emulator-library
	$(PYTEST) -m "not slow and not gpu"

lint: $(READY) types
	$(BIN)/ruff check $(wildcard $(PYTHON_PATHS))
	$(BIN)/ruff format --check $(wildcard $(PYTHON_PATHS))
	@$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

# mypy cannot see that the top-level folders belong to the package deep_moe, so it is given the tree as
# it is installed.
types: $(READY)
	@rm -rf build/types && mkdir -p build/types
	@cp -rp deep_moe build/types/ && cp -rp jit heuristics emulator build/types/deep_moe/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p deep_moe

format: $(READY)
	$(BIN)/ruff check --fix $(wildcard $(PYTHON_PATHS))
	$(BIN)/ruff format $(wildcard $(PYTHON_PATHS))
	@$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out

venv: $(READY)

# Built once for each state of its sources; here, so that no two test workers do it at the same time.
emulator-library: $(READY)
	@$(BIN)/python -c "from deep_moe.emulator import library; library.library_path()"

# torch goes in first and alone: with a torch in place, the packages below it are content with that one.
$(READY): pyproject.toml setup.py constraints.txt
	@echo "installing into $(VENV) (once; a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
