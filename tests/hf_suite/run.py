"""Runs the model tests of transformers on our classes and on the stock classes (`make hf-suite`).

    python tests/hf_suite/run.py [--filter SUBSTR] [--json OUT]

Fetches the source distribution of the installed transformers, unpacks its tests, and runs on each case of
hf_cases.py, in its own process: `ModelTesterMixin`, `TrainingTesterMixin`, and `MemoryCleanupMixin` if the version has
it (5.17 has not; the leak that it detects can only be measured on an accelerator). Then prints, for each case, every
test or subtest that the stock class passes and ours does not, with its reason from hf_reasons.py. The exit status is 0
if each has a reason, each reason still applies, and every case ran.

Omitted tests:
- `GenerationTesterMixin`, `ExportTesterMixin`, `CausalLMModelTest`: not in the source distribution (empty stand-ins
  replace the first two), and the test that requires the first;
- `TensorParallelTesterMixin`, `ExpertParallelTesterMixin`, `FSDPTesterMixin`: since 5.23 they import a module that the
  source distribution lacks, and they test plans for sharding layers, which layers with head interaction do not have;
- `ConfigTester`: needs the source tree of transformers;
- `PipelineTesterMixin`, `ExecutorchTest`: they fetch models from the Hub;
- the remaining files of `tests/`: tokenizers, processors, images and videos, backbones, patching.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from hf_cases import CASES, Case, select
from hf_compare import Outcomes, Result, differences, stale_reasons
from hf_fetch import FetchError, fetch
from hf_reasons import REASONS
from hf_report import print_report, summary_line, to_json

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "hf_suite"
TIME_LIMIT = 1800
"""Maximum seconds per case; a case usually takes about half a minute."""


def environment(case: Case, tests: Path, out: Path) -> dict[str, str]:
    """The environment variables for the process of a case: offline, one thread, unpacked tests on the import path."""
    paths = [str(HERE), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "HF_SUITE_CASE": case.name,
        "HF_SUITE_OUT": str(out),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RUN_TRAINING_TESTS": "1",
        "TRANSFORMERS_TEST_MEMORY_LEAK_MIB": "16",
        "TRANSFORMERS_TEST_MEMORY_LEAK_MODE": "error",
    }


def read_outcomes(out: Path) -> Outcomes:
    """The outcomes that hf_plugin.py wrote; the worst one if a name was reported more than once."""
    outcomes: Outcomes = {}
    badness = ["passed", "skipped", "failed"]
    for line in out.read_text().splitlines():
        row = json.loads(line)
        key = (row["test"], row["subtest"])
        known = outcomes.get(key, ("passed", ""))
        if key not in outcomes or badness.index(row["outcome"]) > badness.index(known[0]):
            outcomes[key] = (row["outcome"], row.get("why", ""))
    return outcomes


def run_case(case: Case, tests: Path) -> Result:
    """Run pytest on one case in its own process."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hf_plugin", "--tb=short", "hf_models.py"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.jsonl"
        out.touch()
        try:
            run = subprocess.run(
                command,
                cwd=HERE,
                env=environment(case, tests, out),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIME_LIMIT,
            )
            # 0 and 1 mean "all passed" and "some failed"; with any other status pytest did not finish.
            error = (
                "" if run.returncode in (0, 1) else f"pytest ended with status {run.returncode}\n{run.stdout[-3000:]}"
            )
        except subprocess.TimeoutExpired:
            error = f"not done after {TIME_LIMIT} seconds"
        return Result(case, read_outcomes(out), time.monotonic() - started, error)


def installed_version() -> str:
    """The version of the installed transformers; exits with a message if a required package is missing."""
    missing = [name for name in ("crosshead", "pytest", "parameterized") if find_spec(name) is None]
    if missing:
        sys.exit(f"hf-suite: not installed: {', '.join(missing)} (pip install -e '.[dev]')")
    try:
        return version("transformers")
    except PackageNotFoundError:
        sys.exit("hf-suite: not installed: transformers")


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Run the model tests of transformers on our classes and on the stock classes."
    )
    parser.add_argument("--filter", default="", metavar="SUBSTR", help="run only cases whose name contains this")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all outcomes and differences to this file")
    options = parser.parse_args(arguments)
    cases = select(options.filter)
    if not cases:
        parser.error(f"no case's name contains {options.filter!r}; they are: {', '.join(CASES)}")
    release = installed_version()
    print(f"transformers {release}, torch {version('torch')}: {len(cases)} cases", flush=True)
    try:
        tests = fetch(release, CACHE)
    except FetchError as error:
        sys.exit(f"hf-suite: {error}")
    results: dict[str, Result] = {}
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case.name} ...", end=" ", flush=True)
        results[case.name] = run_case(case, tests)
        print(summary_line(results[case.name]), flush=True)
    listed = differences(results, REASONS)
    stale = [] if options.filter else stale_reasons(results, listed, REASONS)
    status = print_report(results, listed, stale)
    if options.json:
        options.json.write_text(json.dumps(to_json(release, results, listed, stale, status), indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
