"""Checks of the files that a finished demo writes."""

import json
import os
from pathlib import Path

from crosshead.common.access_tokens import TOKEN
from crosshead.evals.bench.machine import machine
from crosshead.model_cards.published import check_folder


def check_made(folder, table, models):
    """Check that every model is complete with its card and that the table agrees with the files; return its rows."""
    record, scores = (json.loads((folder / name).read_text()) for name in ("demo.json", "scores.json"))
    rows = {row["name"]: row for row in record["models"]}
    for name in models:
        assert {"config.json", "conversion.json", "model.safetensors", "README.md"} <= set(os.listdir(folder / name))
        assert json.loads((folder / name / "conversion.json").read_text())["verification"]["reload"]
        assert "README.md" in check_folder(folder / name, TOKEN)
    assert table.splitlines()[-1] == f"crosshead push {Path(folder.name, models[-1])} YOU/MODEL --dry-run"
    assert record["machine"] == machine() | {"threads": record["machine"]["threads"]}
    assert [row["model"] for row in rows.values()] == [item["model"] for item in scores["models"]]
    for row, scored in zip(rows.values(), scores["models"], strict=True):
        assert row["scores"] == {item["name"]: item["score"] for item in scored["scores"]}
        assert f"{row['kv_bytes_per_token']:,}" in table
        if row["decoded"]:
            assert row["decoded"]["bytes_per_token"] == row["kv_bytes_per_token"]
            assert f"{row['decoded']['cache_bytes']:,} bytes of cache" in table
    if "served" in rows:
        assert rows["served"]["kv_bytes_per_token"] == rows["explicit-trained"]["kv_bytes_per_token"]
        served = set(os.listdir(folder / Path(rows["served"]["model"]).name))
        assert "config.json" in served and not any(name.endswith(".py") for name in served)
    assert "<html" in (folder / "heads.html").read_text()[:500]
    assert all(str(Path(folder.name, name)) in table for name in (*models, "heads.html", "scores.json", "demo.json"))
    return rows
