# Two commands for a newcomer: `make quickstart`, then `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ENGINE := build/engines/tiny

.PHONY: quickstart test bench lint clean

quickstart: $(VENV)/.build $(ENGINE)/manifest.json
	$(BIN)/clover-trt generate --engine $(ENGINE) --prompt "Set a timer for 25 minutes."

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -q

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m clover_trt.bench.cpu --out out/bench
	$(BIN)/python -m clover_trt.bench.decode --out out/bench

$(ENGINE)/manifest.json: $(VENV)/.build clover_trt/assets/clover_tiny/model.safetensors
	$(BIN)/clover-trt build --gpu cpu --checkpoint clover-tiny --out $(ENGINE)

$(VENV)/.build: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[build]'
	touch $@

$(VENV)/.dev: $(VENV)/.build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build/engines out
