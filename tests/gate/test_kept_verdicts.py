"""Every kept report is read and judged as before: a refactoring changes no verdict."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_llmgpu.gate.judge import exit_status, judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import file

_ROOT = Path(__file__).parents[2]
_KEPT = _ROOT / "tests" / "data" / "kept_verdicts.json"
_FOLDERS = ("benchmarks/reports", "benchmarks/paper/results", "tests/data/reports")
_UPDATE = "LLMGPU_UPDATE_VERDICTS"


def _judged() -> Iterator[tuple[str, list[str]]]:
    """Yield each ordered pair of kept reports that share a judged row, with its exit status and its rows.

    Reports of different devices or workloads share none.
    """
    paths = sorted(path for folder in _FOLDERS for path in (_ROOT / folder).glob("*.json*"))
    reports = {path.name: file.load(path) for path in paths}
    for base_name, base in reports.items():
        for head_name, head in reports.items():
            measured = ({(one.case.device, one.case.generates) for one in report.cases} for report in (base, head))
            if not set.intersection(*measured):
                continue
            verdicts = judge(base, head, Policy(), today=datetime.date(2026, 11, 22))
            rows = [
                f"{row.id} {row.metric} {row.verdict}{' improved' * row.improved}"
                for row in verdicts.rows
                if row.verdict != "NEW"
            ]
            if base is head or not all(row.endswith("MISSING") for row in rows):
                yield f"{base_name} -> {head_name}", [f"exit status {exit_status(verdicts, Policy())}", *rows]


@pytest.mark.slow
@pytest.mark.skipif(not (_ROOT / _FOLDERS[0]).is_dir(), reason="the kept reports lie in a checkout only")
def test_kept_reports_are_judged_as_before() -> None:
    """Each pair has the verdicts in tests/data/kept_verdicts.json; LLMGPU_UPDATE_VERDICTS=1 rewrites that file."""
    judged = dict(_judged())
    if os.environ.get(_UPDATE):
        _KEPT.write_text(json.dumps(judged, indent=0) + "\n", encoding="utf-8")
    kept = json.loads(_KEPT.read_text(encoding="utf-8"))
    assert list(judged) == list(kept)
    assert {pair: rows for pair, rows in judged.items() if rows != kept[pair]} == {}
