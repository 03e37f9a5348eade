# The verbs of this repository. PYTHON=/path/to/python chooses the interpreter the environments are made with.
# Each environment has a stamp, so a second call installs nothing.

export PYTHON

.DEFAULT_GOAL := help
.PHONY: help first-light storm-demo test lint soak-ci bench-help bench-data bench-train bench-attention bench-checkpoint bench-control bench-recovery ratchet clean

help:
	@echo "make first-light   install, then train a small language model on this machine's own text (about 6 minutes)"
	@echo "make storm-demo    install, then train a run that is broken five ways and ends with the same bits (three minutes on a quiet machine)"
	@echo "make test          install, lint, and run every test that needs no long wait"
	@echo "make lint          ruff, mypy and the import arrows"
	@echo "make soak-ci       200 kills with JAX workers, storms of faults, real stalls and stores, torch (at most 40 minutes)"
	@echo "make bench-help    how long packtrain --help takes"
	@echo "make bench-data    tokens a second and core of the loader, beside grain and a dataset in Megatron's manner"
	@echo "make bench-train   a training step beside the same in torch (PEER=python with torch; 3 minutes)"
	@echo "make bench-attention  attention under masks, beside others (TORCH=python, TOKAMAX=python; 3 minutes)"
	@echo "make bench-control what a coordinator of 12,500 agents costs, and how soon a fault is seen (17 minutes)"
	@echo "make bench-recovery   from a fault to the next step, beside torchrun and others (PEER=python with torch; 50 minutes)"
	@echo "make ratchet       record shorter functions in tests/house/ratchet.json"
	@echo "make clean         remove environments and caches; runs/ and stores/ stay"

.venv/installed: pyproject.toml setup/make-venv setup/find-python
	@setup/make-venv .venv train,dev

.venv-soak/installed: pyproject.toml setup/make-venv setup/find-python
	@setup/make-venv .venv-soak train,dev,interop-test

.venv-base/installed: pyproject.toml setup/make-venv setup/find-python
	@setup/make-venv .venv-base ""

first-light: .venv/installed
	@.venv/bin/packtrain first-light

storm-demo: .venv/installed
	@.venv/bin/packtrain storm-demo

test: lint
	@.venv/bin/python -m tests.two_sessions 1800 "tests/cli tests/house tests/supervise" .venv/bin/python -m pytest

lint: .venv/installed
	@.venv/bin/ruff check
	@.venv/bin/mypy
	@.venv/bin/lint-imports

soak-ci: .venv-soak/installed .venv-base/installed
	@PACKTRAIN_BASE_PYTHON=.venv-base/bin/python setup/soak-ci .venv-soak/bin/python

bench-help: .venv/installed
	@.venv/bin/python bench/help.py

bench-data: .venv/installed
	@.venv/bin/python bench/data.py

bench-train: .venv/installed
	@.venv/bin/python bench/train.py

bench-attention: .venv/installed
	@.venv/bin/python bench/attention.py

bench-checkpoint: .venv/installed
	@.venv/bin/python bench/checkpoint.py

bench-control: .venv/installed
	@PYTHONPATH=. .venv/bin/python bench/control.py

bench-recovery: .venv/installed
	@PYTHONPATH=. .venv/bin/python bench/recovery.py

ratchet: .venv/installed
	@.venv/bin/python -m tests.house.ratchet

clean:
	rm -rf .venv .venv-soak .venv-base build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  .import_linter_cache .hypothesis
	find packtrain tests bench -name __pycache__ -type d -exec rm -rf {} +
