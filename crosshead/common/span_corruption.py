"""Span corruption as in T5: sentinels replace spans of a text, and the answer is each span after its sentinel."""

from collections.abc import Iterable, Sequence


def corrupted(
    tokens: Sequence[int], spans: Iterable[tuple[int, int]], sentinels: Sequence[int], end: int
) -> tuple[list[int], list[int]]:
    """The encoder's inputs and the decoder's answer, both with the token `end` at their end.

    `spans` are the begins and ends of the spans in order; there is a sentinel for each.
    """
    inputs: list[int] = []
    answer: list[int] = []
    position = 0
    for (begin, stop), sentinel in zip(spans, sentinels, strict=True):
        inputs += [*tokens[position:begin], sentinel]
        answer += [sentinel, *tokens[begin:stop]]
        position = stop
    return [*inputs, *tokens[position:], end], [*answer, end]
