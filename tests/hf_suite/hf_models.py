"""The pytest module for the case named in HF_SUITE_CASE: test mixins of transformers on the classes of the case.

Differences between versions of transformers are handled in `OPTIONAL_MIXINS` and `HFSuiteTest`, and in `STAND_INS` of
hf_fetch.py.
"""

import gc
import importlib
import importlib.util
import os
import unittest
from typing import Any
from unittest import mock

import transformers
from hf_cases import CASES, ENCODERS, IMAGES, SEQ2SEQ, SIZES, Case
from hf_fetch import PACKAGE
from transformers.models.auto import modeling_auto

common = importlib.import_module(f"{PACKAGE}.test_modeling_common")

HEADS: dict[str, Any] = {
    "Model": modeling_auto.MODEL_MAPPING_NAMES,
    "ForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "ForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "ForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "ForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "ForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "ForImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "ForConditionalGeneration": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
"""Suffix of a class name -> table of class names in which the tests of transformers look up the kind of model."""

OPTIONAL_MIXINS: dict[str, str] = {
    "test_memory_cleanup_mixin": "MemoryCleanupMixin",  # must come first among the bases; not yet in 5.17
}


def optional_mixins() -> list[type]:
    """The classes in `OPTIONAL_MIXINS` that this version of transformers has."""
    present = [name for name in OPTIONAL_MIXINS if importlib.util.find_spec(f"{PACKAGE}.{name}")]
    return [getattr(importlib.import_module(f"{PACKAGE}.{name}"), OPTIONAL_MIXINS[name]) for name in present]


def class_of(case: Case, suffix: str) -> Any:
    """The class of the case with this suffix, from transformers or crosshead."""
    module = importlib.import_module("crosshead") if case.mixers else transformers
    return getattr(module, case.prefix + suffix)


def heads_of(case: Case) -> list[str]:
    """The suffixes of the class names of the case."""
    if case.backbone in IMAGES:
        return ["Model", "ForImageClassification"]
    if case.backbone in SEQ2SEQ:
        return ["Model", "ForConditionalGeneration"]
    tasks = ["MaskedLM", "TokenClassification", "QuestionAnswering"] if case.backbone in ENCODERS else ["CausalLM"]
    return ["Model", "ForSequenceClassification", *(f"For{task}" for task in tasks)]


def announce(case: Case) -> None:
    """Add the classes of the case to the tables in HEADS, which already have the stock classes."""
    model_type = class_of(case, "Config").model_type
    for suffix in heads_of(case):
        HEADS[suffix].setdefault(model_type, class_of(case, suffix).__name__)


class Tester:
    """The `model_tester` of the mixins: a tiny config, inputs for it, and the expected sizes of outputs."""

    is_training = True
    batch_size = 13
    seq_length = 7

    def __init__(self, case: Case) -> None:
        self.case = case
        self.vocab_size = SIZES["vocab_size"]
        self.hidden_size = SIZES["hidden_size"]
        self.num_hidden_layers = SIZES["num_hidden_layers"]
        self.num_attention_heads = SIZES["num_attention_heads"]
        if case.backbone in IMAGES:  # four patches and a class token; DeiT also has a distillation token
            self.num_masks, self.mask_length = 2, 4
            self.seq_length = 4 + (2 if case.backbone == "deit" else 1)
        elif case.backbone in SEQ2SEQ:
            self.is_encoder_decoder = True
            self.encoder_seq_length = self.decoder_seq_length = self.seq_length
        elif case.backbone not in ENCODERS:
            self.causal_lm_class = class_of(case, "ForCausalLM")

    def get_config(self) -> Any:
        """A fresh config of the case."""
        return class_of(self.case, "Config")(**self.case.config_kwargs())

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """A config and inputs: images, or right-padded token ids of 1, 2, ... 7, 7, ... tokens per row."""
        if self.case.backbone in IMAGES:
            return self.get_config(), {"pixel_values": common.floats_tensor([self.batch_size, 3, 16, 16])}
        input_ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        attention_mask = common.torch.tril(common.torch.ones_like(input_ids))
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.case.backbone in SEQ2SEQ:
            inputs |= {f"decoder_{name}": value for name, value in inputs.items()}
        return self.get_config(), inputs


CASE = CASES[os.environ["HF_SUITE_CASE"]]
announce(CASE)
TrainingTesterMixin = importlib.import_module(f"{PACKAGE}.test_training_mixin").TrainingTesterMixin
BASES: tuple[Any, ...] = (*optional_mixins(), common.ModelTesterMixin, TrainingTesterMixin, unittest.TestCase)


class HFSuiteTest(*BASES):  # type: ignore[misc]
    """The tests of transformers on one case."""

    all_model_classes = tuple(class_of(CASE, suffix) for suffix in heads_of(CASE))
    run_under_no_grad = False  # MemoryCleanupMixin: most of these tests need gradients
    test_resize_embeddings = CASE.backbone not in IMAGES
    test_generation_tester_mixin_inheritance = (
        None  # needs the generation mixin, which is not in the source distribution
    )

    def setUp(self) -> None:
        """Create a new tester for each test."""
        super().setUp()
        self.model_tester = Tester(CASE)

    def test_can_init_all_missing_weights(self) -> None:
        """Run the test of transformers for every case.

        It skips models older than 2023, by the copyright line in the file of the config class. Our files may have no
        such line, and that of Llama says 2022, so the test reads the file of Qwen3Config instead.
        """
        real = common.inspect.getfile
        dated: str = real(transformers.Qwen3Config)

        def getfile(thing: Any) -> str:
            is_config = isinstance(thing, type) and issubclass(thing, transformers.PreTrainedConfig)
            return dated if is_config else real(thing)

        with mock.patch.object(common.inspect, "getfile", getfile):
            super().test_can_init_all_missing_weights()


gc.freeze()  # MemoryCleanupMixin collects garbage twice per test; objects imported so far are skipped
