"""Token caches are reused, rebuilt when anything that they depend on changes, and published atomically."""

import fcntl
import json
import os
import random
import signal
import time
from multiprocessing import get_context

import numpy as np
import pytest

from crosshead.common.errors import RecipeError
from crosshead.recipes.data import tokenising
from crosshead.recipes.data.token_cache import open_cache
from crosshead.recipes.data.tokenising import HELD_OUT, TRAINING, TokenEncoder
from crosshead.recipes.schema.sections import DataSource
from toy_data import separating_tokenizer, toy_texts, write_jsonl

fork = get_context("fork")
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class CountingEncoder(TokenEncoder):
    """Counts the calls of `encode`."""

    calls = 0

    def encode(self, texts):
        self.calls += 1
        return super().encode(texts)


@pytest.fixture
def encoder():
    return CountingEncoder(separating_tokenizer(), 61)


@pytest.fixture
def source(tmp_path):
    return DataSource(str(write_jsonl(tmp_path / "a.jsonl", toy_texts(300))), "jsonl")


def file_contents(cache):
    return {path.name: path.read_bytes() for path in cache.folder.iterdir()}


def folder_names(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_second_open_reuses_token_cache(source, encoder, tmp_path):
    reports = []
    first = open_cache(source, encoder, 0.1, tmp_path / "x" / "y", lambda *progress: reports.append(progress))
    calls, size = encoder.calls, (tmp_path / "a.jsonl").stat().st_size
    assert calls > 0 and reports[-1] == (source.path, size, size, "")
    again = open_cache(source, encoder, 0.1, tmp_path / "x" / "y")
    assert (encoder.calls, again) == (calls, first)
    held_out, training = again.stream(HELD_OUT), again.stream(TRAINING)
    assert len(training.ends) + len(held_out.ends) == 300 > len(held_out.ends) > 10
    assert len(training.tokens) == training.ends[-1] == again.parts[TRAINING].tokens
    assert not training.tokens.flags.writeable


def test_cache_without_held_out_share_has_empty_part(source, encoder, tmp_path):
    held_out = open_cache(source, encoder, 0.0, tmp_path / "cache").stream(HELD_OUT)
    assert (len(held_out.tokens), len(held_out.ends)) == (0, 0)


def test_changed_settings_or_source_get_another_cache_folder(source, encoder, tmp_path):
    root = tmp_path / "cache"
    made = [open_cache(source, encoder, 0.0, root)]
    made += [open_cache(source, encoder, 0.1, root)]
    made += [open_cache(source, TokenEncoder(separating_tokenizer(80), 80), 0.0, root)]
    write_jsonl(tmp_path / "a.jsonl", [*toy_texts(299), "w1"])
    made += [open_cache(source, encoder, 0.0, root)]
    assert folder_names(root) == sorted(cache.folder.name for cache in made)
    assert len({cache.folder for cache in made}) == 4
    assert made[0].parts[TRAINING].digest != made[3].parts[TRAINING].digest


DAMAGE = {
    "tokens cut": lambda folder: os.truncate(folder / "training.tokens", 100),
    "tokens too long": lambda folder: (folder / "training.tokens").open("ab").write(b"12"),
    "ends cut": lambda folder: os.truncate(folder / "training.ends", 8),
    "other part gone": lambda folder: (folder / "held_out.tokens").unlink(),
    "record gone": lambda folder: (folder / "cache.json").unlink(),
    "record cut": lambda folder: os.truncate(folder / "cache.json", 20),
    "record empty": lambda folder: (folder / "cache.json").write_text("{}"),
    "record is a list": lambda folder: (folder / "cache.json").write_text("[]"),
    "record is no text": lambda folder: (folder / "cache.json").write_bytes(b"\xff\xfe"),
    "record says more": lambda folder: overstate_token_count(folder / "cache.json"),
}


def overstate_token_count(path):
    record = json.loads(path.read_text())
    record["parts"][TRAINING]["tokens"] += 1
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_cache_is_rebuilt(source, encoder, tmp_path, damage, caplog):
    first = open_cache(source, encoder, 0.1, tmp_path / "cache")
    before = file_contents(first)
    damage(first.folder)
    assert file_contents(first) != before
    again = open_cache(source, encoder, 0.1, tmp_path / "cache")
    assert file_contents(again) == before
    assert "damaged" in caplog.text


def test_failed_tokenising_leaves_no_cache_folder(source, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [*toy_texts(20), "w70"])
    with pytest.raises(RecipeError, match="token 70"):
        open_cache(source, TokenEncoder(separating_tokenizer(80), 61), 0.0, tmp_path / "cache")
    assert folder_names(tmp_path / "cache") == []


def test_unwritable_cache_folder_is_refused(source, encoder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="cache") as caught:
        open_cache(source, encoder, 0.0, tmp_path / "file" / "cache")
    assert "\n" not in str(caught.value)


def test_full_disk_is_refused_and_leaves_no_cache_folder(source, encoder, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenising.PartWriter, "end_document", full)
    with pytest.raises(RecipeError, match="No space left"):
        open_cache(source, encoder, 0.0, tmp_path / "cache")
    assert folder_names(tmp_path / "cache") == []


def test_concurrent_builds_without_file_locks_publish_one_cache(source, encoder, tmp_path, monkeypatch, caplog):
    """Another process builds the same cache meanwhile: both work, and one of them is published."""

    def refused(*_):
        raise OSError(38, "Function not implemented")

    class Slow(CountingEncoder):
        def encode(self, texts):
            if not self.calls:
                other.append(open_cache(source, encoder, 0.1, tmp_path / "cache"))
            return super().encode(texts)

    other = []
    whole = file_contents(open_cache(source, encoder, 0.1, tmp_path / "whole"))
    monkeypatch.setattr(fcntl, "flock", refused)
    made = open_cache(source, Slow(separating_tokenizer(), 61), 0.1, tmp_path / "cache")
    assert [made] == other and file_contents(made) == whole
    assert folder_names(tmp_path / "cache") == [made.folder.name]
    assert "cannot be locked" in caplog.text


def build_slowly(source, root, delay, die_after=None):
    """Build a cache slowly; exit abruptly after `die_after` batches."""

    class Slow(TokenEncoder):
        batches = 0

        def encode(self, texts):
            if self.batches == die_after:
                os._exit(9)
            self.batches += 1
            time.sleep(delay)
            return super().encode(texts)

    tokenising.BATCH = 50
    with (root / "begun").open("a") as file:
        file.write("x")
    encoder = Slow(separating_tokenizer(), 61)
    cache = open_cache(source, encoder, 0.1, root)
    with (root / "built").open("a") as file:
        file.write(f"{int(cache.stream(TRAINING).tokens.sum())} {encoder.batches}\n")


@forks
@pytest.mark.parametrize("die_after", [0, 1, 20])
def test_killed_builder_leaves_no_complete_cache(source, encoder, tmp_path, die_after):
    whole = file_contents(open_cache(source, encoder, 0.1, tmp_path / "whole"))
    root = tmp_path / "cache"
    root.mkdir()
    child = fork.Process(target=build_slowly, args=(source, root, 0, die_after))
    child.start()
    child.join()
    assert child.exitcode == 9
    assert [name for name in folder_names(root) if not name.startswith(".")] == []
    cache = open_cache(source, encoder, 0.1, root)
    assert file_contents(cache) == whole
    assert folder_names(root) == [cache.folder.name]


@forks
@pytest.mark.distributed
def test_cache_is_complete_or_absent_after_kill_at_random_moment(source, encoder, tmp_path):
    chance, killed = random.Random(0), 0
    whole = file_contents(open_cache(source, encoder, 0.1, tmp_path / "whole"))
    for moment in range(10):
        root = tmp_path / f"cache{moment}"
        root.mkdir()
        child = fork.Process(target=build_slowly, args=(source, root, 0.002))
        child.start()
        while not (root / "begun").exists():
            time.sleep(0.001)
        time.sleep(chance.random() * 0.3)
        child.kill()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        assert all(
            {path.name: path.read_bytes() for path in (root / name).iterdir()} == whole
            for name in folder_names(root)
            if not name.startswith(".")
        )
        assert file_contents(open_cache(source, encoder, 0.1, root)) == whole
    assert killed > 5


@forks
@pytest.mark.distributed
def test_only_one_of_several_processes_builds_cache(source, tmp_path):
    root = tmp_path / "cache"
    root.mkdir()
    children = [fork.Process(target=build_slowly, args=(source, root, 0.005)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    sums, batches = np.array([line.split() for line in (root / "built").read_text().splitlines()], int).T
    assert len(set(sums)) == 1
    assert sorted(count > 0 for count in batches) == [False, False, True]
