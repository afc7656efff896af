from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.promotion import is_same
from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.report.report import SCHEMA_VERSION, Report
from pytest_llmgpu.report.schema import schema
from pytest_llmgpu.report.verdicts import Armed, Baseline, Candidate

_REPORTS = Path(__file__).parents[1] / "data" / "reports"

_SHA256 = {
    "schema-1.json": "9c842b636717098d89d9d2ff6953a5a6662adb47e3ab63e7057f6009aeb08529",
    "schema-1-promoted.json": "cc238b071a38f9f7b6fed161942c95c1625124d037e7984ce07688f78051934b",
    "schema-2.json": "b968ef64e9e0524101854e11d21c80895df2ad1b8976c4a585f2c7768ca78a63",
}
"""File to its hash. If a test here fails, the reader is wrong, not the file.

`promotion.keep` wrote the promoted one, with the verdicts of `promotion.trial`.
"""


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


def _read_1_promoted(report: Report) -> None:
    verdicts = report.verdicts
    assert verdicts is not None
    assert verdicts.head == Candidate(created="2026-02-03T04:05:06Z", commit="c" * 40)
    assert verdicts.baseline == Baseline(name="baseline.json", sha256="cd" * 32, commit="b" * 40)
    assert verdicts.calibration_sha256 == "ab" * 32
    assert verdicts.policy.startswith("allow_missing = false\n")
    assert verdicts.policy_sha256 == hashlib.sha256(verdicts.policy.encode()).hexdigest()
    assert verdicts.armed == Armed(compared=10, gated=8, unarmed={"path: path was not measured": 2}, gated_unarmed=0)
    assert verdicts.warnings == ["differs from the baseline: driver 570.1 -> 570.2"]
    time, accuracy, predictions, *others = verdicts.rows
    assert (time.id, time.metric, time.verdict) == ("mp-bs1", "time", "NOT_ENOUGH_DATA")
    assert (time.key, time.nodeid) == (report.cases[0].key, report.cases[0].nodeid)
    assert time.known == "a kernel that is right costs this"
    assert (time.n, time.launches_needed, time.threshold) == (2, 12, 0.02)
    figures = (time.base, time.head, time.ratio, time.low, time.high, time.p, time.smallest_seen)
    assert figures == pytest.approx((10.01, 10.46, 1.045, 1.0227, 1.0678, 0.0554, 0.0645), rel=1e-3)
    assert (accuracy.lost, accuracy.won, predictions.gated) == ([2], [3], False)
    assert (len(others), {row.verdict for row in others}) == (7, {"OK"})


def _read_2(report: Report) -> None:
    ceilings, (_, tp, *_) = report.environment.ceilings, report.cases
    assert ceilings is not None
    assert ceilings.devices[0].gemm_flops_per_s == {"float16": 7.6e14}
    assert ceilings.all_reduce_bytes_per_s == 3.5e11
    work = tp.launches[0].work
    assert work is not None
    assert (work.batches, work.passes) == ([0, 2], 3)
    assert work.model is not None
    assert work.model.parameters == 6_500_000
    assert work.collectives is not None
    assert work.collectives[0].transfer_s == [0.002, 0.002, 0.003]
    first, second = work.ranks
    assert first.device_time_s == [0.5, 0.51, 0.5]
    assert (first.kernels, first.flops, first.host_syncs) == (1000, 10**12, 4)
    assert first.runtime_calls == {"cudaLaunchKernel": 990, "cudaStreamSynchronize": 2}
    assert first.rows is not None
    names = [row.kernel if row.kernel is None else report.environment.kernel_names[row.kernel] for row in first.rows]
    assert [row.family for row in first.rows] == ["GEMM", "elementwise", "GEMM", "other"]
    assert [row.module for row in first.rows] == [None, None, "layers.*.mlp.down_proj", "other"]
    assert str(names[0]).startswith("nvjet")
    assert names[-1] is None
    assert (second.device_time_s, second.ops) == (None, {"aten::mm": 400})
    assert "CUPTI" in second.why["device_time_s"]
    assert tp.bound is not None
    assert (tp.bound.limited_by, tp.bound.share) == ("compute", 0.5)
    assert (tp.energy_j_per_sequence, tp.energy_j_per_token) == (12.5, 0.125)


_FACTS = {"schema-1.json": _read_1, "schema-1-promoted.json": _read_1_promoted, "schema-2.json": _read_2}


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_every_version_has_a_file(version: int) -> None:
    """Each version has a file here, and each file has a test."""
    assert load(_path(version)).schema_version == version
    assert {path.name for path in _REPORTS.iterdir()} == set(_FACTS) == set(_SHA256)


@pytest.mark.parametrize("name", _FACTS)
def test_a_report_of_every_version_can_be_read(name: str) -> None:
    """A baseline of an old version keeps its meaning."""
    _FACTS[name](load(_REPORTS / name))


@pytest.mark.parametrize("name", _SHA256)
def test_the_file_of_a_version_is_unchanged(name: str) -> None:
    """A change of a file would hide that the reader no longer reads old reports."""
    assert hashlib.sha256((_REPORTS / name).read_bytes()).hexdigest() == _SHA256[name]


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_the_files_of_a_version_have_a_value_for_every_field(version: int) -> None:
    """A field without a value in any file would not be tested."""
    filled: set[str] = set()
    absent: set[str] = set()

    def visit(value: Any, place: str) -> None:
        for key, item in value.items() if isinstance(value, dict) else [("", item) for item in value]:
            inner = f"{place}.{key}" if key else place
            (absent if item in (None, [], {}) else filled).add(inner)
            if isinstance(item, (dict, list)):
                visit(item, inner)

    visit(json.loads(_path(version).read_bytes()), "$")
    promoted = json.loads((_REPORTS / "schema-1-promoted.json").read_bytes())
    visit({"verdicts": promoted["verdicts"]}, "$")
    assert absent - filled == {"$.options.--llmgpu-revision", "$.environment.versions.ray"}


def test_a_promoted_baseline_is_judged_by_what_was_measured() -> None:
    """Its own verdicts are about the previous baseline and change no verdict on a candidate."""
    base = load(_REPORTS / "schema-1-promoted.json")
    bare = msgspec.structs.replace(base, verdicts=None)
    today = datetime.date(2026, 2, 5)
    assert judge(base, base, Policy(), today=today) == judge(bare, bare, Policy(), today=today)


@pytest.mark.parametrize("name", _FACTS)
def test_an_old_report_is_written_in_the_current_schema(name: str, tmp_path: Path) -> None:
    """An old report that is read and written has every field of the current schema and equal values."""
    report = load(_REPORTS / name)
    dump(report, tmp_path / "new.json")
    report.schema_version = SCHEMA_VERSION
    assert load(tmp_path / "new.json") == report
    jsonschema.validate(json.loads((tmp_path / "new.json").read_bytes()), schema())


def test_a_copy_written_by_this_version_is_the_same_measurement(tmp_path: Path) -> None:
    """Promoting a report of an older version twice finds that it is the baseline already."""
    old = load(_REPORTS / "schema-1.json")
    dump(old, tmp_path / "copy.json")
    assert is_same(old, load(tmp_path / "copy.json"))
