# Every command that people and CI run, under one name. `make help` lists them.
# Run inside an environment made by `python -m pip install -e ".[dev]"`.

.DEFAULT_GOAL := help
.PHONY: help format lint types imports test gpu soak matrix package doctest docs notebooks bench quickstart

help:  ## list these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

format:  ## format the code in place and apply the safe fixes of the linter
	ruff format .
	ruff check --fix .

lint:  ## check format and lint, change nothing
	ruff format --check .
	ruff check .

types:  ## check the types of package, tests and benchmarks, and of the code that README and tutorials show
	mypy
	python -m tests.docs.shown_code
	mypy --allow-untyped-defs --allow-incomplete-defs --allow-redefinition $$(cat .shown_code/files)
	basedpyright $$(cat .shown_code/files)

imports:  ## check that chapters import only from earlier chapters
	lint-imports

test:  ## run the tests, those that `pytest -n 2` leaves out as slow included
	python -m pytest -n 2 -m "not soak"

gpu:  ## run the tests that take a device on a CUDA device
	python -m pytest -n 4 --device cuda -m "(device or cuda) and not soak"

soak:  ## run the long checks that `make test` leaves out
	python -m pytest -n 2 -m soak

matrix:  ## run the tests in every supported environment, the installed wheel included
	tox run

package:  ## build dist/, install the wheel into a fresh environment and run a program with it
	rm -rf dist .venv-package
	uv build -q -o dist
	uv venv -q --python "$$(command -v python)" .venv-package
	uv pip install -q --python .venv-package dist/*.whl
	.venv-package/bin/python .ci/smoke.py

doctest:  ## run the examples of docstrings, README and documentation
	python -m pytest -m "not soak" tests/docs

docs:  ## build the documentation into docs/_build/html, warnings are errors
	sphinx-build -W --keep-going -b html docs docs/_build/html

notebooks:  ## run the notebooks that `make docs` has made of the tutorials
	python docs/run_notebooks.py

bench:  ## do the runs of all benchmarks that are not there yet, then write the reports
	python -m benchmarks run all

quickstart:  ## add error bars to a trained network, and draw the first figure
	python examples/quickstart.py
