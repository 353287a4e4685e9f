"""Prints the report of the suite, and converts it to JSON."""

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from hf_compare import Difference, Result
from hf_reasons import REASONS


def summary_line(result: Result) -> str:
    """The counts and the time of a case, on one line."""
    counts = result.counts()
    numbers = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed"))
    return f"{numbers} in {result.seconds:.0f} s" + (" (DID NOT FINISH)" if result.error else "")


def print_table(results: dict[str, Result], listed: list[Difference]) -> None:
    """Print one row per case: its counts, and the number of tests and subtests that only the stock class passes."""
    print(f"\n{'case':24} {'passed':>7} {'skipped':>8} {'failed':>7} {'behind stock':>13} {'unexplained':>12}")
    for name, result in results.items():
        counts = result.counts()
        row = f"{name:24} {counts['passed']:7} {counts['skipped']:8} {counts['failed']:7}"
        if result.case.mixers:
            own = [difference for difference in listed if difference.case == name]
            row += f" {len(own):13} {sum(difference.key is None for difference in own):12}"
        print(row)


def print_differences(listed: list[Difference]) -> None:
    """Print the explained differences grouped by case and reason, and then the unexplained ones."""
    groups: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for difference in listed:
        if difference.key is not None:
            groups[difference.case, REASONS[difference.key]].append(difference)
    if groups:
        print("\nStock passes, ours does not, and why:")
    for (case, reason), members in groups.items():
        print(f"\n  {case}: {reason}")
        for difference in members:
            print(f"    {difference.outcome:8} {label(difference)}: {difference.why}")
    unexplained = [difference for difference in listed if difference.key is None]
    if unexplained:
        print("\nUNEXPLAINED: stock passes, ours does not, and hf_reasons.py does not say why:")
    for difference in unexplained:
        print(f"    {difference.case:24} {difference.outcome:8} {label(difference)}\n        {difference.why}")


def label(difference: Difference) -> str:
    """The name of the test, with its subtest."""
    return difference.test + (f" [{difference.subtest}]" if difference.subtest else "")


def print_report(results: dict[str, Result], listed: list[Difference], stale: list[tuple[str, str]]) -> int:
    """Print the whole report; return the exit status."""
    print_table(results, listed)
    print_differences(listed)
    for name, result in results.items():
        for (test, subtest), (outcome, why) in result.outcomes.items():
            if not result.case.mixers and outcome == "failed":
                print(f"\nfails on {name} itself: {test} {subtest}\n    {why}")
    for case, test in stale:
        print(f"\nSTALE: hf_reasons.py explains {test!r} on {case!r}, but there is no such difference any more")
    broken = {name: result.error for name, result in results.items() if result.error or not result.outcomes}
    for name, error in broken.items():
        print(f"\nDID NOT FINISH: {name}: {error or 'no test ran'}")
    unexplained = sum(difference.key is None for difference in listed)
    good = not (unexplained or stale or broken)
    print(
        f"\n{'OK' if good else 'NOT OK'}: {len(listed)} differences from stock, {unexplained} unexplained, "
        f"{len(stale)} stale reasons, {len(broken)} cases that did not finish"
    )
    return 0 if good else 1


def to_json(
    release: str,
    results: dict[str, Result],
    differences: list[Difference],
    stale: list[tuple[str, str]],
    status: int,
) -> dict[str, Any]:
    """All outcomes and differences as a JSON object."""
    cases = {}
    for name, result in results.items():
        rows = [
            {"test": test, "subtest": subtest, "outcome": outcome, "why": why}
            for (test, subtest), (outcome, why) in result.outcomes.items()
        ]
        cases[name] = {
            "mixers": result.case.mixers,
            "counts": dict(result.counts()),
            "seconds": round(result.seconds, 1),
            "error": result.error,
            "outcomes": rows,
        }
    difference_rows = [
        {key: value for key, value in asdict(difference).items() if key != "key"}
        | {"reason": REASONS[difference.key] if difference.key else None}
        for difference in differences
    ]
    return {
        "transformers": release,
        "status": status,
        "cases": cases,
        "differences": difference_rows,
        "stale": stale,
    }
