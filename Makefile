# `make demo` and `make test` set up what they need in .venv and run; both can be repeated.
# TORCH_INDEX=URL takes torch from another index (a CPU or another CUDA build).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two test processes on two cores: more threads than cores only make torch slower.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: demo test lint types soak wheel clean

demo: $(VENV)/.ready
	$(BIN)/difflora demo -o difflora-demo.png --force

test: $(VENV)/.tests lint types
	$(PYTEST) -m "not gpu and not slow"

lint: $(VENV)/.tests
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.tests
	$(BIN)/mypy

# The full lengths; what ran and how long goes to tests/soak.json.
soak: $(VENV)/.tests
	OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m slow --record tests/soak.json

wheel: $(VENV)/.tests
	rm -rf build && $(BIN)/python -m build --wheel --outdir dist .

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -e .
	touch $@

$(VENV)/.tests: $(VENV)/.ready
	$(PIP) -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
