"""What pytest runs for one case (its name is in HF_SUITE_CASE): the library's mixins on the case's three classes.

What differs between versions of the library is kept here, in `OPTIONAL_MIXINS` and `HFSuiteTest`, and in the
`STAND_INS` of hf_fetch.py.
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
"""The classes of models, and the tables in which the library's tests look up what kind of head a class carries."""

OPTIONAL_MIXINS: dict[str, str] = {
    "test_memory_cleanup_mixin": "MemoryCleanupMixin",  # must come first among the bases; not yet in 5.17
}


def optional_mixins() -> list[type]:
    """Those of `OPTIONAL_MIXINS` that this version of the library has."""
    present = [name for name in OPTIONAL_MIXINS if importlib.util.find_spec(f"{PACKAGE}.{name}")]
    return [getattr(importlib.import_module(f"{PACKAGE}.{name}"), OPTIONAL_MIXINS[name]) for name in present]


def class_of(case: Case, suffix: str) -> Any:
    """The case's class with this suffix, from the library or from crosshead."""
    module = importlib.import_module("crosshead") if case.mixers else transformers
    return getattr(module, case.prefix + suffix)


def heads_of(case: Case) -> list[str]:
    """What the names of the case's classes end with."""
    if case.backbone in IMAGES:
        return ["Model", "ForImageClassification"]
    if case.backbone in SEQ2SEQ:
        return ["Model", "ForConditionalGeneration"]
    tasks = ["MaskedLM", "TokenClassification", "QuestionAnswering"] if case.backbone in ENCODERS else ["CausalLM"]
    return ["Model", "ForSequenceClassification", *(f"For{task}" for task in tasks)]


def announce(case: Case) -> None:
    """Enter the case's classes in the library's tables, where its own classes stand already."""
    model_type = class_of(case, "Config").model_type
    for suffix in heads_of(case):
        HEADS[suffix].setdefault(model_type, class_of(case, suffix).__name__)


class Tester:
    """What the mixins call `model_tester`: a tiny config, inputs for it, and the sizes that the outputs must have."""

    is_training = True
    batch_size = 13
    seq_length = 7

    def __init__(self, case: Case) -> None:
        self.case = case
        self.vocab_size = SIZES["vocab_size"]
        self.hidden_size = SIZES["hidden_size"]
        self.num_hidden_layers = SIZES["num_hidden_layers"]
        self.num_attention_heads = SIZES["num_attention_heads"]
        if case.backbone in IMAGES:  # patches, and one token of the class, of DeiT another of the teacher
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
        """A config, and right-padded inputs: the first row has one token, the seventh and all after it are full."""
        if self.case.backbone in IMAGES:
            return self.get_config(), {"pixel_values": common.floats_tensor([self.batch_size, 3, 16, 16])}
        input_ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        attention_mask = common.torch.tril(common.torch.ones_like(input_ids))
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.case.backbone in SEQ2SEQ:
            inputs |= {f"decoder_{name}": given for name, given in inputs.items()}
        return self.get_config(), inputs


CASE = CASES[os.environ["HF_SUITE_CASE"]]
announce(CASE)
TrainingTesterMixin = importlib.import_module(f"{PACKAGE}.test_training_mixin").TrainingTesterMixin
BASES: tuple[Any, ...] = (*optional_mixins(), common.ModelTesterMixin, TrainingTesterMixin, unittest.TestCase)


class HFSuiteTest(*BASES):  # type: ignore[misc]
    """The library's tests on one case."""

    all_model_classes = tuple(class_of(CASE, suffix) for suffix in heads_of(CASE))
    run_under_no_grad = False  # MemoryCleanupMixin: most of these tests need gradients
    test_resize_embeddings = CASE.backbone not in IMAGES
    test_generation_tester_mixin_inheritance = None  # demands the generation mixin, which is not distributed

    def setUp(self) -> None:
        """A fresh tester for each test."""
        super().setUp()
        self.model_tester = Tester(CASE)

    def test_can_init_all_missing_weights(self) -> None:
        """The library's test, which skips what is older than 2023 by the copyright line of the config's file.

        Ours may have no such line and Llama's says 2022: the year is read from Qwen3's file instead, for every case.
        """
        real = common.inspect.getfile
        dated: str = real(transformers.Qwen3Config)

        def getfile(thing: Any) -> str:
            is_config = isinstance(thing, type) and issubclass(thing, transformers.PreTrainedConfig)
            return dated if is_config else real(thing)

        with mock.patch.object(common.inspect, "getfile", getfile):
            super().test_can_init_all_missing_weights()


gc.freeze()  # MemoryCleanupMixin collects twice a test: what is imported by now need not be walked each time
