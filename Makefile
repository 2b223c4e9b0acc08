# Every target sets itself up: a fresh clone needs Python 3.11 or newer, make and a package index, nothing else.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
WORKERS ?= auto
# A machine with a GPU may have no network and another torch, so what is tried there needs no .venv.
GPU_PYTHON = $(if $(filter command environment,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(RUN)),$(PYTHON)))
MLFLOW_STAMP := $(VENV)/.installed-mlflow
DETECTORS_STAMP := $(VENV)/.installed-detectors
APP_STAMP := $(VENV)/.installed-app
DOCS_STAMP := $(VENV)/.installed-docs

# Installs packages and shows how far it is: pip says nothing for minutes, or far too much.
define install
	set -o pipefail; echo "Installing into $(VENV) (about 0.6 GB to download; PyTorch with CUDA several GB more; 2 to 5 minutes)"; \
	$(RUN) -m pip install --disable-pip-version-check --progress-bar off $(1) 2>&1 | awk -v total=$$(cat $(filter %.lock,$(1)) | grep -c '==') ' \
		/^(Collecting|Processing|Requirement already)/ { count++; printf "\r  %3d of about %d packages looked at", count, total; fflush() } \
		/^Installing collected/ { printf "\n  unpacking them\n"; fflush() } \
		/^(ERROR|error)/ { printf "\n%s\n", $$0; fflush() }'
endef

# Versions that the resolver would take too new for Python 3.11.0 to 3.11.4 (Debian 12 has 3.11.2).
OLDEST_PYTHON := 'soupsieve<3'
# The torch that is tested, with its torchvision; and from 4.25 on jsonschema compiles grammars of addresses when it is
# imported: 1.2 s in every kernel and command.
PINNED := 'torch==2.13.0' 'torchvision==0.28.*' 'jsonschema<4.25'

# Resolves the extras $(2) in an environment of their own, called $(1), with further options $(3), into a list of versions.
# A local version (torch 2.13.0+cpu) names one machine's build; setuptools belongs to the environment itself.
comma := ,
define resolve
	$(PYTHON) -m venv build/lock/$(1)
	build/lock/$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(3) --editable '.[$(2)]'
	build/lock/$(1)/bin/python -m pip freeze --exclude-editable --exclude setuptools | sed -E 's/\+[a-z0-9.]+$$//' \
		| LC_ALL=C sort > build/lock/$(1).txt
endef

.PHONY: help setup setup-mlflow setup-detectors setup-app setup-docs docs demo demo-image demo-video-text lab verdicts audit doctor test test-runs test-long test-browser test-mlflow test-detectors test-app test-slurm test-gpu bench-gpu golden honesty fuzz faults kills lint format bench bench-quick bench-clips bench-index bench-scale bench-training bench-detectors bench-preflight bench-pipeline bench-coverage bench-queries bench-retrieval bench-verdicts bench-features bench-planted index-kills lock clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Create .venv with the locked dependencies

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; run: make PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(call install,--requirement requirements.lock)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	# JupyterLab would ask everybody whether it may fetch news, and look for updates; a workbench asks nobody outside.
	mkdir -p $(VENV)/etc/jupyter/labconfig
	echo '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}' \
		> $(VENV)/etc/jupyter/labconfig/page_config.json
	@touch $@

setup-mlflow: $(MLFLOW_STAMP)  ## Add MLflow to .venv, for FVC_TRACKER=mlflow and export --format mlflow

$(MLFLOW_STAMP): $(STAMP) requirements-mlflow.lock
	@$(call install,--requirement requirements.lock --requirement requirements-mlflow.lock)
	@touch $@

setup-detectors: $(DETECTORS_STAMP)  ## Add torchvision, timm, pytorchvideo, boosters and facenet-pytorch to .venv, for published networks and faces

# Without what they ask for, which requirements.lock has: else pip might bring another build of torch. facenet-pytorch
# works with this torch and pins an old one, so that no lock can be resolved with it.
$(DETECTORS_STAMP): $(STAMP) requirements-detectors.lock
	@$(call install,--no-deps --requirement requirements-detectors.lock facenet-pytorch==2.6.0)
	@touch $@

setup-app: $(APP_STAMP)  ## Add to .venv what the page for verdicts and provenance (c2pa) need

$(APP_STAMP): $(STAMP) requirements-app.lock
	@$(call install,--requirement requirements.lock --requirement requirements-app.lock)
	@touch $@

setup-docs: $(DOCS_STAMP)  ## Add MkDocs to .venv

$(DOCS_STAMP): $(STAMP) requirements-docs.lock
	@$(call install,--requirement requirements.lock --requirement requirements-docs.lock)
	@touch $@

docs: setup-docs  ## Build the documentation with its reference: build/docs/index.html, which opens offline
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet
	@echo build/docs/index.html

demo: $(STAMP)  ## Run the whole pipeline on the built-in sample corpus, show where the report is, and judge two new videos
	$(RUN) run_notebooks.py --params params/demo.yaml
	$(RUN) run_notebooks.py predict latest $(or $(FVC_DATA_DIR),data)/sample_new

demo-image: $(STAMP)  ## Train image recognition with regression on built-in pictures of dishes
	$(RUN) run_notebooks.py --params params/image.yaml

demo-video-text: $(STAMP)  ## Train video-text retrieval and captions on built-in clips
	$(RUN) run_notebooks.py --params params/video_text.yaml

lab: $(STAMP)  ## Open the notebooks in JupyterLab; it saves your edits of them, but no outputs, which stay out of git
	PYTHONPATH=.ci $(VENV)/bin/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.root_dir=. \
		--LabApp.default_url=/lab/tree/notebooks/01_data_index.ipynb --ContentsManager.pre_save_hook=clean_notebook.clean

verdicts: setup-app  ## Show a page on which anybody drops videos and reads verdicts: make verdicts MODEL=latest PORT=8866
	$(RUN) run_notebooks.py app $(or $(MODEL),latest) --port $(or $(PORT),8866)

audit: $(STAMP)  ## Audit a table of anyone's scores: make audit SCORES=scores.csv
	$(RUN) run_notebooks.py audit $(SCORES)

doctor: $(STAMP)  ## Check packages, torch, disks and memory, and say what to do
	$(RUN) run_notebooks.py doctor

test: $(STAMP)  ## Run the tests; WORKERS=n at once, else two more than cores
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal

test-runs: $(STAMP)  ## Run the tests of whole runs and commands, which take ten seconds or more each
	$(RUN) -m pytest -n auto --dist worksteal -m "slow and not long and not mlflow and not detectors and not app"

test-long: setup-mlflow  ## Run the tests that take longer and have no target of their own
	$(RUN) -m pytest -n auto --dist worksteal -m "long and not fault and not slurm" --ignore tests/test_honesty.py \
		--ignore tests/video/test_fuzz.py --ignore tests/corpus/test_index_scale.py \
		--ignore tests/golden

test-mlflow: setup-mlflow  ## Export runs to a real MLflow server; installs MLflow into .venv
	$(RUN) -m pytest -n 2 --dist worksteal -m "mlflow and not long"

test-detectors: setup-detectors  ## Build, load and train published networks; installs their packages into .venv
	$(RUN) -m pytest -n 2 --dist worksteal -m "detectors and not long"

test-app: setup-app  ## Check provenance; installs its package into .venv
	$(RUN) -m pytest -n 2 --dist worksteal -m "app and not long"

test-browser: $(STAMP)  ## Drive JupyterLab and the offline pages in Chromium
	$(RUN) -m pytest -n 0 tests/browser -m "long or not long"

test-slurm: $(STAMP)  ## Run whole jobs on a real Slurm of this machine's own; installs it where it may (Debian, as root)
	tests/slurm/install.sh
	$(RUN) -m pytest -n 2 --dist worksteal -m slurm tests/slurm

test-gpu:  ## Try on a GPU all that a training relies on; PYTHON= another python with torch and numpy alone, DEVICE=cpu
	$(GPU_PYTHON) tests/gpu/run.py --device $(or $(DEVICE),auto)

golden: $(STAMP)  ## Compare whole runs, commands, refusals, kills and decoded frames with what they gave before, about 12 minutes
	$(RUN) -m pytest -n 0 tests/golden -m "long or not long"

honesty: $(STAMP)  ## Show that real labels are learned, shuffled ones are not, and maps point at what was changed: three whole runs
	$(RUN) -m pytest -m long tests/test_honesty.py

fuzz: $(STAMP)  ## Give 2,000 damaged videos to the index and the decoder; FVC_FUZZ_SEED=n for others
	$(RUN) -m pytest -m long tests/video/test_fuzz.py

faults: $(STAMP)  ## Try every fault that FVC promises to survive, random ones among them, and print the table
	$(RUN) -m pytest -n auto --dist worksteal -m "fault and (long or not long)" --fault-table

kills: $(STAMP)  ## Kill a small run's runner and its kernels 20 times each at random moments, about 20 minutes
	FVC_FAULT_COUNT=20 $(RUN) -m pytest -s -m long tests/faults/test_random_faults.py -k kill

lint: $(STAMP)  ## Check style, types and that notebooks are committed without outputs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/nbstripout --verify notebooks/*.ipynb

format: $(STAMP)  ## Put code and notebooks into the committed form
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/nbstripout notebooks/*.ipynb

bench: $(STAMP)  ## Measure decoding beside its peers in nine rounds, some hours; peers: pip install '.[bench]'
	$(RUN) -m benchmarks.decode

bench-quick: $(STAMP)  ## The same for two videos, in a few minutes
	$(RUN) -m benchmarks.decode --quick

bench-coverage: $(STAMP)  ## Simulate how often 95 % intervals hold the truth: the tables of docs/measurements.md
	$(RUN) -m benchmarks.coverage

bench-queries: setup-mlflow  ## Measure queries over a million metric lines beside polars, pandas and MLflow
	$(RUN) -m benchmarks.queries

bench-retrieval: $(STAMP)  ## Measure streamed retrieval metrics beside dense matrices and faiss; peers: pip install '.[bench]'
	$(RUN) -m benchmarks.retrieval

bench-verdicts: $(STAMP)  ## Measure what judging files costs beside decoding and forward passes of the newest run
	$(RUN) -m benchmarks.verdicts

bench-features: $(STAMP)  ## Measure what forensic features cost beside decoding the frames that they are measured on
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(RUN) -m benchmarks.features

bench-planted: $(STAMP)  ## Measure what each family of forensic features finds of generated manipulations, and what follows size
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(RUN) -m benchmarks.planted_features
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(RUN) -m benchmarks.planted_in_time
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(RUN) -m benchmarks.feature_proxies

bench-clips: $(STAMP)  ## Measure how fast stored clips are read back and how long training waits for them
	$(RUN) benchmarks/clips.py

bench-index: $(STAMP)  ## Measure what indexing costs per file and per row, as ratios of CPU time
	$(RUN) -m benchmarks.index
	$(RUN) -m benchmarks.near_duplicates

bench-scale: $(STAMP)  ## Measure stages on tables of 10,000 to a million rows: seconds, memory, bytes (takes hours; ROWS=10000)
	$(RUN) -m benchmarks.scale $(if $(ROWS),--rows $(ROWS))

bench-training: $(STAMP)  ## Measure what the engine costs over a bare loop: steps, checkpoints, logging, memory
	$(RUN) -m benchmarks.training

bench-detectors: setup-detectors  ## Measure the engine beside Trainer and Lightning Fabric on five networks; peers: pip install '.[bench]'
	$(RUN) -m benchmarks.detectors

bench-preflight: $(STAMP)  ## Compare the predicted peak of memory with the measured one, model by model
	$(RUN) -m benchmarks.preflight

bench-gpu:  ## Measure on a GPU how busy training keeps it and what the engine costs, 9 minutes; PYTHON= as test-gpu, OUT=file.json, ARGS=--help
	$(GPU_PYTHON) tests/gpu/bare.py benchmarks.gpu --device $(or $(DEVICE),auto) $(if $(OUT),--out $(OUT)) $(ARGS)

bench-pipeline: $(STAMP)  ## Measure what running notebooks costs beside bare papermill, as ratios
	$(RUN) -m benchmarks.pipeline

index-kills: $(STAMP)  ## Kill an index of 10,000 files again and again; the outcome must not change
	$(RUN) -m pytest -m long tests/corpus/test_index_scale.py

lock:  ## Resolve the newest allowed versions anew into requirements.lock and the locks of MLflow, detectors, the app and the site
	rm -rf build/lock && mkdir -p build/lock
	$(call resolve,all,workbench$(comma)dev$(comma)mlflow$(comma)detectors$(comma)app$(comma)docs,$(OLDEST_PYTHON) $(PINNED))
	# The same versions without what is optional: MLflow would bring pandas into every process.
	$(call resolve,base,workbench$(comma)dev,--constraint build/lock/all.txt)
	$(call resolve,mlflow,workbench$(comma)dev$(comma)mlflow,--constraint build/lock/all.txt)
	$(call resolve,detectors,workbench$(comma)dev$(comma)detectors,--constraint build/lock/all.txt)
	$(call resolve,app,workbench$(comma)dev$(comma)app,--constraint build/lock/all.txt)
	$(call resolve,docs,workbench$(comma)dev$(comma)docs,--constraint build/lock/all.txt)
	echo "# Every package FVC runs and is tested with. Made by: make lock" > requirements.lock
	cat build/lock/base.txt >> requirements.lock
	# Debian 12 has Python 3.11.2, and some packages want 3.11.5: then name an older version in OLDEST_PYTHON.
	$(PYTHON) -m pip install --dry-run --quiet --disable-pip-version-check --no-deps --python-version 3.11.0 \
		--only-binary :all: --target build/lock/oldest --requirement requirements.lock
	echo "# What MLflow brings beside requirements.lock. Made by: make lock" > requirements-mlflow.lock
	LC_ALL=C comm -13 build/lock/base.txt build/lock/mlflow.txt >> requirements-mlflow.lock
	echo "# What published networks bring beside requirements.lock. Made by: make lock" > requirements-detectors.lock
	# One machine's GPUs need no nccl for boosting, and it has no wheel for every system.
	LC_ALL=C comm -13 build/lock/base.txt build/lock/detectors.txt | grep -v '^nvidia-' >> requirements-detectors.lock
	echo "# What the page and provenance bring beside requirements.lock. Made by: make lock" > requirements-app.lock
	LC_ALL=C comm -13 build/lock/base.txt build/lock/app.txt >> requirements-app.lock
	echo "# What the site of the documentation brings beside requirements.lock. Made by: make lock" > requirements-docs.lock
	LC_ALL=C comm -13 build/lock/base.txt build/lock/docs.txt >> requirements-docs.lock

clean:  ## Remove the environment and tool caches; runs, data and clips stay
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
