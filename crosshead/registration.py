"""Makes the Auto classes of transformers know ours."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)


def register(
    config: type[PreTrainedConfig],
    backbone: type[PreTrainedModel],
    language_model: type[PreTrainedModel],
    classifier: type[PreTrainedModel],
) -> None:
    """Register one backbone; its configuration saves the code, not the library's `register_for_auto_class`."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, backbone, exist_ok=True)
    AutoModelForCausalLM.register(config, language_model, exist_ok=True)
    AutoModelForSequenceClassification.register(config, classifier, exist_ok=True)
