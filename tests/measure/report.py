"""Measures the size of the `crosshead inspect` page of a real model, and the time until a browser has drawn it.

usage: python -P tests/measure/report.py MODEL FOLDER [--tokens 300]

MODEL is a GGUF file or the folder of a stock model. The page shows `--tokens` tokens of a help text of Python, and is
written to FOLDER. Five times, a new browser opens it, until everything is drawn. Prints the results as JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

from offline_suite import stock
from transformers import AutoTokenizer

from browser import opened, running

TIMES = 5
"""Number of times that the page is opened."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=300)
    return parser.parse_args()


def beginning(model: Path, tokens: int) -> str:
    """The first `tokens` tokens of a help text, decoded."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer.decode(tokenizer(topics["assignment"])["input_ids"][:tokens])


def seconds_to_open(page: Path) -> float:
    with tempfile.TemporaryDirectory() as profile, running(profile) as browser:
        begin = time.perf_counter()
        with opened(browser, page):
            return time.perf_counter() - begin


def main() -> None:
    options = arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    model, page = stock(options.model, options.folder), options.folder / "report.html"
    command = [sys.executable, "-P", "-m", "crosshead", "inspect", str(model), "--out", str(page), "--overwrite"]
    begin = time.perf_counter()
    subprocess.run([*command, "--text", beginning(model, options.tokens)], check=True, stdout=subprocess.DEVNULL)
    results = {"tokens": options.tokens, "seconds_to_make": time.perf_counter() - begin}
    results["megabytes"] = page.stat().st_size / 1e6
    results["seconds_to_open"] = [seconds_to_open(page) for _ in range(TIMES)]
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
