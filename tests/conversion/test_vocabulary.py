"""The new rows of a larger vocabulary are the mean of the old ones, whatever the sizes of the chunks."""

import pytest
import torch

from crosshead.common.errors import ConversionError
from crosshead.conversion.plan import check_vocabulary, grown
from crosshead.conversion.sources.tensor_store import DTYPES, Entry


class PieceStore:
    """A store of one matrix that yields chunks of `piece` bytes, which need not end at the end of a row."""

    def __init__(self, matrix, dtype, piece):
        self.matrix, self.piece = matrix.to(DTYPES[dtype]), piece
        self.entries = {"embed": Entry("embed", dtype, tuple(matrix.shape))}

    def chunks(self, name):
        raw = bytes(self.matrix.view(torch.uint8).flatten().tolist())
        for start in range(0, len(raw), self.piece):
            yield memoryview(raw[start : start + self.piece])


@pytest.mark.parametrize("piece", [8, 24, 1000])
@pytest.mark.parametrize(("stored", "written"), [("F32", "F32"), ("BF16", "BF16"), ("F32", "BF16"), ("F16", "F32")])
def test_grown_embedding_appends_mean_row(stored, written, piece):
    matrix = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    store = PieceStore(matrix, stored, piece)
    raw = b"".join(bytes(chunk) for chunk in grown(store, Entry("embed", written, (600, 5))))
    result = torch.frombuffer(bytearray(raw), dtype=DTYPES[written]).reshape(600, 5)
    assert torch.equal(result[:7], store.matrix.to(DTYPES[written]))
    mean = store.matrix.double().mean(0).to(DTYPES[written])
    assert torch.equal(result[7:], mean.expand(593, 5))


@pytest.mark.parametrize("piece", [8, 1000])
def test_grown_bias_appends_mean(piece):
    bias = torch.randn(7, generator=torch.Generator().manual_seed(0))
    raw = b"".join(bytes(chunk) for chunk in grown(PieceStore(bias, "F32", piece), Entry("embed", "F32", (600,))))
    result = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    assert torch.equal(result[:7], bias)
    assert torch.equal(result[7:], bias.double().mean().float().expand(593))


def test_smaller_vocabulary_is_refused():
    check_vocabulary(61, 61)
    with pytest.raises(ConversionError, match=r"--vocab-size 60.*61"):
        check_vocabulary(60, 61)


def test_overflow_in_dtype_conversion_suggests_bfloat16():
    store = PieceStore(torch.tensor([[1.0, 1e5], [2.0, 3.0]]), "F32", 16)
    with pytest.raises(ConversionError, match=r"embed.*--dtype bfloat16"):
        list(grown(store, Entry("embed", "F16", (5, 2))))
