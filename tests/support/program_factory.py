"""Programs of a model of two layers, as work passes record them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import msgspec

from pytest_llmgpu.gate import program
from pytest_llmgpu.gate.program import Pair
from pytest_llmgpu.recording import work
from pytest_llmgpu.recording.work import Calls, Modules, PassKernels
from pytest_llmgpu.report.kernel_families import family_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.work import CollectiveWork, HostCalls, ModelSize, RankWork, Work, WorkRow
from support.report_factory import make_report
from support.verdict_factory import with_launches

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half> >(int)"
CLONE = "Memcpy DtoD (Device -> Device)"
REDUCED = "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FLASH = "flash_fwd_kernel"
MLP, PROJECTION = "layers.*.mlp", "layers.*.mlp.down_proj"
CLOCK_GHZ = 1.7
_LOADS = (1.0, 0.96, 1.0, 0.96)
"""The clock of each pass as a fraction of that of the first: every second pass follows a load."""
PASSES = len(_LOADS)

_HEALTHY = {
    ("layers.*.self_attn.q_proj", "nvjet_hsh_64x8"): Calls(64, 0.003),
    ("layers.*.self_attn", FLASH): Calls(64, 0.004),
    ("layers.*.mlp.gate_proj", "nvjet_hsh_128x256"): Calls(64, 0.008),
    (PROJECTION, "nvjet_hsh_128x256"): Calls(64, 0.008),
    (MLP, ADD): Calls(64, 0.001),
    (PROJECTION, REDUCED): Calls(64, 0.002),
    ("layers.*", ADD): Calls(128, 0.002),
    ("lm_head", "nvjet_hsh_vocabulary"): Calls(2, 0.001),
}
_OPS = {"layers.*": {"aten::add": 4}, MLP: {"aten::add": 2, "aten::view": 2}, PROJECTION: {"aten::mm": 2}}
_CALLS = {"cudaLaunchKernel": 514, "cudaStreamSynchronize": 4, "cudaMemcpyAsync": 6}


@dataclasses.dataclass(frozen=True)
class Program:
    """What one rank runs in a pass of two forwards; one of them is run eagerly."""

    kernels: dict[tuple[str, str], Calls] = dataclasses.field(default_factory=lambda: dict(_HEALTHY))
    idle_s: float = 0.01
    wait_s: float = 0.0
    syncs: int = 2
    runtime_calls: dict[str, int] = dataclasses.field(default_factory=lambda: dict(_CALLS))
    ops: dict[str, dict[str, int]] = dataclasses.field(default_factory=lambda: dict(_OPS))
    files: dict[str, int] = dataclasses.field(default_factory=lambda: {"torch/nn/modules/module.py": 40})
    flops: dict[str, int] = dataclasses.field(default_factory=lambda: {PROJECTION: 1000})

    def slower(self, name: str, times: float) -> Program:
        """Return it with longer calls of a kernel; for "" of all kernels."""
        changed = {
            place: Calls(calls, time_s * (times if name in ("", place[1]) else 1))
            for place, (calls, time_s) in self.kernels.items()
        }
        return dataclasses.replace(self, kernels=changed)

    def more(self, module: str, name: str, calls: int, time_s: float, op: str = "") -> Program:
        """Return it with more calls of a kernel in a pass, and with an op that launches them."""
        seen = self.kernels.get((module, name), Calls(0, 0.0))
        kernels = {**self.kernels, (module, name): Calls(seen.calls + calls, seen.time_s + time_s)}
        ops = {**self.ops, module: dict(Counter(self.ops.get(module, {})) + Counter({op: calls // 2}))}
        return dataclasses.replace(self, kernels=kernels, ops=ops if op else self.ops)

    def recorded(self, names: dict[str, int], clock_ghz: float = CLOCK_GHZ, on_cpu: bool = False) -> RankWork:
        """Return what its work passes record at a clock on which all kernels depend, or on a CPU."""
        kernels: dict[str, Calls] = {}
        for (_, name), (calls, time_s) in self.kernels.items():
            seen, wait_s = kernels.get(name, Calls(0, 0.0)), self.wait_s if name == REDUCED else 0.0
            kernels[name] = Calls(seen.calls + calls, seen.time_s + (time_s + wait_s) * CLOCK_GHZ / clock_ghz)
        eager = {key: Calls(calls // 2, time_s / 2) for key, (calls, time_s) in self.kernels.items()}
        passes = [{name: Calls(one.calls, one.time_s / load) for name, one in kernels.items()} for load in _LOADS]
        rows = work.pass_rows([PassKernels(0.0, 0.0, 0.0, one, {}) for one in passes])
        rows += work.module_rows(Modules(eager, {}, 0))
        numbered = [
            WorkRow(**{**row._asdict(), "kernel": row.kernel and names.setdefault(row.kernel, len(names))})
            for row in rows
        ]
        copy_s = kernels.get(CLONE, Calls(0, 0.0)).time_s
        device_s = sum(calls.time_s for name, calls in kernels.items() if family_of(name) != "collective") - copy_s
        total: Counter[str] = Counter()
        for ops in self.ops.values():
            total.update(ops)
        counted = RankWork(
            uuids=[] if on_cpu else ["GPU-0"],
            ops=dict(total),
            ops_by_module=self.ops,
            flops=sum(self.flops.values()),
            flops_by_module=self.flops,
            host_calls=HostCalls(python=sum(self.files.values()), c=9, by_file=self.files, python_version="3.12"),
        )
        if on_cpu:
            return counted
        return msgspec.structs.replace(
            counted,
            device_time_s=[device_s / load for load in _LOADS],
            copy_s=[copy_s / load for load in _LOADS],
            idle_s=[self.idle_s + copy_s] * PASSES,
            busy=device_s / (device_s + self.idle_s),
            clock_ghz=[[clock_ghz * load for load in _LOADS]],
            runtime_calls=self.runtime_calls,
            host_syncs=self.syncs,
            rows=numbered,
        )


class Measured(NamedTuple):
    """The work passes of a report, as the gate compares them."""

    works: list[Work]
    kernel_names: list[str]


def measured(*ranks: Program, clock_ghz: float = CLOCK_GHZ, on_cpu: bool = False) -> Measured:
    """Return the work passes of a report of one launch whose ranks run the programs."""
    names: dict[str, int] = {}
    of_ranks = [rank.recorded(names, clock_ghz, on_cpu) for rank in ranks]
    transfer_s = min(sum(calls.time_s for (_, name), calls in one.kernels.items() if name == REDUCED) for one in ranks)
    collective = CollectiveWork(
        collective="all_reduce", calls=64, transfer_s=[transfer_s] * PASSES, wait_s=[0.0] * PASSES
    )
    size = ModelSize(parameters=1, weights_bytes=2, layers=2, attention_width=4)
    passes = 0 if on_cpu else PASSES
    one = Work(batches=[0, 2], eager_batches=[0], passes=passes, collectives=[collective], ranks=of_ranks, model=size)
    return Measured([one], list(names))


def pairs(before: Program, *after: Program, **fields: Any) -> list[Pair]:
    """Return each rank in both reports; in the baseline all of them run one program."""
    return between(measured(*[before] * len(after)), measured(*after, **fields))


def between(before: Measured, after: Measured) -> list[Pair]:
    """Return each rank in both reports."""
    (base,), (head,) = (report_of(one).cases for one in (before, after))
    return program.pairs_of(base, head, (before.kernel_names, after.kernel_names))


def report_of(found: Measured, *, seconds: float = 1.0, **case: Any) -> Report:
    """Return a report with a launch for each of these work passes, whose batches take so many times 210 s."""
    result = with_launches([seconds] * len(found.works), **case)
    for launch, passes in zip(result.launches, found.works, strict=True):
        launch.work = passes
    report = make_report([result])
    report.environment = msgspec.structs.replace(report.environment, kernel_names=found.kernel_names)
    return report
