# Mixed Precision, Hands On. Every target builds .venv first where it is missing, and costs nothing where it is there.
PYTHON ?= python3
PORT ?=
BROWSER ?=
EDIT ?=
NB ?=
P ?=
THREADS ?= 1
CLAIMS ?=

BIN := .venv/bin
# A lesson is validated on the CPU, whatever the machine has. Workers with two threads each are more threads than cores:
# waiting threads must sleep, for where they spin, OpenMP's default, the same work took up to fifty times as long. Three
# workers, for tests also wait: for kernels, browsers, installations.
ON_CPU := CUDA_VISIBLE_DEVICES= OMP_WAIT_POLICY=PASSIVE
PYTEST := $(BIN)/python -m pytest -n 3
UNITS := $(ON_CPU) OMP_NUM_THREADS=1 $(PYTEST) --dist worksteal tests amp_utils

.DEFAULT_GOAL := help
.PHONY: help lab run sweep save test test-all validate progress claims handout slides bench gpu lint format clean ready

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-9s %s\n", $$1, $$2}'

lab: ready  ## open the course in JupyterLab (PORT=8888, BROWSER=no: just print the address, EDIT=yes: for authors)
	@exec $(if $(filter yes no,$(BROWSER)),env -u BROWSER) $(BIN)/python -m amp_utils.course lab \
	  $(if $(PORT),--port "$(PORT)") $(if $(filter no,$(BROWSER)),--no-browser) $(if $(filter yes,$(EDIT)),--edit)

run: ready  ## run lessons into runs/ (NB=12: one lesson, P="-p precision bf16 -p steps 100": its parameters)
	@$(BIN)/python -m amp_utils.course run $(NB) $(P)

sweep: ready  ## run a lesson for all combinations of values (NB=12 P="--set precision=fp32,bf16 --set width=64,128")
	@$(BIN)/python -m amp_utils.course sweep $(NB) $(P)

save: ready  ## run lessons on the CPU and keep their outputs in notebooks/ (NB=12: one lesson)
	@$(BIN)/python -m amp_utils.course run --save $(NB)

test: ready  ## check units and anatomy, then every notebook against its saved outputs (4 minutes)
	@status=0; \
	$(UNITS) -m "not full" || status=1; \
	$(MAKE) --no-print-directory validate || status=1; \
	exit $$status

test-all: ready  ## check everything: what takes long too, and the notebooks with one and with two threads
	@status=0; \
	$(UNITS) || status=1; \
	$(MAKE) --no-print-directory validate THREADS=1 CLAIMS=yes || status=1; \
	$(MAKE) --no-print-directory validate THREADS=2 || status=1; \
	exit $$status

validate: ready  ## check only the notebooks against their saved outputs (THREADS=2, CLAIMS=yes: measure claims too)
	$(ON_CPU) OMP_NUM_THREADS=$(THREADS) PYTHONPATH=tests $(PYTEST) --dist loadscope \
	  -p support.kernels $(if $(filter yes,$(CLAIMS)),-p support.claimed) \
	  --nbval --nbval-kernel-startup-timeout 600 --nbval-sanitize-with tests/support/nbval_sanitize.cfg notebooks

claims: ready  ## measure every claim of the sources again, and write the ledger: notebooks/claims.md and .html
	@$(BIN)/python -m amp_utils.course claims $(P)

progress: ready  ## show which exercises you solved, and which predictions were wrong
	@$(BIN)/python -m amp_utils.course progress

handout: ready  ## build what a class gets into build/handout: notebooks without and with solutions, offline pages
	@$(BIN)/python -m amp_utils.course handout

slides: ready  ## open a lesson as a presentation, without a network (NB=06; BROWSER=no: just print where it is)
	@$(if $(filter yes no,$(BROWSER)),env -u BROWSER) $(BIN)/python -m amp_utils.course slides $(NB) \
	  $(if $(filter no,$(BROWSER)),--no-browser)

bench: ready  ## measure gains and overheads, as ratios (ARGS="recipe loop": some of them, P="--device cuda")
	@$(BIN)/python -m amp_utils.course bench $(P) $(ARGS)

gpu: ready  ## run every lesson, benchmark and claim on a GPU (DEVICE=cpu: rehearse; P="--minutes 20")
	@$(BIN)/python -m amp_utils.course gpu --device $(or $(DEVICE),cuda) $(P) $(NB)

lint: ready  ## check code and notebooks with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: ready  ## lay out code and notebooks with ruff
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

clean:  ## remove the environment and all that was made
	rm -rf .venv runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ready:
	@command -v "$(PYTHON)" >/dev/null || { echo "PYTHON = '$(PYTHON)' was not found: give a Python 3.11 or newer, for example make lab PYTHON=python3.12." >&2; exit 1; }
	@"$(PYTHON)" -I amp_utils/course/bootstrap.py $(if $(filter lab,$(MAKECMDGOALS)),$(if $(PORT),--port "$(PORT)"))
