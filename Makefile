# `make demo` and `make test` do everything from a fresh checkout: create .venv, install, run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python compiles modules when it imports them, and most of torch is never imported.
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# Many short processes import torch, so compiled modules are kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-gpu test-adapters check audit format bench chaos wheelhouse clean

demo: $(VENV)/.installed
	$(BIN)/millrace demo

# Three files at a time, because many tests wait for processes that they started; in the order of the
# tree, because the longest are not among the last.
test: check
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Tests marked slow, then the adapters. A slow test that fails runs once more, alone. If it passes
# then, the target succeeds, and the last lines name the test.
test-slow: $(VENV)/.installed-dev
	$(BIN)/python tools/run_slow_tests.py
	$(MAKE) test-adapters

# For a machine with CUDA whose own Python has torch (see docs/how-to/gpu-machine.md).
GPU_PYTHON ?= python
GPU_PROCESSES ?= 6
test-gpu:
	$(GPU_PYTHON) -m pytest -m gpu -n $(GPU_PROCESSES) --dist worksteal --timeout 300

# Adapters to packages that conflict with the pins of the tests, or that take long to install. They
# run in a venv of their own, which finds everything else in the main one.
ADAPTERS := $(VENV)-adapters
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
test-adapters: $(VENV)/.installed-dev
	$(PYTHON) -m venv $(ADAPTERS)
	@# addsitedir also reads the .pth file of the editable install of millrace; a plain path does not.
	printf 'import site; site.addsitedir("%s")\n' \
		"$$($(abspath $(BIN))/python -c '$(PURELIB)')" \
		> "$$($(ADAPTERS)/bin/python -c '$(PURELIB)')/behind.pth"
	$(ADAPTERS)/bin/pip --disable-pip-version-check --quiet install \
		"verifiers>=0.4,<0.5" reasoning-gym datasets torchao s3fs "moto[server]"
	$(ADAPTERS)/bin/python -m pytest tests/environments/test_verifiers_env.py \
		tests/scoring/test_reasoning_gym.py tests/tasks/test_tables.py \
		tests/training/test_adamw_8bit.py tests/training/test_s3_store.py \
		tests/scoring/test_scorer_pool.py -k "not scorer_pool or puzzles"

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@# In parallel, because verify_dependencies.py mostly waits for the network.
	$(BIN)/python tools/verify_dependencies.py & verifying=$$!; \
		$(BIN)/pyright --threads 2 && wait $$verifying

# Like check, but known vulnerabilities are errors.
audit: $(VENV)/.installed-dev
	$(BIN)/python tools/verify_dependencies.py --strict

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	$(BIN)/millrace bench pipeline

# About five minutes; --kills 200 is the soak.
chaos: $(VENV)/.installed
	$(BIN)/millrace bench chaos --kills 20

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Millrace needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml requirements.txt | $(VENV)/bin/python
	@echo "Installing pinned dependencies into $(VENV) (a minute or two) ..."
	$(PIP) install --no-compile --no-warn-conflicts -r requirements.txt
	$(PIP) install --no-compile --no-deps --no-build-isolation -e .
	@touch $@

# In parallel: with --no-deps, pip installs nothing that requirements.txt has. `pip check` follows in
# tools/verify_dependencies.py.
$(VENV)/.installed-dev: pyproject.toml requirements.txt requirements-dev.txt | $(VENV)/bin/python
	$(MAKE) --no-print-directory $(VENV)/.installed & installing=$$!; \
		$(PIP) install --no-compile --no-deps -r requirements-dev.txt && wait $$installing
	@touch $@

# Wheels for a machine without a network that has PyTorch and transformers; see
# docs/how-to/gpu-machine.md.
WHEELHOUSE ?= wheelhouse
# Packages that torch and transformers have installed there; other versions might break them.
SKIP ?= torch filelock fsspec jinja2 markupsafe mpmath networkx numpy setuptools sympy \
	typing_extensions transformers annotated-doc anyio click h11 hf-xet httpcore2 httpx2 \
	huggingface_hub idna markdown-it-py mdurl packaging pygments pyyaml regex rich safetensors \
	shellingham tokenizers tqdm truststore typer
# Further packages by name, pinned in requirements-dev.txt. Their dependencies are not followed.
EXTRA ?=
THERE := $(patsubst python%,%,$(notdir $(PYTHON)))
GLIBC := $(word 3,$(subst _, ,$(PLATFORM)))
ARCH := $(subst manylinux_2_$(GLIBC)_,,$(PLATFORM))
# pip matches a platform exactly, but wheels for an older glibc run there as well.
PLATFORMS = $(foreach minor,$(shell seq 17 $(GLIBC)),--platform manylinux_2_$(minor)_$(ARCH)) \
	--platform manylinux2014_$(ARCH)

wheelhouse:
	@case "$(PLATFORM) $(THERE)" in manylinux_2_[0-9]*_*\ 3.[0-9]*) ;; *) \
		echo "Name the target machine: make wheelhouse PLATFORM=manylinux_2_28_x86_64 PYTHON=3.12"; \
		exit 1;; esac
	@mkdir -p $(WHEELHOUSE)
	@awk -F== -v skip=" $(SKIP) " '/==/ && !index(tolower(skip), " " tolower($$1) " ")' \
		requirements.txt > $(WHEELHOUSE)/requirements.txt
	$(firstword $(wildcard $(BIN)/python) python3) -m pip download --quiet --dest $(WHEELHOUSE) \
		--no-deps --only-binary=:all: --implementation cp --python-version $(THERE) $(PLATFORMS) \
		-r $(WHEELHOUSE)/requirements.txt -c requirements-dev.txt $(EXTRA)
	@echo "On that machine, in this checkout with $(WHEELHOUSE)/ in it:"
	@echo "  pip install --no-index --no-deps $(WHEELHOUSE)/*.whl"
	@echo "  pip install --no-index --no-deps --no-build-isolation -e ."

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
