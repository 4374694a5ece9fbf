# Two commands: `make demo` and `make test`. Both set up .venv first (once).
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
DEMO_OUT ?= runs/demo

.PHONY: demo test setup lint lock clean

setup:
	@launch/setup_env.sh

demo: setup
	@.venv/bin/quads demo --out $(DEMO_OUT) --overwrite

test: setup lint
	.venv/bin/python -m pytest

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

lock:
	.venv/bin/uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate \
		--override requirements/overrides.txt -o requirements/cpu.lock requirements/cpu.in

clean:
	rm -rf runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
