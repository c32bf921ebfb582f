# Two commands do everything on a fresh machine with Python 3.10 or later: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test lint types unit docs docs-check package benchmark api schema pictures clean

demo: $(VENV)/.installed
	$(BIN)/gemmscope forecast llama-3.1-8b b300 h200 --quiet -o forecast-demo.png

test: lint types unit

lint: $(VENV)/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.developing
	$(BIN)/mypy

unit: $(VENV)/.developing
	$(BIN)/pytest -n 2 --dist worksteal

# The documentation site, warnings as errors: open build/site/index.html.
docs: $(VENV)/.developing
	$(BIN)/zensical build --strict --clean

# Every page in Chromium, at desktop and phone width, light and dark: nothing too wide, no error, no request to another host.
docs-check: docs
	$(BIN)/python tests/support/site_pages.py build/site

# Wheel and sdist; then each in an environment of its own, which must have gemmscope and no torch.
package: $(VENV)/.developing
	rm -rf dist build/installed
	$(BIN)/hatchling build -d dist
	for made in dist/*.whl dist/*.tar.gz; do \
		rm -rf build/installed && $(PYTHON) -m venv build/installed && \
		build/installed/bin/python -m pip --disable-pip-version-check install --quiet $$made && \
		build/installed/bin/python benchmarks/newcomer.py build/installed/bin/gemmscope || exit 1; \
	done

benchmark: $(VENV)/.developing
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/forecast_speed.py

# The keywords of the Python API, from the options that are declared in src/gemmscope/options.
api: $(VENV)/.developing
	$(BIN)/python tests/support/api_signatures.py
	$(BIN)/ruff format src/gemmscope/api

schema: $(VENV)/.installed
	$(BIN)/python tests/support/schemas.py docs/schema

pictures: $(VENV)/.developing
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/outputs.py
	$(BIN)/python docs/report_picture.py

$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV) …"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/.developing: $(VENV)/.installed requirements-dev.txt
	@echo "installing what the tests need (torch among it: a minute or two) …"
	$(PIP) --requirement requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
