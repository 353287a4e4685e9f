"""A converted model's tokenizer and image processor load as the source's, if the source's files name no class."""

import json

import pytest
from transformers import AutoTokenizer, BertTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

import crosshead
from crosshead.common.errors import ConversionError
from crosshead.conversion import stages
from encoder_toys import write_encoder
from image_toys import write_image_model

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "two", "head", "##s")
PUBLISHED = {"do_lower_case": True, "model_max_length": 512}
"""tokenizer_config.json of bert-base-uncased on the Hub."""


@pytest.fixture
def bert(tmp_path):
    """A BERT with the tokenizer files that the Hub has."""
    source = write_encoder(tmp_path / "bert")
    BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}).save_pretrained(source)
    (source / "tokenizer_config.json").write_text(json.dumps(PUBLISHED))
    return source


@pytest.mark.oldest
@pytest.mark.parametrize("has_settings", [True, False])
def test_tokenizer_class_is_written(has_settings, bert, tmp_path):
    if not has_settings:
        (bert / "tokenizer_config.json").unlink()
    report = crosshead.convert(bert, tmp_path / "made", {"gating": {}})
    assert report["verification"]["reload"]["same_processor"] is True
    source, made = (AutoTokenizer.from_pretrained(each, trust_remote_code=False) for each in (bert, tmp_path / "made"))
    assert type(made) is type(source) is BertTokenizer
    assert made.mask_token == "[MASK]"
    assert made("two heads", "head").data == source("two heads", "head").data
    assert made("two", "head").token_type_ids == [0, 0, 0, 1, 1]
    settings = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    assert settings == (PUBLISHED if has_settings else {}) | {"tokenizer_class": "BertTokenizer"}


def test_other_tokenizer_than_the_sources_is_refused(bert, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "write_loader_class", lambda source, folder: None)
    with pytest.raises(ConversionError, match="tokenizer"):
        crosshead.convert(bert, tmp_path / "made", {"gating": {}})
    assert not (tmp_path / "made").exists()


@pytest.mark.oldest
def test_class_of_image_processor_is_written(tmp_path):
    source = write_image_model(tmp_path / "vit")
    path = source / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    name = settings.pop("image_processor_type")
    path.write_text(json.dumps(settings))
    report = crosshead.convert(source, tmp_path / "made", {"gating": {}})
    assert report["verification"]["reload"]["same_processor"] is True
    made = AutoImageProcessor.from_pretrained(tmp_path / "made", trust_remote_code=False)
    assert made.to_dict() == AutoImageProcessor.from_pretrained(source).to_dict()
    assert json.loads((tmp_path / "made" / path.name).read_text()) == settings | {"image_processor_type": name}


@pytest.mark.parametrize("write", [write_encoder, write_image_model])
def test_files_that_name_the_class_are_copied(write, tmp_path):
    source = write(tmp_path / "source")
    crosshead.convert(source, tmp_path / "made", {"gating": {}}, verify=False)
    for name in ("tokenizer_config.json", "preprocessor_config.json"):
        if (source / name).exists():
            assert (tmp_path / "made" / name).read_bytes() == (source / name).read_bytes()
