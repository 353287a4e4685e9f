"""A folded model is a stock checkpoint: programs that read stock checkpoints find no difference."""

import json
import re

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import crosshead
from tiers import grid
from toy_checkpoints import MANY_SHARDS, write_stock
from toys import BACKBONES, STOCK, tokens

FOLDABLE = {"knocking": {"form": "linear", "on": ["query", "key", "value"]}, "explicit": {}}
OLDER_NAMES = {"rope_theta": 10000.0, "torch_dtype": "float32"}
"""Config keys of transformers 4, which folded checkpoints have in addition to those of transformers 5."""
EXPERTS = {"num_experts": 4}
"""Additional config keys of a folded Qwen3-MoE."""
ARCHITECTURES = {backbone: getattr(gguf.MODEL_ARCH, backbone.upper()) for backbone in BACKBONES}
OURS = (b"crosshead", b"mixers", b"auto_map", b"knocking")
"""Words that only files of crosshead models contain."""
INDEX = "model.safetensors.index.json"


def header(file):
    """The length and the JSON header at the start of a safetensors file, as bytes."""
    content = file.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


def stored_names(folder):
    """The tensor names of a checkpoint."""
    return {name for file in folder.glob("*.safetensors") for name in json.loads(header(file)[8:])} - {"__metadata__"}


def gguf_names(backbone, names, layers=2):
    """Tensor name -> name in llama.cpp, or None; its converter stacks the experts of a layer first."""
    known = gguf.get_tensor_name_map(ARCHITECTURES[backbone], layers)
    stacked = {re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in names}
    return {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in stacked}


DIVISIONS = {"one file": None, "many files": MANY_SHARDS}
FORMS = [
    pytest.param(each.values, marks=each.marks, id="-".join(each.values))
    for each in grid(BACKBONES, DIVISIONS, strength=1)
]


@pytest.fixture(scope="module", params=FORMS)
def backbone_and_sharding(request):
    """A backbone, and a key of DIVISIONS."""
    return request.param


@pytest.fixture(scope="module")
def backbone(backbone_and_sharding):
    return backbone_and_sharding[0]


@pytest.fixture(scope="module")
def model_folders(backbone_and_sharding, tmp_path_factory):
    """Folders of a stock model with all usual files, of a crosshead model trained from it, and of its folded copy."""
    parent = tmp_path_factory.mktemp("models")
    source, trained, folded = (parent / name for name in ("source", "trained", "folded"))
    backbone, division = backbone_and_sharding
    write_stock(source, backbone, DIVISIONS[division])
    GenerationConfig(temperature=0.7, top_p=0.9, do_sample=True).save_pretrained(source)
    settings = json.loads((source / "tokenizer_config.json").read_text())  # published ones name the class that loads
    settings["tokenizer_class"] = type(AutoTokenizer.from_pretrained(source)).__name__
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "chat_template.jinja").write_text("{{ messages }}\n")
    (source / "LICENSE").write_text("Do as you like.\n")
    crosshead.convert(source, trained, FOLDABLE, verify=False)
    generator = torch.Generator().manual_seed(0)
    for file in trained.glob("*.safetensors"):
        tensors = load_file(file)
        for name in filter(re.compile(r".*\.mixers\.").match, tensors):
            tensors[name] += 0.3 * torch.randn(tensors[name].shape, generator=generator)
        save_file(tensors, file, metadata={"format": "pt"})
    crosshead.fold(trained, folded, verify=False)
    return source, trained, folded


def test_folded_files_match_stock_checkpoint(model_folders):
    source, trained, folded = model_folders
    files = {file.name: file for file in source.iterdir()}
    assert {file.name for file in folded.iterdir()} == files.keys()
    changed = 0
    for name, file in files.items():
        if name.endswith(".safetensors"):
            assert header(folded / name) == header(file)  # names, dtypes, shapes, order and metadata
            changed += (folded / name).read_bytes() != file.read_bytes()
        elif name == INDEX:
            indexes = [json.loads(path.read_text()) for path in (folded / name, file)]
            assert indexes[0] == indexes[1]
        elif name != "config.json":
            assert (folded / name).read_bytes() == file.read_bytes(), name
    assert changed  # otherwise nothing was trained
    for file in folded.iterdir():
        assert not [word for word in OURS if word in file.read_bytes()], file.name
    assert any(word in file.read_bytes() for file in trained.iterdir() for word in OURS)


def test_folded_config_equals_stock_config(backbone, model_folders):
    source, _, folded = model_folders
    config, expected = (json.loads((folder / "config.json").read_text()) for folder in (folded, source))
    assert config == expected | OLDER_NAMES | (EXPERTS if backbone == "Qwen3Moe" else {})
    read, stock = (AutoConfig.from_pretrained(folder) for folder in (folded, source))
    assert type(read) is STOCK[backbone][0]
    assert {**stock.to_dict(), "_name_or_path": ""} == {**read.to_dict(), "_name_or_path": ""}


@torch.no_grad()
def test_stock_class_loads_folded_model_with_same_logits(backbone, model_folders):
    _, trained, folded = model_folders
    loaded, report = STOCK[backbone][1].from_pretrained(folded, output_loading_info=True, attn_implementation="eager")
    assert not any(report.values())
    expected = AutoModelForCausalLM.from_pretrained(trained, attn_implementation="eager")(tokens()).logits
    torch.testing.assert_close(loaded(tokens()).logits, expected, rtol=1e-4, atol=1e-4)
    assert type(AutoModelForCausalLM.from_pretrained(folded)) is type(loaded)


def test_llama_cpp_maps_every_folded_tensor_name(backbone, model_folders):
    _, trained, folded = model_folders
    known_names = gguf_names(backbone, stored_names(folded))
    assert None not in known_names.values()
    assert len(set(known_names.values())) == len(known_names)
    assert None in gguf_names(backbone, stored_names(trained)).values()  # unfolded models have unknown tensors
