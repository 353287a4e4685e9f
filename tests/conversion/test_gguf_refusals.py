"""Tokenizers that llama.cpp would read differently are refused; their metadata contain no invalid ids."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from crosshead.common.errors import ConversionError

pytest.importorskip("gguf")
toy = pytest.importorskip("gguf_tokenizers")
from crosshead.conversion.gguf.tokenizer import tokenizer_metadata  # noqa: E402

UNMERGED = {"low er": toy.VOCABULARY - 1}
"""A token of the vocabulary that no merge produces."""


def metadata_of(tokenizer, **ids):
    fields = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | ids
    return tokenizer_metadata(tokenizer, SimpleNamespace(vocab_size=toy.VOCABULARY, **fields), "made")


def changed_bpe(pre="gpt-2", vocabulary=(), **settings):
    """Return a toy tokenizer with more tokens in its vocabulary and other settings of its model."""
    content = json.loads(toy.bpe(pre).backend_tokenizer.to_str())
    content["model"]["vocab"] |= vocabulary
    content["model"] |= settings
    backend = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("vocabulary", [{}, UNMERGED], ids=["merged", "unmerged"])
@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("pre", toy.PRE)
def test_unmerged_tokens_need_the_ignore_merges_of_their_pre_tokeniser(pre, ignores, vocabulary):
    tokenizer = changed_bpe(pre, vocabulary, ignore_merges=ignores)
    if vocabulary and ignores != (pre == "llama-bpe"):
        with pytest.raises(ConversionError, match=f"ignore_merges={ignores} .* {pre} .*low er"):
            metadata_of(tokenizer)
    else:
        assert metadata_of(tokenizer)["tokenizer.ggml.pre"] == pre


@pytest.mark.parametrize("setting", [{"end_of_word_suffix": "</w>"}, {"dropout": 0.5}], ids=str)
def test_other_settings_of_bpe_are_refused(setting):
    with pytest.raises(ConversionError, match=next(iter(setting))):
        metadata_of(changed_bpe(**setting))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_added_tokens_with_flags_are_refused(kind, flag):
    tokenizer = getattr(toy, kind)()
    tokenizer.add_tokens([AddedToken("<mask>", **{flag: True})])
    with pytest.raises(ConversionError, match=f"<mask>.*{flag}"):
        metadata_of(tokenizer)


def test_metaspace_with_another_replacement_is_refused():
    tokenizer = toy.sentencepiece()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("_", prepend_scheme="first", split=False)
    with pytest.raises(ConversionError, match="Metaspace"):
        metadata_of(tokenizer)


@pytest.mark.parametrize(("given", "written"), [(-1, None), (toy.VOCABULARY, None), (0, 0), (7, 7)])
def test_ids_outside_the_vocabulary_are_left_out(given, written):
    assert metadata_of(toy.bpe(), pad_token_id=given).get("tokenizer.ggml.padding_token_id") == written
