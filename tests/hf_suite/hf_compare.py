"""Compares the test outcomes of a case with those of its stock baseline."""

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hf_cases import COMPARED, Case

Outcomes = dict[tuple[str, str], tuple[str, str]]
"""(test, subtest) -> (`passed`, `skipped` or `failed`; reason). The subtest is empty for the test itself."""

Reasons = dict[tuple[str, str], str]
"""(pattern of case names, pattern of test names) -> reason why these tests cannot pass, in one sentence."""


@dataclass
class Result:
    """The result of the pytest run of one case; `error` is set if the run did not finish."""

    case: Case
    outcomes: Outcomes
    seconds: float
    error: str = ""

    def counts(self) -> Counter[str]:
        """The number of passed, skipped and failed tests, without subtests."""
        return Counter(outcome for (_, subtest), (outcome, _) in self.outcomes.items() if not subtest)


@dataclass
class Difference:
    """A test or subtest that passes with the stock class but not with ours."""

    case: str
    test: str
    subtest: str
    outcome: str
    why: str
    key: tuple[str, str] | None
    """Key in the table of reasons that explains the difference, or None."""


def matching(case: str, test: str, reasons: Reasons) -> tuple[str, str] | None:
    """The first key in the table of reasons that matches this case and test, or None."""
    return next((key for key in reasons if fnmatchcase(case, key[0]) and fnmatchcase(test, key[1])), None)


def differences(results: dict[str, Result], reasons: Reasons) -> list[Difference]:
    """All tests and subtests that only the stock class passes; subtests of a listed test are not listed."""
    listed = []
    for name, result in results.items():
        if not result.case.mixers:
            continue
        worse: set[str] = set()
        stock = results[result.case.baseline].outcomes
        for (test, subtest), (outcome, _) in sorted(stock.items()):  # sorted, so that a test precedes its subtests
            ours, why = result.outcomes.get((test, subtest), ("not run", ""))
            if outcome != "passed" or ours == "passed" or test in worse:
                continue
            if (
                subtest and result.case.backbone in COMPARED
            ):  # subtests are named after classes and layers, which differ from the baseline's
                continue
            if not subtest:
                worse.add(test)
            listed.append(Difference(name, test, subtest, ours, why, matching(name, test, reasons)))
    return listed


def stale_reasons(results: dict[str, Result], listed: list[Difference], reasons: Reasons) -> list[tuple[str, str]]:
    """Keys of the table of reasons that explain no difference, although the stock class passes a matching test.

    An entry for a test that this version of the library lacks, or that no stock class passes on this machine, is not
    stale, because it was not tested.
    """
    used = {difference.key for difference in listed}
    tested = {
        matching(name, test, reasons)
        for name, result in results.items()
        if result.case.mixers
        for (test, _), (outcome, _) in results[result.case.baseline].outcomes.items()
        if outcome == "passed"
    }
    return [key for key in reasons if key in tested and key not in used]
