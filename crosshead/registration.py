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
    """Register one family, for loading here and for shipping its code with what is saved."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    config.register_for_auto_class()
    served = (
        (AutoModel, backbone),
        (AutoModelForCausalLM, language_model),
        (AutoModelForSequenceClassification, classifier),
    )
    for auto, model in served:
        auto.register(config, model, exist_ok=True)
        model.register_for_auto_class(auto.__name__)
