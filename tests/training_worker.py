"""Runs `crosshead` and records the batches that each process trains on.

Arguments: a folder for the records, then the arguments of the command. For every micro-batch, the process appends a
line to its record file: the step (from 0) and a digest of each sequence.
"""

import os
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

from crosshead.recipes.trainer.run_trainer import RunTrainer
from crosshead_command.main import main


def record(folder: Path) -> None:
    """Patch RunTrainer to append each micro-batch to this process's record file."""
    name = f"{os.environ.get('RANK', '0')}-{os.getpid()}"
    step = RunTrainer.training_step

    def recording(self: RunTrainer, model: Any, inputs: dict[str, Any], *others: Any) -> Any:
        samples = inputs["input_ids" if "input_ids" in inputs else "pixel_values"]
        rows = [blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in samples]
        with (folder / name).open("a") as file:
            file.write(f"{self.state.global_step} {' '.join(rows)}\n")
        return step(self, model, inputs, *others)

    RunTrainer.training_step = recording  # type: ignore[method-assign]


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    record(Path(folder))
    sys.argv = ["crosshead", *arguments]
    main()
