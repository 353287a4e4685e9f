import random
import time
from functools import partial
from multiprocessing import get_context

import pytest
import torch

from crosshead.conversion.sources.tensor_store import Entry
from crosshead.conversion.writing import atomic_output as module
from crosshead.conversion.writing.atomic_output import atomic_output
from crosshead.conversion.writing.shard_writer import tensor_chunks, write_shard
from output_toys import ONE


def write_many_shards(target):
    """Write a model of many shards to `target`, with some computation between the chunks."""

    def chunks(seed):
        yield from tensor_chunks(torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)))

    shards = {f"{i:02d}.safetensors": [Entry(f"{i}.{j}", "F32", (64, 64)) for j in range(8)] for i in range(20)}
    with atomic_output(target, {"options": "same"}, overwrite=True) as output:
        output.expect(shards)
        for i, (file, entries) in enumerate(shards.items()):
            if file not in output.finished:
                items = [(entry, partial(chunks, 99 * i + j)) for j, entry in enumerate(entries)]
                output.record(file, write_shard(output.folder / file, items))
        (output.folder / "config.json").write_text("{}")
        output.sibling(f"{target.name}.conversion.json").write_text("of it")
        output.publish()


def write_many_shards_forever(target):
    while True:
        write_many_shards(target)


def file_contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("work", [write_many_shards, write_many_shards_forever], ids=["first", "replacing"])
def test_process_killed_at_random_times_leaves_complete_or_no_model(tmp_path, work):
    """Kill a process that writes a first model, or one that replaces the model over and over."""
    begin = time.perf_counter()
    write_many_shards(tmp_path / "whole")
    duration, whole = time.perf_counter() - begin, file_contents(tmp_path / "whole")
    target, chance, published = tmp_path / "out", random.Random(1), False
    for _ in range(20):
        process = get_context("fork").Process(target=work, args=(target,))
        process.start()
        time.sleep(chance.random() * duration * (0.3 if work is write_many_shards and not published else 1.5))
        process.kill()
        process.join()
        complete = (target / "config.json").exists()  # a folder without it is no model
        assert not complete or file_contents(target) == whole
        assert target.exists() or not published
        published = published or complete
        assert not (tmp_path / "out.conversion.json").exists() or target.exists()
    write_many_shards(target)
    assert file_contents(target) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out",
        "out.conversion.json",
        "whole",
        "whole.conversion.json",
    ]


def test_record_is_removed_before_partial_model(tmp_path, monkeypatch):
    """Otherwise the remains would look like a published model whose record is still missing."""

    def killed(path):
        remove(path)
        if path.name == "model":
            raise KeyboardInterrupt

    target, remove = tmp_path / "out", module.remove
    with pytest.raises(KeyboardInterrupt), atomic_output(target, ONE, overwrite=False) as output:
        (output.work / "kept").write_text("for the next run")
        output.sibling("out.conversion.json").write_text("of it")
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "remove", killed)
        with atomic_output(target, {}, overwrite=False, restart=True):  # removes the remains of the run before
            pass
    with pytest.raises(KeyboardInterrupt), atomic_output(target, ONE, overwrite=False):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == []
