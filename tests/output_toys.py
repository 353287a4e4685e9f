"""Small model folders of four shards, written through `atomic_output`, complete or interrupted."""

from functools import partial

import pytest
import torch

from crosshead.common.errors import ConversionError
from crosshead.conversion.sources.tensor_store import Entry
from crosshead.conversion.writing.atomic_output import atomic_output
from crosshead.conversion.writing.shard_writer import tensor_chunks, write_shard

SHARDS = {f"model-{shard:02d}.safetensors": [Entry(f"{shard}.weight", "F32", (8, 5))] for shard in range(4)}
ONE, TWO = {"command": "convert", "options": 1}, {"command": "convert", "options": 2}


def items(file):
    """Return the tensors of a shard, filled with the shard's number."""
    return [(entry, partial(tensor_chunks, torch.full(entry.shape, float(file[6:8])))) for entry in SHARDS[file]]


def write(output, stop=None):
    """Write the missing shards and return their names; raise KeyboardInterrupt before missing shard number `stop`."""
    output.expect(SHARDS)
    written = [file for file in SHARDS if file not in output.finished]
    for number, file in enumerate(written):
        if number == stop:
            raise KeyboardInterrupt
        output.record(file, write_shard(output.folder / file, items(file)))
    (output.folder / "config.json").write_text("{}")
    return written


def run(target, identity=ONE, overwrite=False, restart=False, stop=None):
    with atomic_output(target, identity, overwrite, restart) as output:
        written = write(output, stop=stop)
        output.publish()
    return written


def stopped(target, identity=ONE, overwrite=False, stop=2):
    with pytest.raises(KeyboardInterrupt):
        run(target, identity, overwrite, stop=stop)


def refusal(target, **options):
    before = names(target.parent)
    with pytest.raises(ConversionError) as caught:
        run(target, **options)
    assert "\n" not in str(caught.value)
    assert names(target.parent) == before
    return str(caught.value)


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None


def complete(target):
    return names(target) == sorted([*SHARDS, "config.json"])


def old_model(tmp_path, name="out"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("old")
    (tmp_path / name / "model.safetensors").write_text("old")


def fill(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
