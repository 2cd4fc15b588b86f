# Sets up a virtual environment of its own with pinned packages, then trains, tests, checks or documents with it.
#
#     make train ARGS="strategy=pipeline_gpipe trainer.max_steps=200"
#     make test ARGS="tests/pipeline -k gpipe"
#     make test JOBS=0                         # one test at a time, without pytest-xdist: for a debugger
#     make timm-tests                          # those that need timm; make test runs them too, if it is given no ARGS
#     make programs                            # tests that start whole programs: scripts, launchers, the wheel, a kill
#     make thorough                            # all tests: make test leaves rows out that repeat others, and programs
#     make cluster-tests                       # runs killed and preempted under torchrun, Ray and a SLURM of two nodes
#     make lightning-tests TESTS=/folder/tests_pytorch   # Lightning's own tests, from its repository, with our strategies
#     make gpu                                 # what can be seen on this machine's GPUs, into docs/gpu.json
#     make matrix                              # a part of the tests under each Python that is supported and found here
#     make matrix TORCH="2.12.*"               # with another torch than the oldest and the newest: of CUDA, by default
#     make docs                                # the site of docs/, into site/
#     make zoo                                 # nearly three hundred models under every layout, into docs/zoo.md
#     make zoo ARGS="--only 'gpt2*' --traces"  # some of them; ARGS="--resume" goes on after an interruption
#     make others                              # modules of other people's packages, into docs/others.md: hours
#     make others ARGS="--room lightly"        # some of them; ARGS="--resume" goes on after an interruption
#     make optimizers                          # optimizers under every layout, into docs/optimizers.md: ten minutes
#     make faults                              # faults that check has to find, into docs/faults.md: five minutes
#     make torture                             # runs that are killed at every moment, into docs/torture.md: an hour or two
#     make torture ARGS="--sample"             # some of them; ARGS="--resume" goes on after an interruption

PYTHON ?= python3
VENV ?= .venv
# The zoo has one of its own: torchvision would change what the tests import.
ZOO_VENV ?= .venv-zoo
# Other people's packages have one of their own too: they bring several hundred others.
OTHERS_VENV ?= .venv-others
# For the tests of model=timm, these two lie in a folder of their own, for the same reason.
TIMM := $(abspath $(VENV)/timm)
ARGS ?=
# Tests at a time. Each is of up to eight processes, which often wait for each other: three keep two cores busy. They run
# in the order of their files: by itself pytest-xdist puts files of few tests last, which here are the slowest.
JOBS ?= 3

# For `make matrix`: the versions, what its tests need besides the recipes, and the tests.
PYTHONS ?= 3.11 3.12 3.13
TORCH ?= 2.11.* 2.13.*
MATRIX_NEEDS := pytest pytest-timeout pytest-xdist setproctitle filelock peft transformers
MATRIX_TESTS := tests/schedules tests/private tests/strategies/test_refusals.py tests/strategies/test_contract.py

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# For the recipes a third of the packages is enough, for the pages fewer; a set-up with all of them has these.
RECIPES_READY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.ready-recipes)
DOCS_READY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.ready-docs)
RUN_ZOO := $(ZOO_VENV)/bin/python
ZOO_READY := $(ZOO_VENV)/.ready
RUN_OTHERS := $(OTHERS_VENV)/bin/python
OTHERS_READY := $(OTHERS_VENV)/.ready-others
TIMM_READY := $(TIMM)/.ready

.PHONY: train compare test timm-tests programs thorough cluster-tests slurm zoo others optimizers faults torture lightning-tests gpu matrix lint docs clean

train: $(RECIPES_READY)
	$(RUN) -m recipes.train strategy=pipeline_async $(ARGS)

compare: $(RECIPES_READY)
	$(RUN) -m recipes.compare $(ARGS)

TEST_TIMM = OMP_NUM_THREADS=1 PYTHONPATH=$(TIMM) $(RUN) -m pytest -m "timm" tests/recipes

test: $(READY) $(if $(ARGS),,$(TIMM_READY))
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)
	$(if $(ARGS),,$(TEST_TIMM))

thorough: $(READY) $(if $(ARGS),,$(TIMM_READY))
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --thorough $(ARGS)
	$(if $(ARGS),,$(TEST_TIMM) --thorough)

timm-tests: $(TIMM_READY)
	$(TEST_TIMM) $(ARGS)

programs: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "programs" $(ARGS)

cluster-tests: $(READY) slurm
	OMP_NUM_THREADS=1 $(RUN) -m pytest --thorough $(ARGS) tests/clusters

# Where it may be installed; elsewhere its tests are reported as not run.
slurm:
	@if [ ! -x /usr/sbin/slurmctld ] && [ -x /usr/bin/apt-get ] && [ "$$(id -u)" = 0 ]; then \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge) > /dev/null || \
		echo "SLURM can't be installed: its tests are not run"; fi

zoo: $(ZOO_READY)
	$(RUN_ZOO) -m tools.zoo --page docs/zoo.md --record $(ARGS)

others: $(OTHERS_READY)
	$(RUN_OTHERS) -m tools.others --page docs/others.md $(ARGS)

optimizers: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m tools.optimizer_table --page docs/optimizers.md $(ARGS)

faults: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m tools.faults --page docs/faults.md $(ARGS)

torture: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m tools.torture --record $(ARGS)

# PyPI's archives of Lightning hold no tests: TESTS is the folder at the tag of the version that is installed.
lightning-tests: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR):$(dir $(abspath $(TESTS)))" $(RUN) -m tools.lightning_suite $(TESTS) $(ARGS)

gpu: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m tools.gpu

# Each pair has an environment of its own, without the pins of constraints.txt: what a user gets who installs it today.
matrix:
	@for version in $(PYTHONS); do command -v python$$version > /dev/null || { echo "python$$version isn't here"; continue; }; \
		for torch in $(TORCH); do venv=.venv-matrix/$$version-$${torch%.\*}; echo "Python $$version, torch $$torch"; \
			python$$version -m venv $$venv && \
			$$venv/bin/python -m pip install -qq --disable-pip-version-check "torch==$$torch" -e ".[recipes]" $(MATRIX_NEEDS) && \
			OMP_NUM_THREADS=1 $$venv/bin/python -m pytest -q $(or $(ARGS),$(MATRIX_TESTS)) || exit 1; \
		done; \
	done

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

docs: $(DOCS_READY)
	$(RUN) -m zensical build --clean --strict

clean:
	rm -rf $(VENV) $(ZOO_VENV) $(OTHERS_VENV) .venv-matrix build site .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made anew when what is to be installed changes; a set-up that was cut short has no .ready and is done again.
define SET_UP
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/one"; exit 1; }
	@echo "Setting up $(@D): once, a minute or more"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@
endef
$(READY) $(ZOO_READY) $(VENV)/.ready-recipes $(VENV)/.ready-docs: pyproject.toml constraints.txt
	$(SET_UP)

# torch first, for the CPU where pip's settings say so: what a package would bring by itself is built for CUDA.
$(OTHERS_READY): tools/others/requirements.txt tools/others/constraints.txt
	@echo "Setting up $(OTHERS_VENV): once, half an hour or more"
	$(PYTHON) -m venv $(OTHERS_VENV)
	@for package in torch torchvision lightning pytorch-lightning $$(sed 's/#.*//' tools/others/requirements.txt); do \
		$(RUN_OTHERS) -m pip install -qq --disable-pip-version-check -c tools/others/constraints.txt "$$package" || \
			echo "$$package can't be installed: its modules are not run"; done
	@touch $@

$(TIMM_READY): $(READY)
	$(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target $(TIMM) \
		timm torchvision
	@touch $@

$(READY): EXTRAS = recipes,ray,optuna,wandb,mlflow,test,docs
$(VENV)/.ready-recipes: EXTRAS = recipes
$(VENV)/.ready-docs: EXTRAS = docs
$(ZOO_READY): EXTRAS = zoo
