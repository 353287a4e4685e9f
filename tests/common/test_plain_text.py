from types import SimpleNamespace

import pytest

from crosshead.common.errors import EvalError
from crosshead.common.plain_text import conversation_text, read_text


def test_read_text_keeps_content_unchanged(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("Größe\r\n漢字\n".encode())
    assert read_text(path, EvalError) == "Größe\r\n漢字\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b" \n\t", "empty"),
        (b"caf\xe9", r"UTF-8.*byte 3"),
        (b"text\0text", "binary"),
        ("text".encode("utf-16"), r"UTF-8.*byte 0"),
    ],
)
def test_empty_binary_and_non_utf8_files_are_refused(tmp_path, content, message):
    path = tmp_path / "sample"
    path.write_bytes(content)
    with pytest.raises(EvalError, match=message) as caught:
        read_text(path, EvalError)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(EvalError, match=r"none\.txt"):
        read_text(tmp_path / "none.txt", EvalError)
    with pytest.raises(EvalError, match=tmp_path.name):
        read_text(tmp_path, EvalError)


def test_byte_order_mark_is_removed(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("words".encode("utf-8-sig"))
    assert read_text(path, EvalError) == "words"


TOKENIZER = SimpleNamespace(chat_template="toy", apply_chat_template=lambda messages, tokenize: repr(messages))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": 5},
        {"role": "user", "content": True},
        {"role": "user", "content": {"text": "hi"}},
        {"role": "user", "content": None},
        {"role": "user", "content": None, "tool_calls": []},
        {"role": "user"},
        {"role": None, "content": "hi"},
    ],
)
def test_content_and_roles_of_wrong_types_are_refused(message):
    with pytest.raises(EvalError, match=r"^a\.jsonl, line 3 has ") as caught:
        conversation_text(TOKENIZER, [{"role": "user", "content": "hi"}, message], "a.jsonl, line 3", EvalError)
    assert "\n" not in str(caught.value)


def test_tool_call_needs_no_content():
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "search"}}]}
    assert conversation_text(TOKENIZER, [message], "a.jsonl, line 3", EvalError) == repr([message])
