"""The table of supported mechanisms per backbone in backbones.md matches what the configurations accept."""

import re

import pytest

import crosshead
from backbone_support import DIT, backbones, build
from rules import ROOT

PAGE = (ROOT / "modeling" / "docs" / "backbones.md").read_text(encoding="utf-8")
TABLE = re.search(r"<!-- refused: .*? -->\n(.*?)\n\n(.*?)\n\n", PAGE, re.DOTALL)
CELLS = {}
if TABLE:
    heads, _, *rows = (line.strip("| ").split(" | ") for line in TABLE[1].splitlines())
    CELLS = {
        (backbone, name.strip("`")): cell
        for names, *cells in rows
        for backbone in names.split(", ")
        for name, cell in zip(heads, cells, strict=True)
    }
    REASONS = dict(re.findall(r"^(\d+)\. (.*)$", TABLE[2], re.MULTILINE))


def test_support_table_lists_every_backbone_and_mechanism():
    assert CELLS.keys() == {(backbone, name) for backbone in backbones() for name in crosshead.MECHANISMS}


@pytest.mark.parametrize(("backbone", "mechanism"), CELLS)
def test_support_table_matches_config_validation(backbone, mechanism):
    if backbone == DIT:
        pytest.importorskip("diffusers")
    cell = CELLS[backbone, mechanism]
    if cell == "yes":
        build(backbone, mechanism)
        return
    with pytest.raises(ValueError, match="mixers") as refused:
        build(backbone, mechanism)
    assert REASONS[cell.removeprefix("no (").removesuffix(")")] in str(refused.value)
