"""Talking heads on BERT take memory that is linear in the length of the texts; eager attention, in its square."""

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
found = []
for length in (128, *map(int, lengths)):  # a longer text takes more, so that the peak of the process is its own
    hidden, tokens = torch.randn(2, length, 128), torch.ones(2, length)
    tokens[1, length // 2 :] = padded == "whole"
    mask = create_bidirectional_mask(config=config, inputs_embeds=hidden, attention_mask=tokens)
    gc.collect()
    before = now()  # with transformers' mask, which is quadratic for padded texts
    with torch.inference_mode():
        layer(hidden, mask)
    found.append(peak() - before)
print(json.dumps(found[1:]))
"""


def growth(implementation, padded, *lengths):
    """The factors by which each length takes more memory than the one before, in a process of its own."""
    command = [sys.executable, "-P", "-c", PEAKS, implementation, padded, *map(str, lengths)]
    environment = os.environ | MALLOC_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    peaks = json.loads(done.stdout)
    return [after / before for before, after in pairwise(peaks)]


@pytest.mark.parametrize("padded", ["whole", "padded"])
def test_memory_grows_with_the_length(padded):
    """Two texts; one of them is padded to twice its length."""
    assert all(1.5 < factor < 2.3 for factor in growth("sdpa", padded, 1024, 2048, 4096))


def test_eager_attention_grows_with_the_square():
    assert all(factor > 3.3 for factor in growth("eager", "padded", 512, 1024))
