# Two commands for a newcomer: `make demo` shows what hf_zero does in about a minute, `make test` runs the tests.
# Needs Python (3.11 or newer) and make; everything is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo
READY_DEV := $(VENV)/.ready-dev
READY_AUDIT := $(VENV)/.ready-audit
DOCS_VENV ?= .venv-docs
READY_DOCS := $(DOCS_VENV)/.ready
# Environments of their own: neither the index's newest versions nor the oldest that are allowed may stand in the one of `make test`.
VENV_RELEASE ?= .venv-release
VENV_NEWEST ?= .venv-newest
VENV_OLDEST ?= .venv-oldest
INPUTS := pyproject.toml constraints.txt $(wildcard packaging/*.py kernels/*)

SCANNED := hf_zero packaging _hf_zero_startup.py examples benchmarks tests tools docs kernels Makefile pyproject.toml README.md

DEMO_ARGS ?=
TEST_ARGS ?=
LONG ?=
TEST_WORKERS ?= 4
BENCH_ARGS ?=
GPU_ARGS ?= --out results-gpu
GPU_PYTHON ?=
RELEASE_ARGS ?=
RELEASE_TOOLS := auditwheel build cmake ninja setuptools twine ziglang
# torch of `make test-newest`: PyPI's newest build for Linux brings CUDA, so the one that `make venv` installs stays unless you name another.
NEWEST_TORCH ?= torch==2.13.0
# Of `make test-oldest`: the oldest Python, and versions that are to stand in for a lower bound, as in OLDEST_BUT=$(NEWEST_TORCH).
OLDEST_PYTHON ?= python3.10
OLDEST_BUT ?=
OLDEST_TESTS ?= tests/parity tests/accelerate tests/trainer tests/checkpoint tests/facade tests/plan

# Ranks wait for each other about as long as they compute, so four processes of tests keep two cores busy, with about 12 GiB at most: 2 is for
# less memory. A file stays in one of them.
# TEST_WORKERS=0: one process, as a debugger wants it.
SIDE_BY_SIDE = -n $(TEST_WORKERS) --dist loadfile

.PHONY: help demo test test-quick test-all test-newest test-oldest lint format audit advisories bench gpu docs release venv kernels clean

help:
	@echo "make demo      exact losses, less memory, a checkpoint for other ranks, a saved model: one screen and a picture (DEMO_ARGS)"
	@echo "make test      run the fast tests (TEST_ARGS='-k alias', TEST_WORKERS=2); LONG=1 adds those that take seconds, as CI does"
	@echo "make test-quick  run what a minute allows, after every edit: configuration, imports, traces, one row of the parity matrix per stage"
	@echo "make test-all  run every test"
	@echo "make test-newest  all but the slow tests with what the package index has today, pins ignored (NEWEST_TORCH)"
	@echo "make test-oldest  the essential tests with the oldest versions that are allowed (OLDEST_PYTHON, OLDEST_BUT, OLDEST_TESTS)"
	@echo "make lint      check format, style, types and spelling; make format repairs the first two"
	@echo "make audit     scan the sources for unsafe code and secrets, check the dependencies, run every fuzzer (SECURITY.md)"
	@echo "make advisories  ask PyPI for known faults of the pinned dependencies; needs the network"
	@echo "make bench     measure step times against DDP and FSDP2 (BENCH_ARGS)"
	@echo "make gpu       tests and measurements that need a GPU, each under its own time limit (GPU_ARGS); taken as it is and without"
	@echo "               network where $(PYTHON) has PyTorch and a GPU (GPU_PYTHON names another; benchmarks/gpu/gpu_bundle.sh: what it lacks)"
	@echo "make docs      build the site of docs/ into build/site, strictly; needs no PyTorch ($(DOCS_VENV))"
	@echo "make release   build all wheels and the sdist into dist, check and try them; says what is left for a person (RELEASE_ARGS)"
	@echo "make kernels   build the native library again, after a change in kernels/"
	@echo "make venv      only install into $(VENV)"

# Processes of tests import the package hundreds of times: it stays compiled, whatever the shell says of other work.
test test-quick test-all test-newest test-oldest: export PYTHONDONTWRITEBYTECODE =

demo: $(READY_DEMO)
	$(BIN)/python examples/demo/demo.py $(DEMO_ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(if $(LONG),,--short) $(TEST_ARGS)

test-quick: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m quick $(TEST_ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --slow $(TEST_ARGS)

test-newest: $(INPUTS)
	test -x $(VENV_NEWEST)/bin/python || $(PYTHON) -m venv $(VENV_NEWEST)
	$(VENV_NEWEST)/bin/python -m pip install --upgrade pip
	$(VENV_NEWEST)/bin/python -m pip install $(NEWEST_TORCH)
	$(VENV_NEWEST)/bin/python -m pip install --upgrade --upgrade-strategy only-if-needed -e ".[examples,test]"
	$(VENV_NEWEST)/bin/python -m pytest $(SIDE_BY_SIDE) $(TEST_ARGS)

test-oldest: $(INPUTS)
	test -x $(VENV_OLDEST)/bin/python || $(OLDEST_PYTHON) -m venv $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python -m pip install --upgrade pip
	$(VENV_OLDEST)/bin/python packaging/oldest.py $(OLDEST_BUT) > $(VENV_OLDEST)/oldest.txt
	$(VENV_OLDEST)/bin/python -m pip install -c $(VENV_OLDEST)/oldest.txt -e ".[test]"
	$(VENV_OLDEST)/bin/python -m pytest $(SIDE_BY_SIDE) $(TEST_ARGS) $(OLDEST_TESTS)

lint: $(READY_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --slow tests/house/test_types.py -k mypy
	$(BIN)/codespell

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Each part fails where it finds something. The fuzzers come last: they take a quarter of an hour.
audit: $(READY_AUDIT)
	$(BIN)/bandit -q -c pyproject.toml -r hf_zero packaging _hf_zero_startup.py examples benchmarks tools
	files="$$(git ls-files 2>/dev/null || find $(SCANNED) -type f)" && test -n "$$files" && \
		$(BIN)/detect-secrets-hook --exclude-files '^tests/golden/native_bits.json$$|/__pycache__/' $$files
	$(BIN)/python -m pip check
	$(BIN)/python -m pytest --slow tests/fuzz $(TEST_ARGS)

advisories: $(READY_AUDIT)
	$(BIN)/pip-audit --strict --disable-pip --no-deps -r constraints.txt

bench: $(READY)
	$(BIN)/python -m benchmarks.steps.step_time $(BENCH_ARGS)

# A machine with a GPU has the PyTorch that fits its driver: that Python is used, and nothing is installed. Else the venv serves.
gpu:
	@python="$(GPU_PYTHON)"; \
	if [ -z "$$python" ] && $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then python=$(PYTHON); fi; \
	if [ -z "$$python" ]; then $(MAKE) --no-print-directory venv && python=$(BIN)/python || exit 1; fi; \
	exec "$$python" -m benchmarks.gpu $(GPU_ARGS)

# A venv of its own: the site is made from the sources, and neither they nor PyTorch are installed for it.
docs: $(READY_DOCS)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

release: $(VENV_RELEASE)/.ready
	$(VENV_RELEASE)/bin/python packaging/release.py $(RELEASE_ARGS)

$(VENV_RELEASE)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("the pinned versions need Python 3.11; run make PYTHON=python3.11")'
	test -x $(VENV_RELEASE)/bin/python || $(PYTHON) -m venv $(VENV_RELEASE)
	$(VENV_RELEASE)/bin/python -m pip install -c constraints.txt $(RELEASE_TOOLS)
	@touch $@

venv: $(READY)

kernels:
	$(PYTHON) packaging/native_library.py

# The demo needs little: a newcomer does not wait for what the tests need.
# PyTorch first: its size makes it worth a line of its own, and builds that need it installed find it.
$(READY_DEMO): $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("the pinned versions need Python 3.11; run make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch and hf_zero into $(VENV): a few minutes, once."
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . matplotlib
	@touch $@

$(READY): $(READY_DEMO)
	$(BIN)/python -m pip install -c constraints.txt -e ".[examples,test]"
	@touch $@

$(READY_DEV): $(READY)
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	@touch $@

$(READY_AUDIT): $(READY)
	$(BIN)/python -m pip install -c constraints.txt -e ".[audit]"
	@touch $@

$(READY_DOCS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("the pinned versions need Python 3.11; run make docs PYTHON=python3.11")'
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> $(DOCS_VENV)/wanted.txt
	$(DOCS_VENV)/bin/python -m pip install -c constraints.txt -r $(DOCS_VENV)/wanted.txt
	@touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(VENV_RELEASE) $(VENV_NEWEST) $(VENV_OLDEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
