"""Checkpoints that cannot be converted: a one-line error that names the fault, and no files left behind."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import crosshead
from broken import (
    CONVERT,
    INDEX,
    WEIGHTS,
    Case,
    both,
    config,
    cut,
    edit_json,
    leaves_nothing,
    remove,
    state,
    value,
    weight_map,
    write,
)
from toy_checkpoints import MANY_SHARDS, write_stock

KEY, VALUE = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
SHARD = "model-00002-of-00005.safetensors"
SVD = "convert source out --mixer explicit:value_heads=1,method=svd"
HUGE = 10**9


def save_other_tokenizer(folder):
    tokenizer = Tokenizer(models.WordLevel({"<unknown>": 5000}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def save_fused_experts(folder):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, save_original_format=False)


def replace_tensor(name, new):
    return state(lambda tensors: tensors.update({name: new(tensors.get(name))}))


def rename_embedding_to_lm_head(tensors):
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


FILES = {
    "truncated file": Case("model.safetensors", cut(WEIGHTS, -5)),
    "truncated shard": Case(SHARD, cut(SHARD, -5), base="sharded"),
    "empty shard": Case(f"{SHARD} has 0 bytes", write(SHARD, ""), base="sharded"),
    "missing shard": Case(SHARD, remove(SHARD), base="sharded"),
    "longer file": Case("model.safetensors", lambda folder: (folder / WEIGHTS).open("ab").write(b"more")),
    "garbage as header": Case("model.safetensors", write(WEIGHTS, (5).to_bytes(8, "little") + b"{oops")),
    "header without end": Case("18446744073709551615", write(WEIGHTS, b"\xff" * 64)),
    "index of a missing file": Case("00009", weight_map(lm_head__weight="model-00009.safetensors"), base="sharded"),
    "index leads outside": Case("'../m.safetensors'", weight_map(lm_head__weight="../m.safetensors"), base="sharded"),
    "index knows more": Case("'lm_tail'", weight_map(lm_tail=SHARD), base="sharded"),
    "index is no JSON": Case(INDEX, write(INDEX, "{"), base="sharded"),
    "index is empty": Case("weight_map={}", lambda folder: edit_json(folder, INDEX, weight_map={}), base="sharded"),
    "no weights": Case("model.safetensors", remove(WEIGHTS)),
    "pickle": Case("'pytorch_model.bin'", both(remove(WEIGHTS), write("pytorch_model.bin", b"\x80\x02"))),
    "missing tensor": Case(KEY, state(lambda tensors: tensors.pop(KEY))),
    "missing expert": Case(EXPERT, state(lambda tensors: tensors.pop(EXPERT)), base="moe"),
    "fused experts": Case("mlp.experts.down_proj", save_fused_experts, base="moe"),
    "unknown tensor": Case("extra", replace_tensor("extra", lambda old: torch.ones(2))),
    "wrong shape": Case("[3, 24]", replace_tensor(KEY, lambda old: torch.ones(3, 24))),
    "transposed": Case("[24, 16]", replace_tensor(KEY, lambda old: old.T.contiguous())),
    "NaN in a copied tensor": Case(KEY, value(KEY, float("nan"))),
    "infinity": Case("model.norm.weight", value("model.norm.weight", float("inf"))),
    "NaN in a rewritten tensor": Case(VALUE, value(VALUE, float("nan")), SVD),
    "too large for float16": Case(KEY, value(KEY, 1e30), f"{CONVERT} --dtype float16"),
    "fp8": Case("'F8_E4M3'", replace_tensor(KEY, lambda old: old.to(torch.float8_e4m3fn))),
    "int8": Case("'I8'", replace_tensor(KEY, lambda old: old.to(torch.int8))),
    "no tokenizer": Case("tokenizer", remove("tokenizer.json")),
    "only a vocab.txt": Case(
        "from its vocab.txt, with AutoTokenizer", both(remove("tokenizer.json"), write("vocab.txt", "[UNK]\na"))
    ),
    "tokenizer without content": Case("tokenizer", write("tokenizer.json", "{}")),
    "tokenizer is no JSON": Case("tokenizer", write("tokenizer.json", "\0")),
    "tokenizer of another model": Case("5000", save_other_tokenizer),
    "tied, but another head": Case("tie_word_embeddings", config(tie_word_embeddings=True)),
    "tied, but no embedding": Case(
        "model.embed_tokens.weight is missing", state(rename_embedding_to_lm_head), base="tied"
    ),
    "untied, but no head": Case("lm_head.weight", config(tie_word_embeddings=False), base="tied"),
    "no config": Case("config.json", remove("config.json")),
    "an adapter": Case("merge_and_unload", both(remove("config.json"), write("adapter_config.json", "{}"))),
    "an adapter beside a model": Case("merge_and_unload", write("adapter_config.json", "{}")),
    "config is no JSON": Case("config.json", write("config.json", "{'a': 1}")),
    "config is a list": Case("config.json", write("config.json", "[]")),
    "config is empty": Case("config.json", write("config.json", "")),
    "config in UTF-16": Case("config.json", write("config.json", b"\xff\xfe{")),
    "config without bottom": Case("nested", write("config.json", "[" * 100_000)),
    "config says it twice": Case(
        "'model_type'", write("config.json", '{"model_type": "llama", "model_type": "llama"}')
    ),
    "only a SentencePiece model": Case(
        "pip install sentencepiece",
        both(remove("tokenizer.json"), write("tokenizer.model", b"\x0a\x10abc")),
    ),
    "generation config in Latin-1": Case(
        "generation_config.json", write("generation_config.json", '{"a": "é"}'.encode("latin-1"))
    ),
    "template is no JSON": Case("chat_template.json", write("chat_template.json", "{")),
    "code of its own": Case("code", config(auto_map={"AutoModelForCausalLM": "own.Model"})),
    "code of another family": Case("code", config(auto_map={"AutoModel": "modeling_deepseek.DeepseekV3Model"})),
    "already ours": Case("crosshead fold", base="made"),
}
FIELDS = [
    *((name, given, f"model_type={given!r}") for name, given in (("model_type", "mistral"), ("model_type", "gpt2"))),
    ("model_type", "gemma", "model_type='gemma'"),
    ("model_type", ..., "model_type=None"),
    ("model_type", ["llama"], "model_type=['llama']"),
    ("model_type", "qwen2", "q_proj.bias"),
    ("quantization_config", {"quant_method": "gptq"}, "'gptq'"),
    ("quantization_config", {"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
    ("quantization_config", {"quant_method": "fp8"}, "'fp8'"),
    ("num_attention_heads", 5, "(5)"),
    ("num_attention_heads", -4, "num_attention_heads=-4"),
    ("num_attention_heads", 0, "num_attention_heads=0"),
    ("num_attention_heads", "4", "num_attention_heads='4'"),
    ("num_attention_heads", None, "num_attention_heads"),
    ("num_attention_heads", 10**30, "num_attention_heads=1000"),
    ("num_key_value_heads", 3, "[16, 24]"),
    ("num_key_value_heads", 0, "num_key_value_heads=0"),
    ("num_hidden_layers", 0, "num_hidden_layers=0"),
    ("num_hidden_layers", 1, "model.layers.1."),
    ("num_hidden_layers", 3, "model.layers.2."),
    ("num_hidden_layers", HUGE, "num_hidden_layers=1000000000"),
    ("num_hidden_layers", True, "num_hidden_layers=True"),
    ("head_dim", 0, "head_dim=0"),
    ("head_dim", 6, "[32, 24]"),
    ("hidden_size", 32, "[61, 24]"),
    ("hidden_size", ..., "4096"),
    ("hidden_size", None, "hidden_size"),
    ("vocab_size", 60, "[61, 24]"),
    ("vocab_size", "61", "vocab_size='61'"),
    ("hidden_act", "nonsense", "'nonsense'"),
    ("rms_norm_eps", "small", "'small'"),
    ("rope_parameters", {"rope_type": "nonsense", "rope_theta": 1e4}, "'nonsense'"),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "'factor'"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": "big"}, "config.json"),
    ("attention_bias", True, "q_proj.bias"),
    ("pad_token_id", HUGE, "config.json"),
    ("num_labels", HUGE, "num_labels=1000000000"),
    ("dtype", "float99", "float99"),
    ("to_dict", 3, "to_dict=3"),
]
MOE_FIELDS = [
    ("num_local_experts", 5, "mlp.experts.4.down_proj.weight is missing"),
    ("num_local_experts", HUGE, "num_local_experts=1000000000"),
    ("num_hidden_layers", HUGE, "num_hidden_layers=1000000000"),
    ("decoder_sparse_step", 0, "decoder_sparse_step=0"),
    ("mlp_only_layers", [0], "mlp.down_proj.weight"),
]
CASES = FILES | {
    f"{base} {name}={given!r:.40}": Case(words, config(**{name: given}), base=base)
    for base, fields in (("one", FIELDS), ("moe", MOE_FIELDS))
    for name, given, words in fields
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    write_stock(folder / "one")
    write_stock(folder / "sharded", shard_size=MANY_SHARDS)
    write_stock(folder / "tied", tie_word_embeddings=True)
    write_stock(folder / "moe", "Qwen3Moe")
    crosshead.convert(folder / "one", folder / "made", {"knocking": {}}, verify=False)
    return folder


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_checkpoint_gives_one_line_error_and_no_files(case, bases, tmp_path, capfd, monkeypatch):
    leaves_nothing(case, bases, tmp_path, capfd, monkeypatch)
