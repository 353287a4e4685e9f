import pytest

from crosshead.common.errors import EvalError
from crosshead.common.plain_text import read_text


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
