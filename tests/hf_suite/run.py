"""transformers' own model tests on our classes, beside the same tests on the stock classes (`make hf-suite`).

    python tests/hf_suite/run.py [--filter SUBSTR] [--json OUT]

Fetches the source distribution of the installed transformers, unpacks its tests, and runs on each case of
hf_cases.py, in a process of its own: `ModelTesterMixin`, `TrainingTesterMixin`, and `MemoryCleanupMixin` where the
version has it (not 5.17; the leak it looks for can be measured on an accelerator only). Then prints, for each case,
every test or subtest that the stock class passes and ours does not, with its reason from hf_reasons.py. The status is
0 if each has a reason, each reason still applies, and every case ran.

Left out:
- `GenerationTesterMixin`, `ExportTesterMixin`, `CausalLMModelTest`: not in the source distribution (empty stand-ins
  for the first two), nor therefore the test that demands the first;
- `TensorParallelTesterMixin`, `ExpertParallelTesterMixin`, `FSDPTesterMixin`: since 5.23 they import a module that the
  source distribution lacks, and they test plans for splitting a layer, which heads that work together do not have;
- `ConfigTester`: needs the library's source tree around it;
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
"""Seconds after which a case is given up; a case takes about half a minute."""


def environment(case: Case, tests: Path, out: Path) -> dict[str, str]:
    """The environment of a case's process: offline, one thread (the models are tiny), the unpacked tests in reach."""
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
    """What the plugin wrote: (test, subtest) -> outcome and why; the worst where one name was reported twice."""
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
    """Run pytest on one case in a process of its own."""
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
            # 0 and 1 are pytest's own "all passed" and "some failed"; anything else means that it did not get through.
            error = (
                "" if run.returncode in (0, 1) else f"pytest ended with status {run.returncode}\n{run.stdout[-3000:]}"
            )
        except subprocess.TimeoutExpired:
            error = f"not done after {TIME_LIMIT} seconds"
        return Result(case, read_outcomes(out), time.monotonic() - started, error)


def installed_version() -> str:
    """The installed transformers' version; exits with one line where something needed is missing."""
    missing = [name for name in ("crosshead", "pytest", "parameterized") if find_spec(name) is None]
    if missing:
        sys.exit(f"hf-suite: not installed: {', '.join(missing)} (pip install -e '.[dev]')")
    try:
        return version("transformers")
    except PackageNotFoundError:
        sys.exit("hf-suite: not installed: transformers")


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; returns the exit status."""
    parser = argparse.ArgumentParser(description="transformers' own model tests on our classes, beside stock ones")
    parser.add_argument("--filter", default="", metavar="SUBSTR", help="only the cases whose name contains this")
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
    found = differences(results, REASONS)
    stale = [] if options.filter else stale_reasons(results, found, REASONS)
    status = print_report(results, found, stale)
    if options.json:
        options.json.write_text(json.dumps(to_json(release, results, found, stale, status), indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
