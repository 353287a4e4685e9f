"""`crosshead inspect` of encoders, T5, vision transformers, latent attention and GTA, against the oracles."""

import json
import shutil

import pytest
import torch
from PIL import Image
from transformers import ByT5Tokenizer

import crosshead
import toys
import transnext_oracle
import transnext_toys
from broken import run, snapshot
from crosshead.common.images import model_image, open_processor
from crosshead.evals.inspect.backbones import BACKBONES
from encoder_toys import write_encoder
from image_toys import write_image_model, write_images
from inspect_oracle import IMAGES, shown_and_called, shown_maps, truth
from packed import maps, numbers, unpack
from t5_toys import write_t5
from tiers import first, grid
from toy_checkpoints import write_model

STOCK = {"stock": {}}
TEXT, TARGET = "the cat sat on the mat.", "the dog"
CASES = [
    *grid(["T5", *toys.ENCODERS, *IMAGES], STOCK | toys.ENCODER_CASES, strength=1),
    *grid(toys.SHARED_ROTARY, STOCK | toys.SHARED_ROTARY_CASES, strength=1),
]
STOCK_MODELS = ["Bert", "DeepseekV3", "DeepseekV2", "Albert", "ViT", "DeiT", "T5"]


def test_every_backbone_family_is_supported():
    families = {config.model_type.removeprefix("crosshead_") for config in crosshead.FAMILIES}
    assert families == {name for name in BACKBONES if name.islower()} - {"dit"} | {"transnext"}


@pytest.mark.parametrize(("backbone", "case"), CASES)
@torch.no_grad()
def test_maps_and_routing_match_oracles(backbone, case):
    mixers = (STOCK | toys.CASES_OF.get(backbone, toys.ENCODER_CASES))[case] if case != "stock" else {}
    model, shown = shown_and_called(backbone, mixers)
    assert len(shown) == (6 if backbone == "T5" else 2)
    for record, *call in shown:
        layer_mixers, weights, expected = truth(backbone, model, record, *call)
        depth = 0 if backbone == "Albert" else record["layer"]
        expected_maps = shown_maps(expected["weights"], weights, layer_mixers, depth)
        assert record["maps"]["shape"] == list(expected_maps.shape)
        scale = record["maps"]["scale"]
        roots = [each.sign() * (each.abs() / scale).sqrt() for each in (maps(record["maps"]), expected_maps)]
        assert torch.allclose(*roots, atol=0.5 / 127 + 1e-3)
        for side, turned in (("keys", expected_maps), ("queries", expected_maps.transpose(1, 2))):
            index = torch.tensor(unpack(record[side]["index"])).long().reshape(record[side]["index"]["shape"])
            picked, tolerance = numbers(record[side]["weight"]), 1e-4 * max(1.0, float(expected_maps.abs().max()))
            assert torch.allclose(picked, turned.gather(-1, index.clamp_min(0)) * (index >= 0), atol=tolerance)
            largest = turned.abs().topk(index.shape[-1], dim=-1).values
            assert torch.allclose(picked.abs(), largest, atol=tolerance)
        assert (record["routing"] is not None) == ("mixture" in layer_mixers)
        if record["routing"]:
            assert torch.allclose(numbers(record["routing"]["gates"]), expected["gates"].T, atol=1e-3)
            assert torch.allclose(numbers(record["routing"]["scores"]), expected["probabilities"].T, atol=1e-3)


@pytest.mark.parametrize("backbone", first(STOCK_MODELS, 2))
@torch.no_grad()
def test_value_and_output_norms_of_stock_layers(backbone):
    """Expected values from matmuls in float64, expected outputs as the weighted sums of these values."""
    model, shown = shown_and_called(backbone, {})
    for record, module, inputs, source in shown:
        read = (inputs if source is None else source)[0].double()
        names = {"value", "v", "v_proj"} & set(dict(module.named_children()))
        if names:
            projection = getattr(module, names.pop())
            bias = 0 if projection.bias is None else projection.bias.double()
            values = (read @ projection.weight.double().T + bias).unflatten(-1, (4, -1))
        else:
            latent = (read @ module.kv_a_proj_with_mqa.weight.double().T)[:, :12]
            latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            latent = latent * module.kv_a_layernorm.weight.double()
            values = (latent @ module.kv_b_proj.weight.double().T).unflatten(-1, (4, 14))[..., 8:]
        weights = truth(backbone, model, record, module, inputs, source)[2]["weights"]
        outputs = torch.stack([weights[head] @ values[:, head] for head in range(4)])
        assert torch.allclose(numbers(record["value_norms"]), values.norm(dim=-1).T, atol=1e-3)
        assert torch.allclose(numbers(record["output_norms"]), outputs.norm(dim=-1), atol=1e-3)


@pytest.mark.parametrize("backbone", ["Bert", "ViT"])
@torch.no_grad()
def test_head_measures_without_causal_mask(backbone):
    model, shown = shown_and_called(backbone, {})
    (record, *call), *_ = shown
    weights = truth(backbone, model, record, *call)[2]["weights"].tolist()
    count = len(weights[0])
    positions = {token: divmod(token - 1, 4) for token in range(1, count)} if backbone == "ViT" else None
    for head, rows in enumerate(weights):
        if positions:
            pairs = [(t, s) for t in positions for s in positions]
            distances = {
                (t, s): sum((a - b) ** 2 for a, b in zip(positions[t], positions[s], strict=True)) ** 0.5
                for t, s in pairs
            }
        else:
            distances = {(t, s): abs(t - s) for t in range(count) for s in range(count)}
        expected = {
            "first": sum(row[0] for row in rows) / count,
            "own": sum(rows[t][t] for t in range(count)) / count,
            "distance": sum(rows[t][s] * distance for (t, s), distance in distances.items())
            / sum(rows[t][s] for t, s in distances),
        }
        if not positions:
            expected["previous"] = sum(rows[t][t - 1] for t in range(1, count)) / (count - 1)
            expected["next"] = sum(rows[t][t + 1] for t in range(count - 1)) / (count - 1)
        measures = {name: record["measures"][name][head] for name in expected}
        assert measures == pytest.approx(expected, rel=1e-3)
        assert ("previous" in record["measures"]) == (backbone == "Bert")


@pytest.fixture
def report(tmp_path, monkeypatch, capfd):
    """A function that runs the command and returns the only model of the report."""
    monkeypatch.chdir(tmp_path)

    def measured(*arguments):
        status, _, err = run(capfd, monkeypatch, ["inspect", *arguments, "--out", "page.html"])
        assert (status, err) == (0, "")
        (model,) = json.loads((tmp_path / "page.json").read_text())["models"]
        return model

    return measured


@pytest.mark.parametrize("task", first(["ForMaskedLM", "ForSequenceClassification", "Model"]))
def test_encoder_special_tokens_are_shown(tmp_path, report, task):
    write_encoder(tmp_path / "bert", task=task)
    model = report("bert", "--text", "w5 w9")
    assert model["texts"][0]["tokens"] == ["w1", "w5", " w9", "w2"]
    part = {"name": "encoder", "rows": "text", "columns": "text", "causal": False, "layers": 2}
    assert (model["parts"], model["layers"], model["head_dim"]) == ([part], 2, 8)


def test_shared_albert_layer_is_shown_at_every_depth(tmp_path, report):
    model = toys.mixed_model("Albert", {"talking": {}}, num_hidden_layers=3)
    write_model(model, tmp_path / "albert")
    record = report("albert", "--text", TEXT)
    layers = record["texts"][0]["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2]
    assert len({layer["maps"]["data"] for layer in layers}) == 3
    assert [(each["name"], each["layers"]) for each in record["matrices"]][:2] == [
        ("logits", [0, 1, 2]),
        ("weights", [0, 1, 2]),
    ]
    assert record["parameters"] == model.num_parameters()


def test_t5_report_has_encoder_decoder_and_cross_attention(tmp_path, report):
    mixers = {"encoder": {"talking": {}}, "cross": {"mixture": {"active_heads": 3, "layers": [1]}}}
    write_model(toys.mixed_model("T5", mixers, num_layers=3, num_decoder_layers=2), tmp_path / "t5")
    record = report("t5", "--text", TEXT, "--target", TARGET)
    (text,) = record["texts"]
    assert (len(text["tokens"]), text["target"]["tokens"][1:]) == (len(TEXT), list(TARGET))
    sizes = {"encoder": (len(TEXT),) * 2, "decoder": (len(TARGET) + 1,) * 2, "cross": (len(TARGET) + 1, len(TEXT))}
    for part, count in (("encoder", 3), ("decoder", 2), ("cross", 2)):
        layers = [layer for layer in text["layers"] if layer["part"] == part]
        assert [layer["layer"] for layer in layers] == list(range(count))
        assert {tuple(layer["maps"]["shape"][1:]) for layer in layers} == {sizes[part]}
    matrices = {(each["part"], each["mechanism"], *each["layers"]) for each in record["matrices"]}
    assert matrices == {*(("encoder", "talking", layer) for layer in range(3)), ("cross", "mixture", 1)}


def test_t5_encoder_model_report_has_encoder_only(tmp_path, report):
    config = toys.mixed_config("T5", {"mixture": {"active_heads": 3}})
    write_model(crosshead.CrossheadT5EncoderModel(config), tmp_path / "t5")
    assert [part["name"] for part in report("t5", "--text", TEXT)["parts"]] == ["encoder"]


@pytest.mark.parametrize("backbone", first(["DeiT", "ViT"]))
def test_image_report_has_patch_tokens_and_picture(tmp_path, report, backbone):
    special = ["class", "distillation"] if backbone == "DeiT" else ["class"]
    write_image_model(tmp_path / "model", backbone, image_size=[16, 24], patch_size=[4, 8])
    processor = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    processor["size"] = {"height": 16, "width": 24}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(processor))
    halves = Image.new("RGB", (24, 16), (200, 100, 0))
    halves.paste((0, 50, 250), (12, 0, 24, 16))
    halves.save(tmp_path / "halves.png")
    (text,) = report("model", "--image", "halves.png")["texts"]
    assert text["tokens"] == [*special, *(f"patch ({row}, {column})" for row in range(4) for column in range(3))]
    image = text["image"]
    assert (text["name"], image["rows"], image["columns"], image["special"]) == ("halves.png", 4, 3, len(special))
    picture = unpack(image["picture"]).reshape(16, 24, 3) % 256
    assert picture[3, 2].tolist() == [200, 100, 0] and picture[15, 20].tolist() == [0, 50, 250]


@pytest.mark.parametrize("case", first(["mixture", "plain", "talking", "differential"]))
def test_transnext_last_stage_matches_oracle(tmp_path, report, case):
    model = transnext_toys.model_of(transnext_toys.CASES[case], image_size=96)
    model.save_pretrained(tmp_path / "model")
    write_image_model(tmp_path / "vit", image_size=96)
    shutil.copy(tmp_path / "vit" / "preprocessor_config.json", tmp_path / "model")
    image = write_images(tmp_path / "images", 1) / "0.png"
    model_record = report("model", "--image", str(image))
    (text,), attention = model_record["texts"], model.transnext.block4[0].attn
    assert text["tokens"] == [f"patch ({row}, {column})" for row in range(3) for column in range(3)]
    assert model_record["parts"] == [
        {"name": "last", "rows": "image", "columns": "image", "causal": False, "layers": 1}
    ]
    assert (model_record["query_heads"], model_record["key_value_heads"], model_record["head_dim"]) == (4, 4, 8)

    inputs = []
    attention.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    processor = open_processor(tmp_path / "model", "in model")
    with torch.no_grad():
        model(model_image(image, processor, model.config, "in model"))
    weights = {name: each.detach().double() for name, each in attention.named_parameters()}
    mixers = model.config.mixers_of_layer(4)
    shape = transnext_oracle.Attention(4, 1, 3, 3, 4)
    expected = transnext_oracle.attention_weights(list(inputs[0][0].double()), (3, 3), weights, shape, mixers)
    shown = shown_maps(expected, weights, mixers, 4)
    (record,) = text["layers"]
    assert torch.allclose(maps(record["maps"]), shown, atol=0.02)
    assert torch.allclose(numbers(record["keys"]["weight"])[:, :, 0].abs(), shown.abs().amax(-1), atol=1e-3)
    assert (record["routing"] is not None) == ("mixture" in mixers)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder with a model of each kind, an image and a broken image."""
    write_encoder(tmp_path / "bert")
    write_encoder(tmp_path / "short", max_position_embeddings=20)
    write_model(toys.stock_model("T5"), tmp_path / "t5")
    (write_t5(tmp_path / "bytes", vocab_size=384) / "tokenizer.json").unlink()
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    write_image_model(tmp_path / "vit")
    write_image_model(tmp_path / "fine", image_size=92)
    write_image_model(tmp_path / "bare")
    (tmp_path / "bare" / "preprocessor_config.json").unlink()
    transnext_toys.model_of({}, sr_ratios=[8, 4, 2, 2]).save_pretrained(tmp_path / "windows")
    write_images(tmp_path / "images", 1)
    (tmp_path / "images" / "0.png").rename(tmp_path / "image.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "image.png").read_bytes()[:60])
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED_USES = [
    (["bert", "--image", "image.png"], "needs --text"),
    (["bert", "--text", TEXT, "--target", TARGET], "no use for --target"),
    (["bert", "--text", TEXT, "--image", "image.png"], "no use for --image"),
    (["bert", "vit", "--text", TEXT], "vit has no use for --text"),
    (["short", "--text", "w5 " * 30], "use its first 53 characters"),
    (["t5", "--text", TEXT], "needs --target"),
    (["bytes", "--text", TEXT, "--target", TARGET], "bytes has a ByT5Tokenizer, which gives no positions"),
    (["t5", "--text", TEXT, "--text", "another", "--target", TARGET], "2 --text and 1 --target"),
    (["t5", "--text", TEXT, "--target", " "], "target of"),
    (["vit", "--text", TEXT], "no use for --text"),
    (["vit", "--image", "none.png"], "none.png"),
    (["vit", "--image", "broken.png"], "broken.png"),
    (["vit", "--image", "image.png", "--image", "./image.png"], "two images"),
    (["bare", "--image", "image.png"], "preprocessor_config.json"),
    (["fine", "--image", "image.png"], "530 tokens"),
    (["windows", "--image", "image.png"], "sr_ratios=[8, 4, 2, 2]"),
]


def test_refused_options_give_one_line_and_no_files(models, capfd, monkeypatch):
    before = snapshot(models)
    for arguments, words in REFUSED_USES:
        status, out, err = run(capfd, monkeypatch, ["inspect", *arguments, "--out", "page.html"])
        assert (status, out) == (1, ""), arguments
        assert err.startswith("crosshead: error: ") and err.count("\n") == 1, err
        assert words in err, err
        assert snapshot(models) == before
