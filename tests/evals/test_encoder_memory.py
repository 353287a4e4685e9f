"""Memory of talking heads on BERT is linear in the text length; memory of eager attention is quadratic."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from crosshead.evals.bench.memory import MALLOC_ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

PEAKS = """
import gc, json, sys
import torch
from transformers.masking_utils import create_bidirectional_mask
from crosshead import CrossheadBertConfig, CrossheadBertModel
from crosshead.evals.bench.memory import system_counter

implementation, padded, *lengths = sys.argv[1:]
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
config = CrossheadBertConfig(**sizes, vocab_size=61, mixers={"talking": {}})
config._attn_implementation = implementation
layer = CrossheadBertModel(config).eval().encoder.layer[0]
now, peak = system_counter()
peaks = []
for length in (128, *map(int, lengths)):  # ascending, so that the peak of the process is that of the last length
    hidden, tokens = torch.randn(2, length, 128), torch.ones(2, length)
    tokens[1, length // 2 :] = padded == "whole"
    mask = create_bidirectional_mask(config=config, inputs_embeds=hidden, attention_mask=tokens)
    gc.collect()
    before = now()  # with transformers' mask, which is quadratic for padded texts
    with torch.inference_mode():
        layer(hidden, mask)
    peaks.append(peak() - before)
print(json.dumps(peaks[1:]))
"""


def peak_growth(implementation, padded, *lengths):
    """Return the ratio of peak memory between each two successive lengths, measured in a new process."""
    command = [sys.executable, "-P", "-c", PEAKS, implementation, padded, *map(str, lengths)]
    environment = os.environ | MALLOC_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    peaks = json.loads(done.stdout)
    return [after / before for before, after in pairwise(peaks)]


@pytest.mark.parametrize("padded", ["whole", "padded"])
def test_talking_memory_grows_linearly_with_length(padded):
    """A batch of two texts, whole or with one padded to twice its length."""
    assert all(1.5 < factor < 2.3 for factor in peak_growth("sdpa", padded, 1024, 2048, 4096))


def test_eager_memory_grows_quadratically_with_length():
    assert all(factor > 3.3 for factor in peak_growth("eager", "padded", 512, 1024))
