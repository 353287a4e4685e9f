"""`crosshead bench convert`: the synthetic checkpoint, its conversions, and the copy of files as a baseline.

Slow tier, like all tests of measuring tools, except for one quick run of the command and the instant tests.
"""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from broken import run
from crosshead.common.errors import ConversionError
from crosshead.conversion import bench_convert
from crosshead.conversion.bench_convert import MIXERS, Synthetic
from crosshead.conversion.sources.safetensors_store import SafetensorsStore
from tiers import first
from toy_checkpoints import character_tokenizer


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 16, "vocab_size": 70}
    monkeypatch.setattr(bench_convert, "SHAPES", ((0, sizes),))
    monkeypatch.setattr(bench_convert, "SHARD", 60_000)
    made = Synthetic(tmp_path, 2e-4)
    made.write(character_tokenizer().save_pretrained)
    return made


@pytest.mark.parametrize(("gigabytes", "hidden"), [(0.01, 512), (0.49, 512), (1, 2048), (3.9, 2048), (8, 4096)])
def test_synthetic_checkpoint_has_requested_size(gigabytes, hidden, tmp_path):
    made = Synthetic(tmp_path, gigabytes)
    assert made.config.hidden_size == hidden
    assert made.size == pytest.approx(gigabytes * 1e9, rel=0.1)
    assert list(tmp_path.iterdir()) == []


def test_synthetic_checkpoint_is_complete_and_finite(checkpoint):
    store = SafetensorsStore(checkpoint.source)
    assert sum(entry.size for entry in store.entries.values()) == checkpoint.size == pytest.approx(2e5, rel=0.2)
    assert {entry.dtype for entry in store.entries.values()} == {"BF16"}
    assert len(list(checkpoint.source.glob("*.safetensors"))) > 2
    first, second = (store.read(f"model.layers.{layer}.self_attn.q_proj.weight") for layer in (0, 1))
    assert first.isfinite().all() and not torch.equal(first, second)


@pytest.mark.slow
def test_named_benchmarks_run_expected_conversions(checkpoint, monkeypatch):
    records = []
    fresh = Synthetic._fresh

    def keep(self, name):
        record = self.folder / name / "conversion.json"
        records.append(json.loads(record.read_text()) if record.exists() else None)
        return fresh(self, name)

    monkeypatch.setattr(Synthetic, "_fresh", keep)
    figures = {name: checkpoint.convert(name) for name in ("neutral", "virtual-heads", "calibration")}
    for figure in figures.values():
        assert figure["seconds"] > 0 and figure["peak_bytes"] > 100e6
    neutral, virtual = (record for record in records if record is not None)
    assert list(neutral["options"]["mixers"]) == ["knocking"] and neutral["counts"]["rewritten"] == 0
    assert virtual["options"]["mixers"]["explicit"]["key_heads"] == 4
    assert virtual["calibration"]["saved"] == "calibration.safetensors"
    left = {path.name for path in checkpoint.folder.iterdir()}
    assert left == {"source", "text.txt", "calibration.safetensors"}
    assert checkpoint.copy() > 0 and {path.name for path in checkpoint.folder.iterdir()} == left


@pytest.mark.slow
def test_baseline_copy_copies_every_file(checkpoint, monkeypatch):
    copied = []
    run_process = bench_convert.run_child

    def recording(command, *arguments):
        output = run_process(command, *arguments)
        out = Path(command[-1])
        copied.append({path.name: path.read_bytes() for path in out.iterdir()})
        return output

    monkeypatch.setattr(bench_convert, "run_child", recording)
    checkpoint.copy()
    assert copied == [{path.name: path.read_bytes() for path in checkpoint.source.iterdir()}]


def test_full_disk_is_refused_before_checkpoint_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=2.5e9))
    with pytest.raises(ConversionError, match=r"2\.98 GB.*2\.5 GB.*TMPDIR"):
        Synthetic(tmp_path, 1).write(lambda folder: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_interrupted_conversion_kills_child_process(checkpoint, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def communicate(self):
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert("neutral")
    assert started[0].returncode == -9


@pytest.mark.slow
@pytest.mark.distributed
def test_failing_child_process_reports_its_error(checkpoint):
    (checkpoint.source / "config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"ConversionError: .*config\.json"):
        checkpoint.convert("neutral")


def run_in_this_process(command, *_):
    """Run a conversion or a copy in this process instead of a new one."""
    if command[0] == "cp":
        return subprocess.run(command, check=True, capture_output=True).stdout
    return json.dumps(bench_convert.main(json.loads(command[-1]))).encode()


@pytest.mark.parametrize("process", first(["this one", "one for each conversion"]))
def test_bench_convert_command_writes_report(process, checkpoint, tmp_path, monkeypatch, capfd):
    if process == "this one":
        monkeypatch.setattr(bench_convert, "run_child", run_in_this_process)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(bench_convert, "SHAPES", ((0, bench_convert.SHAPES[0][1] | {"vocab_size": 300}),))
    status, out, err = run(
        capfd, monkeypatch, f"bench convert neutral --gigabytes 0.01 --rounds 1 --out {tmp_path}/a.json"
    )
    assert status == 0, err
    report = json.loads((tmp_path / "a.json").read_text())
    case = report["cases"]["neutral"]
    assert case["shape"]["bytes"] == pytest.approx(1e7, rel=0.1) and case["dtype"] == "bfloat16"
    assert case["bytes_per_second"][1] == case["shape"]["bytes"] / case["median_baseline"]
    assert case["target"] == 1.5
    assert out.splitlines()[1].startswith("neutral ") and list(scratch.iterdir()) == []
    assert list(MIXERS) == ["neutral", "calibration", "virtual-heads"]
