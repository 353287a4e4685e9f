"""Load published folders as somebody would who has torch and transformers, and never heard of crosshead.

usage: python load.py FOLDERS SAVED_AGAIN

Compares logits and generated tokens with what stands beside each folder, and saves each model again. Triton, which
comes with torch where there are GPUs, is hidden: nothing may need it.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification


@torch.no_grad()
def load(folder: Path, again: Path) -> None:
    """Check one folder; save what was loaded, with what was expected beside it."""
    expected = load_file(folder / "expected.safetensors")
    trusted = {"trust_remote_code": True, "attn_implementation": "eager"}
    classifies = "generated" not in expected
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    model = auto.from_pretrained(folder / "model", **trusted).eval()
    require(type(model).__module__.startswith("transformers_modules"), f"{type(model)} is not remote code")
    require(torch.equal(model(expected["ids"]).logits, expected["logits"]), "logits differ")
    fast = auto.from_pretrained(folder / "model", trust_remote_code=True).eval()
    require(torch.allclose(fast(expected["ids"]).logits, expected["logits"], rtol=1e-3, atol=1e-4), "sdpa differs")
    again.mkdir(parents=True)
    if not classifies:
        generated = model.generate(expected["ids"], max_new_tokens=5, do_sample=False, pad_token_id=0)
        require(torch.equal(generated, expected["generated"]), "generated tokens differ")
        mixers = (folder / "mixers.json").read_text()
        config = AutoConfig.from_pretrained(folder / "model", trust_remote_code=True)
        require(list(config.mixers) == json.loads(mixers), f"mixers are {list(config.mixers)}, not {mixers}")
        backbone = AutoModel.from_pretrained(folder / "model", **trusted).eval()
        hidden = model.model(expected["ids"]).last_hidden_state
        require(torch.equal(backbone(expected["ids"]).last_hidden_state, hidden), "the backbone differs")
        (again / "mixers.json").write_text(mixers)
    model.save_pretrained(again / "model")
    (again / "expected.safetensors").write_bytes((folder / "expected.safetensors").read_bytes())


def require(holds: bool, message: str) -> None:
    """Stop with a message unless something holds."""
    if not holds:
        raise SystemExit(message)


def main(folders: Path, again: Path) -> None:
    """Check every folder."""
    require(importlib.util.find_spec("crosshead") is None, "crosshead can be imported here: this proves nothing")
    require("triton" not in sys.modules, "triton is imported already: this does not show that models load without it")
    sys.modules["triton"] = None  # type: ignore[assignment]
    names = sorted(path.name for path in folders.iterdir())
    for name in names:
        try:
            load(folders / name, again / name)
        except (Exception, SystemExit) as error:
            raise SystemExit(f"{name}: {error}") from error
    require(len(names) > 0, f"{folders} is empty")
    print(f"{len(names)} models loaded, compared and saved again")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
