# Two commands: `make demo` and `make test`. Both set up .venv first (once).
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
DEMO_OUT ?= runs/demo

# `make test` runs these beside all others: SLURM's tests mostly wait, and most others keep one core busy
BESIDE := tests/launch tests/test_checkpoint_layouts.py tests/test_te_install.py tests/test_trainer_layouts.py

.PHONY: demo test test-most test-beside setup lint lock clean

setup:
	@launch/setup_env.sh

demo: setup
	@.venv/bin/quads demo --out $(DEMO_OUT) --overwrite

test: setup lint
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-most test-beside

test-most:
	.venv/bin/python -m pytest $(BESIDE:%=--ignore=%)

# lines marked, and whole: both write to one screen
test-beside: SHELL := bash -o pipefail
test-beside:
	.venv/bin/python -m pytest $(BESIDE) 2>&1 | sed -u 's/^/beside: /'

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

lock:
	.venv/bin/uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate \
		--override requirements/overrides.txt -o requirements/cpu.lock requirements/cpu.in

clean:
	rm -rf runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
