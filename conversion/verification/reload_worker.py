"""Loads a model folder as its users do: a script that `reload.py` runs in a process that cannot import crosshead.

usage: python -P reload_worker.py JOB.json

It imports nothing from crosshead. The results go to the files that the job names; an error is the last line on stderr.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.17's public one needs torchvision

IMAGE_PROCESSOR = "preprocessor_config.json"
TEXTS = ("A pair of texts,", "of which this is the second.")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LOADING = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Makes transformers report all tensors that do not fit, instead of raising an error for the first one."""


def load_weights(auto_class: Any, folder: Path, trusted: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Load the model in float32; return it with the loading info of transformers."""
    return auto_class.from_pretrained(folder, dtype=torch.float32, **trusted, **LOADING)


def load_shapes(
    auto_class: Any, folder: Path, trusted: dict[str, Any], shapes: dict[str, list[int]]
) -> tuple[Any, dict[str, Any]]:
    """Load names and shapes only, from tensors on the meta device; return the model with the loading info."""
    config = AutoConfig.from_pretrained(folder, **trusted)
    with torch.device("meta"):
        model_class: Any = type(auto_class.from_config(config, **trusted))
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    return model_class.from_pretrained(None, config=config, state_dict=tensors, device_map={"": "meta"}, **LOADING)


def tensor_report(info: dict[str, Any]) -> dict[str, Any]:
    """Return the names of the tensors that do not fit, by kind."""
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(name for name, *_ in info["mismatched_keys"]),
        "errors": list(info["error_msgs"]),
    }


def unloaded(model: Any) -> list[str]:
    """Return the names of the tensors that are still on the meta device, without values."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return sorted(name for name, tensor in named if tensor.is_meta)


def load_processor(folder: Path, reads_images: bool, trusted: dict[str, Any]) -> Any:
    """Load the tokenizer or the image processor; None for a model that reads images without a file for it."""
    if not reads_images:
        return AutoTokenizer.from_pretrained(folder, **trusted)
    is_there = (folder / IMAGE_PROCESSOR).is_file()
    return AutoImageProcessor.from_pretrained(folder, **trusted) if is_there else None


def processor_report(processor: Any) -> dict[str, Any]:
    """Return special tokens and encoding of two texts by a tokenizer, or all settings of an image processor."""
    if hasattr(processor, "special_tokens_map"):
        special = {name: str(getattr(processor, name, None)) for name in SPECIAL_TOKENS}
        return special | {name: list(values) for name, values in processor(*TEXTS).items()}
    return {} if processor is None else json.loads(processor.to_json_string())


def model_inputs(config: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the model's inputs for sequences (B, T).

    An encoder-decoder reads the first half in the encoder and the second half, after a start token, in the decoder.
    """
    if not getattr(config, "is_encoder_decoder", False):
        return {"input_ids": tokens}
    half = tokens.shape[1] // 2
    answer = tokens[:, half:].clone()
    answer[:, 0] = start_token(config)
    return {"input_ids": tokens[:, :half], "decoder_input_ids": answer}


def start_token(config: Any) -> int:
    """Return the token that a decoder starts with; by default the padding token."""
    start = getattr(config, "decoder_start_token_id", None)
    return int(config.pad_token_id or 0 if start is None else start)


@torch.no_grad()
def continue_greedily(model: Any, tokens: torch.Tensor, new_tokens: int) -> list[list[int]]:
    """Return greedy continuations of sequences (B, T)."""
    model.generation_config = GenerationConfig()  # the folder's own may sample, penalise or stop
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    start = tokens.shape[1]
    if model.config.is_encoder_decoder:
        tokens, start = model_inputs(model.config, tokens)["input_ids"], 1
        # transformers creates the decoder's cache with as many layers as the encoder has.
        is_cached = model.config.num_hidden_layers >= model.config.num_decoder_layers
        options |= {"decoder_start_token_id": start_token(model.config), "use_cache": is_cached}
    generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return generated[:, start:].tolist()


@torch.no_grad()
def run_model(model: Any, tokenizer: Any, tokens: torch.Tensor, new_tokens: int, logits: Path) -> dict[str, Any]:
    """Write the outputs for sequences (B, T) or pixel values to a file; return greedy continuations of the sequences.

    The outputs are logits, or last hidden states of text encoders and of models without a head.
    """
    model.eval()
    generates = model.can_generate()
    if tokens.is_floating_point():
        outputs = [model(image[None]) for image in tokens]
    else:
        run = model if generates else model.base_model
        outputs = [run(**model_inputs(model.config, sequence[None])) for sequence in tokens]
    save_file({"logits": torch.cat([out.get("logits", out.get("last_hidden_state")) for out in outputs])}, logits)
    if not generates:
        return {}
    continuations = continue_greedily(model, tokens, new_tokens)
    return {"continuations": continuations, "texts": [tokenizer.decode(ids) for ids in continuations]}


def main(job: dict[str, Any]) -> None:
    """Run one job of `reload.py`."""
    torch.set_num_threads(job["threads"])
    folder, trusted = Path(job["folder"]), {"trust_remote_code": job["remote_code"]}
    auto_class = getattr(transformers, job["auto_class"])
    inputs = load_file(job["inputs"])["inputs"]
    processor = load_processor(folder, inputs.is_floating_point(), trusted)
    if job["shapes"] is None:
        model, info = load_weights(auto_class, folder, trusted)
        report = tensor_report(info) | {"unloaded": unloaded(model)}
        report |= run_model(model, processor, inputs, job["new_tokens"], Path(job["logits"]))
    else:
        report = tensor_report(load_shapes(auto_class, folder, trusted, job["shapes"])[1])
    report["processor"] = processor_report(processor)
    Path(job["result"]).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    sys.modules["crosshead"] = None  # type: ignore[assignment]  # makes any import of crosshead fail
    try:
        main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except Exception as error:  # the folder's code and files may raise any error; it is printed as one line
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
