# Everything here runs in a virtual environment of the project's own, set up on first use.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.stamp

.PHONY: demo test bench lint gallery clean

# A small GPT learns English-like Python text on four ranks, one process each.
demo: $(STAMP)
	$(VENV)/bin/pipeloom train --ranks 4 --schedule DualPipeV --microbatches 10 --steps 100 --eval-every 20

# Runs every check, also after one has failed.
test: $(STAMP)
	@status=0; for check in "ruff check" "ruff format --check" mypy pytest; do \
		echo "== $$check"; $(VENV)/bin/$$check || status=1; \
	done; exit $$status

# Messages and steps beside torch's; each program has options of its own, and --json.
bench: $(STAMP)
	$(VENV)/bin/python benchmarks/messages.py
	$(VENV)/bin/python benchmarks/starting.py
	$(VENV)/bin/python benchmarks/planning.py
	for ranks in 2 4; do $(VENV)/bin/python -W ignore benchmarks/steps.py --stages tiny --ranks $$ranks; done
	$(VENV)/bin/python -W ignore benchmarks/steps.py --stages small --microbatches 32
	$(VENV)/bin/python benchmarks/backward.py
	$(VENV)/bin/python -W ignore benchmarks/evaluation.py
	$(VENV)/bin/python -W ignore benchmarks/memory.py

lint: $(STAMP)
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/mypy

# Draws the pictures of the documents.
gallery: $(STAMP)
	$(VENV)/bin/python docs/gallery/draw.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): PyTorch and the tools of the tests, a few minutes where they must be downloaded"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -qq -c constraints.txt -e ".[dev]"
	@touch $@
