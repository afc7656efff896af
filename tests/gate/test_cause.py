"""Faults in a model of two layers, as work passes record them, and the cause that the gate names."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import make_report
from support.verdict_factory import with_launches

from pytest_llmgpu.gate import cause
from pytest_llmgpu.gate.cause import Measured
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.ranks import work
from pytest_llmgpu.ranks.work import Calls, Modules, PassKernels
from pytest_llmgpu.report.cause import Cause
from pytest_llmgpu.report.kernel_families import family_of
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Row, Verdict
from pytest_llmgpu.report.work import CollectiveWork, ModelSize, RankWork, Work, WorkRow

_ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half> >(int)"
_CAST = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator&)>"
_REDUCED = "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_MLP, _PROJECTION = "layers.*.mlp", "layers.*.mlp.down_proj"

_Kernels = dict[tuple[str, str], Calls]
_HEALTHY: _Kernels = {
    ("layers.*.self_attn.q_proj", "nvjet_hsh_64x8"): Calls(64, 0.003),
    ("layers.*.self_attn", "flash_fwd_kernel"): Calls(64, 0.004),
    ("layers.*.mlp.gate_proj", "nvjet_hsh_128x256"): Calls(64, 0.008),
    (_PROJECTION, "nvjet_hsh_128x256"): Calls(64, 0.008),
    (_MLP, _ADD): Calls(64, 0.001),
    (_PROJECTION, _REDUCED): Calls(64, 0.002),
    ("layers.*", _ADD): Calls(128, 0.002),
    ("lm_head", "nvjet_hsh_vocabulary"): Calls(2, 0.001),
}
_CALLS = {"cudaLaunchKernel": 514, "cudaStreamSynchronize": 4, "cudaMemcpyAsync": 6}


@dataclasses.dataclass(frozen=True)
class _Program:
    """What one rank runs in a pass."""

    kernels: _Kernels = dataclasses.field(default_factory=lambda: dict(_HEALTHY))
    idle_s: float = 0.01
    copy_s: float = 0.0001
    wait_s: float = 0.0
    runtime_calls: dict[str, int] = dataclasses.field(default_factory=lambda: dict(_CALLS))
    ops: dict[str, int] = dataclasses.field(default_factory=lambda: {"aten::mm": 200, "aten::add": 192})
    flops_by_module: dict[str, int] | None = None

    def slower(self, module: str, times: float, family: str = "GEMM") -> _Program:
        """Return it with longer kernels of a family in a module; for "" in all modules."""
        kernels = {
            (where, name): Calls(calls, time_s * (times if family_of(name) == family and module in (where, "") else 1))
            for (where, name), (calls, time_s) in self.kernels.items()
        }
        return dataclasses.replace(self, kernels=kernels)

    def more(self, module: str, name: str, calls: int, time_s: float) -> _Program:
        """Return it with more calls of a kernel."""
        seen = self.kernels.get((module, name), Calls(0, 0.0))
        added = Calls(seen.calls + calls, seen.time_s + time_s)
        return dataclasses.replace(self, kernels={**self.kernels, (module, name): added})

    def recorded(self, names: dict[str, int]) -> RankWork:
        """Return what its work passes record."""
        kernels: dict[str, Calls] = {}
        for (_, name), (calls, time_s) in self.kernels.items():
            seen = kernels.get(name, Calls(0, 0.0))
            wait_s = self.wait_s if name == _REDUCED else 0.0
            kernels[name] = Calls(seen.calls + calls, seen.time_s + time_s + wait_s)
        # The eager pass runs half of the batches.
        eager = {key: Calls(calls // 2, time_s / 2) for key, (calls, time_s) in self.kernels.items()}
        rows = work.rows_of([PassKernels(0.0, 0.0, 0.0, kernels, {})], Modules(eager, {}, 0))
        device_s = sum(calls.time_s for name, calls in kernels.items() if family_of(name) != "collective")
        return RankWork(
            uuids=["GPU-0"],
            device_time_s=[device_s] * 3,
            copy_s=[self.copy_s] * 3,
            idle_s=[self.idle_s + self.copy_s] * 3,
            runtime_calls=self.runtime_calls,
            ops=self.ops,
            flops_by_module=self.flops_by_module,
            rows=[
                WorkRow(
                    module=row.module,
                    kernel=None if row.kernel is None else names.setdefault(row.kernel, len(names)),
                    family=row.family,
                    calls=row.calls,
                    time_s=row.time_s,
                )
                for row in rows
            ],
        )


def _measured(*programs: _Program, layers: int | None = None) -> Measured:
    """Return the work passes of a report of one launch whose ranks run the programs."""
    names: dict[str, int] = {}
    size = None if layers is None else ModelSize(parameters=1, weights_bytes=2, layers=layers, attention_width=4)
    transfer_s = min(
        sum(calls.time_s for (_, name), calls in program.kernels.items() if name == _REDUCED) for program in programs
    )
    collective = CollectiveWork(collective="all_reduce", calls=64, transfer_s=[transfer_s] * 3, wait_s=[0.0] * 3)
    ranks = [program.recorded(names) for program in programs]
    return Measured([Work(batches=[0, 2], passes=3, collectives=[collective], ranks=ranks, model=size)], list(names))


def _changed(measured: Measured, **fields: Any) -> Measured:
    """Return work passes in which fields of each rank differ."""
    (work,) = measured.works
    ranks = [msgspec.structs.replace(rank, **fields) for rank in work.ranks]
    return Measured([msgspec.structs.replace(work, ranks=ranks)], measured.kernel_names)


def _found(metric: MetricName, before: Sequence[_Program], after: Sequence[_Program], ratio: float = 1.1) -> Cause:
    found = cause.find(metric, _measured(*before), _measured(*after), ratio=ratio)
    assert found is not None
    return found


_BASE = _Program()
_SYNCHRONIZING = _Program(runtime_calls={**_CALLS, "cudaStreamSynchronize": 132})
_FAULTS: dict[str, tuple[MetricName, Sequence[_Program]]] = {
    "a slower layer": ("device_time", [_BASE.slower(_PROJECTION, 1.2)] * 2),
    "all layers slower": ("device_time", [_BASE.slower("", 1.2)] * 2),
    "a cast": ("device_time", [_BASE.more(_PROJECTION, _CAST, 128, 0.002).slower(_PROJECTION, 1.1)] * 2),
    "one rank computes more": ("device_time", [_BASE, _BASE.more(_MLP, _ADD, 64, 0.001)]),
    "one more all-reduce": ("traffic", [_BASE.more(_MLP, _REDUCED, 64, 0.002)] * 2),
    "one more all-reduce in time": ("time", [_BASE.more(_MLP, _REDUCED, 64, 0.004)] * 2),
    "one more kernel": ("kernels", [_BASE.more(_MLP, _ADD, 64, 0.001)] * 2),
    "more FLOPs": ("flops", [_Program(ops={"aten::mm": 264, "aten::add": 256})] * 2),
    "more FLOPs of one rank": ("flops", [_Program(ops={"aten::mm": 264, "aten::add": 192}), _BASE]),
    "a host that sleeps": ("time", [_Program(idle_s=0.02)] * 2),
    "a host that waits for the GPU": ("time", [dataclasses.replace(_SYNCHRONIZING, idle_s=0.02)] * 2),
    "a host synchronization": ("host_syncs", [_SYNCHRONIZING] * 2),
    "a rank with a slower host": ("time", [_Program(wait_s=0.01), _Program(idle_s=0.02)]),
    "a rank with a slower GPU": ("time", [_Program(wait_s=0.008), _BASE.slower(_PROJECTION, 2.0)]),
    "work passes that show nothing": ("time", [_BASE] * 2),
    "a part that became faster": (
        "device_time",
        [_BASE.slower(_PROJECTION, 1.5).slower("", 0.5, "attention")] * 2,
    ),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_cause_is_worded(fault: str, prose: Prose) -> None:
    """A clause for the headline, with the rank that alone became slower, and at most three lines of details."""
    metric, after = _FAULTS[fault]
    found = _found(metric, [_BASE] * 2, after)
    lines = cause.details(found)
    assert len(lines) <= 3
    assert prose == "\n".join([cause.describe(found), *lines])


@pytest.mark.parametrize(
    ("ops", "flops", "words"),
    [
        ({"aten::bmm": 4}, {_MLP: 100, _PROJECTION: 180}, "4 more aten::bmm in layers.*.mlp.down_proj"),
        ({}, {_MLP: 100, _PROJECTION: 180}, "80 more FLOPs in layers.*.mlp.down_proj"),
        ({"aten::bmm": 4}, None, "4 more aten::bmm"),
    ],
)
def test_the_cause_of_more_flops_names_a_module(ops: dict[str, int], flops: dict[str, int] | None, words: str) -> None:
    """Also on a CPU, where no kernel is recorded: ops have no module, their FLOPs do. Larger products count as well."""
    before = _Program(kernels={}, ops={"aten::mm": 7}, flops_by_module={_MLP: 100, _PROJECTION: 100})
    after = _Program(kernels={}, ops={"aten::mm": 7, **ops}, flops_by_module=flops)
    assert cause.describe(_found("flops", [before], [after])) == words


@pytest.mark.parametrize(
    ("added", "layers", "words"),
    [
        (1, 32, "(elementwise, 1 layer)"),
        (3, 32, "(elementwise, at most 3 layers)"),
        (32, 32, "(elementwise)"),
        (3, None, "(elementwise)"),
    ],
)
def test_calls_that_fewer_than_all_layers_can_have_name_their_number(
    added: int, layers: int | None, words: str
) -> None:
    """The numbers of layers are folded in the name of a module: one more kernel can be in one layer or in several."""
    forwards = 2
    # The eager pass runs half of the kernels of a pass.
    after = _BASE.more(_MLP, _CAST.replace("copy", "cast"), 2 * forwards * added, 0.01)
    before, after_ = (_measured(program, layers=layers) for program in (_BASE, after))
    found = cause.find("device_time", before, after_)
    assert found is not None
    assert cause.describe(found).endswith(f"in {_MLP} {words}")
    limit = added if layers is not None and added < layers else None
    assert [change.layers for change in found.modules] == [limit]
    assert [change.layers for change in found.kernels] == [limit]


def test_kernels_that_take_longer_come_first_and_views_last() -> None:
    """The number of calls says nothing about the cost of an op."""
    after = _BASE.more("lm_head", "nvjet_hsh_large", 2, 0.1).more(_MLP, _ADD, 64, 0.001)
    found = _found("device_time", [_BASE], [after])
    assert [change.name for change in found.kernels] == ["nvjet_hsh_large", _ADD]
    ops = {"aten::view": 96, "aten::mul": 32, "aten::mm": 1}
    found = _found("flops", [_Program(kernels={}, ops={"aten::add": 1})], [_Program(kernels={}, ops=ops)])
    assert [change.name for change in found.ops] == ["aten::mm", "aten::mul", "aten::view", "aten::add"]


@pytest.mark.parametrize("metric", ["device_time", "time"])
def test_the_parts_add_up_to_the_difference(metric: MetricName) -> None:
    """Families for device time; for wall time also collectives, copies and the idle time of the GPU."""
    after = [_BASE.slower(_PROJECTION, 1.2).more(_MLP, _CAST, 64, 0.001)] * 2
    found = _found(metric, [_BASE] * 2, after, ratio=1.05)
    assert (found.after_s or 0.0) - (found.before_s or 0.0) == pytest.approx(0.0026)
    growth_s = {(part.name, part.family): part.growth_s for part in found.parts}
    assert growth_s == {("GEMM", "GEMM"): pytest.approx(0.0016), ("copy", "copy"): pytest.approx(0.001)}
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    shares = {(part.name, part.family): part.share for part in found.modules}
    assert shares == {(_PROJECTION, "GEMM"): pytest.approx(1.6 / 2.6), (_MLP, "copy"): pytest.approx(1.0 / 2.6)}


def test_a_module_is_named_only_where_its_family_grew_in_the_execution_of_the_case() -> None:
    """Recorded graphs can run other kernels than the eager pass: here attention grew, products did not."""
    before, after = _measured(_BASE), _measured(_BASE.slower(_PROJECTION, 1.2))
    passes = [
        msgspec.structs.replace(row, time_s=row.time_s + 0.001 * (row.family == "attention"))
        for row in before.works[0].ranks[0].rows or ()
        if row.module is None
    ]
    eager = [row for row in after.works[0].ranks[0].rows or () if row.module is not None]
    found = cause.find("device_time", before, _changed(after, rows=[*passes, *eager]))
    assert found is not None
    assert [part.name for part in found.parts] == ["attention"]
    assert found.modules == []


def test_a_kernel_in_the_sum_of_its_family_is_neither_added_nor_removed() -> None:
    """Only the largest kernels have rows: one that became longer can take the row of another."""
    program = _BASE
    for number in range(60):
        program = program.more(_MLP, f"gemm{number}", 8, 1e-4 + 1e-6 * number)
    longer = program.slower(_MLP, 1.0)
    longer = dataclasses.replace(longer, kernels={**longer.kernels, (_MLP, "gemm0"): Calls(8, 0.01)})
    assert _found("device_time", [program], [longer]).kernels == []
    added = _found("device_time", [program], [program.more(_MLP, "gemm_of_float32", 8, 0.01)])
    assert [(one.name, one.module, one.before, one.after) for one in added.kernels] == [("gemm_of_float32", _MLP, 0, 8)]


@pytest.mark.parametrize("metric", ["device_time", "flops", "host_syncs", "kernels", "runtime_calls", "ops", "traffic"])
def test_nothing_is_named_where_nothing_changed(metric: MetricName) -> None:
    """Equal programs have no cause, and neither have those whose work passes ran other batches or ranks."""
    healthy = _measured(_BASE, _BASE)
    assert cause.find(metric, healthy, healthy) is None
    slower = _measured(*[_SYNCHRONIZING.slower("", 2.0)] * 2)
    (work,) = slower.works
    for changed in ({"batches": [1]}, {"eager_batches": [1]}):
        other = Measured([msgspec.structs.replace(work, **changed)], slower.kernel_names)
        assert cause.find(metric, healthy, other) is None
    assert cause.find(metric, _measured(_BASE), slower) is None
    assert cause.find(metric, Measured([], []), slower) is None
    no_ranks = Measured([msgspec.structs.replace(work, ranks=[])], [])
    assert cause.find(metric, no_ranks, no_ranks) is None
    assert cause.find("time", no_ranks, no_ranks, ratio=2.0) is None


@pytest.mark.parametrize(
    ("slower", "fields"), [(2.0, {"rows": None}), (1.01, {"device_time_s": [0.036] * 3})], ids=["no rows", "small rows"]
)
def test_rows_that_lack_most_of_the_growth_explain_nothing(slower: float, fields: dict[str, Any]) -> None:
    """A report can lack the rows of the kernels; rows with a hundredth of the growth of device time are noise."""
    before, after = _measured(_BASE), _measured(_BASE.slower("", slower))
    assert cause.find("device_time", before, after) is not None
    assert cause.find("device_time", before, _changed(after, **fields)) is None


def test_a_case_on_a_cpu_has_the_ops_that_changed() -> None:
    """Without kernels there are no times to split; equal ops explain nothing."""

    def on_cpu(**ops: int) -> Measured:
        return Measured([Work(batches=[0], passes=0, ranks=[RankWork(uuids=[], ops=ops, flops=1)])], [])

    for metric in ("time", "flops"):
        found = cause.find(metric, on_cpu(mm=4, add=2), on_cpu(mm=6, add=9), ratio=1.5)
        assert found is not None
        assert [(one.name, one.before, one.after) for one in found.ops] == [("mm", 4, 6), ("add", 2, 9)]
        assert cause.find(metric, on_cpu(mm=4), on_cpu(mm=4), ratio=1.5) is None
    assert cause.find("device_time", on_cpu(mm=4), on_cpu(mm=6)) is None


def test_one_launch_that_differs_does_not_change_the_cause() -> None:
    """Every figure is the median of the launches."""
    before, after, odd = (_measured(_BASE.slower(_PROJECTION, times)) for times in (1.0, 1.2, 9.0))
    several = Measured([*after.works, *odd.works, *after.works], after.kernel_names)
    assert cause.find("device_time", before, several) == cause.find("device_time", before, after)


def _report(measured: Measured, slower: float = 1.0) -> Report:
    """Return a report of one launch with these work passes."""
    result = with_launches([slower])
    (launch,) = result.launches
    (launch.work,) = measured.works
    report = make_report([result])
    report.environment = msgspec.structs.replace(report.environment, kernel_names=list(measured.kernel_names))
    return report


def _caused(base: Report, head: Report, metric: MetricName, verdict: Verdict = "REGRESSED") -> Row:
    """Return a row that is twice as slow, with its cause."""
    row = Row.of(head.cases[0], metric, verdict, "Time +100 %.\nAlso changed: torch.", ratio=2.0, low=1.01)
    names = base.environment.kernel_names, head.environment.kernel_names
    return cause.with_cause(row, base.cases[0], head.cases[0], names)


@pytest.mark.parametrize(
    ("metric", "verdict", "plan", "is_caused"),
    [
        ("time", "REGRESSED", "f", True),
        ("device_time", "REGRESSED", "f", True),
        ("time", "REGRESSED", "e", False),
        ("memory", "REGRESSED", "f", False),
        ("time", "UNDECIDED", "f", False),
        ("time", "IMPROVED", "f", False),
    ],
)
def test_a_row_that_is_worse_has_a_cause(metric: MetricName, verdict: Verdict, plan: str, is_caused: bool) -> None:
    """An undecided row has none, even where its interval lies above no change; nor has one of another plan."""
    before, after = _measured(_BASE), _measured(_BASE.slower("", 3.0))
    head = _report(after)
    head.cases[0].launches[0].plan_sha256 = plan * 64
    row = _caused(_report(before), head, metric, verdict)
    found = cause.find(metric, before, after, ratio=2.0)
    assert row.cause == (found if is_caused else None)
    first, *middle, last = row.reason.splitlines()
    assert (first, last) == ("Time +100 %.", "Also changed: torch.")
    if found is not None:
        assert middle == ([f"Cause: {cause.describe(found)}.", *cause.details(found)] if is_caused else [])
    assert msgspec.json.decode(msgspec.json.encode(row), type=Row) == row


@pytest.mark.parametrize(
    ("metric", "passes", "module"),
    [
        ("first_token", "prefill_work", _PROJECTION),
        ("first_token", "work", None),
        ("token_time", "work", _PROJECTION),
        ("token_time", "prefill_work", None),
    ],
)
def test_a_slower_token_has_the_cause_of_its_forwards(metric: MetricName, passes: str, module: str | None) -> None:
    """The first token takes a prefill, the others take decode steps: each has work passes of its own."""
    healthy, slower = _measured(_BASE), _measured(_BASE.slower(_PROJECTION, 3.0))
    base, head = _report(healthy), _report(healthy)
    for report in (base, head):
        report.cases[0].launches[0].prefill_work = healthy.works[0]
    setattr(head.cases[0].launches[0], passes, slower.works[0])
    found = _caused(base, head, metric).cause
    assert (None if found is None else cause.module_of(found)) == module


def test_one_launch_names_the_module_that_takes_more_device_time() -> None:
    """3 % more device time of one rank: wall time shows nothing."""
    healthy, slower = _BASE, _BASE.slower(_PROJECTION, 1.1)
    base, head, same = (_report(_measured(healthy, program)) for program in (healthy, slower, healthy))
    rows = {row.metric: row for row in judge(base, head, Policy(), today=datetime.date(2026, 6, 1)).rows}
    row = rows["device_time"]
    assert row.verdict == "REGRESSED"
    assert row.cause is not None
    assert (row.cause.rank, row.cause.modules[0].name, row.cause.parts[0].name) == (1, _PROJECTION, "GEMM")
    assert "Cause: rank 1 alone: 100 % in layers.*.mlp.down_proj (GEMM)." in row.reason.splitlines()
    assert rows["time"].cause is None
    assert not any(row.cause for row in judge(base, same, Policy(), today=datetime.date(2026, 6, 1)).rows)
