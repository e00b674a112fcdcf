# Everything runs in .venv, which the first target that needs it creates and later ones reuse.
# What has to be there before: python3 (3.10 or newer) with venv, g++ with C++20, a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two workers: the suite is sized for a machine of two cores.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard -- \
	'include/*.cuh' 'emulator/src/*.h' 'emulator/src/*.cpp' 'emulator/cuda/*.h' 'emulator/cuda/*.cpp')
PYTHON_PATHS := setup.py conftest.py deep_moe heuristics jit emulator tests benchmarks examples docs

INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

# $(call visibly,what,command): run a command that takes long in silence; a dot every two seconds says
# that it goes on. Fails as the command does.
visibly = printf '  %s ' "$(1)"; ( $(2) ) & pid=$$!; \
	while sleep 0.2; kill -0 $$pid 2>/dev/null; do printf .; sleep 1.8; done; \
	wait $$pid && echo ' done'

.PHONY: demo docs test test-fast test-serving test-exporters test-trainers test-compilers test-aarch64 \
	test-versions test-wheel sanitize lint format types clean venv emulator-library

demo: emulator-library
	$(BIN)/python examples/demo.py

test: emulator-library
	$(PYTEST)

test-fast: emulator-library
	$(PYTEST) -m "not slow and not gpu"

# Adapters with the classes of the engines themselves, which lie in a folder of their own, so that
# nothing of them is in the environment of the other tests.
SERVING := build/serving
test-serving: emulator-library $(SERVING)/.ready
	PYTHONPATH=$(CURDIR)/$(SERVING) $(BIN)/python -m pytest tests/serving

# Checkpoints that ModelOpt and compressed-tensors write themselves.
EXPORTERS := build/exporters
test-exporters: $(EXPORTERS)/.ready
	PYTHONPATH=$(CURDIR)/$(EXPORTERS) $(BIN)/python -m pytest tests/exporters

# Trainers' own layers around ours.
TRAINERS := build/trainers
test-trainers: $(TRAINERS)/.ready
	PYTHONPATH=$(CURDIR)/$(TRAINERS) $(BIN)/python -m pytest tests/trainers

# Programs of other languages under warpcheck. CuTe DSL lies in a folder of its package.
COMPILERS := build/compilers
test-compilers: emulator-library $(COMPILERS)/.ready
	PYTHONPATH=$(CURDIR)/$(COMPILERS):$(CURDIR)/$(COMPILERS)/nvidia_cutlass_dsl/dsl_packages \
		$(BIN)/python -m pytest tests/compilers

build/%/.ready: tests/%/requirements.txt $(READY)
	@rm -rf build/$*
	@$(call visibly,packages for tests/$*, $(BIN)/python -m pip install --quiet --no-deps \
		--target build/$* -r tests/$*/requirements.txt)
	@touch $@

# The adapter of transformers with each version that an engine asks for.
test-versions: emulator-library
	$(BIN)/python -m tests.versions

# The wheel in a bare environment of each Python that is here.
# WHEEL: --debian, --cuda-torch; see tests/packaging/bare.py.
test-wheel: $(READY)
	$(BIN)/python -m tests.packaging.bare $(WHEEL)

# The wheel for aarch64, made by a cross compiler, under user-mode emulation of that processor.
# AARCH64: --quick, --or-skip; see python -m tests.aarch64 --help.
test-aarch64: emulator-library
	$(BIN)/python -m tests.aarch64 $(AARCH64)

# The emulator under AddressSanitizer and UndefinedBehaviorSanitizer, ten minutes of drawn PTX.
sanitize: $(READY)
	$(BIN)/python -m tests.emulator.sanitize.drawn --seconds 600

lint: $(READY) types
	$(BIN)/ruff check $(wildcard $(PYTHON_PATHS))
	$(BIN)/ruff format --check $(wildcard $(PYTHON_PATHS))
	@$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

# What the everyday tests here never run, and its helpers: only types tell that a signature changed.
MYPY = $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache
UNTYPED := --namespace-packages --explicit-package-bases --allow-untyped-defs \
	--allow-incomplete-defs --implicit-reexport
GPU_TESTS = $(shell git ls-files -- 'tests/layer/*.py' 'tests/*test_gpu*.py' 'tests/*test_*_gpu.py')

# mypy cannot see that the top-level folders belong to the package deep_moe, so it is given the tree as
# it is installed.
types: $(READY)
	@rm -rf build/types && mkdir -p build/types
	@cp -rp deep_moe build/types/ && cp -rp jit heuristics emulator build/types/deep_moe/
	@rm build/types/deep_moe/emulator/setup.py  # setuptools has no types
	cd build/types && $(MYPY) -p deep_moe
	@cp -rp tests benchmarks examples build/types/
	cd build/types && $(MYPY) $(UNTYPED) $(wildcard benchmarks/*.py) $(GPU_TESTS)

format: $(READY)
	$(BIN)/ruff check --fix $(wildcard $(PYTHON_PATHS))
	$(BIN)/ruff format $(wildcard $(PYTHON_PATHS))
	@$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out

venv: $(READY)

# The site, in build/site.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

# Built once for each state of its sources; here, so that no two test workers do it at the same time.
emulator-library: $(READY)
	@$(call visibly,the emulator's library,$(BIN)/python -c \
		"from deep_moe.emulator import library; library.library_path()")

# torch goes in first and alone: with a torch in place, the packages below it are content with that one.
$(READY): pyproject.toml setup.py constraints.txt
	@echo "installing into $(VENV): once, in four steps, for a minute or two"
	@$(call visibly,1. a virtual environment,$(PYTHON) -m venv $(VENV))
	@$(call visibly,2. PyTorch,$(INSTALL) torch)
	@$(call visibly,3. build tools,$(INSTALL) setuptools wheel)
	@$(call visibly,4. deep-moe and the packages it needs,$(INSTALL) --no-build-isolation -e '.[dev]')
	@touch $@
