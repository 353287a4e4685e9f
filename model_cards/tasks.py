"""What a model is for, by the class that its config names: the Auto class, the Hub's task, and how to call it."""

from dataclasses import dataclass
from typing import Any

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ENCODER_PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True)
class Task:
    """A kind of model."""

    auto_class: str
    pipeline: str
    """The Hub's name of the task; its title is the same in words."""
    call: str
    """Python that shows what a model computes for the input of the example."""
    projections: tuple[str, ...] = ENCODER_PROJECTIONS
    """The projections of attention, for adapters."""
    reads_images: bool = False
    library: str = "transformers"

    @property
    def title(self) -> str:
        """The task in words."""
        return self.pipeline.replace("-", " ").capitalize()

    @property
    def generates(self) -> bool:
        """Whether it is a causal language model."""
        return self.pipeline == "text-generation"


GENERATE = "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))"
GENERATION = Task("AutoModelForCausalLM", "text-generation", GENERATE, PROJECTIONS)
LOGITS = "print(model(**tokens).logits)"
IMAGE_FEATURES = Task(
    "AutoModel", "image-feature-extraction", "print(model(**image).last_hidden_state[:, 0])", PROJECTIONS, True
)
DIFFUSION = Task("AutoModel", "unconditional-image-generation", "", library="diffusers")
TASKS = {
    "ForCausalLM": GENERATION,
    "ForConditionalGeneration": Task("AutoModelForSeq2SeqLM", "text2text-generation", GENERATE, ("q", "k", "v", "o")),
    "ForMaskedLM": Task("AutoModelForMaskedLM", "fill-mask", LOGITS),
    "ForPreTraining": Task("AutoModelForPreTraining", "fill-mask", "print(model(**tokens).prediction_logits)"),
    "ForSequenceClassification": Task("AutoModelForSequenceClassification", "text-classification", LOGITS),
    "ForTokenClassification": Task("AutoModelForTokenClassification", "token-classification", LOGITS),
    "ForQuestionAnswering": Task(
        "AutoModelForQuestionAnswering", "question-answering", "print(model(**tokens).start_logits)"
    ),
    "ForImageClassification": Task(
        "AutoModelForImageClassification", "image-classification", "print(model(**image).logits)", PROJECTIONS, True
    ),
    "ViTModel": IMAGE_FEATURES,
    "DeiTModel": IMAGE_FEATURES,
    "Model": Task("AutoModel", "feature-extraction", "print(model(**tokens).last_hidden_state.mean(1))"),
}
"""The ending of a class's name -> its task; the first that fits counts."""


def task_of(config: Any) -> Task:
    """The task of a model by its config.json; without a class there, text generation."""
    if is_dit(config):
        return DIFFUSION
    architecture = str((config.get("architectures") or [""])[0])
    return next((task for ending, task in TASKS.items() if architecture.endswith(ending)), GENERATION)


def is_dit(config: Any) -> bool:
    """Whether a config.json is that of a diffusion transformer, or a recipe's entry for one."""
    return str(config.get("_class_name", "")).endswith("DiTTransformer2DModel") or config.get("model_type") == "dit"
