.PHONY: setup fmt check test test-all test-levels test-gpu test-triton test-ray sanitize bench plan-grid docs

PYTHON := .venv/bin/python
GPUS ?= 2
unexport PYTHONDONTWRITEBYTECODE  # or each process compiles torch again

setup:
	./setup.sh
fmt: setup
	$(PYTHON) -m ruff format src tests examples benchmarks docs/conf.py
	$(PYTHON) -m ruff check --fix src tests examples benchmarks docs/conf.py
check: setup
	$(PYTHON) -m ruff format --check src tests examples benchmarks docs/conf.py
	$(PYTHON) -m ruff check src tests examples benchmarks docs/conf.py
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
test:
	./test.sh
test-all:
	./setup.sh test frameworks
	$(PYTHON) tests/run.py -m "slow or not slow" --durations=25
	tests/levels/run.sh
	$(MAKE) test-triton
test-levels: setup
	tests/levels/run.sh
test-gpu: setup
	$(PYTHON) -m pytest -m "not slow" tests/gpu
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(GPUS) -m tests.gpu.first_run
test-triton:
	GRADLANE_VENV=.venv-triton ./setup.sh test triton
	.venv-triton/bin/python -m pytest -m "slow or not slow" tests/gpu
test-ray:
	GRADLANE_VENV=.venv-ray ./setup.sh test ray
	.venv-ray/bin/python -m pytest -m "slow or not slow" tests/integration/test_ray.py tests/integration/test_pages.py
sanitize:
	tests/sanitize/run.sh
bench: setup
	$(PYTHON) benchmarks/lane_overhead.py
	$(PYTHON) benchmarks/codecs.py
	$(PYTHON) benchmarks/rules.py
plan-grid: setup
	$(PYTHON) benchmarks/plan_grid.py --json plan-grid.json
	$(PYTHON) benchmarks/auto_grid.py --pairs 3 --json auto-grid.json
	$(PYTHON) benchmarks/off.py --json off.json
docs: setup
	$(PYTHON) -m pytest README.md src/gradlane/core/README.md docs tests/docs
	$(PYTHON) -m sphinx -W -q -d build/doctrees docs site
	@echo "open site/index.html"
