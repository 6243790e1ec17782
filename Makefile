.PHONY: setup fmt check test test-all test-levels test-ray sanitize bench docs

PYTHON := .venv/bin/python
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
test-levels: setup
	tests/levels/run.sh
test-ray:
	GRADLANE_VENV=.venv-ray ./setup.sh test ray
	.venv-ray/bin/python -m pytest -m "slow or not slow" tests/integration/test_ray.py tests/integration/test_pages.py
sanitize:
	tests/sanitize/run.sh
bench: setup
	$(PYTHON) benchmarks/lane_overhead.py
	$(PYTHON) benchmarks/codecs.py
	$(PYTHON) benchmarks/rules.py
docs: setup
	$(PYTHON) -m pytest README.md src/gradlane/core/README.md docs tests/docs
	$(PYTHON) -m sphinx -W -q -d build/doctrees docs site
	@echo "open site/index.html"
