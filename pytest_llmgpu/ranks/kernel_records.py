"""Figures of a pass from the records of torch.profiler: pure functions over plain tuples.

A record of a device is a kernel or a copy; one of the host is a call of the CUDA runtime or driver, or a range that was
opened around a module. A kernel has the correlation id of the call that launched it, and the innermost range around the
start of that call is its module.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from pytest_llmgpu.report.kernel_families import collective_of, family_of
from pytest_llmgpu.report.work import KERNEL_NAME_LENGTH, OTHER_MODULE, KernelFamily

RANGE_PREFIX = "llmgpu:"
"""Begin of the name of a range that a work pass opens; the rest is the module's name."""

OUTSIDE = "(outside)"
"""Module of a kernel that was launched outside of every range."""

_NS = 1e-9
_CALL = re.compile(r"^(cuda|cu)[A-Z]")
_POLLS = re.compile(r"(Event|Stream)Query|GetLastError|PeekAtLastError|IsCapturing|GetCaptureInfo")
"""Calls without effect, some of them by other threads such as NCCL's watchdog: their number differs between passes."""
_SYNCHRONIZES = re.compile(r"^cuda(Stream|Device|Event)Synchronize|^cu(Stream|Ctx|Event)Synchronize")
_COPY = re.compile(r"^Mem(cpy|set)\b")
_COPY_TO_HOST = "Memcpy DtoH"
_FAMILIES = get_args(KernelFamily)
_KERNEL_ROWS = 36
"""Kernels with a row of their own; one row for each family sums the others."""
_MODULE_ROWS = 100 - _KERNEL_ROWS - len(_FAMILIES)
"""Rows of modules: a rank has at most 100 rows."""
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class Record(NamedTuple):
    """One record of torch.profiler."""

    name: str
    device: int | None
    """The index of the GPU; None: a record of the host."""
    start_ns: int
    duration_ns: int
    correlation: int
    """Joins a kernel or a copy to the call that launched it."""

    @property
    def end_ns(self) -> int:
        """The end on the same clock as the start."""
        return self.start_ns + self.duration_ns


class Calls(NamedTuple):
    """The calls of one kernel."""

    calls: int
    time_s: float


class PassKernels(NamedTuple):
    """The device records of one pass."""

    device_time_s: float
    """The sum over kernels that are no collective."""
    copy_s: float
    """The sum over copies and memsets."""
    covered_s: float
    """The time during which a kernel ran on any GPU."""
    kernels: dict[str, Calls]
    """Full name of a kernel, collectives included, to its calls."""
    collective_s: dict[str, list[float]]
    """Kind of a collective to the durations of its calls in the order of their start."""


class Modules(NamedTuple):
    """The kernels of an eager pass by module, and the calls of the host that launched them."""

    kernels: dict[tuple[str, str], Calls]
    """Module and full name of a kernel to its calls."""
    runtime_calls: dict[str, int]
    """Function to its number of calls inside the ranges, calls that poll left out."""
    host_syncs: int
    """Calls inside the ranges that wait for the GPU, and copies to the host."""


class NamedRow(NamedTuple):
    """A `work.WorkRow` with the name of its kernel."""

    module: str | None
    kernel: str | None
    family: KernelFamily
    calls: int
    time_s: float


def read(events: Iterable[Any]) -> list[Record]:
    """Return the records that matter of `torch.profiler.profile(...).profiler.kineto_results.events()`.

    Ops of torch are left out, and ranges where they appear as records of a device a second time.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # as torch's own profiler does

    records = []
    for event in events:
        name = event.name()
        if event.device_type() != DeviceType.CPU:
            if event.is_user_annotation():
                continue
            device = event.device_index()
        elif name.startswith(RANGE_PREFIX) or _CALL.match(name):
            device = None
        else:
            continue
        records.append(Record(name, device, event.start_ns(), event.duration_ns(), event.correlation_id()))
    return records


def of_pass(records: Sequence[Record]) -> PassKernels:
    """Return the kernels of one pass."""
    time_ns: dict[str, int] = defaultdict(int)
    calls: Counter[str] = Counter()
    collectives: dict[str, list[float]] = defaultdict(list)
    device_ns = 0
    kernels = sorted(_kernels(records), key=lambda record: record.start_ns)
    for record in kernels:
        calls[record.name] += 1
        time_ns[record.name] += record.duration_ns
        if family_of(record.name) == "collective":
            collectives[collective_of(record.name)].append(record.duration_ns * _NS)
        else:
            device_ns += record.duration_ns
    copy_ns = sum(record.duration_ns for record in records if _is_copy(record))
    return PassKernels(
        device_time_s=device_ns * _NS,
        copy_s=copy_ns * _NS,
        covered_s=_covered_ns(kernels) * _NS,
        kernels={name: Calls(count, time_ns[name] * _NS) for name, count in calls.items()},
        collective_s=dict(collectives),
    )


def modules(records: Sequence[Record]) -> Modules:
    """Attribute the kernels of an eager pass to the innermost range around the call that launched them."""
    calls = [record for record in records if record.device is None and _CALL.match(record.name)]
    module_of = _innermost(calls, [record for record in records if record.name.startswith(RANGE_PREFIX)])
    time_ns: dict[tuple[str, str], int] = defaultdict(int)
    count: Counter[tuple[str, str]] = Counter()
    for record in _kernels(records):
        module = module_of.get(record.correlation, OUTSIDE)
        count[module, record.name] += 1
        time_ns[module, record.name] += record.duration_ns
    inside = [record.name for record in calls if record.correlation in module_of]
    to_host = [record for record in records if _is_copy(record) and record.name.startswith(_COPY_TO_HOST)]
    return Modules(
        kernels={key: Calls(number, time_ns[key] * _NS) for key, number in count.items()},
        runtime_calls=dict(sorted(Counter(name for name in inside if not _POLLS.search(name)).items())),
        host_syncs=sum(_SYNCHRONIZES.match(name) is not None for name in inside)
        + sum(record.correlation in module_of for record in to_host),
    )


def kernels_sha256(kernels: Mapping[str, Calls]) -> str:
    """Return the hash of the sorted names and numbers of calls: equal where two passes ran the same kernels."""
    counts = sorted((name, calls.calls) for name, calls in kernels.items())
    return hashlib.sha256(json.dumps(counts).encode()).hexdigest()


def rows(passes: Sequence[PassKernels], attributed: Modules | None) -> list[NamedRow]:
    """Return the largest rows of the passes by kernel, and of the eager pass by module and kernel; the rest is summed.

    Args:
        passes: Each with the same kernels; the time of a row is its median.
        attributed: The eager pass; None leaves its rows out.
    """
    by_kernel = _by_time(
        NamedRow(
            None,
            name,
            family_of(name),
            calls.calls,
            statistics.median(one.kernels[name].time_s for one in passes if name in one.kernels),
        )
        for name, calls in passes[-1].kernels.items()
    )
    found = [*by_kernel[:_KERNEL_ROWS], *_summed(by_kernel[_KERNEL_ROWS:], None)]
    if attributed is not None:
        found += _module_rows(
            _by_time(
                NamedRow(module, name, family_of(name), *calls) for (module, name), calls in attributed.kernels.items()
            )
        )
    return found


def _module_rows(by_time: Sequence[NamedRow]) -> list[NamedRow]:
    """Return the largest rows, and the others summed by module and family; no family of a module is lost.

    Only a program of very many modules has a row `other` for each family: it sums the smallest modules.

    Args:
        by_time: A row for each module and kernel, the largest time first.
    """
    for own in range(min(_MODULE_ROWS, len(by_time)), -1, -1):
        sums = _summed_by_module(by_time[own:])
        if own + len(sums) <= _MODULE_ROWS:
            return [*by_time[:own], *sums]
    kept = _MODULE_ROWS - len(_FAMILIES)
    return [*sums[:kept], *_summed(sums[kept:], OTHER_MODULE)]


def _by_time(several: Iterable[NamedRow]) -> list[NamedRow]:
    """Return rows with cut names, equal ones summed, the largest time first."""
    summed: dict[tuple[str | None, str | None, KernelFamily], tuple[int, float]] = {}
    for row in several:
        key = row.module, None if row.kernel is None else row.kernel[:KERNEL_NAME_LENGTH], row.family
        calls, time_s = summed.get(key, (0, 0.0))
        summed[key] = calls + row.calls, time_s + row.time_s
    found = [NamedRow(*key, *amounts) for key, amounts in summed.items()]
    return sorted(found, key=lambda row: (-row.time_s, row.module or "", row.kernel or ""))


def _summed(several: Sequence[NamedRow], module: str | None) -> list[NamedRow]:
    """Return a row without a kernel for each family of the rows."""
    return _summed_by_module([row._replace(module=module) for row in several])


def _summed_by_module(several: Sequence[NamedRow]) -> list[NamedRow]:
    """Return a row without a kernel for each module and family of the rows, the largest time first."""
    return _by_time(row._replace(kernel=None) for row in several)


def folded(module: str, prefix: str = "") -> str:
    """Return the name of a module with layer numbers folded: `model.layers.3.mlp` is `layers.*.mlp`.

    Args:
        module: As `torch.nn.Module.named_modules` names it; empty for the model itself.
        prefix: Attribute that holds the decoder, which is left out.
    """
    if module in ("", prefix):
        return "model"
    return _LAYER_NUMBER.sub(".*", module.removeprefix(f"{prefix}."))


def _kernels(records: Iterable[Record]) -> Iterator[Record]:
    return (record for record in records if record.device is not None and not _COPY.match(record.name))


def _is_copy(record: Record) -> bool:
    return record.device is not None and _COPY.match(record.name) is not None


def _covered_ns(kernels: Sequence[Record]) -> int:
    """Return the length of the union of intervals that are sorted by their start."""
    covered = end_ns = 0
    for record in kernels:
        covered += max(0, record.end_ns - max(end_ns, record.start_ns))
        end_ns = max(end_ns, record.end_ns)
    return covered


def _innermost(calls: Sequence[Record], ranges: Sequence[Record]) -> dict[int, str]:
    """Return the correlation id of each call inside a range to the module of the innermost one; ranges are nested."""
    waiting = sorted(
        (record for record in ranges if record.device is None), key=lambda record: (record.start_ns, -record.end_ns)
    )
    waiting.reverse()
    found: dict[int, str] = {}
    opened: list[Record] = []
    for call in sorted(calls, key=lambda record: record.start_ns):
        while waiting and waiting[-1].start_ns <= call.start_ns:
            entered = waiting.pop()
            while opened and opened[-1].end_ns <= entered.start_ns:
                opened.pop()
            opened.append(entered)
        while opened and opened[-1].end_ns <= call.start_ns:
            opened.pop()
        if opened:
            found[call.correlation] = opened[-1].name.removeprefix(RANGE_PREFIX)
    return found
