# Two commands for a newcomer: `make quickstart`, then `make test`. `make plugins-test` needs a C++ compiler too,
# `make page-test` Chromium and its driver.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ENGINE := build/engines/tiny

PRESETS := h200 gb300 portable

.PHONY: quickstart test plugins-test page-test bench lint clean

quickstart: $(VENV)/.build $(ENGINE)/manifest.json
	$(BIN)/clover-trt generate --engine $(ENGINE) --prompt "Set a timer for 25 minutes."

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -q

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

plugins-test: $(VENV)/.plugins
	$(BIN)/python -m clover_trt.engine.plugins host-sanitized $(PRESETS)
	cd plugins && PATH="$(abspath $(BIN)):$$PATH" && for preset in host-sanitized $(PRESETS); do ctest --preset $$preset || exit 1; done
	$(BIN)/python -m pytest -q plugins/tests

page-test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m browser tests/serving/test_page.py

bench: $(VENV)/.dev
	$(BIN)/python -m clover_trt.bench.cpu --out out/bench
	$(BIN)/python -m clover_trt.bench.decode --out out/bench
	$(BIN)/python -m clover_trt.bench.serve_cost --out out/bench

$(ENGINE)/manifest.json: $(VENV)/.build clover_trt/assets/clover_tiny/model.safetensors
	$(BIN)/clover-trt build --gpu cpu --checkpoint clover-tiny --out $(ENGINE)

$(VENV)/.build: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[build]'
	touch $@

$(VENV)/.dev: $(VENV)/.build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.plugins: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt cmake ninja
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps kernel-lens
	command -v nvcc > /dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl
	touch $@

clean:
	rm -rf $(VENV) build/engines out
