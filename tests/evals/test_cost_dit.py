"""Costs of DiT, against models that are run, formulas and the papers' tables; `crosshead cost` on DiT folders."""

import json
from pathlib import Path

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("diffusers")

import cost_formulas
from broken import run
from crosshead.evals.cost.dit_config import DiTConfig
from crosshead.evals.cost.model import model_cost, usual_length
from crosshead.evals.cost.report import cost_report
from dit_toys import LABELS, LATENTS, MIXTURE, SIZES, TIMES, our_dit, stock_dit
from tiers import first

TOKENS = (SIZES["sample_size"] // SIZES["patch_size"]) ** 2
PAPERS = {
    "S/2": (12, 384, 6, "33", "33", "6.06"),
    "B/2": (12, 768, 12, "130", "131", "23.01"),
    "L/2": (24, 1024, 16, "458", "459", "80.71"),
    "XL/2": (28, 1152, 16, "675", "676", "118.64"),
}
"""Name of a DiT -> blocks, width, heads, millions of parameters without and with routers (MoH, table 2), and 1e9
multiplications as printed in DiT's own table."""


def counted_flops(model):
    """Return the FLOPs of a call with one latent, by PyTorch's counter."""
    # The counter does not know the fused attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(LATENTS[:1], TIMES[:1], LABELS[:1])
    return counter.get_total_flops()


@pytest.mark.parametrize("mixers", [{}, MIXTURE, {"knocking": {}, "gating": {}}], ids=str)
def test_dit_cost_matches_built_model(mixers):
    config = DiTConfig(SIZES).with_mixers(mixers)
    model = our_dit(mixers) if mixers else stock_dit()
    assert usual_length(config, 1) == TOKENS
    cost = model_cost(config, TOKENS)
    assert cost.input_flops == counted_flops(model) and cost.prefill_flops == 2 * (cost.input_flops // 2 // TOKENS)
    named = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert cost.parameters == sum(named.values())
    assert cost.attention_parameters == sum(size for name, size in named.items() if ".attn1." in name)
    assert cost.new_parameters == sum(size for name, size in named.items() if ".mixers." in name)
    assert cost.copied_parameters == sum(size for name, size in named.items() if "blocks.1.norm1.emb." in name)
    assert cost.kv_bytes == cost.decode_flops == 0
    assert cost_report(config, TOKENS)["stock"]["parameters"] == stock_dit().num_parameters()
    with pytest.raises(ValueError, match="length=8"):
        model_cost(config, 8)


@pytest.mark.parametrize("name", first([*reversed(PAPERS)]))
def test_dit_costs_match_tables_of_dit_and_moh_papers(name):
    blocks, width, heads, millions, routed, printed = PAPERS[name]
    sizes = {"num_attention_heads": heads, "attention_head_dim": width // heads, "num_layers": blocks}
    content = {"out_channels": 8, **sizes}
    report = cost_report(DiTConfig(content).with_mixers({"mixture": {"active_heads": heads - 1}}), 256)
    cost, stock = report["cost"], report["stock"]
    # Both papers count the time and class embedding once, and also the position table, which is not trained.
    ours = {part: report[part]["parameters"] - stock["copied_parameters"] + 256 * width for part in ("cost", "stock")}
    assert cost["copied_parameters"] == stock["copied_parameters"] > 0
    assert abs(ours["stock"] / 1e6 - int(millions)) < 0.52  # DiT-B/2 has 130.51 million, which is rounded down
    assert f"{ours['cost'] / 1e6:.0f}" == routed
    assert cost["new_parameters"] == blocks * (heads + 2) * width
    if name == "XL/2":  # the count of diffusers
        assert f"{stock['parameters'] / 1e6:.1f}" == "749.8"
    whole, embedding = cost_formulas.dit(blocks, width, 32, 2, 4, 8)
    assert stock["input_flops"] == 2 * (
        whole + blocks * embedding
    )  # one embedding per block; `whole` has the output's
    assert cost["input_flops"] - stock["input_flops"] == 2 * 256 * cost["new_parameters"]
    # The table's "Gflops" are multiplications, and count one for each normalised number, too.
    assert f"{(whole + (2 * blocks + 1) * 256 * width) / 1e9:.2f}" == printed


@pytest.fixture
def run_cli(tmp_path, capfd, monkeypatch):
    our_dit(MIXTURE).save_pretrained(tmp_path / "ours")
    stock_dit().save_pretrained(tmp_path / "stock")
    monkeypatch.chdir(tmp_path)
    return lambda command: run(capfd, monkeypatch, command)


def test_cost_command_reads_diffusers_folders(run_cli):
    status, out, err = run_cli("cost ours --json")
    assert (status, err) == (0, "")
    expected = cost_report(DiTConfig(SIZES).with_mixers(MIXTURE), TOKENS)
    assert json.loads(out) == {"model": "ours"} | expected and expected["model_type"] == "dit"
    mixer = "mixture:active_heads=75%,shared_heads=2,method=paper,router=two_stage,gate=weighted"
    status, mixed, _ = run_cli(f"cost stock/config.json --mixer {mixer} --json")
    assert json.loads(mixed)["cost"] == expected["cost"]
    content = json.loads(Path("stock/config.json").read_text())
    Path("older.json").write_text(json.dumps(content | {"_class_name": "Transformer2DModel"}))
    assert json.loads(run_cli("cost older.json --json")[1])["cost"] == expected["stock"]
    status, plain, _ = run_cli("cost stock")
    assert (status, "stock" in plain, "copies of one embedding" in plain) == (0, False, True)
    assert str(expected["stock"]["copied_parameters"]) in plain.replace(",", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("ours --length 7", "length=7"),
        ("ours --mixer talking", "mixers.talking"),
        ("ours --mixer mixture:active_heads=5", "mixers.mixture.active_heads=5"),
        ("other.json", "_class_name='UNet2DModel'"),
        ("broken.json", "config.json of broken.json"),
    ],
)
def test_refused_arguments_give_one_line_error(run_cli, tmp_path, arguments, words):
    (tmp_path / "other.json").write_text('{"_class_name": "UNet2DModel"}')
    content = {"_class_name": "DiTTransformer2DModel", "num_layers": "two"}
    (tmp_path / "broken.json").write_text(json.dumps(content))
    status, out, err = run_cli(f"cost {arguments}")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("crosshead: error: ") and words in err
