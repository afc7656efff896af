from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.report.schema import schema
from pytest_llmgpu.report.verdicts import Baseline, Candidate

_REPORTS = Path(__file__).parents[1] / "data" / "reports"

_SHA256 = {
    "schema-2-promoted.json": "a26516d9a2aa8fe6b320df1f5d636a29cdccfad21461270c82113db7f1f5f5be",
    "schema-2.json": "b968ef64e9e0524101854e11d21c80895df2ad1b8976c4a585f2c7768ca78a63",
}
"""File to its hash. If a test here fails, the reader is wrong, not the file."""


@pytest.mark.parametrize("name", _SHA256)
def test_a_stored_report_stays_readable(name: str, tmp_path: Path) -> None:
    """Its file is unchanged, and what this version writes of it fits the present schema and has equal values."""
    assert hashlib.sha256((_REPORTS / name).read_bytes()).hexdigest() == _SHA256[name]
    report = load(_REPORTS / name)
    dump(report, tmp_path / "new.json")
    assert load(tmp_path / "new.json") == report
    jsonschema.validate(json.loads((tmp_path / "new.json").read_bytes()), schema())


def test_the_figures_of_a_stored_report_keep_their_meaning() -> None:
    """A baseline that was kept for a year is compared by what was measured then."""
    report = load(_REPORTS / "schema-2.json")
    ceilings, (_, tp, again, *_) = report.environment.ceilings, report.cases
    assert (report.environment.gpus[1].memory_bytes, report.environment.nccl) == (150754820096, "2.26.2")
    assert (report.session.complete, report.options["--strategy"]) == (False, ["mp", "tp"])
    assert ceilings is not None
    assert (ceilings.devices[0].gemm_flops_per_s, ceilings.all_reduce_bytes_per_s) == ({"float16": 7.6e14}, 3.5e11)
    assert (tp.case.workload, again.id) == ("score", "mp-bs4#2")
    launch = tp.launches[0]
    assert launch.batches.latency_s == [1.0, 1.0, 1.0]
    assert launch.accuracy is not None
    assert (launch.accuracy.predictions, launch.accuracy.labels) == ([0, 1, 3], [0, 1, 2])
    assert launch.memory[1].nvml_used_max_bytes == 20 * 2**30
    assert tp.comparison is not None
    assert tp.comparison.flipped == [2]
    assert tp.traffic is not None
    assert tp.traffic.ranks[0][0].wire_bytes == 786432
    work = launch.work
    assert work is not None
    assert work.collectives is not None
    assert (work.batches, work.passes, work.collectives[0].transfer_s) == ([0, 2], 3, [0.002, 0.002, 0.003])
    first, second = work.ranks
    assert (first.device_time_s, first.kernels, first.flops, first.host_syncs) == ([0.5, 0.51, 0.5], 1000, 10**12, 4)
    assert first.runtime_calls == {"cudaLaunchKernel": 990, "cudaStreamSynchronize": 2}
    assert first.rows is not None
    names = [row.kernel if row.kernel is None else report.environment.kernel_names[row.kernel] for row in first.rows]
    assert str(names[0]).startswith("nvjet")
    assert [row.family for row in first.rows] == ["GEMM", "elementwise", "GEMM", "other"]
    assert (second.device_time_s, second.ops) == (None, {"aten::mm": 400})
    assert tp.bound is not None
    assert (tp.bound.limited_by, tp.bound.share) == ("compute", 0.5)


def test_the_verdicts_of_a_promoted_report_keep_their_meaning() -> None:
    """They are about the previous baseline and change no verdict on a candidate."""
    base = load(_REPORTS / "schema-2-promoted.json")
    verdicts = base.verdicts
    assert verdicts is not None
    assert verdicts.head == Candidate(created="2026-02-03T04:05:06Z", commit="c" * 40)
    assert verdicts.baseline == Baseline(name="baseline.json", sha256="cd" * 32, commit="b" * 40)
    assert verdicts.policy_sha256 == hashlib.sha256(verdicts.policy.encode()).hexdigest()
    time, *_ = verdicts.rows
    assert (time.key, time.nodeid, time.id) == (base.cases[0].key, base.cases[0].nodeid, "mp-bs1")
    assert (time.base, time.head, time.ratio) == pytest.approx((10.01, 10.46, 1.045), rel=1e-3)
    bare, today = msgspec.structs.replace(base, verdicts=None), datetime.date(2026, 2, 5)
    assert judge(base, base, Policy(), today=today) == judge(bare, bare, Policy(), today=today)
