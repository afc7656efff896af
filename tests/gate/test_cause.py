"""Faults in a model of two layers, as work passes record them, and the cause that the gate names."""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
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

    def calling(self, **runtime_calls: int) -> _Program:
        """Return it with other numbers of runtime calls."""
        return dataclasses.replace(self, runtime_calls={**self.runtime_calls, **runtime_calls})

    def recorded(self, names: dict[str, int], noise: Callable[[float], float]) -> RankWork:
        """Return what its work passes record."""
        kernels: dict[str, Calls] = {}
        for (_, name), (calls, time_s) in self.kernels.items():
            seen = kernels.get(name, Calls(0, 0.0))
            wait_s = self.wait_s if name == _REDUCED else 0.0
            kernels[name] = Calls(seen.calls + calls, seen.time_s + noise(time_s) + wait_s)
        # The eager pass runs half of the batches.
        eager = {key: Calls(calls // 2, noise(time_s / 2)) for key, (calls, time_s) in self.kernels.items()}
        rows = work.largest_rows([PassKernels(0.0, 0.0, 0.0, kernels, {})], Modules(eager, {}, 0))
        device_s = sum(calls.time_s for name, calls in kernels.items() if family_of(name) != "collective")
        return RankWork(
            uuids=["GPU-0"],
            device_time_s=[device_s] * 3,
            copy_s=[self.copy_s] * 3,
            idle_s=[noise(self.idle_s) + self.copy_s] * 3,
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


def _measured(
    *programs: _Program, launches: int = 1, noise: float = 0.0, seed: int = 0, layers: int | None = None
) -> Measured:
    """Return the work passes of a report whose ranks run the programs."""
    chance = random.Random(seed)
    names: dict[str, int] = {}
    works = []
    size = None if layers is None else ModelSize(parameters=1, weights_bytes=2, layers=layers, attention_width=4)
    for _ in range(launches):
        ranks = [program.recorded(names, lambda s: s * chance.gauss(1.0, noise)) for program in programs]
        transfer_s = min(
            sum(calls.time_s for (_, name), calls in program.kernels.items() if name == _REDUCED)
            for program in programs
        )
        collective = CollectiveWork(collective="all_reduce", calls=64, transfer_s=[transfer_s] * 3, wait_s=[0.0] * 3)
        works.append(Work(batches=[0, 2], passes=3, collectives=[collective], ranks=ranks, model=size))
    return Measured(works, list(names))


def _found(metric: MetricName, before: Sequence[_Program], after: Sequence[_Program], ratio: float = 1.1) -> Cause:
    found = cause.find(metric, _measured(*before), _measured(*after), ratio=ratio)
    assert found is not None
    return found


_HEALTHY_PROGRAM = _Program()
_FAULTS: dict[str, tuple[MetricName, Sequence[_Program]]] = {
    "a slower layer": ("device_time", [_HEALTHY_PROGRAM.slower(_PROJECTION, 1.2)] * 2),
    "all layers slower": ("device_time", [_HEALTHY_PROGRAM.slower("", 1.2)] * 2),
    "a cast": ("device_time", [_HEALTHY_PROGRAM.more(_PROJECTION, _CAST, 128, 0.002).slower(_PROJECTION, 1.1)] * 2),
    "one rank computes more": ("device_time", [_HEALTHY_PROGRAM, _HEALTHY_PROGRAM.more(_MLP, _ADD, 64, 0.001)]),
    "one more all-reduce": ("traffic", [_HEALTHY_PROGRAM.more(_MLP, _REDUCED, 64, 0.002)] * 2),
    "one more all-reduce in time": ("time", [_HEALTHY_PROGRAM.more(_MLP, _REDUCED, 64, 0.004)] * 2),
    "one more kernel": ("kernels", [_HEALTHY_PROGRAM.more(_MLP, _ADD, 64, 0.001)] * 2),
    "more FLOPs": ("flops", [dataclasses.replace(_HEALTHY_PROGRAM, ops={"aten::mm": 264, "aten::add": 256})] * 2),
    "more FLOPs of one rank": ("flops", [_Program(ops={"aten::mm": 264, "aten::add": 192}), _HEALTHY_PROGRAM]),
    "a host that sleeps": ("time", [dataclasses.replace(_HEALTHY_PROGRAM, idle_s=0.02)] * 2),
    "a host that waits for the GPU": (
        "time",
        [dataclasses.replace(_HEALTHY_PROGRAM.calling(cudaStreamSynchronize=132), idle_s=0.02)] * 2,
    ),
    "a host synchronization": ("host_syncs", [_HEALTHY_PROGRAM.calling(cudaStreamSynchronize=132)] * 2),
    "a rank with a slower host": (
        "time",
        [dataclasses.replace(_HEALTHY_PROGRAM, wait_s=0.01), dataclasses.replace(_HEALTHY_PROGRAM, idle_s=0.02)],
    ),
    "a rank with a slower GPU": (
        "time",
        [dataclasses.replace(_HEALTHY_PROGRAM, wait_s=0.008), _HEALTHY_PROGRAM.slower(_PROJECTION, 2.0)],
    ),
    "work passes that show nothing": ("time", [_HEALTHY_PROGRAM] * 2),
    "a part that became faster": (
        "device_time",
        [_HEALTHY_PROGRAM.slower(_PROJECTION, 1.5).slower("", 0.5, "attention")] * 2,
    ),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_cause_is_worded(fault: str, prose: Prose) -> None:
    """A clause for the headline, and at most three lines of details."""
    metric, after = _FAULTS[fault]
    found = _found(metric, [_HEALTHY_PROGRAM] * 2, after)
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
    after = _HEALTHY_PROGRAM.more(_MLP, _CAST.replace("copy", "cast"), 2 * forwards * added, 0.01)
    before, after_ = (_measured(program, layers=layers) for program in (_HEALTHY_PROGRAM, after))
    found = cause.find("device_time", before, after_)
    assert found is not None
    assert cause.describe(found).endswith(f"in {_MLP} {words}")
    limit = added if layers is not None and added < layers else None
    assert [change.layers for change in found.modules] == [limit]
    assert [change.layers for change in found.kernels] == [limit]


def test_kernels_that_take_longer_come_first_and_views_last() -> None:
    """The number of calls says nothing about the cost of an op."""
    after = _HEALTHY_PROGRAM.more("lm_head", "nvjet_hsh_large", 2, 0.1).more(_MLP, _ADD, 64, 0.001)
    found = _found("device_time", [_HEALTHY_PROGRAM], [after])
    assert [change.name for change in found.kernels] == ["nvjet_hsh_large", _ADD]
    ops = {"aten::view": 96, "aten::mul": 32, "aten::mm": 1}
    found = _found("flops", [_Program(kernels={}, ops={"aten::add": 1})], [_Program(kernels={}, ops=ops)])
    assert [change.name for change in found.ops] == ["aten::mm", "aten::mul", "aten::view", "aten::add"]


def test_the_parts_add_up_to_the_difference() -> None:
    """Families for device time; for wall time also collectives, copies and the idle time of the GPU."""
    after = [_HEALTHY_PROGRAM.slower(_PROJECTION, 1.2).more(_MLP, _CAST, 64, 0.001)] * 2
    for metric in ("device_time", "time"):
        found = _found(metric, [_HEALTHY_PROGRAM] * 2, after, ratio=1.05)
        assert found.before_s is not None
        assert found.after_s is not None
        assert sum(part.growth_s for part in found.parts) == pytest.approx(found.after_s - found.before_s)
        assert {(part.name, part.family): part.growth_s for part in found.parts} == {
            ("GEMM", "GEMM"): pytest.approx(0.0016),
            ("copy", "copy"): pytest.approx(0.001),
        }
        assert sum(part.share for part in found.parts) == pytest.approx(1.0)
        assert {(part.name, part.family): part.share for part in found.modules} == {
            (_PROJECTION, "GEMM"): pytest.approx(1.6 / 2.6),
            (_MLP, "copy"): pytest.approx(1.0 / 2.6),
        }


def test_a_module_is_named_only_where_its_family_grew_in_the_execution_of_the_case() -> None:
    """Recorded graphs can run other kernels than the eager pass."""
    before, after = _measured(_HEALTHY_PROGRAM), _measured(_HEALTHY_PROGRAM.slower(_PROJECTION, 1.2))
    (work,) = after.works
    (rank,) = work.ranks
    assert rank.rows is not None
    (healthy,) = before.works[0].ranks
    # The execution of the case: attention grew, products did not.
    passes = [
        msgspec.structs.replace(row, time_s=row.time_s + 0.001 * (row.family == "attention"))
        for row in healthy.rows or ()
        if row.module is None
    ]
    rows = [*passes, *(row for row in rank.rows if row.module is not None)]
    changed = msgspec.structs.replace(rank, rows=rows)
    after = Measured([msgspec.structs.replace(work, ranks=[changed])], after.kernel_names)
    found = cause.find("device_time", before, after)
    assert found is not None
    assert [part.name for part in found.parts] == ["attention"]
    assert found.modules == []


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("a slower layer", None),
        ("one rank computes more", 1),
        ("a rank with a slower host", 1),
        ("more FLOPs of one rank", 0),
        ("a rank with a slower GPU", 1),
        ("a host that sleeps", None),
        ("work passes that show nothing", None),
    ],
)
def test_the_rank_that_alone_became_slower_is_named(fault: str, rank: int | None) -> None:
    """The other ranks wait for it; a change of all ranks belongs to none."""
    metric, after = _FAULTS[fault]
    assert _found(metric, [_HEALTHY_PROGRAM] * 2, after).rank == rank


def test_a_kernel_in_the_sum_of_its_family_is_neither_added_nor_removed() -> None:
    """Only the largest kernels have rows: one that became longer can take the row of another."""
    program = _HEALTHY_PROGRAM
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
    healthy = _measured(_HEALTHY_PROGRAM, _HEALTHY_PROGRAM)
    assert cause.find(metric, healthy, healthy) is None
    slower = _measured(*[_HEALTHY_PROGRAM.slower("", 2.0).calling(cudaStreamSynchronize=9)] * 2)
    (work,) = slower.works
    for changed in ({"batches": [1]}, {"eager_batches": [1]}):
        other = Measured([msgspec.structs.replace(work, **changed)], slower.kernel_names)
        assert cause.find(metric, healthy, other) is None
    assert cause.find(metric, _measured(_HEALTHY_PROGRAM), slower) is None
    assert cause.find(metric, Measured([], []), slower) is None
    no_ranks = Measured([msgspec.structs.replace(work, ranks=[])], [])
    assert cause.find(metric, no_ranks, no_ranks) is None
    assert cause.find("time", no_ranks, no_ranks, ratio=2.0) is None


@pytest.mark.parametrize(
    ("slower", "fields"), [(2.0, {"rows": None}), (1.01, {"device_time_s": [0.036] * 3})], ids=["no rows", "small rows"]
)
def test_rows_that_lack_most_of_the_growth_explain_nothing(slower: float, fields: dict[str, Any]) -> None:
    """A report can lack the rows of the kernels; rows with a hundredth of the growth of device time are noise."""
    before, after = _measured(_HEALTHY_PROGRAM), _measured(_HEALTHY_PROGRAM.slower("", slower))
    (work,) = after.works
    ranks = [msgspec.structs.replace(rank, **fields) for rank in work.ranks]
    lacking = Measured([msgspec.structs.replace(work, ranks=ranks)], after.kernel_names)
    assert cause.find("device_time", before, after) is not None
    assert cause.find("device_time", before, lacking) is None


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


@given(seed=st.integers(0, 2**20), launches=st.integers(1, 4))
def test_noise_of_kernels_does_not_change_the_cause(seed: int, launches: int) -> None:
    """2 % more device time in one module is named at the noise of kernel times, which is at most 0.3 % on a GPU."""
    before = _measured(*[_HEALTHY_PROGRAM] * 2, launches=launches, noise=0.0005, seed=seed)
    slower = [_HEALTHY_PROGRAM.slower(_PROJECTION, 1.08)] * 2
    after = _measured(*slower, launches=launches, noise=0.0005, seed=seed + 1)
    found = cause.find("device_time", before, after)
    assert found is not None
    assert found.place == "device"
    assert (found.parts[0].name, found.modules[0].name) == ("GEMM", _PROJECTION)


def _report(slower: float, measured: Measured, launches: int = 5, **fields: Any) -> Report:
    """Return a report of launches with these work passes."""
    result = with_launches([slower] * launches, **fields)
    for launch in result.launches:
        (launch.work,) = measured.works
        launch.plan_sha256 = "e" * 64
    report = make_report([result])
    report.environment = msgspec.structs.replace(report.environment, kernel_names=list(measured.kernel_names))
    return report


def _judged(base: Report, head: Report, metric: MetricName = "time") -> Row:
    rows = judge(base, head, Policy(), today=datetime.date(2026, 6, 1)).rows
    return next(row for row in rows if row.metric == metric)


def test_a_slower_row_has_its_cause() -> None:
    """The record is stored with the verdict, and the reason names it; a row that is OK has none."""
    healthy = _measured(_HEALTHY_PROGRAM)
    slower = _measured(_HEALTHY_PROGRAM.slower("", 3.0))
    row = _judged(_report(1.0, healthy), _report(2.0, slower))
    assert row.verdict == "REGRESSED"
    assert row.cause == cause.find("time", healthy, slower, ratio=row.ratio)
    assert row.cause is not None
    assert f"Cause: {cause.describe(row.cause)}." in row.reason.splitlines()
    assert msgspec.json.decode(msgspec.json.encode(row), type=Row) == row
    assert _judged(_report(1.0, healthy), _report(1.0, slower)).cause is None
    assert _judged(_report(2.0, healthy), _report(1.0, slower)).cause is None


@pytest.mark.parametrize(("metric", "passes"), [("first_token", "prefill_work"), ("token_time", "work")])
def test_a_slower_token_has_the_cause_of_its_forwards(metric: MetricName, passes: str) -> None:
    """The first token takes a prefill, the others take decode steps: each has work passes of its own."""
    healthy, slower = _measured(_HEALTHY_PROGRAM), _measured(_HEALTHY_PROGRAM.slower(_PROJECTION, 3.0))
    base, head = _report(1.0, healthy), _report(1.0, healthy)
    row = Row.of(head.cases[0], metric, "REGRESSED", "+40 %.", ratio=1.4)
    names = base.environment.kernel_names, head.environment.kernel_names
    for launch in (*base.cases[0].launches, *head.cases[0].launches):
        launch.prefill_work = launch.work
    for launch in head.cases[0].launches:
        setattr(launch, passes, slower.works[0])
    found = cause.with_cause(row, base.cases[0], head.cases[0], names).cause
    assert found is not None
    assert cause.module_of(found) == _PROJECTION
    other: MetricName = "token_time" if metric == "first_token" else "first_token"
    found = cause.with_cause(msgspec.structs.replace(row, metric=other), base.cases[0], head.cases[0], names).cause
    assert found is None or cause.module_of(found) is None


def test_one_launch_names_the_module_that_takes_more_device_time() -> None:
    """3 % more device time of one rank: wall time shows nothing."""
    healthy = _measured(_HEALTHY_PROGRAM, _HEALTHY_PROGRAM)
    slower = _measured(_HEALTHY_PROGRAM, _HEALTHY_PROGRAM.slower(_PROJECTION, 1.1))
    base, head = _report(1.0, healthy, launches=1), _report(1.0, slower, launches=1)
    row = _judged(base, head, "device_time")
    assert row.verdict == "REGRESSED"
    assert row.cause is not None
    assert (row.cause.rank, row.cause.modules[0].name, row.cause.parts[0].name) == (1, _PROJECTION, "GEMM")
    assert "Cause: rank 1 alone: 100 % in layers.*.mlp.down_proj (GEMM)." in row.reason.splitlines()
    assert _judged(base, head).cause is None
    assert _judged(base, _report(1.0, healthy, launches=1), "device_time").cause is None


@pytest.mark.parametrize(
    ("verdict", "plan", "caused"),
    [("REGRESSED", "e", True), ("REGRESSED", "f", False), ("UNDECIDED", "e", False), ("IMPROVED", "e", False)],
)
def test_a_row_that_is_worse_has_a_cause(verdict: Verdict, plan: str, caused: bool) -> None:
    """An undecided row has none, even where its interval lies above no change; nor has one of another plan."""
    base, head = _report(1.0, _measured(_HEALTHY_PROGRAM)), _report(2.0, _measured(_HEALTHY_PROGRAM.slower("", 3.0)))
    head.cases[0].launches[0].plan_sha256 = plan * 64
    row = Row.of(head.cases[0], "time", verdict, "Time +2 %.\nAlso changed: torch.", ratio=2.0, low=1.01)
    names = base.environment.kernel_names, head.environment.kernel_names
    found = cause.with_cause(row, base.cases[0], head.cases[0], names)
    assert (found.cause is not None) is caused
    first, *_, last = found.reason.splitlines()
    assert (first, last) == ("Time +2 %.", "Also changed: torch.")
