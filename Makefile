# gpumap's commands. One virtual environment, .venv, filled in two steps: what gpumap needs to run, then what its
# developers need. Both come from the hashed locks and are redone only when a lock or pyproject.toml changed.

PYTHON ?= python3
ARGS ?=
PARALLEL ?= 4
# One folder: pytest reads it again for each file that it is given.
TESTS ?= tests --ignore-glob="tests/*/*"
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n $(PARALLEL) --dist loadfile -m "not e2e and not cluster"
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
UV := .tools/uv-venv/bin/uv
UV_VERSION := 0.13.9
COMPILE := $(UV) --quiet pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-annotate --no-header

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all check prose e2e e2e-cluster faults soak fuzz tools golden protos docs site manifests boards pictures bench bench-idle audit lock krew wheel image clean

help: ## Lists these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "PYTHON=python3.12 chooses the interpreter of .venv; ARGS='…' goes to demo, test, test-all, e2e, soak, fuzz, bench, lock, krew"
	@echo "and image. Tests run in four processes, also on two cores, because many wait; PARALLEL=8 makes it eight."

setup: .venv/.dev ## Makes .venv with gpumap and all that its developers need

demo: .venv/.runtime ## Runs gpumap on a simulated node: no GPU, no kubelet, no root (ARGS=…)
	$(BIN)/gpumap demo --idle-after 1m $(ARGS)

test: check ## What a contributor runs: all checks, and the tests beside the folders of tests/ (TESTS=tests/test_x.py)
	@$(BIN)/python -m scripts.install_tools prometheus promtool || echo "The tests that need it are skipped." >&2
	$(PYTEST) $(TESTS) $(ARGS)

test-all: check ## The same with all examples of each law, and tests/*/: captures, bill, chart, image, boards, documents, shells, browser; the CI runs this
	@$(BIN)/python -m scripts.install_tools || echo "The tests that need it are skipped; under CI they fail." >&2
	$(PYTEST) --hypothesis-profile=full $(ARGS)

check: .venv/.dev prose ## Format, lint, import layers, types, prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

prose: .venv/.dev ## Finds long sentences, and words that the style replaces, in documents, messages, docstrings and comments
	$(BIN)/python -m scripts.check_prose

e2e: .venv/.dev tools ## The longer runs: gpumap as a process with real neighbours (Prometheus, …)
	@echo "End-to-end tests: they start gpumap and its neighbours as real processes, and take minutes."
	$(BIN)/python -m pytest -m e2e --hypothesis-profile=full $(ARGS)

e2e-cluster: .venv/.dev ## gpumap on a live node: containerd, a kubelet built from source, pods; root; under 15 minutes from nothing
	$(BIN)/python -m scripts.install_tools --cluster buildah runc helm
	$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

faults: .venv/.dev ## Prints every fault that a test injects into a running gpumap, and what the page and the log then show
	$(BIN)/python -m tests.faults

soak: .venv/.dev tools ## gpumap for an hour at 20 times speed on a node that never rests (ARGS="--minutes 10 --seed 7")
	$(BIN)/python -m tests.soak $(ARGS)

fuzz: .venv/.dev ## Looks for inputs that break a parser: ten minutes (ARGS="--minutes 60", ARGS=--list, ARGS=cgroup)
	$(BIN)/python -m tests.fuzz $(ARGS)

tools: | $(BIN)/python ## Puts prometheus, promtool, chromium, helm, kubectl, buildah, runc and systemd-analyze into .tools/bin where PATH lacks them
	$(BIN)/python -m scripts.install_tools

golden: .venv/.dev tools ## Rewrites the expected pages of tests/captures, and tests/deploy/rendered; `git diff` is the review
	$(BIN)/python -m tests.golden
	$(BIN)/python -m tests.deploy.rendered

protos: .venv/.dev ## Regenerates src/gpumap/agent/_proto from protos/
	$(BIN)/python scripts/generate_protos.py

docs: .venv/.dev ## Rewrites the tables of docs/ and of the chart's README from the code
	$(BIN)/python -m scripts.generate_docs

site: .venv/.dev ## Builds build/site from docs/, for GitHub Pages or any other host; a broken link fails
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs --doctree-dir build/doctrees . build/site $(ARGS)

manifests: .venv/.dev tools ## Rewrites the objects of deploy/ from the chart
	$(BIN)/python -m scripts.generate_deploy

boards: .venv/.dev ## Rewrites Grafana's boards in charts/gpumap/dashboards from boards/
	$(BIN)/python -m boards

pictures: .venv/.dev tools ## Takes the pictures of the page for docs/ from the demo
	$(BIN)/python -m scripts.take_picture

bench: .venv/.dev .tools/bench-venv/.installed ## What gpumap costs, beside its goals: some 12 minutes (ARGS="P1 P6", ARGS=--long)
	$(BIN)/python -m bench $(ARGS)

bench-idle: .venv/.dev ## Whether gpumap finds holders that rest, and accuses none that works, on simulated nodes (ARGS="--lives 10 jobs")
	$(BIN)/python -m bench.idle $(ARGS)

audit: ## Asks the OSV database for known vulnerabilities of what the locks name; nothing audited is a failure (ARGS=LOCK)
	$(PYTHON) scripts/audit.py $(ARGS)

lock: $(UV) ## Brings the locks in line with pyproject.toml (ARGS=--upgrade: newest versions)
	$(COMPILE) $(ARGS) --output-file requirements.lock
	$(COMPILE) $(ARGS) --output-file requirements-dev.lock --group dev -c requirements.lock
	$(COMPILE:pyproject.toml=--group image) $(ARGS) --output-file requirements-image.lock -c requirements.lock
	$(COMPILE:pyproject.toml=bench/requirements.in) $(ARGS) --output-file bench/requirements.lock

krew: .venv/.runtime ## Builds dist/krew: kubectl's plugin and its krew manifest (ARGS=--uri=…)
	$(BIN)/python scripts/make_krew.py $(ARGS)

wheel: .venv/.runtime ## Builds dist/gpumap-*.whl
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

image: ## Builds the image with docker, podman or buildah (IMAGE=… PLATFORMS=… ARGS="--push -- …"); prints its size
	$(PYTHON) scripts/build_image.py $(if $(IMAGE),--image $(IMAGE)) $(if $(PLATFORMS),--platforms $(PLATFORMS)) $(ARGS)

clean: ## Removes what was built, and caches; .venv and .tools stay
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests scripts boards bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON) here: install Python 3.11 or later, or say make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  "gpumap needs Python 3.11 or later, and $(PYTHON) is %d.%d: say make PYTHON=python3.12, or the like" % v[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# Only the build needs setuptools; it is taken from the other lock, hashes and all.
.venv/.runtime: requirements.lock pyproject.toml | $(BIN)/python
	@echo "Installing gpumap's run-time dependencies and gpumap into .venv"
	@sed -n '/^setuptools==/,/[^\\]$$/p' requirements-dev.lock >.venv/setuptools.lock
	@$(PIP) install --require-hashes -r requirements.lock -r .venv/setuptools.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

.venv/.dev: requirements-dev.lock .venv/.runtime
	@echo "Installing the development dependencies into .venv"
	@$(PIP) install --require-hashes -r requirements-dev.lock
	@touch $@

# The bench's contestants, in an environment of their own. Without it, its rows say so and the others stand.
.tools/bench-venv/.installed: bench/requirements.lock
	@echo "Installing the contestants of the bench into .tools/bench-venv"
	@if $(PYTHON) -m venv .tools/bench-venv && .tools/bench-venv/bin/python -m pip --quiet --disable-pip-version-check \
	  install --require-hashes -r bench/requirements.lock; then touch $@; \
	  else rm -rf .tools/bench-venv; echo "No contestants: the rows against nvitop-exporter will say so." >&2; fi

$(UV):
	$(PYTHON) -m venv .tools/uv-venv
	.tools/uv-venv/bin/python -m pip --quiet --disable-pip-version-check install uv==$(UV_VERSION)
