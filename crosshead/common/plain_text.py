"""Reads text files, JSON lines and conversations, and finds the special tokens that a tokenizer adds to a text."""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from .errors import one_line


def read_text(path: Path, error_type: type[ValueError]) -> str:
    """The content of a UTF-8 text file; raise `error_type` for binary, empty or unreadable files."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise error_type(f"the text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise error_type(f"{path} is not UTF-8 text (at byte {error.start}): give plain text") from error
    if "\0" in text:
        raise error_type(f"{path} is a binary file (it contains zero bytes): give plain text")
    if not text.strip():
        raise error_type(f"the text {path} is empty: give a file with text")
    return text


def check_characters(text: str, location: str, error_type: type[ValueError]) -> str:
    """Return the text; raise `error_type` if it has a lone surrogate, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise error_type(f"{location} has half a character (a lone surrogate): remove it") from None
    return text


def json_object(line: str, location: str, error_type: type[ValueError]) -> dict[str, Any]:
    """The JSON object in a line of a file; for other lines raise `error_type` with `location`, the file and line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise error_type(f"{location} is not JSON ({one_line(error)}): give one JSON object a line") from None
    if not isinstance(content, dict):
        raise error_type(f"{location} is {line.strip()[:40]}, not a JSON object: give one a line")
    return content


def conversation_text(tokenizer: Any, messages: Any, location: str, error_type: type[ValueError]) -> str:
    """The text of a conversation in the tokenizer's chat template; raise `error_type` if that is impossible."""
    if not (
        isinstance(messages, list)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    ):
        raise error_type(f"{location} has {messages!r:.60} as its messages: give objects with a role and a content")
    if tokenizer.chat_template is None:
        raise error_type(f"{location} is a conversation, but the tokenizer has no chat template: give text")
    written = [_with_text(message, location, error_type) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(written, tokenize=False))
    except Exception as error:  # a chat template can raise any error
        raise error_type(f"{location} does not fit the chat template: {one_line(error)}") from None


def _with_text(message: dict[str, Any], location: str, error_type: type[ValueError]) -> dict[str, Any]:
    """The message with its list of text parts joined, because most templates would print the list itself."""
    parts = message.get("content")
    if isinstance(parts, str) or (parts is None and message.get("tool_calls")):
        return message
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        raise error_type(f"{location} has the content {parts!r:.60}: give text, or parts that are text")
    return message | {"content": "".join(part["text"] for part in parts)}


def has_vocabulary(tokenizer: Any) -> bool:
    """Whether a tokenizer has words; for a folder without tokenizer files, transformers creates one that has none.

    Such a tokenizer has special tokens, and T5's also the space.
    """
    return len(tokenizer) - len(set(tokenizer.all_special_ids)) > 1


def start_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before any text: BOS for Llama, none for Qwen."""
    return _special(tokenizer, 1)


def end_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts after any text: [SEP] for BERT."""
    return _special(tokenizer, -1)[::-1]


def _special(tokenizer: Any, step: int) -> list[int]:
    """The special tokens at the start (`step` 1) or end (-1) of a text, from the outside in."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    pairs = list(zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True))
    return [token for token, _ in takewhile(lambda pair: pair[1], pairs[::step])]
