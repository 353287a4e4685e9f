import errno
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import toys
from crosshead.common.errors import ConversionError
from crosshead.common.free_memory import fits_in_memory
from crosshead.conversion.sources.model_folder import write_json
from crosshead.conversion.verification import reload
from crosshead.conversion.verification.reload import agreement, reload_check
from crosshead.conversion.verification.reload_worker import load_shapes, load_weights, processor_report, tensor_report
from tiers import grid
from toy_tokenizer import toy_tokenizer

TOKENS = toys.tokens(2, 9)
MIXERS = {"knocking": {}, "mixture": {"shared_heads": 2, "active_heads": 3}}
SOUND = {"missing": [], "unexpected": [], "mismatched": [], "errors": []}


def save_model(folder, model):
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return model.set_attn_implementation("sdpa") or model


def damage(folder):
    """Rename one tensor of a checkpoint and change the shape of another one."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.extra"] = tensors.pop("model.layers.0.self_attn.o_proj.weight")
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(3, 24)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


DAMAGED = SOUND | {
    "missing": ["model.layers.0.self_attn.o_proj.weight"],
    "unexpected": ["model.layers.0.extra"],
    "mismatched": ["model.layers.1.self_attn.k_proj.weight"],
}


@pytest.mark.oldest
@pytest.mark.clean_process
@torch.no_grad()
def test_crosshead_model_loads_and_generates_in_clean_process(tmp_path):
    model = save_model(tmp_path / "model", toys.mixed_model("Qwen3Moe", MIXERS, tie_word_embeddings=True))
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    logits = torch.cat([model(sequence[None]).logits for sequence in TOKENS])
    report, outputs = reload_check(tmp_path / "model", TOKENS)
    assert report.pop("processor") == processor_report(toy_tokenizer())
    generated = model.generate(TOKENS, max_new_tokens=reload.NEW_TOKENS, do_sample=False)[:, TOKENS.shape[1] :]
    assert (outputs - logits).abs().max() <= 1e-5
    assert report.pop("continuations") == generated.tolist()
    assert report.pop("texts") == [toy_tokenizer().decode(ids) for ids in generated]
    assert report == SOUND | {"remote_code": True, "checked": "logits and text", "unloaded": []}
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before


def test_model_larger_than_memory_is_checked_by_names_and_shapes(tmp_path, monkeypatch):
    save_model(tmp_path, toys.mixed_model("Llama", MIXERS))
    damage(tmp_path)
    monkeypatch.setattr(reload, "fits_in_memory", lambda size: False)
    report, outputs = reload_check(tmp_path, TOKENS)
    assert report.pop("processor") == processor_report(toy_tokenizer())
    assert report == DAMAGED | {"remote_code": True, "checked": "names and shapes"} and outputs is None


def test_error_in_reload_process_gives_one_line(tmp_path):
    save_model(tmp_path, toys.mixed_model("Llama", {"knocking": {}}))
    code = tmp_path / "modeling_crosshead.py"
    code.write_text("import crosshead\n" + code.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ConversionError, match=f"{tmp_path}.*crosshead") as caught:
        reload_check(tmp_path, TOKENS)
    assert "\n" not in str(caught.value)


def test_killed_reload_process_reports_signal(tmp_path, monkeypatch):
    save_model(tmp_path, toys.stock_model("Llama"))
    worker = tmp_path / "dies.py"
    worker.write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(reload, "WORKER", worker)
    with pytest.raises(ConversionError, match="-9"):
        reload_check(tmp_path, TOKENS)


@pytest.mark.parametrize(("backbone", "mixers", "tied"), grid(toys.BACKBONES, [None, MIXERS], [False, True]))
def test_load_shapes_reports_same_faults_as_load_weights(tmp_path, backbone, mixers, tied):
    changes = {"tie_word_embeddings": tied}
    save_model(
        tmp_path, toys.mixed_model(backbone, mixers, **changes) if mixers else toys.stock_model(backbone, **changes)
    )

    def reports():
        shapes = {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
        loaded = (
            load_weights(AutoModelForCausalLM, tmp_path, {}),
            load_shapes(AutoModelForCausalLM, tmp_path, {}, shapes),
        )
        return [tensor_report(result[1]) for result in loaded]

    assert reports() == [SOUND, SOUND]
    damage(tmp_path)
    assert reports() == [DAMAGED, DAMAGED]


@pytest.mark.clean_process
def test_reload_process_uses_import_path_of_parent(tmp_path, monkeypatch):
    """Libraries from `pip install --user` or PYTHONPATH are importable in the new process, too."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "only_here.py").write_text("")
    worker = tmp_path / "worker.py"
    code = "import json, only_here, sys; open(json.load(open(sys.argv[1]))['result'], 'w').write"
    worker.write_text(f"""{code}('{{"unexpected": []}}')""")
    monkeypatch.setattr(reload, "WORKER", worker)
    monkeypatch.setattr(reload, "fits_in_memory", lambda size: False)  # this worker computes no logits
    save_model(tmp_path / "model", toys.stock_model("Llama"))
    with pytest.raises(ConversionError, match="only_here"):
        reload_check(tmp_path / "model", TOKENS)
    monkeypatch.syspath_prepend(tmp_path / "library")
    assert reload_check(tmp_path / "model", TOKENS)[0]["checked"] == "names and shapes"


def test_agreement_is_the_share_of_equal_tokens():
    assert agreement([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.75


def test_fits_in_memory_compares_with_physical_memory():
    assert fits_in_memory(1 << 20)
    assert not fits_in_memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def test_full_temporary_folder_is_named(tmp_path, monkeypatch):
    save_model(tmp_path, toys.stock_model("Llama"))

    def full(tensors, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reload, "save_file", full)
    with pytest.raises(ConversionError, match=f"temporary folder {tempfile.gettempdir()} is full.*TMPDIR"):
        reload_check(tmp_path, TOKENS)


def test_interrupted_record_leaves_no_partial_file(tmp_path, monkeypatch):
    record = tmp_path / "conversion.json"
    write_json(record, {"a": 1})

    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(record, {"a": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["conversion.json"]
    assert json.loads(record.read_text()) == {"a": 1}
