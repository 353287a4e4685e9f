"""The task of a model, from the class named in its config: Auto class, pipeline tag of the Hub, and example call."""

from dataclasses import dataclass, replace
from typing import Any

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Attention projections of decoders and vision models."""
ENCODER_PROJECTIONS = ("query", "key", "value")
"""Attention projections of BERT and ALBERT."""
ENCODERS = ("bert", "albert")
"""Model types with ENCODER_PROJECTIONS."""
T5_PROJECTIONS = ("q", "k", "v", "o")
LATENT_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""Projections of multi-head latent attention (DeepSeek)."""


@dataclass(frozen=True)
class Task:
    """The task of a model, and the texts on its card that depend on the task."""

    auto_class: str
    pipeline: str
    """Pipeline tag of the Hub."""
    call: str
    """Python statement that prints the result of the model for the example input."""
    projections: tuple[str, ...] = ENCODER_PROJECTIONS
    """Attention projections that adapters change."""
    reads_images: bool = False
    noun: str = "encoder"
    """Noun for the model in the introduction of the card."""
    library: str = "transformers"
    """`library_name` in the metadata of the card."""

    @property
    def title(self) -> str:
        """The pipeline tag in words, such as `Text generation`."""
        return self.pipeline.replace("-", " ").capitalize()

    @property
    def generates(self) -> bool:
        """True for a causal language model."""
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
    "TransNextModel": replace(IMAGE_FEATURES, call="print(model(**image).pooler_output)"),
    "Model": Task("AutoModel", "feature-extraction", LAST_STATES.format("**tokens")),
}
"""Ending of a class name -> task; the first ending that matches applies."""


def task_of(config: Any) -> Task:
    """The task of a model, from its config.json; text generation if no known class is named there."""
    if is_dit(config):
        return DIFFUSION
    architecture = str((config.get("architectures") or [""])[0])
    result = next((task for ending, task in TASKS.items() if architecture.endswith(ending)), GENERATION)
    stock = str(config.get("model_type", ENCODERS[0])).removeprefix("crosshead_")
    if result.projections == ENCODER_PROJECTIONS and stock not in ENCODERS:
        return replace(result, projections=PROJECTIONS, noun="decoder")
    return result


def projections(config: Any) -> tuple[str, ...]:
    """The attention projections that adapters can change, as module names."""
    names = task_of(config).projections
    if "kv_lora_rank" in config:
        return LATENT_PROJECTIONS if config.get("q_lora_rank") else ("q_proj", *LATENT_PROJECTIONS[2:])
    if names == T5_PROJECTIONS and "bilinear" in str(config.get("mixers")):
        return "q", "o"  # full matrices replace keys and values
    return names


def is_dit(config: Any) -> bool:
    """True for the config.json of a diffusion transformer, and for the config of one in a recipe."""
    return str(config.get("_class_name", "")).endswith("DiTTransformer2DModel") or config.get("model_type") == "dit"
