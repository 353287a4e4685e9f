"""Conversations as training data: the tokenizer's chat template renders each one as one document."""

import json

import datasets
import pytest

from crosshead.common.errors import RecipeError
from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.schema.sections import DataOptions, DataSource
from toy_data import SEPARATOR, separating_tokenizer, words, write_jsonl, write_parquet

ROLES = {"user": 1, "assistant": 2}
TEMPLATE = (
    "{% for message in messages %}{{ {'user': 'w1', 'assistant': 'w2'}[message.role] }} {{ message.content }} w60\n"
    "{% endfor %}"
)
CHATS = [[("user", [number]), ("assistant", [number + 1, number + 2])] for number in range(10, 30)]


def chat_tokenizer():
    tokenizer = separating_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def messages(chat):
    return [{"role": role, "content": words(*tokens)} for role, tokens in chat]


def tokens_of(chat):
    """Return the tokens of a rendered chat, whose turns end with the separator; none is added at the end."""
    return [token for role, tokens in chat for token in (ROLES[role], *tokens, SEPARATOR)]


def open_windows(path, kind, tokenizer, tmp_path):
    source = DataSource(str(path), kind, column="messages")
    return open_data(DataOptions((source,), length=7, cache=str(tmp_path / "cache")), tokenizer, 61)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_each_conversation_becomes_one_document(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    path = tmp_path / "chats" / "train.jsonl"
    path.parent.mkdir()
    write = write_parquet if kind == "parquet" else write_jsonl
    write(path, [messages(chat) for chat in CHATS], column="messages")
    (windows,) = open_windows(path.parent if kind == "hub" else path, kind, chat_tokenizer(), tmp_path).sources
    assert [sample["input_ids"].tolist() for sample in windows] == [tokens_of(chat) for chat in CHATS]


def test_text_and_conversations_may_share_a_column(tmp_path):
    path = write_jsonl(tmp_path / "a", [words(5, 6, 7, 8, 9, 10), messages(CHATS[0])], column="messages")
    (windows,) = open_windows(path, "jsonl", chat_tokenizer(), tmp_path).sources
    assert [sample["input_ids"].tolist() for sample in windows] == [
        [5, 6, 7, 8, 9, 10, SEPARATOR],
        tokens_of(CHATS[0]),
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_empty_conversation_is_skipped(kind, tmp_path):
    write = write_parquet if kind == "parquet" else write_jsonl
    path = write(tmp_path / "a", [messages(CHATS[0]), [], None, messages(CHATS[1])], column="messages")
    (windows,) = open_windows(path, kind, chat_tokenizer(), tmp_path).sources
    assert [sample["input_ids"].tolist() for sample in windows] == [tokens_of(chat) for chat in CHATS[:2]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_text_parts_of_a_message_are_joined(kind, tmp_path):
    chat = [
        each | {"content": [{"type": "text", "text": text} for text in (each["content"][:2], each["content"][2:])]}
        for each in messages(CHATS[0])
    ]
    write = write_parquet if kind == "parquet" else write_jsonl
    (windows,) = open_windows(
        write(tmp_path / "a", [chat], column="messages"), kind, chat_tokenizer(), tmp_path
    ).sources
    assert windows[0]["input_ids"].tolist() == tokens_of(CHATS[0])


def test_image_part_of_a_message_is_refused(tmp_path):
    chat = [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]
    path = write_jsonl(tmp_path / "a", [chat], column="messages")
    with pytest.raises(RecipeError, match=r"line 1 has the content .*image.*: give text, or parts that are text"):
        open_windows(path, "jsonl", chat_tokenizer(), tmp_path)


def test_changed_chat_template_rebuilds_token_cache(tmp_path):
    path = write_jsonl(tmp_path / "a", [messages(chat) for chat in CHATS], column="messages")
    first, second = chat_tokenizer(), chat_tokenizer()
    second.chat_template = TEMPLATE.replace("w1", "w3")
    (one,), (two,) = (open_windows(path, "jsonl", tokenizer, tmp_path).sources for tokenizer in (first, second))
    assert (one[0]["input_ids"][0], two[0]["input_ids"][0]) == (1, 3)


def test_changed_bos_token_of_template_rebuilds_token_cache(tmp_path):
    path = write_jsonl(tmp_path / "a", [messages(chat) for chat in CHATS], column="messages")
    first_tokens = []
    for start in ("w3", "w4"):
        tokenizer = chat_tokenizer()
        tokenizer.bos_token, tokenizer.chat_template = start, "{{ bos_token }} " + TEMPLATE
        (windows,) = open_windows(path, "jsonl", tokenizer, tmp_path).sources
        first_tokens.append(windows[0]["input_ids"][0])
    assert first_tokens == [3, 4]


@pytest.mark.parametrize(
    ("content", "template", "expected"),
    [
        (messages(CHATS[0]), None, "line 1 is a conversation"),
        ([{"role": "robot", "content": "w5"}], "{{ raise_exception('no robots') }}", "line 1 .*no robots"),
        ([{"from": "human", "value": "w5"}], TEMPLATE, "line 1 has .*from.*role"),
        (["w5"], TEMPLATE, r"line 1 has \['w5'\] in 'messages'"),
        ({"role": "user"}, TEMPLATE, "line 1 has {'role': 'user'} in 'messages'"),
    ],
)
def test_invalid_conversations_are_refused(content, template, expected, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": content}) + "\n")
    tokenizer = separating_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(RecipeError, match=expected) as caught:
        open_windows(tmp_path / "a.jsonl", "jsonl", tokenizer, tmp_path)
    assert "\n" not in str(caught.value)
