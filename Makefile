# `make demo` shows the main job, `make test` runs the tests; both set up .venv first. See README.md.

PYTHON ?= python3
PYTHON_312 := $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python $(PYTHON); do $$p -c "import ensurepip, venv" 2>/dev/null && echo $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := .venv-torch
OLDEST := .venv-oldest
CLEAN  := .venv-clean
PIP    := -m pip install --quiet --no-compile --disable-pip-version-check

# Each module is compiled once, by the first process that imports it, and not by every process of the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-full check bench gpu schedules docs wheel zoo adversarial oldest clean

demo: $(VENV)/ready
	$(BIN)/python examples/quickstart.py --out out/resnet50
	$(BIN)/python examples/unet.py --out out/unet

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=50 --durations-min=4

test-full: $(VENV)/ready # all combinations of the transparency test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --full

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python benchmarks/partition.py --markdown benchmarks/results/partition.md
	$(BIN)/python benchmarks/partition_chains.py --markdown benchmarks/results/partition_chains.md
	$(BIN)/python benchmarks/partition_models.py --markdown benchmarks/results/partition_models.md
	$(BIN)/python benchmarks/partition_scale.py --markdown benchmarks/results/partition_scale.md
	$(BIN)/python benchmarks/overhead.py --markdown benchmarks/results/overhead.md
	$(BIN)/python benchmarks/distributed.py --markdown benchmarks/results/distributed.md
	$(BIN)/python benchmarks/launches.py --markdown benchmarks/results/launches.md
	$(BIN)/python benchmarks/rank_launches.py --jobs 2 --markdown benchmarks/results/rank_launches.md
	$(BIN)/python benchmarks/overlap.py --markdown benchmarks/results/overlap.md
	$(BIN)/python benchmarks/faults.py --markdown benchmarks/results/faults.md
	$(BIN)/python benchmarks/two_cores.py --markdown benchmarks/results/two_cores.md
	$(BIN)/python benchmarks/cost_accuracy.py --markdown benchmarks/results/cost_accuracy.md
	$(BIN)/python benchmarks/prediction.py --markdown benchmarks/results/prediction.md
	$(BIN)/python benchmarks/memory.py --markdown benchmarks/results/memory.md
	$(BIN)/python benchmarks/published.py --markdown benchmarks/results/published.md
	$(BIN)/python benchmarks/published_plans.py --markdown benchmarks/results/published_plans.md
	$(BIN)/python benchmarks/tracing.py --markdown benchmarks/results/tracing.md
	$(BIN)/python benchmarks/meta_memory.py --markdown benchmarks/results/meta_memory.md
	$(BIN)/python benchmarks/recorders.py --markdown benchmarks/results/recorders.md

# Half an hour on a GPU, in five parts that go on where they ended; ARGS=--dry runs all of it on the CPU.
gpu: $(VENV)/ready
	$(BIN)/python benchmarks/gpu.py $(ARGS)

schedules: $(VENV)/ready # an hour and a half
	$(BIN)/python benchmarks/schedules.py --markdown benchmarks/results/schedules.md
	$(BIN)/python benchmarks/mutations.py --markdown benchmarks/results/mutations.md
	$(BIN)/python benchmarks/schedules_speed.py --markdown benchmarks/results/schedules_speed.md
	$(BIN)/python benchmarks/periodic.py --markdown benchmarks/results/periodic.md
	$(BIN)/python benchmarks/schedules_auto.py --resume benchmarks/results/schedules_auto.jsonl --markdown benchmarks/results/schedules_auto.md

docs: $(VENV)/ready # the generated pages, and the site in out/site; needs no network
	$(BIN)/python docs/architecture.py
	$(BIN)/python docs/schedules.py
	$(BIN)/python docs/options.py
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs out/site

# sdist and wheel in dist/; the wheel is installed where torch alone is, and a user's file runs there and passes mypy and
# pyright: basedpyright is pyright with Node in its wheel, where the package `pyright` asks npm.
wheel: $(VENV)/ready $(TORCH)/ready
	rm -rf build dist $(CLEAN)
	$(BIN)/python -m build
	cp -al $(TORCH) $(CLEAN)
	$(CLEAN)/bin/python $(PIP) dist/*.whl mypy==1.18.* basedpyright==1.40.*
	cp tests/packaging/user_code.py $(CLEAN)/
	cd $(CLEAN) && bin/python -I user_code.py && bin/python -m mypy --strict --config-file= user_code.py
	cd $(CLEAN) && bin/python -m basedpyright --level error --pythonpath bin/python user_code.py

zoo: $(VENV)/ready # an hour
	$(BIN)/python benchmarks/zoo.py --jobs 2
	$(BIN)/python benchmarks/zoo.py --markdown benchmarks/results/zoo.md

adversarial: $(VENV)/ready # two hours; libraries that are not installed are left out
	$(BIN)/python benchmarks/adversarial.py
	$(BIN)/python benchmarks/adversarial.py --markdown benchmarks/results/adversarial.md

# The smoke tests on the oldest torch that is supported, and on Python 3.12 where there is one.
oldest: $(OLDEST)/ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q -m smoke

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --editable ".[test,check]"
	touch $@

# The oldest torch that is supported, in an environment that others are copied from: hard links, as torch has 5 GB of files.
$(TORCH)/ready: Makefile
	$(PYTHON_312) -m venv --clear $(TORCH)
	$(TORCH)/bin/python $(PIP) "torch==2.11.0" "torchvision==0.26.0"
	touch $@

$(OLDEST)/ready: pyproject.toml $(TORCH)/ready
	rm -rf $(OLDEST)
	cp -al $(TORCH) $(OLDEST)
	$(OLDEST)/bin/python $(PIP) --editable ".[test]"
	rm -f $@
	touch $@

clean:
	rm -rf $(VENV) $(TORCH) $(OLDEST) $(CLEAN) build dist out
