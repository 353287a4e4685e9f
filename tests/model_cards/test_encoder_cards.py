"""Cost reports, cards and the checks before a push, for text encoders, image encoders and T5."""

import json
import re

import pytest
from huggingface_hub import metadata_load

import crosshead
import toys
import transnext_toys
from broken import run
from crosshead.model_cards.facts import Facts
from crosshead.model_cards.metadata import card_metadata
from crosshead.model_cards.tasks import projections
from encoder_toys import write_encoder
from image_toys import write_image_model
from t5_toys import write_t5
from toy_checkpoints import character_tokenizer


@pytest.fixture
def run_cli(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda command: run(capfd, monkeypatch, command)


@pytest.mark.parametrize(
    ("write", "task", "pipeline"),
    [
        (write_encoder, "ForMaskedLM", "fill-mask"),
        (write_image_model, "ForImageClassification", "image-classification"),
        (write_image_model, "Model", "image-feature-extraction"),
        (write_t5, "ForConditionalGeneration", "text2text-generation"),
        pytest.param(write_t5, "EncoderModel", "feature-extraction", marks=pytest.mark.slow),
        pytest.param(write_t5, "Model", "feature-extraction", marks=pytest.mark.slow),
    ],
)
def test_convert_fold_card_and_push_dry_run(write, task, pipeline, run_cli, tmp_path):
    write(tmp_path / "source", task=task)
    crosshead.convert("source", "made", {"knocking": {"form": "linear"}})
    crosshead.fold("made", "stock", verify=False)
    for folder in ("made", "stock"):
        assert run_cli(f"card {folder}")[0] == 0
        text = (tmp_path / folder / "README.md").read_text()
        assert metadata_load(tmp_path / folder / "README.md")["pipeline_tag"] == pipeline
        assert re.search(rf"(encoder|decoder|model) with{'out' * (folder == 'stock')} ", text)
        examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        exec(compile("\n".join(examples), "README.md", "exec"), names := {})
        assert "lora" in str(names["model"])
        status, out, err = run_cli(f"push {folder} me/{folder} --dry-run")
        assert (status, err) == (0, ""), err
        assert "model.safetensors" in out


@pytest.mark.parametrize("ending", ["ForSequenceClassification", "Model"])
def test_card_of_decoder_without_language_model_head(ending, run_cli, tmp_path):
    config = toys.mixed_config("Llama", {"knocking": {}}, vocab_size=61)
    getattr(crosshead, f"CrossheadLlama{ending}")(config).save_pretrained(tmp_path / "made")
    character_tokenizer().save_pretrained(tmp_path / "made")
    assert run_cli("card made")[0] == 0
    text = (tmp_path / "made" / "README.md").read_text()
    assert "decoder with" in text and "KV cache, bytes" not in text
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile("\n".join(examples), "README.md", "exec"), names := {})
    assert "lora" in str(names["model"])


@pytest.mark.parametrize("ending", ["ForImageClassification", "Model"])
def test_transnext_gets_a_card_but_is_not_converted(ending, run_cli, tmp_path):
    """TransNeXt models get a card and can be pushed, but not converted, folded or verified."""
    classifier = transnext_toys.model_of(transnext_toys.ROUTED, image_size=96)
    (classifier if ending != "Model" else classifier.base_model).save_pretrained(tmp_path / "made")
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 96, "width": 96}}
    (tmp_path / "made" / "preprocessor_config.json").write_text(json.dumps(processor))
    assert run_cli("card made")[0] == 0
    text = (tmp_path / "made" / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile("\n".join(examples), "README.md", "exec"), names := {})
    assert "lora" in str(names["model"]) and "`transnext` encoder" in text
    status, out, err = run_cli("push made me/made --dry-run")
    assert (status, err) == (0, "") and "model.safetensors" in out
    for command in ("convert made again --mixer knocking", "fold made stock", "verify made made"):
        status, out, err = run_cli(command)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert "'crosshead_transnext'" in err and "mixers" in err


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["CrossheadBertForMaskedLM"]}, "fill-mask"),
        ({"_class_name": "CrossheadDiTTransformer2DModel"}, "unconditional-image-generation"),
    ],
)
def test_held_out_loss_has_the_task_of_the_model(config, task):
    facts = Facts("model", config, training={"metrics": {"eval_loss": 2.5}})
    (result,) = card_metadata(facts).eval_results
    assert (result.task_type, result.metric_type, result.metric_value) == (task, "loss", 2.5)


def test_t5_card_has_the_mechanisms_of_each_part(run_cli, tmp_path):
    write_t5(tmp_path / "source")
    mixers = {"talking@encoder+cross": {}, "mixture@decoder": {"active_heads": 3}}
    crosshead.convert("source", "made", mixers, verify=False)
    assert run_cli("card made")[0] == 0
    text = (tmp_path / "made" / "README.md").read_text()
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert json.dumps({"mixers": config["mixers"]}) in text
    assert metadata_load(tmp_path / "made" / "README.md")["tags"][:3] == ["crosshead", "talking", "mixture"]
    assert "A `t5` sequence-to-sequence model with " in text
    command = re.search(r"^crosshead (convert source made .*)$", text, re.MULTILINE)[1]
    assert "--mixer talking@encoder" in command and "active_heads=3" in command and "method=calibrated" in command
    status, _, err = run_cli(f"{command.replace(' made ', ' again ')} --no-verify")
    assert status == 0, err
    assert config == json.loads((tmp_path / "again" / "config.json").read_text())


def test_t5_card_names_the_tokens_of_each_cache(run_cli, tmp_path):
    write_t5(tmp_path / "source")
    crosshead.convert("source", "made", {"talking": {}})
    assert run_cli("card made")[0] == 0
    text = (tmp_path / "made" / "README.md").read_text()
    rows = dict(re.findall(r"^\| (KV cache[^|]*) \| ([\d,]+) \|", text, re.MULTILINE))
    both = rows.pop("KV cache, bytes per token in the stored dtype, for a token of the input and one of the output")
    own, cross = (int(number.replace(",", "")) for number in rows.values())
    assert list(rows) == ["KV cache, bytes per token", "KV cache of cross-attention, bytes per token of the input"]
    assert own + cross == int(both.replace(",", ""))


def test_image_model_card_describes_verification_images(run_cli, tmp_path):
    write_image_model(tmp_path / "source")
    crosshead.convert("source", "made", {"talking": {}})
    assert run_cli("card made")[0] == 0
    text = (tmp_path / "made" / "README.md").read_text()
    assert "on 8 images (random pixel values" in text and "for images of 17 tokens" in text
    (tmp_path / "made" / "preprocessor_config.json").unlink()
    status, _, err = run_cli("push made me/made --dry-run")
    assert status == 1 and "preprocessor_config.json" in err and err.count("\n") == 1


@pytest.mark.parametrize(("backbone", "tokens"), [("ViT", 17), ("DeiT", 18)])
def test_image_model_cost_matches_formula(backbone, tokens, run_cli, tmp_path):
    """Multiplications of one layer and one image, against the formula."""
    write_image_model(tmp_path / "source", backbone, num_hidden_layers=1)
    status, out, _ = run_cli("cost source --mixer mixture:active_heads=50%,method=paper,router=two_stage --json")
    report = json.loads(out)
    assert (status, report["length"]) == (0, tokens)
    hidden, inner, patches = 32, 40, 16
    layer = tokens * (4 * hidden**2 + 2 * hidden * inner) + 2 * tokens**2 * hidden
    whole = layer + patches * 48 * hidden + 3 * hidden
    assert report["stock"]["prefill_multiplications"] == whole // tokens
    routers = hidden * (4 + 2)
    assert report["cost"]["new_parameters"] == routers
    assert report["stock"]["attention_parameters"] == 4 * (hidden**2 + hidden)
    assert report["cost"]["prefill_multiplications"] == (whole + tokens * routers) // tokens
    status, _, err = run_cli("cost source --length 40")
    assert status == 1 and "length=40" in err and str(tokens) in err


@pytest.mark.parametrize(
    ("write", "task", "mixers", "changes"),
    [
        (write_image_model, "ForImageClassification", {"knocking": {"form": "linear"}}, {"num_channels": 1}),
        (write_t5, "ForConditionalGeneration", {"bilinear@encoder": {}}, {}),
    ],
)
def test_card_examples_run_for_grey_images_and_bilinear_t5(write, task, mixers, changes, run_cli, tmp_path):
    """The card's example uses grey images for one channel and puts adapters only on existing projections."""
    write(tmp_path / "source", task=task, **changes)
    if changes:
        processor = json.loads((tmp_path / "source" / "preprocessor_config.json").read_text())
        grey = {"image_mean": [0.5], "image_std": [0.5]}
        (tmp_path / "source" / "preprocessor_config.json").write_text(json.dumps(processor | grey))
    crosshead.convert("source", "made", mixers, verify=False)
    assert run_cli("card made")[0] == 0
    examples = re.findall(r"```python\n(.*?)```", (tmp_path / "made" / "README.md").read_text(), re.DOTALL)
    exec(compile("\n".join(examples), "README.md", "exec"), names := {})
    assert "lora" in str(names["model"])


def test_lora_projections_of_latent_attention():
    shared = {"architectures": ["CrossheadDeepseekV3ForCausalLM"], "kv_lora_rank": 16}
    assert projections(shared | {"q_lora_rank": 8})[0] == "q_a_proj"
    assert projections(shared | {"q_lora_rank": None}) == ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
