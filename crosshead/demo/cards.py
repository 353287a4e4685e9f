"""Model cards for what the demo has made."""

from collections.abc import Sequence
from pathlib import Path

from crosshead_command.card import write_card


def write_cards(folders: Sequence[Path], scores: Path, origin: str) -> None:
    """One in each folder, with its scores."""
    for folder in folders:
        write_card(folder, [scores], source=origin)
