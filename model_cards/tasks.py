"""What a model is for, by the class that its config names: the Auto class, the Hub's task, and how to call it."""

from dataclasses import dataclass, replace
from typing import Any

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ENCODER_PROJECTIONS = ("query", "key", "value")
ENCODERS = ("bert", "albert")
"""The model types with these."""
T5_PROJECTIONS = ("q", "k", "v", "o")
LATENT_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""The projections of multi-head latent attention (DeepSeek)."""


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
    noun: str = "encoder"
    """What the model is called."""
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
GENERATION = Task("AutoModelForCausalLM", "text-generation", GENERATE, PROJECTIONS, noun="language model")
LOGITS = "print(model(**tokens).logits)"
LAST_STATES = "print(model({}).last_hidden_state.mean(1))"
IMAGE_FEATURES = Task(
    "AutoModel", "image-feature-extraction", "print(model(**image).last_hidden_state[:, 0])", PROJECTIONS, True
)
DIFFUSION = Task("AutoModel", "unconditional-image-generation", "", noun="diffusion transformer", library="diffusers")
TASKS = {
    "ForCausalLM": GENERATION,
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
    "ForConditionalGeneration": Task(
        "AutoModelForSeq2SeqLM", "text2text-generation", GENERATE, T5_PROJECTIONS, noun="sequence-to-sequence model"
    ),
    "T5EncoderModel": Task(
        "AutoModelForTextEncoding", "feature-extraction", LAST_STATES.format("**tokens"), T5_PROJECTIONS
    ),
    "T5Model": Task(
        "AutoModel",
        "feature-extraction",
        LAST_STATES.format("**tokens, decoder_input_ids=tokens.input_ids"),
        T5_PROJECTIONS,
        noun="encoder and decoder",
    ),
    "ViTModel": IMAGE_FEATURES,
    "DeiTModel": IMAGE_FEATURES,
    "Dinov2Model": IMAGE_FEATURES,
    "Model": Task("AutoModel", "feature-extraction", LAST_STATES.format("**tokens")),
}
"""The ending of a class's name -> its task; the first that fits counts."""


def task_of(config: Any) -> Task:
    """The task of a model by its config.json; without a class there, text generation."""
    if is_dit(config):
        return DIFFUSION
    architecture = str((config.get("architectures") or [""])[0])
    found = next((task for ending, task in TASKS.items() if architecture.endswith(ending)), GENERATION)
    stock = str(config.get("model_type", ENCODERS[0])).removeprefix("crosshead_")
    if found.projections == ENCODER_PROJECTIONS and stock not in ENCODERS:
        return replace(found, projections=PROJECTIONS, noun="decoder")
    return found


def projections(config: Any) -> tuple[str, ...]:
    """The projections of attention that adapters can change."""
    found = task_of(config).projections
    if "kv_lora_rank" in config:
        return LATENT_PROJECTIONS if config.get("q_lora_rank") else ("q_proj", *LATENT_PROJECTIONS[2:])
    if found == T5_PROJECTIONS and "bilinear" in str(config.get("mixers")):
        return "q", "o"  # full matrices replace keys and values
    return found


def is_dit(config: Any) -> bool:
    """Whether a config.json is that of a diffusion transformer, or a recipe's entry for one."""
    return str(config.get("_class_name", "")).endswith("DiTTransformer2DModel") or config.get("model_type") == "dit"
