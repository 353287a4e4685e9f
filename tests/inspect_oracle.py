"""Expected attention weights and routing in the reports of `crosshead inspect`, computed by the oracles in float64."""

import torch

import crosshead
import image_toys
import oracle_latent
import oracles
import toys
from crosshead.evals.inspect.backbones import BACKBONES
from crosshead.evals.inspect.inputs import Sample
from crosshead.evals.inspect.report import attention_modules, layer_records
from oracle_arithmetic import LayerShape
from oracle_layers import oracle_view

LENGTH = 6
NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "dense": "o_proj"} | {n: f"{n}_proj" for n in "qkvo"}
"""Names of projections in the attention modules -> names in the oracle."""
IMAGES = image_toys.IMAGE_BACKBONES


def toy(backbone, mixers):
    """Return a tiny model with eager attention: stock if `mixers` is empty, else with mechanisms."""
    if backbone not in IMAGES:
        return toys.mixed_model(backbone, mixers) if mixers else toys.stock_model(backbone)
    if not mixers:
        config = getattr(image_toys.transformers, f"{backbone}Config")(**toys.IMAGE_SIZES)
        config._attn_implementation = "eager"
        return toys.lopsided(getattr(image_toys.transformers, f"{backbone}Model")(config)).eval()
    config = getattr(crosshead, f"Crosshead{backbone}Config")(**toys.IMAGE_SIZES, mixers=mixers)
    config._attn_implementation = "eager"
    return toys.lopsided(getattr(crosshead, f"Crosshead{backbone}ForImageClassification")(config)).eval()


def sample_of(backbone):
    """Return the input sample of a toy."""
    positions = {name: torch.arange(float(count)).unsqueeze(1) for name, count in (("text", LENGTH), ("target", 5))}
    if backbone in IMAGES:
        special = 2 if backbone == "DeiT" else 1
        patches = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
        positions = {"image": torch.cat([torch.full((special, 2), torch.nan), patches])}
        return Sample({"pixel_values": image_toys.IMAGES[:1]}, {}, positions)
    arguments = {"input_ids": toys.tokens(1, LENGTH)}
    if backbone == "T5":
        arguments["decoder_input_ids"] = toys.tokens(1, 5, seed=3)
    return Sample(arguments, {}, positions)


def shown_and_called(backbone, mixers):
    """Return the model, and (report record, attention module, inputs, key/value source) for each of its layers."""
    model, family = toy(backbone, mixers), BACKBONES[snake(backbone)]
    layers, calls = attention_modules(model, family), {}

    def listen(part):
        def record(layer, arguments, named):
            hidden_states = arguments[0] if arguments else named["hidden_states"]
            calls.setdefault(part, []).append((layer, hidden_states, named.get("key_value_states")))

        return record

    hooks = [layer.attention.register_forward_pre_hook(listen(layer.part.name), with_kwargs=True) for layer in layers]
    records = layer_records(model, family, layers, sample_of(backbone), lambda: None)["layers"]
    for hook in hooks:
        hook.remove()
    return model, [(record, *calls[record["part"]][record["layer"]]) for record in records]


def snake(backbone):
    """Return the stock model type of a backbone."""
    return {"DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3"}.get(backbone, backbone.lower())


def truth(backbone, model, record, module, inputs, source):
    """Return a call's mixers, its oracle weights, and the expected attention weights (H, T, S) and router outputs."""
    part, layer = record["part"], record["layer"]
    config, index = model.config, 0 if backbone == "Albert" else layer
    if backbone == "T5":
        config = getattr(model, "encoder" if part == "encoder" else "decoder").config
        index = layer if part == "encoder" else 2 * layer + (part == "cross")
    mixers = oracle_view(config, index)[0] if hasattr(module, "mixers") else {}
    inputs, source = (None if tensor is None else tensor.double() for tensor in (inputs, source))
    weights = {}
    for name, parameter in module.named_parameters():
        first, _, rest = name.partition(".")
        weights[f"{NAMES.get(first, first)}.{rest}"] = parameter.detach().double()
    if backbone == "Bert":
        weights["o_proj.weight"] = torch.eye(model.base_model.encoder.layer[0].attention.output.dense.in_features)
        weights["o_proj.weight"] = weights["o_proj.weight"].double()
    causal = part == "decoder"
    keys = inputs.shape[1] if source is None else source.shape[1]
    allowed = torch.ones(1, inputs.shape[1], keys, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    if backbone in toys.SHARED_ROTARY:
        return mixers, weights, shared_rotary(config, weights, inputs[0], mixers, allowed[0], layer)
    eps = getattr(config, "layer_norm_eps", 1e-6)
    index = 0 if backbone == "Albert" else layer
    shape = LayerShape(4, 4, 8, index, eps, has_qk_norm=False, is_scaled=backbone != "T5")
    options = {"source": source, "bias": bias_of(model, part, inputs.shape[1]) if backbone == "T5" else None}
    extras = oracles.attention_layer(inputs, weights, shape, mixers, None, None, allowed, **options)[1]
    return mixers, weights, {name: tensor[0] for name, tensor in extras.items()}


def shared_rotary(config, weights, inputs, mixers, allowed, layer):
    """Return the expected attention weights and router outputs of a decoder with shared rotary keys (MLA, GTA)."""
    mla = hasattr(config, "kv_lora_rank")
    heads = (4, 4, 12) if mla else (4, 2, 8)
    shape = LayerShape(*heads, layer, config.rms_norm_eps, has_qk_norm=False)
    base = config.rope_parameters["rope_theta"]
    angles = torch.arange(LENGTH)[:, None] * base ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    if not mla:
        return oracle_latent.tied_sequence(inputs, weights, shape, mixers, angles, allowed)[1]
    sizes = oracle_latent.LatentSizes(12, 8, 6, getattr(config, "rope_interleave", True))
    return oracle_latent.latent_sequence(inputs, weights, shape, sizes, mixers, angles, allowed)[1]


def bias_of(model, part, count):
    """Return T5's relative position bias (H, T, S), read entry by entry; None in cross-attention.

    Each distance under 8 has its own bucket; buckets of later keys start at 16.
    """
    if part == "cross":
        return None
    attention = getattr(model, part).block[0].layer[0].SelfAttention
    table = attention.relative_attention_bias.weight.detach().double()
    bias = torch.empty(4, count, count, dtype=torch.float64)
    for t in range(count):
        for s in range(count):
            bucket = t - s if s <= t else 16 + s - t
            bias[:, t, s] = table[bucket if part == "encoder" else max(t - s, 0)]
    return bias


def shown_maps(rows, weights, mixers, layer):
    """Return the maps that the page shows, from the weights per softmax; for `differential`, differences first."""
    if "differential" not in mixers:
        return rows
    factor = 0.8 - 0.6 * torch.exp(torch.tensor(-0.3 * layer, dtype=torch.float64))
    for sign, pair in ((1, "1"), (-1, "2")):
        q, k = (weights[f"mixers.differential.lambda_{side}{pair}"] for side in "qk")
        factor = factor + sign * torch.exp(q @ k)
    return torch.cat([rows[0::2] - factor * rows[1::2], rows])
