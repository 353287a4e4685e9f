import gc

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration.streamed_model import StreamedModel
from crosshead.conversion.sources.safetensors_store import SafetensorsStore
from tiers import grid, oldest

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
TOKENS = toys.tokens(3, 11)


def save_model(folder, backbone, mixers=None, **changes):
    model = toys.stock_model(backbone, **changes) if mixers is None else toys.mixed_model(backbone, mixers, **changes)
    model.save_pretrained(folder, max_shard_size="5KB")
    return folder


def open_streamed(folder, **options):
    return StreamedModel(SafetensorsStore(folder), AutoConfig.from_pretrained(folder), **options)


@torch.no_grad()
def streamed_logits(model, tokens=TOKENS):
    hidden = model.embed(tokens)
    for _, layer in model.layers():
        hidden = model.call(layer, hidden)
    with model.head() as head:
        return head(hidden)


@torch.no_grad()
def loaded_logits(folder, tokens=TOKENS, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **({"dtype": torch.float32} | options)).eval()
    return model(tokens).logits


@pytest.mark.parametrize(("backbone", "tied", "backend"), grid(toys.BACKBONES, [False, True], ["eager", "sdpa"]))
def test_streamed_stock_model_gives_same_bits_as_loaded_model(tmp_path, backbone, tied, backend):
    save_model(tmp_path, backbone, tie_word_embeddings=tied)
    model = open_streamed(tmp_path, attn_implementation=backend)
    assert model.config._attn_implementation == backend
    assert torch.equal(streamed_logits(model), loaded_logits(tmp_path, attn_implementation=backend))


@pytest.mark.parametrize(("backbone", "case"), oldest(grid(toys.BACKBONES, toys.CASES, strength=1)))
def test_streamed_mixed_model_gives_same_bits_as_loaded_model(tmp_path, backbone, case):
    save_model(tmp_path, backbone, toys.CASES[case], tie_word_embeddings=case in toys.COMPOSITIONS)
    model = open_streamed(tmp_path)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(streamed_logits(model), loaded_logits(tmp_path))


@pytest.mark.parametrize("backbone", ["Qwen2", "Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("mixers", [None, {"knocking": {}}])
def test_sliding_window_layers_give_same_logits(tmp_path, backbone, mixers):
    save_model(tmp_path / "window", backbone, mixers, **WINDOW)
    save_model(tmp_path / "full", backbone, mixers)
    windowed = streamed_logits(open_streamed(tmp_path / "window"))
    assert torch.equal(windowed, loaded_logits(tmp_path / "window"))
    assert not torch.equal(windowed, streamed_logits(open_streamed(tmp_path / "full")))


def test_dense_and_moe_layers_give_same_logits(tmp_path):
    save_model(tmp_path, "Qwen3Moe", mlp_only_layers=[0])
    assert torch.equal(streamed_logits(open_streamed(tmp_path)), loaded_logits(tmp_path))


def test_llama3_rope_scaling_gives_same_logits(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    save_model(tmp_path, "Llama", rope_parameters=rope)
    assert torch.equal(streamed_logits(open_streamed(tmp_path)), loaded_logits(tmp_path))


@pytest.mark.parametrize("backbone", ["Llama", "Qwen3Moe"])
def test_bfloat16_checkpoint_runs_in_float32_and_bfloat16(tmp_path, backbone):
    toys.stock_model(backbone).bfloat16().save_pretrained(tmp_path)
    assert torch.equal(streamed_logits(open_streamed(tmp_path)), loaded_logits(tmp_path))
    half = streamed_logits(open_streamed(tmp_path, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, loaded_logits(tmp_path, dtype=torch.bfloat16))


def test_run_processes_one_sequence_at_a_time(tmp_path):
    save_model(tmp_path, "Qwen3Moe")
    model, steps = open_streamed(tmp_path), []
    hidden = model.run(TOKENS, lambda: steps.append(None))
    with model.head() as head:
        for sequence, tokens in zip(hidden, TOKENS, strict=True):
            assert torch.equal(head(sequence[None]), loaded_logits(tmp_path, tokens[None]))
    assert len(steps) == 2


def test_attention_hook_receives_hidden_states_and_position_embeddings(tmp_path):
    save_model(tmp_path, "Qwen3", {"knocking": {}})
    model, calls = open_streamed(tmp_path), []

    def hook(attention, args, inputs):
        calls.append((inputs["hidden_states"].shape, inputs["position_embeddings"][0].shape, attention.layer_idx))

    hidden = model.embed(TOKENS)
    for _, layer in model.layers():
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
        hidden = model.call(layer, hidden)
    assert calls == [((3, 11, 24), (1, 11, 8), layer) for layer in range(2)]


def test_only_current_layer_has_weights(tmp_path):
    save_model(tmp_path, "Llama", {"talking": {}})
    model, earlier = open_streamed(tmp_path), []
    for _, layer in model.layers():
        assert not any(tensor.is_meta for tensor in layer.parameters())
        assert not any(tensor.requires_grad for tensor in layer.parameters())
        assert all(tensor.is_meta for layer in earlier for tensor in layer.parameters())
        earlier.append(layer)
    assert all(tensor.is_meta for layer in earlier for tensor in layer.parameters())
    assert len(earlier) == 2


@pytest.mark.parametrize("backbone", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize(("tied", "resident"), [(False, True), (True, False)])
@torch.no_grad()
def test_whole_context_gives_same_logits_and_frees_weights(tmp_path, backbone, tied, resident):
    save_model(tmp_path, backbone, {"knocking": {}}, tie_word_embeddings=tied)
    streaming = open_streamed(tmp_path)
    with streaming.whole(resident) as model:
        for _ in range(2):
            assert torch.equal(model(TOKENS).logits, loaded_logits(tmp_path))
        assert {tensor.is_meta for tensor in model.model.layers.parameters()} == {not resident}
    assert all(tensor.is_meta for tensor in model.parameters())
    assert torch.equal(streamed_logits(streaming), loaded_logits(tmp_path))


def test_layer_is_freed_after_break(tmp_path):
    model = open_streamed(save_model(tmp_path, "Llama"))
    for _, layer in model.layers():  # noqa: B007
        break
    gc.collect()
    assert all(tensor.is_meta for tensor in layer.parameters())


def test_given_config_is_not_modified(tmp_path):
    save_model(tmp_path, "Llama")
    config = AutoConfig.from_pretrained(tmp_path)
    before = config.to_dict()
    StreamedModel(SafetensorsStore(tmp_path), config, dtype=torch.bfloat16, attn_implementation="eager")
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.embed_tokens.weight", None, r"\[61, 24\]"),
        ("model.layers.1.self_attn.k_proj.weight", lambda x: x[:-1], r"\[15, 24\].*\[16, 24\]"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", None, r"\[16, 24\]"),
        ("model.layers.1.mlp.experts.3.down_proj.weight", lambda x: x.T, r"\[16, 24\].*\[24, 16\]"),
        ("model.norm.weight", lambda x: x[:-1], r"\[23\].*\[24\]"),
        ("lm_head.weight", None, r"\[61, 24\]"),
    ],
)
def test_missing_or_misshapen_tensor_is_named_in_error(tmp_path, name, change, message):
    toys.stock_model("Qwen3Moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConversionError, match=f"{name}.*{message}"):
        streamed_logits(open_streamed(tmp_path))
