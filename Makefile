# Every target is one `lingpt` command, or a tool's, in an environment made on first use.

PYTHON ?= python3#         makes the environment (3.11 or newer)
VENV ?= .venv#             where it lives; `make VENV= …` uses the environment you are in instead
TORCH_INDEX ?=#            another index for PyTorch's build; without a GPU the CPU build's, if it answers
CONSTRAINTS ?= constraints.txt#  the tested versions; `CONSTRAINTS=` takes the newest that are allowed
JOBS ?= 2#                 processes of `make test`

# The CUDA that the driver runs: its major version picks the compiler's. Empty on a machine with no GPU.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
comma := ,
GPU_EXTRAS := $(if $(CUDA),$(comma)cuda$(CUDA))
CPU_INDEX := https://download.pytorch.org/whl/cpu

VENV := $(strip $(VENV))
BIN := $(if $(VENV),$(VENV)/bin/)
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
# What a target needs: train, eval (which has train), dev (which has both) or bench. A file says that it is installed.
ready = $(if $(VENV),$(patsubst %,$(VENV)/.%-installed,$(1)))

FAULT_RECORD ?= docs/results/reliability/faults.json#  of `make soak`

# What the site's reference reads. Linked one by one: in a link to the clone it would meet the link, time and again.
DOCUMENTED = __init__.py common kernels models layers hf

CUDA_SOURCES = $(sort $(shell find kernels ptx_emulator tests -name '*.cu' -o -name '*.cuh'))

# `$(call opt,--key,$(VALUE))` is `--key 'VALUE'`, or nothing where VALUE is empty; a quote in it stays one.
quoted = '$(subst ','\'',$(strip $(1)))'
opt = $(if $(strip $(2)),$(1) $(call quoted,$(2)))
PINS = $(call opt,-c,$(CONSTRAINTS))
RECIPE = --config $(call quoted,$(or $(MODEL),demo)) $(strip $(call opt,--model.attention,$(ATTN)) \
	$(call opt,--data.source,$(DATA)) $(call opt,--data.tokenizer,$(TOKENIZER)))
RUN = $(strip $(call opt,--train.devices,$(DEVICES)) $(call opt,--train.resume,$(RESUME)) \
	$(call opt,--train.name,$(NAME)) $(if $(filter-out 0,$(DRY)),--train.dry_run true))

.DEFAULT_GOAL := help
.PHONY: help install train data eval study curves bench test test-all test-gpu soak check check-lint check-format check-types format docs \
	release-check
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

help: ## show this list
	@echo "make <target> [VARIABLE=value …]"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r name text; do printf '  %-14s %s\n' "$$name" "$$text"; done
	@echo "Any option of the command fits in ARGS: make train ARGS=\"--train.max_steps 100\"; \`lingpt train --help\` lists them."

train: $(call ready,train) ## train a model: MODEL=demo|pythia-160m… ATTN=ours|ours-decay|ours-gated|softmax|gla|unified|hybrid|hybrid-best|linear-best|softmax-best (or ours-gated+output_gate) DATA= TOKENIZER= DEVICES= RESUME= NAME= DRY=1
	$(BIN)lingpt train $(strip $(RECIPE) $(RUN) $(ARGS))

data: $(call ready,train) ## tokenise a corpus, and show what is in it: MODEL= DATA= TOKENIZER=
	$(BIN)lingpt data $(strip $(RECIPE) $(ARGS))

eval: $(call ready,eval) ## score checkpoints, print the paper's Table 2: MODEL= or RUNS="runs/a runs/b", EVAL_DATA=folder
	$(BIN)lingpt eval $(strip $(call opt,--model,$(MODEL)) $(if $(RUNS),--runs $(RUNS)) \
		$(call opt,--data,$(EVAL_DATA)) $(ARGS))

study: $(call ready,eval) ## train and score several attentions: MODEL= or STUDY=, TOKENS= ATTNS="softmax ours" SEEDS= DEVICES= NAME= DATA= TOKENIZER= EVAL_DATA= DRY=1
	$(BIN)lingpt study $(strip $(call opt,--config,$(STUDY)) $(call opt,--model,$(MODEL)) $(call opt,--tokens,$(TOKENS)) \
		$(if $(ATTNS),--attentions $(ATTNS)) $(call opt,--seeds,$(SEEDS)) $(call opt,--devices,$(DEVICES)) \
		$(call opt,--source,$(DATA)) $(call opt,--tokenizer,$(TOKENIZER)) $(call opt,--eval_data,$(EVAL_DATA)) \
		$(call opt,--name,$(NAME)) $(if $(filter-out 0,$(DRY)),--dry_run true) $(ARGS))

curves: $(call ready,train) ## draw the loss curves of runs, or of a study, in one figure: RUNS="runs/a runs/b" (default: all in runs/)
	$(BIN)lingpt curves $(strip $(RUNS) $(ARGS))

bench: $(call ready,train $(if $(CUDA),bench)) ## time the kernels against the baselines (GPU; ARGS="--device cpu" tries it), with ARGS=train training steps, with ARGS=decode decoding
	$(BIN)lingpt bench $(ARGS)

PYTEST = OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(BIN)pytest -n $(strip $(JOBS))

test: $(call ready,dev) ## check this machine in minutes: the tests that are not marked slow
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(call ready,dev) ## run all tests that this machine can run; LINGPT_TEST_DATA=folder adds those on real data
	$(PYTEST) $(ARGS)

test-gpu: $(call ready,dev) ## run the GPU tests, and record them in docs/results/kernels
	$(BIN)pytest -m gpu -p lingpt.tests.gpu_record --gpu-record docs/results/kernels/gpu-tests.json $(ARGS)

soak: $(call ready,dev) ## inject faults for forty minutes (kills, signals, failing disks, damage, odd input), and record it
	LINGPT_SOAK=1 LINGPT_PROPERTY_FACTOR=128 OMP_NUM_THREADS=1 $(BIN)pytest -n $(strip $(JOBS)) -m fault \
		-p lingpt.tests.faults.record --fault-record $(FAULT_RECORD) $(ARGS)

check: check-lint check-format check-types ## check lint, formatting and types (`make -k check` shows all that fails)

check-lint: $(call ready,dev)
	$(BIN)ruff check .

check-format: $(call ready,dev)
	$(BIN)ruff format --check .
	$(BIN)clang-format --dry-run -Werror $(CUDA_SOURCES)

check-types: $(call ready,dev) # the link: mypy sees the package under its own name, whatever the clone's is
	@mkdir -p .types && ln -sfn .. .types/lingpt
	$(BIN)mypy -n 2

docs: $(call ready,dev) ## build the documentation site in site/; a link that leads nowhere is an error
	@mkdir -p .types/docs/lingpt && ln -sfn $(DOCUMENTED:%=../../../%) .types/docs/lingpt
	NO_MKDOCS_2_WARNING=1 $(BIN)mkdocs build --strict $(ARGS)

format: $(call ready,dev) ## format the source
	$(BIN)ruff check --fix .
	$(BIN)ruff format .
	$(BIN)clang-format -i $(CUDA_SOURCES)

release-check: $(call ready,dev) ## check that the record of the GPU tests is of this source
	$(BIN)lingpt kernels release-check

install: $(call ready,dev) ## install everything, for tests and checks too: TORCH_INDEX=URL for another PyTorch than this machine's

ifneq ($(VENV),)
$(VENV)/.torch-installed: $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "LinGPT needs Python 3.11 or newer: make PYTHON=python3.12 …" >&2; exit 2; }
	@echo "making the environment $(VENV), once: PyTorch$(if $(CUDA), for CUDA (gigabytes)) and other packages, minutes"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv --upgrade-deps $(VENV)
	@index=$(call quoted,$(TORCH_INDEX)); \
	if [ -z "$$index" ] && [ -z "$(CUDA)" ] && $(PY) -c \
		'from urllib.request import urlopen; urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then index=$(CPU_INDEX); fi; \
	set -x; $(PY) -m pip install torch $(PINS) $${index:+--index-url "$$index"}
	@touch $@

$(VENV)/.%-installed: pyproject.toml $(VENV)/.torch-installed
	$(PY) -m pip install -e '.[$*$(GPU_EXTRAS)]' $(PINS)
	@test -z "$(CUDA)" || $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo \
		"PyTorch cannot use this GPU (the driver runs CUDA $(CUDA)): remove $(VENV) and give the build that can," \
		"make install TORCH_INDEX=… (pytorch.org lists them)" >&2; exit 2; }
	@touch $@ $(call ready,$(if $(filter eval dev,$*),train eval))
endif
