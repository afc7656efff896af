from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_llmgpu.json_schema import schema
from pytest_llmgpu.report import SCHEMA_VERSION, Report, dump, load

_REPORTS = Path(__file__).parent / "data" / "reports"
_PUBLISHED = sorted((Path(__file__).parents[1] / "benchmarks" / "reports").glob("*.json*"))

_SHA256 = {1: "9c842b636717098d89d9d2ff6953a5a6662adb47e3ab63e7057f6009aeb08529"}
"""Version to the hash of its file: a reader is mended to read the file, never the file to suit the reader."""


def _path(version: int) -> Path:
    return _REPORTS / f"schema-{version}.json"


def _read_1(report: Report) -> None:
    mp, tp, again, oom, *others = report.cases
    launch = tp.launches[0]
    assert (report.commit.sha, report.commit.dirty) == ("3b1f09ac" * 5, True)
    assert (report.environment.gpus[1].memory_bytes, report.environment.nccl) == (150754820096, "2.26.2")
    assert (report.session.complete, report.session.exit_status) == (False, 2)
    assert report.options["--strategy"] == ["mp", "tp"]
    assert [mp.id, tp.id, again.id, oom.id] == ["mp-bs4", "tp-bs4", "mp-bs4#2", "tp-bs8"]
    assert (tp.case.strategy_options, tp.case.gpu_memory_bytes) == ({"kernels": "fixed", "count": 2}, 32 * 2**30)
    assert launch.batches.latency_s == [1.0, 1.0, 1.0]
    assert launch.accuracy is not None
    assert (launch.accuracy.predictions, launch.accuracy.labels) == ([0, 1, 3], [0, 1, 2])
    assert launch.memory[1].nvml_used_max_bytes == 20 * 2**30
    assert launch.profile is not None
    assert launch.profile.series is not None
    assert launch.profile.series.devices[0] == {"utilization_pct": [80.0, None, 81.0]}
    assert tp.comparison is not None
    assert tp.comparison.flipped == [2]
    assert tp.accuracy_check is not None
    assert tp.accuracy_check.ok is False
    assert tp.traffic is not None
    assert tp.traffic.ranks[0][0].wire_bytes == 786432
    assert tp.traffic.path is not None
    assert tp.traffic.path.link == "nvlink"
    assert tp.findings[0].code == "accuracy-collapsed"
    assert oom.failure is not None
    assert oom.failure.tokens_granted == 60
    assert [result.outcome for result in others] == ["skipped_after_oom", "timeout", "crashed", "error", "interrupted"]


_FACTS = {1: _read_1}


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_a_report_of_every_version_is_read_for_ever(version: int) -> None:
    """A baseline that was stored with an old version keeps its meaning."""
    report = load(_path(version))
    assert report.schema_version == version
    _FACTS[version](report)


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_the_file_of_a_version_is_as_that_version_wrote_it(version: int) -> None:
    """Nobody mends the file instead of the reader."""
    assert hashlib.sha256(_path(version).read_bytes()).hexdigest() == _SHA256[version]


def test_the_oldest_file_has_a_value_for_every_field_it_knows() -> None:
    """What is not in the file is not kept readable by it: each field of a record holds something at least once."""
    filled: set[str] = set()
    absent: set[str] = set()

    def visit(value: Any, place: str) -> None:
        for key, item in value.items() if isinstance(value, dict) else [("", item) for item in value]:
            inner = f"{place}.{key}" if key else place
            (absent if item in (None, [], {}) else filled).add(inner)
            if isinstance(item, (dict, list)):
                visit(item, inner)

    visit(json.loads(_path(1).read_bytes()), "$")
    assert absent - filled == {"$.verdicts", "$.options.--llmgpu-revision", "$.environment.versions.ray"}


@pytest.mark.parametrize("path", _PUBLISHED, ids=lambda path: path.name)
def test_published_reports_are_read(path: Path) -> None:
    """What was measured on real machines, by versions of their day, still loads."""
    assert load(path).cases


def test_an_old_report_is_written_anew_as_one_of_today(tmp_path: Path) -> None:
    """Read and written again, it has every field of today's schema, and says the same."""
    report = load(_path(1))
    dump(report, tmp_path / "new.json")
    assert load(tmp_path / "new.json") == report
    jsonschema.validate(json.loads((tmp_path / "new.json").read_bytes()), schema())
