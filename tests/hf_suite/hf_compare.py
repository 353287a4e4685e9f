"""Comparing a case's outcomes with those of its stock baseline."""

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hf_cases import COMPARED, Case

Outcomes = dict[tuple[str, str], tuple[str, str]]
"""(test, subtest) -> (passed, skipped or failed; why). The subtest is empty for the test itself."""

Reasons = dict[tuple[str, str], str]
"""(pattern of case names, pattern of test names) -> why those tests cannot pass, in a sentence."""


@dataclass
class Result:
    """What one case's run gave; `error` is set where it did not get through."""

    case: Case
    outcomes: Outcomes
    seconds: float
    error: str = ""

    def counts(self) -> Counter[str]:
        """How many tests passed, were skipped and failed; subtests are not counted."""
        return Counter(outcome for (_, subtest), (outcome, _) in self.outcomes.items() if not subtest)


@dataclass
class Difference:
    """A test or subtest that stock passes and ours does not."""

    case: str
    test: str
    subtest: str
    outcome: str
    why: str
    key: tuple[str, str] | None
    """The entry of the table of reasons that covers it, if one does."""


def matching(case: str, test: str, reasons: Reasons) -> tuple[str, str] | None:
    """The first entry of the table that covers this test of this case."""
    return next((key for key in reasons if fnmatchcase(case, key[0]) and fnmatchcase(test, key[1])), None)


def differences(results: dict[str, Result], reasons: Reasons) -> list[Difference]:
    """All that stock passes and ours does not; a subtest is listed only where its test itself is not."""
    found = []
    for name, result in results.items():
        if not result.case.mixers:
            continue
        worse: set[str] = set()
        stock = results[result.case.baseline].outcomes
        for (test, subtest), (outcome, _) in sorted(stock.items()):  # a test before its subtests
            ours, why = result.outcomes.get((test, subtest), ("not run", ""))
            if outcome != "passed" or ours == "passed" or test in worse:
                continue
            if subtest and result.case.backbone in COMPARED:  # its classes and layers have other names
                continue
            if not subtest:
                worse.add(test)
            found.append(Difference(name, test, subtest, ours, why, matching(name, test, reasons)))
    return found


def stale_reasons(results: dict[str, Result], found: list[Difference], reasons: Reasons) -> list[tuple[str, str]]:
    """Entries that explain no difference, although stock passes a test that they name: the difference is gone.

    An entry for a test that this version of the library does not have, or that no stock class can pass on this
    machine, is not stale: it was not put to the test.
    """
    used = {difference.key for difference in found}
    tested = {
        matching(name, test, reasons)
        for name, result in results.items()
        if result.case.mixers
        for (test, _), (outcome, _) in results[result.case.baseline].outcomes.items()
        if outcome == "passed"
    }
    return [key for key in reasons if key in tested and key not in used]
