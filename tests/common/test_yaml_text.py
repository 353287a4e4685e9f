"""YAML with scalars as text: keys that YAML 1.1 would convert, repeated keys, anchors, and typed values."""

import pytest

from crosshead.common.yaml_text import parse_yaml, typed


def test_parse_yaml_keeps_scalars_as_text():
    assert parse_yaml("{on: [yes, 1e-5], 1: null}") == {"on": ["yes", "1e-5"], "1": "null"}


def test_typed_converts_text_scalars():
    content = parse_yaml("{on: True, a: [1e-5, 1_000, '7', ~, Null, NULL, 1e999, text], b: {c: no}}")
    assert typed(content) == {"on": True, "a": [1e-5, 1000, 7, None, None, None, "1e999", "text"], "b": {"c": "no"}}


def test_typed_keeps_converted_values():
    content = {"a": [1, 2.5, None, True, "text"]}
    assert typed(content) == content


def test_anchor_aliases_are_independent():
    first, second = parse_yaml("[&one {a: b}, *one]")
    first["a"] = "c"
    assert second == {"a": "b"}


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "a: [", "a: &a [*a]", "{a: b", r'a: "\UFFFFFFFF"'])
def test_invalid_yaml_raises_one_line_error(text):
    with pytest.raises(ValueError, match="YAML") as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)
