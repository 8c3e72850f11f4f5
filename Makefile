# Shortcuts for people; CI and the README call scripts/ directly. No logic here.
.PHONY: help checks test gpu quickstart docs format doctor clean

help:            ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

checks:          ## format, lint, spelling, types, import contracts, CPU tests
	./scripts/test

test: checks

gpu:             ## the tests that need a GPU, in the environment that is active
	python -m pytest -m "(gpu or multi_gpu) and not faults"

quickstart:      ## the whole main job on generated data
	./scripts/quickstart

docs:            ## the documentation as a site, at http://localhost:8000
	.venv/bin/python docs/make_reference.py
	.venv/bin/zensical serve

format:          ## rewrite the files as ruff wants them
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

doctor:          ## what runs on this machine
	.venv/bin/coat-vlm doctor

clean:           ## caches and build leftovers; keeps .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
