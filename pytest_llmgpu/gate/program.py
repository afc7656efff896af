"""The program of a case in two reports: what it calls, by name and module, and what a change of it costs.

Numbers of calls are exact. In 4,134 pairs of healthy launches on six GPUs no kernel had another number of calls. The
price of a change is the time of the calls that were added less that of the calls that went, in work passes, divided by
the factor that the times of all unchanged kernels have in common: the clock changes that factor, and not the price.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from os.path import commonprefix
from typing import NamedTuple, TypeVar

from pytest_llmgpu.gate import fixed_clock
from pytest_llmgpu.gate.fixed_clock import Fitted, Pass
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.verdicts import CallsChange, Cause, Place, SlowerKernel
from pytest_llmgpu.report.work import KernelFamily, RankWork, Work

_K = TypeVar("_K")
_N = TypeVar("_N", int, float)

RENAMED = 0.015
"""Error of the price of kernels that were only renamed, as a fraction of their own time: it was 1.6 % at most."""
_SMALL, _LARGE = 0.001, 0.1
"""Shares of device time: a kernel below cannot become a regression, one above is compared with the others alone."""
_MOST = 10
"""Most changes of calls of one kind in a record."""
_FOLDED = "*"
"""In the name of a module, the numbers of all layers."""
FLOPS = "FLOPs"
SYNCS = "host synchronizations"
_C = "C functions"
_PYTHON = re.compile(r"\.py$")
WAITS = re.compile(r"(Stream|Device|Event|Ctx)Synchronize")
_PRODUCES = re.compile(r"mm\b|matmul|linear|conv|attention|einsum")
COMPUTES_NOTHING = re.compile(
    r"view|reshape|permute|transpose|::t\b|expand|slice|select|split|squeeze|alias|empty|detach"
)
"""Ops that only describe memory in another way, and launch no kernel."""

OWN: tuple[Place, ...] = ("device", "copies", "host")
"""Places of the own time of a rank, for which the others wait."""


class Amount(NamedTuple):
    """The calls of a kernel, or of several."""

    calls: int = 0
    time_s: float = 0.0


Kernel = tuple[KernelFamily, str]
"""Family and name, of a kernel or of a module."""


class RankFigures(NamedTuple):
    """The figures of one rank, each the median over the launches of a report. None and empty: not measured."""

    device_s: float | None
    """The time of kernels that are no collective, and of copies."""
    busy: float | None
    """The fraction of a pass during which a kernel ran."""
    parts_s: dict[Place, float]
    """The time of a pass by place."""
    kernels: dict[Kernel, Amount]
    passes: dict[Kernel, list[list[Pass]]]
    """The passes of each launch, for kernels whose passes and clock are known."""
    modules: dict[Kernel, Amount]
    runtime_calls: dict[str, int]
    ops: dict[tuple[str, str], int]
    """Module and op."""
    python_calls: float
    """The calls of Python functions in a forward."""
    host_calls: dict[str, int]
    """Source file to calls of Python functions, with `C functions`."""
    python_versions: frozenset[str]
    host_syncs: int | None
    flops: int | None
    flops_by_module: dict[str, int]
    uuids: frozenset[str]
    layers: int | None
    forwards: int
    """The forwards of the eager pass."""
    batches: int
    """The forwards of a pass."""

    @property
    def own_s(self) -> float:
        """The time of a pass in which the rank does not wait for another one."""
        return sum(self.parts_s[place] for place in OWN)


class Pair(NamedTuple):
    """One rank in both reports."""

    before: RankFigures
    after: RankFigures

    @property
    def is_priced(self) -> bool:
        """True if the times of all kernels are known in both reports."""
        return all(bool(rank.kernels and rank.device_s) for rank in self)

    @property
    def same_gpus(self) -> bool:
        """True if the rank was on the same GPUs in both reports: others of one kind differ by up to 1 %."""
        return self.before.uuids == self.after.uuids


def pairs_of(base: CaseResult, head: CaseResult, names: tuple[Sequence[str], Sequence[str]]) -> list[Pair]:
    """Return each rank in two results of the same batches; empty where their work passes cannot be compared."""
    launches = [list(filter(is_known, result.launches)) for result in (base, head)]
    if len({one.plan_sha256 for side in launches for one in side}) != 1:
        return []
    works = [[one.work for one in side if one.work is not None] for side in launches]
    shapes = {(tuple(one.batches), tuple(one.eager_batches), len(one.ranks)) for side in works for one in side}
    if not all(works) or len(shapes) != 1:
        return []
    ranks = range(len(works[0][0].ranks))
    return [Pair(*(_figures(*side, number) for side in zip(works, names, strict=True))) for number in ranks]


def is_known(launch: Launch) -> bool:
    """Return whether the program of a launch is known: earlier reports lack the modules of ops, and most kernels."""
    return bool(launch.ranks) and all(rank.ops_by_module is not None for rank in launch.ranks)


def price(pair: Pair) -> tuple[float, float] | None:
    """Return the price of a changed program and its error, as fractions of device time; None where it is not known.

    Without an unchanged kernel the factor of the clock is unknown.
    """
    total_s = pair.before.device_s
    if not pair.is_priced or not total_s:
        return None
    unchanged, changed = _split(pair)
    if not changed:
        return 0.0, 0.0
    times_s = [(before.time_s, after.time_s) for _, before, after in unchanged if before.time_s > 0 < after.time_s]
    if not times_s:
        return None
    factor = _weighted_median((after_s / before_s, before_s) for before_s, after_s in times_s)
    growth_s = sum(after.time_s / factor - before.time_s for _, before, after in changed)
    share = max(sum(before.time_s for _, before, _ in changed), sum(after.time_s for _, _, after in changed) / factor)
    return growth_s / total_s, RENAMED * share / total_s


def slower_kernels(pair: Pair) -> list[SlowerKernel]:
    """Return the unchanged kernels that became slower than the factor common to the others, at a fixed clock.

    The largest growth comes first. Kernels depend on the clock by different amounts: each has a line of its own. Where
    most of the time became shorter the others did not become slower.
    """
    total_s = pair.before.device_s
    if not pair.is_priced or not total_s:
        return []
    fits: list[tuple[Kernel, Amount, Fitted]] = []
    for kernel, before, after in _split(pair)[0]:
        launches = [rank.passes.get(kernel, []) for rank in pair]
        if all(launches) and before.time_s > 0 and max(before.time_s, after.time_s) > _SMALL * total_s:
            fits.append((kernel, before, fixed_clock.fit(*launches)))
    grown = [(fitted.samples.change, before.time_s) for _, before, fitted in fits]
    common = _weighted_median(grown) if grown else 0.0
    times_s: dict[str, dict[str, float]] = defaultdict(dict)
    for (family, place), amount in pair.after.modules.items():
        times_s[family][place] = amount.time_s
    most = {family: _module_with_most(of_family, 1) for family, of_family in times_s.items()}
    busy = [rank.busy for rank in pair if rank.busy is not None]
    idle = max(busy) - min(busy) if len(busy) == len(pair) else 0.0
    found = []
    for number, ((family, name), before, fitted) in enumerate(fits):
        share = before.time_s / total_s
        # A kernel with half of the time would be compared with itself; between GPUs it differs from the others.
        others = [*grown[:number], *grown[number + 1 :]] if pair.same_gpus and share > _LARGE else []
        growth = math.expm1(fitted.samples.change - max(0.0, _weighted_median(others) if others else common))
        of_launches = fitted.sd * sum(1 / len(side) for side in fitted.samples) ** 0.5
        error = share * (1 + growth) * math.hypot(of_launches, fixed_clock.KERNEL_IDLE_SD * idle)
        excess, module = share * growth, most.get(family)
        found.append(SlowerKernel(name=name, family=family, module=module, growth=growth, excess=excess, error=error))
    return sorted(found, key=lambda one: -one.excess)


def changes(pair: Pair) -> Cause | None:
    """Return everything that one rank calls more or less often than before; None if nothing changed."""
    before, after = pair
    runtime_calls = _counts(before.runtime_calls, after.runtime_calls, WAITS)
    if before.host_syncs is not None and after.host_syncs is not None and before.host_syncs != after.host_syncs:
        runtime_calls.insert(0, CallsChange(name=SYNCS, before=before.host_syncs, after=after.host_syncs))
    ops, moved = op_changes(pair)
    kernels = kernel_changes(pair)
    priced, error = (price(pair) if kernels else None) or (None, None)
    same_python = before.python_versions == after.python_versions
    found = Cause(
        place="program",
        kernels=kernels,
        runtime_calls=runtime_calls,
        ops=ops,
        moved=moved,
        host_calls=_counts(before.host_calls, after.host_calls, _PYTHON) if same_python else [],
        price=priced,
        price_error=error,
        forwards=after.batches,
    )
    return found if found.calls or found.moved else None


def kernel_changes(pair: Pair) -> list[CallsChange]:
    """Return kernels whose number of calls changed, growth before decline, the largest change of time first."""
    found: list[tuple[float, CallsChange]] = []
    known = {module for _, module in pair.before.modules}
    for family, name in pair.before.kernels | pair.after.kernels if pair.is_priced else ():
        before, after = (rank.kernels.get((family, name), Amount()) for rank in pair)
        if before.calls == after.calls:
            continue
        then, now = ({module: one.calls for (of, module), one in rank.modules.items() if of == family} for rank in pair)
        growths, _ = _net(then, now, known)
        module = _module_with_most(growths, after.calls - before.calls)
        layers = _layers(pair, module, growths.get(module or "", 0))
        change = CallsChange(name=name, module=module, layers=layers, before=before.calls, after=after.calls)
        found.append((abs(after.time_s - before.time_s), change))
    ordered = sorted(found, key=lambda one: (one[1].growth < 0, -one[0], one[1].name))
    return [change for _, change in ordered[:_MOST]]


def op_changes(pair: Pair) -> tuple[list[CallsChange], str | None]:
    """Return the ops whose number of calls changed, with their module, and the shortest names between which ops moved.

    Products and what computes something come first. Calls that left one module and are in another one cancel. Products
    of other sizes have equal calls: the module that computes other FLOPs is then named alone.
    """
    before, after = pair.before.ops, pair.after.ops
    layers = (pair.after.layers or 0) * pair.after.forwards
    found: list[CallsChange] = []
    moves: list[str] = []
    known = {module for module, _ in before}
    changed = {name: None for place, name in (*before, *after) if before.get((place, name)) != after.get((place, name))}
    for op in changed if before and after else ():
        ran, runs = ({module: calls for (module, name), calls in ops.items() if name == op} for ops in (before, after))
        growths, moved = _net(ran, runs, known)
        moves += moved
        for module, growth in growths.items():
            if growth:
                change = CallsChange(
                    name=op,
                    module=module,
                    layers=_layers(pair, module, abs(growth)),
                    # The calls that every layer has more, or fewer; None where layers can differ.
                    per_layer=abs(growth) // layers if _FOLDED in module and layers and not growth % layers else None,
                    before=runs.get(module, 0) - growth,
                    after=runs.get(module, 0),
                )
                found.append(change)
    then, now = pair.before.flops, pair.after.flops
    if None not in (then, now) and then != now and not any(_PRODUCES.search(change.name) for change in found):
        ran_by, growth = pair.before.flops_by_module, (now or 0) - (then or 0)
        most = _module_with_most(_net(ran_by, pair.after.flops_by_module, ran_by)[0], growth)
        found.append(CallsChange(name=FLOPS, module=most, before=then or 0, after=now or 0))

    def order(change: CallsChange) -> tuple[bool, bool, bool, int, str]:  # views launch no kernel
        nothing = COMPUTES_NOTHING.search(change.name) is not None
        product = _PRODUCES.search(change.name) is not None or change.name == FLOPS
        return change.growth < 0, nothing, not product, -abs(change.growth), change.name

    return sorted(found, key=order)[:_MOST], min(moves, key=len, default=None)


def _split(pair: Pair) -> tuple[list[tuple[Kernel, Amount, Amount]], list[tuple[Kernel, Amount, Amount]]]:
    """Return the kernels with equal and those with other numbers of calls; collectives wait, and are left out."""
    unchanged: list[tuple[Kernel, Amount, Amount]] = []
    changed: list[tuple[Kernel, Amount, Amount]] = []
    for kernel in pair.before.kernels | pair.after.kernels:
        before, after = (rank.kernels.get(kernel, Amount()) for rank in pair)
        if kernel[0] != "collective":
            (unchanged if before.calls == after.calls else changed).append((kernel, before, after))
    return unchanged, changed


def _weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the smallest value up to which half of the weight lies, of (value, weight)."""
    ordered = sorted(weighted)
    passed = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(passed, passed[-1] / 2)][0]


def _layers(pair: Pair, module: str | None, growth: int) -> int | None:
    """Return the largest number of layers that can have the added calls of an eager pass; None if that can be all."""
    most = growth // pair.after.forwards
    total = pair.after.layers
    return most if module is not None and _FOLDED in module and total is not None and 0 < most < total else None


def _module_with_most(growths: Mapping[str, float], growth: int) -> str | None:
    """Return the module with at least half of the changes in the direction of `growth`; None if no module has."""
    found = {module: abs(change) for module, change in growths.items() if change * growth > 0}
    best = max(sorted(found), key=lambda module: found[module], default=None)
    return best if best is not None and found[best] >= sum(found.values()) / 2 else None


def _alike(name: str, other: str) -> int:
    """Return how many letters at the begin and at the end are equal."""
    return sum(map(len, map(commonprefix, ((name, other), (name[::-1], other[::-1])))))


def _net(before: Mapping[str, _N], after: Mapping[str, _N], known: Collection[str]) -> tuple[dict[str, _N], list[str]]:
    """Return growths by module, less moves to a new or an outer module with the most similar name, and the moves."""
    growths = {module: after.get(module, 0) - before.get(module, 0) for module in {**before, **after}}
    moves = []
    for module in sorted(growths):
        # A wrapper's module is new, or that of a wrapper went: an op that moved between others is a change of both.
        new = [name for name in growths if name not in known]
        more = new or [name for name in growths if module.startswith(f"{name}.")]
        while growths[module] < 0 and (more := [name for name in more if growths[name] > 0]):
            to = max(more, key=functools.partial(_alike, module))
            calls = min(growths[to], -growths[module])
            growths[module] += calls
            growths[to] -= calls
            moves.append(f"{module} to {to}")
    return growths, moves


def _counts(before: Mapping[str, int], after: Mapping[str, int], first: re.Pattern[str]) -> list[CallsChange]:
    """Return the largest changes of numbers of calls, growth before decline, and those that `first` matches first."""
    if not before or not after:
        return []  # one of the reports did not count them
    found = [
        CallsChange(name=name, before=before.get(name, 0), after=after.get(name, 0))
        for name in {**before, **after}
        if before.get(name, 0) != after.get(name, 0)
    ]
    found.sort(key=lambda change: (change.growth < 0, not first.search(change.name), -abs(change.growth), change.name))
    return found[:_MOST]


def _figures(works: Sequence[Work], names: Sequence[str], number: int) -> RankFigures:
    """Return the medians of one rank over the launches."""
    ranks = [work.ranks[number] for work in works]
    of_kernels, of_modules, of_passes = zip(*(_amounts(rank, names) for rank in ranks), strict=True)
    kernels = _median_amounts(of_kernels)
    collective_s = sum(amount.time_s for (family, _), amount in kernels.items() if family == "collective")
    transfers = [
        sum(statistics.median(one.transfer_s) for one in work.collectives)
        for work in works
        if work.collectives is not None and all(one.transfer_s for one in work.collectives)
    ]
    transfer_s = min(collective_s, statistics.median(transfers)) if transfers else 0.0
    copy_s = _median(rank.copy_s for rank in ranks) or 0.0
    kernels_s = _median(rank.device_time_s for rank in ranks)
    by_module = [(rank.ops_by_module or {}).items() for rank in ranks]
    ops = [{(module, name): calls for module, of in one for name, calls in of.items()} for one in by_module]
    host_calls = [rank.host_calls for rank in ranks if rank.host_calls is not None]
    return RankFigures(
        device_s=None if kernels_s is None else kernels_s + copy_s,
        busy=_median(None if part is None else [part] for part in map(fixed_clock.busy, ranks)),
        parts_s={
            "device": kernels_s or 0.0,
            "copies": copy_s,
            "host": max(0.0, (_median(rank.idle_s for rank in ranks) or 0.0) - copy_s),
            "transfer": transfer_s,
            "waiting": collective_s - transfer_s,
        },
        kernels=kernels,
        passes={kernel: [one[kernel] for one in of_passes if kernel in one] for one in of_passes for kernel in one},
        modules=_median_amounts(of_modules),
        runtime_calls=_median_counts([rank.runtime_calls for rank in ranks]),
        ops=_median_counts(ops),
        host_calls=_median_counts([{**one.by_file, _C: one.c} for one in host_calls]),
        python_calls=statistics.median(one.python for one in host_calls) if host_calls else 0,
        python_versions=frozenset(one.python_version for one in host_calls),
        host_syncs=_median_count(rank.host_syncs for rank in ranks),
        flops=_median_count(rank.flops for rank in ranks),
        flops_by_module=_median_counts([rank.flops_by_module for rank in ranks]),
        uuids=frozenset(uuid for rank in ranks for uuid in rank.uuids),
        layers=min((work.model.layers for work in works if work.model is not None), default=None),
        forwards=max(1, len(works[0].eager_batches)),
        batches=max(1, len(works[0].batches)),
    )


def _amounts(
    rank: RankWork, names: Sequence[str]
) -> tuple[dict[Kernel, Amount], dict[Kernel, Amount], dict[Kernel, list[Pass]]]:
    """Return the calls and seconds of each kernel of the passes, of each part of a module, and the kernel's passes."""
    kernels: dict[Kernel, Amount] = defaultdict(Amount)
    modules: dict[Kernel, Amount] = defaultdict(Amount)
    passes: dict[Kernel, list[Pass]] = {}
    clocks = fixed_clock.log_clocks(rank.clock_ghz)
    for row in rank.rows or ():
        name = names[row.kernel] if row.kernel is not None and row.kernel < len(names) else "other"
        family = "collective" if name.startswith("Memcpy PtoP") else row.family  # a copy in older reports
        amounts, key = (kernels, (family, name)) if row.module is None else (modules, (family, row.module))
        amounts[key] = Amount(amounts[key].calls + row.calls, amounts[key].time_s + row.time_s)
        if row.module is None and (found := fixed_clock.passes(clocks, row.passes_s)):
            passes[key] = found
    return kernels, modules, passes


def _median(columns: Iterable[Sequence[float] | None]) -> float | None:
    """Return the median over launches of the median over passes; None where no launch has the figure."""
    found = [statistics.median(column) for column in columns if column]
    return statistics.median(found) if found else None


def _median_count(launches: Iterable[int | None]) -> int | None:
    found = [one for one in launches if one is not None]
    return statistics.median_low(found) if found else None


def _median_amounts(launches: Sequence[Mapping[_K, Amount]]) -> dict[_K, Amount]:
    if len(launches) == 1:
        return dict(launches[0])
    calls = _median_counts([{key: one.calls for key, one in launch.items()} for launch in launches])
    times_s = {key: [launch.get(key, Amount()).time_s for launch in launches] for key in calls}
    return {key: Amount(count, statistics.median(times_s[key])) for key, count in calls.items()}


def _median_counts(launches: Sequence[Mapping[_K, _N] | None]) -> dict[_K, _N]:
    known = [launch or {} for launch in launches]
    if len(known) == 1:
        return dict(known[0])
    keys = {key: None for launch in known for key in launch}
    return {key: statistics.median_low(launch.get(key, 0) for launch in known) for key in keys}
