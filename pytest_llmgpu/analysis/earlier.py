"""The cases of a session by what makes them comparable, so that each is compared with few of those before it."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_llmgpu.analysis.reference import decisive
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.result import CaseResult


class Earlier:
    """The assessed cases of a session. A case is assessed again after each of its launches."""

    def __init__(self, cases: Iterable[CaseResult] = ()) -> None:
        self._peers: dict[tuple[object, ...], dict[int, CaseResult]] = {}
        """Maps the fields that decide the answers of a case to the cases that have them equal, by place. Series and
        references are among these."""
        self._stated: dict[str, tuple[int, CaseResult]] = {}
        """Maps the code of a finding to the first case that has it, with its place: some are stated once a session."""
        for place, result in enumerate(cases):
            self.put(place, result)

    def put(self, place: int, result: CaseResult) -> None:
        """Add an assessed case, or replace the one at its place in the report."""
        self._peers.setdefault(decisive(result.case), {})[place] = result
        self._stated = {code: first for code, first in self._stated.items() if first[0] != place}
        for finding in result.findings:
            if finding.code not in self._stated or self._stated[finding.code][0] > place:
                self._stated[finding.code] = place, result

    def peers(self, case: Case) -> list[CaseResult]:
        """Return the cases that compute the same answers as a case."""
        return list(self._peers.get(decisive(case), {}).values())

    def before(self, place: int, case: Case) -> list[CaseResult]:
        """Return the cases that `assess` compares a case with, in the order of the report.

        They are its peers, and those that stated a finding first, before its place in the report.
        """
        found = {**self._peers.get(decisive(case), {}), **dict(self._stated.values())}
        return [found[at] for at in sorted(found) if at < place]
