"""Extracts commands and examples from the documents, and replaces their placeholders by toys."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import crosshead
import toys
from gguf_tokenizers import characters
from image_toys import write_image_model, write_images
from rules import ROOT, project_files
from scoring_toys import labelled, write_class_folders, write_classifier, write_rows
from t5_toys import write_t5
from toy_eval import write_scorable

GENERATED = "model_cards"
"""Folder of the generated pages, which have their own tests."""
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)
CONTINUED = re.compile(r" *\\\n\s*")
INLINE = re.compile(r"`(crosshead [^`\n]+)`")
TOLD = re.compile(r"\s{2,}.*$")
"""Matches the explanation after a command, separated by two or more spaces."""
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]{2,}(?:\.\w+)?")
OBSERVED = re.compile(r"--layers auto|--cache|--active|--recipe|(?:key|value)_heads=\d(?!.*svd)|shared=calibrated")
"""Matches options of conversions that read a calibration text; the default text would take long."""
SERVING = re.compile("--engine|--backend vllm")
"""Matches commands that need a serving engine; `tests/engines/` tests them."""
RESULT = re.compile(r"^runs/\w+/model$")
"""Matches the output model of a recipe; at toy size it is in another folder."""
PROGRAMS = {"crosshead", "make", "pip", "accelerate", "torchrun", "lm_eval", "python", ".ci/run"}
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4}
TOYS = {
    "source": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}),
    "qwen": ("Qwen3", GROUPED),
    "experts": ("Qwen3Moe", GROUPED),
    "bert": ("Bert", {}),
}
"""Stock toys, by folder; `source` has the head counts of SmolLM2-135M."""
HUB = {
    "HuggingFaceTB/SmolLM2-135M": "source",
    "Qwen/Qwen3-0.6B": "qwen",
    "Qwen/Qwen3-30B-A3B": "experts",
    "google/vit-base-patch16-224": "vit",
    "google-t5/t5-small": "t5",
    "google-bert/bert-base-uncased": "bert",
    "sentence-transformers/all-MiniLM-L6-v2": "bert",
}
"""Model name on the Hub -> folder of a toy of the same family."""
PLACEHOLDERS = {
    "SOURCE": "source",
    "MODEL": "model",
    "EXPLICIT_MODEL": "explicit",
    "RECIPE.yaml": "recipe.yaml",
    "MIXERS.yaml": "mixers.yaml",
    "TEXT.txt": "text.txt",
    "datasets:HuggingFaceTB/smoltalk:all": "text.txt",
    "datasets:Salesforce/wikitext:wikitext-2-raw-v1": "text.txt",
    "PARAGRAPH.txt": "paragraph.txt",
    "IMAGES": "images",
    "IMAGE.png": "images/0.png",
    "DIT": "dit",
    "CLASSIFIER": "classifier",
    "ROWS.tsv": "rows.tsv",
    "CLASSES": "classes",
    "DIT_RESULT": "dit_result",
    "FOLDER": "toy",
    "OUT": "out",
    "OUT.gguf": "out.gguf",
    "quick": "offline",
}
"""Word in the documents -> its toy. MODEL is converted from SOURCE and can be folded; `quick` would need the Hub."""
TEXT = "the cat sat on the mat, and the dogs ran down to the river. when it rained, they all came back. "


def documents() -> list[Path]:
    """Return the paths of all hand-written documents."""
    return [path for path in project_files() if path.suffix == ".md" and path.relative_to(ROOT).parts[0] != GENERATED]


def pages() -> list[Path]:
    """Return the paths of the generated pages."""
    return sorted((ROOT / GENERATED).rglob("*.md"))


def name_of(document: Path) -> str:
    """Return the path of a document, relative to the root."""
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path, language: str) -> list[str]:
    """Return the fenced code blocks in one language."""
    return [block for kind, block in FENCED.findall(document.read_text(encoding="utf-8")) if kind == language]


def shown(document: Path) -> Iterator[str]:
    """Yield each command in the code blocks of a document as one line, without its explanation."""
    plain = FENCED.sub("", document.read_text(encoding="utf-8"))
    for block in [*blocks(document, "sh"), *INDENTED.findall(plain)]:
        lines = [line.strip() for line in CONTINUED.sub(" ", block).splitlines()]
        if any(line.split()[0] in PROGRAMS for line in lines):  # other blocks have no commands
            yield from (TOLD.sub("", line) for line in lines)


def mentioned(document: Path) -> list[str]:
    """Return the inline `crosshead ...` commands in the sentences of a document."""
    return INLINE.findall(INDENTED.sub("", FENCED.sub("", document.read_text(encoding="utf-8"))))


def ours(command: str) -> list[str] | None:
    """Return the arguments of `crosshead`, called directly or through a launcher; None for other commands."""
    words = shlex.split(command)
    if words[0] == "crosshead":
        return words[1:]
    return words[words.index("crosshead") + 1 :] if "crosshead" in words and words[0] != "pip" else None


def at_toy_size(words: list[str]) -> list[str]:
    """Return the arguments with toys for placeholders; raise ValueError for an unknown placeholder."""
    arguments = [PLACEHOLDERS.get(word, RESULT.sub("model", word)) for word in map(with_toys, words)]
    for word in arguments:
        if PLACEHOLDER.fullmatch(word):
            raise ValueError(f"{' '.join(words)}: nothing is known for {word}")
    return arguments + smaller(arguments)


def with_toys(text: str) -> str:
    """Return the text with the model names of the Hub replaced by toys."""
    for name, toy in HUB.items():
        text = text.replace(name, toy)
    return text


def smaller(words: list[str]) -> list[str]:
    """Return extra options that make a command quick without changing what it does."""
    command, rest = words[0], words[1:]
    if command in ("convert", "fold"):
        reads = OBSERVED.search(" ".join(rest)) and "--calibration" not in rest
        return ["--no-verify", "--overwrite", *["--calibration", "text.txt"] * bool(reads)]
    if command == "eval":
        return ["--overwrite"] if "--limit" in rest else ["--overwrite", "--limit", "2"]
    if command == "probe":
        more = ["--draws", "1"] if rest[0] == "heads" else ["--calibration", "text.txt"]
        return ["--windows", "1", "--length", "64", "--overwrite", *more]
    if command in ("train", "sweep") and not {"--accelerate", "--toy"} & set(rest):
        return ["--toy", "toy"]
    return {"inspect": ["--overwrite"], "demo": ["--tiny"]}.get(command, [])


def prepare(folder: Path) -> None:
    """Create the toy models, texts, images and recipes in the working directory of the commands."""
    for name, (backbone, sizes) in TOYS.items():
        write_scorable(toys.stock_model(backbone, max_position_embeddings=512, **sizes), folder / name)
        characters().save_pretrained(folder / name)  # a GGUF file can hold it
    masked = characters()
    masked.mask_token = "*"
    masked.save_pretrained(folder / "bert")
    write_t5(folder / "t5", num_heads=8)
    write_image_model(folder / "vit", num_hidden_layers=12, num_attention_heads=12, hidden_size=48)
    write_images(folder / "images")
    (folder / "dit").mkdir()
    (folder / "dit" / "config.json").write_text('{"_class_name": "DiTTransformer2DModel", "num_layers": 1}')
    write_classifier(folder / "classifier", num_labels=2)
    write_rows(folder / "rows.tsv", labelled([0, 1, 1]))
    write_class_folders(folder / "classes", ["LABEL_0", "LABEL_1"])
    from toy_diffusion import write_diffusion_model  # diffusers takes seconds to import

    write_diffusion_model(folder / "dit_result")
    (folder / "text.txt").write_text(TEXT * 12, encoding="utf-8")
    (folder / "paragraph.txt").write_text(TEXT, encoding="utf-8")
    crosshead.convert(folder / "source", folder / "model", {"knocking": {"form": "linear"}}, verify=False)
    fewer = {"explicit": {"key_heads": 2, "value_heads": 2, "method": "svd"}}
    crosshead.convert(folder / "source", folder / "explicit", fewer, verify=False)
    (folder / "recipe.yaml").write_text((ROOT / "recipes" / "small" / "smollm2_knocking.yaml").read_text())
    (mixers,) = blocks(ROOT / "conversion" / "README.md", "yaml")
    (folder / "mixers.yaml").write_text(mixers)
    (task,) = blocks(ROOT / "evals" / "README.md", "yaml")
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.yaml").write_text(task)
    (folder / "notes.txt").write_text(TEXT, encoding="utf-8")
