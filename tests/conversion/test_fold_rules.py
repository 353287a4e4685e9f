"""Fold rules on random weights: the folded stock layer computes the same as the layer with mechanisms."""

import pytest
import torch

import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.fold import fold_layers
from crosshead.conversion.sources.tensor_store import DTYPE_NAMES, Entry

FOLDABLE = {
    "linear knock": {"knocking": {"form": "linear", "on": ["query", "key", "value"]}},
    "linear knock on values": {"knocking": {"form": "linear"}},
    "fewer components": {"explicit": {"norm": False, "key_heads": 1, "value_heads": [1, 2]}},
    "combined values": {"explicit": {"norm": False, "on": ["value"]}},
    "combinations in groups": {"explicit": {"norm": False, "groups": 2, "value_heads": [2, 4]}},
    "all heads": {"mixture": {"active_heads": 4, "shared_heads": 1, "gate": "binary"}},
    "some layers": {"knocking": {"form": "linear", "layers": [1]}},
    "three at once": {
        "knocking": {"form": "linear", "on": ["key", "value"]},
        "explicit": {"norm": False, "key_heads": 1},
        "mixture": {"active_heads": 4, "router": "query_norm", "gate": "binary"},
    },
}
STUCK = [
    ({"knocking": {}}, "form='mlp'"),
    ({"knocking": {"form": "gate"}}, "form='gate'"),
    ({"explicit": {"norm": True}}, "norm=true"),
    ({"mixture": {"active_heads": 3, "gate": "binary"}}, "active_heads=3 of 4"),
    ({"mixture": {"active_heads": 4}}, "gate='weighted'"),
    ({"talking": {}}, "'talking'"),
    ({"differential": {}}, "'differential'"),
    ({"gating": {}}, "'gating'"),
    ({"knocking": {"form": "linear", "layers": [0]}, "talking": {"layers": [1]}}, "'talking'"),
]


class StateStore:
    """A tensor store over a state dict."""

    def __init__(self, state):
        self.state = state
        self.entries = {
            name: Entry(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()
        }
        self.shards = {"model.safetensors": list(state)}

    def read(self, name):
        return self.state[name].clone()


def folded_state(model, stock):
    rewrites = fold_layers(StateStore(model.state_dict()), model.config, {n: t.shape for n, t in stock.items()})
    state = model.state_dict()
    return {name: rewrites.tensor(name) if name in rewrites.layers else state[name] for name in stock}


@pytest.mark.parametrize("mixers", FOLDABLE.values(), ids=FOLDABLE)
@pytest.mark.parametrize("backbone", toys.BACKBONES)
def test_folded_stock_model_matches_trained_mixers(backbone, mixers):
    heads = {"num_key_value_heads": 4} if "groups" in mixers.get("explicit", {}) else {}
    model = toys.mixed_model(backbone, mixers, **heads)
    stock = toys.stock_model(backbone, **heads)
    stock.load_state_dict(folded_state(model, stock.state_dict()))
    tokens = toys.tokens()
    expected = model(tokens).logits
    assert (stock(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", toys.OF_DECODERS)
@pytest.mark.parametrize("backbone", ["Llama", "Qwen3"])
def test_untrained_neutral_mixers_fold_to_source_weights(backbone, name):
    for mixers in toys.NEUTRAL[name]:
        stock = toys.stock_model(backbone)
        model = getattr(toys.crosshead, f"Crosshead{backbone}ForCausalLM")(toys.mixed_config(backbone, mixers))
        model.load_state_dict(stock.state_dict(), strict=False)
        for key, tensor in folded_state(model, stock.state_dict()).items():
            assert torch.equal(tensor, stock.state_dict()[key]), key


@pytest.mark.parametrize(("mixers", "reason"), STUCK, ids=str)
def test_unfoldable_mixers_are_refused_with_reason(mixers, reason):
    model = toys.mixed_model("Llama", mixers)
    with pytest.raises(ConversionError) as caught:
        fold_layers(StateStore(model.state_dict()), model.config, {})
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
