"""The cause of a verdict: what changed in the program, by the work passes of both reports.

Families of kernels, collectives and idle time come from the passes in the execution of the case. Modules come from the
eager pass, with the layers that can have changed: `layers.*.mlp (GEMM, at most 3 layers)`. A module is named only where
its family grew in the execution of the case too.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

import msgspec

from pytest_llmgpu.report.cause import CallsChange, Cause, Place, TimeChange
from pytest_llmgpu.report.kernel_families import collective_of, family_of
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import listed, percent, plural
from pytest_llmgpu.report.verdicts import ALSO_CHANGED, Row
from pytest_llmgpu.report.work import OTHER_MODULE, KernelFamily, RankWork, Work

_WALL_TIMES = frozenset(("time", "first_token", "token_time"))
_EXPLAINED = _WALL_TIMES | {"device_time", "flops", "host_syncs", "kernels", "ops", "runtime_calls", "traffic"}
"""Metrics that work passes can explain."""
_SMALL, _SMALL_MODULE = 0.05, 0.1
"""Families and modules with a smaller share of the growth are not named. Modules are noisier: the eager pass runs
once."""
_MOST_OF_IT = 0.5
"""A module with this share of the growth is named alone."""
_MORE = 0.01
"""A host that launches this fraction of kernels more is slower for that reason."""
_SHOWN = 0.3
"""Work passes show a change of wall time if a part of them grew by this fraction of it. They are too few to show all of
it: the time of the host alone varies."""
_MOST = 10
"""Most changes of calls of one kind in a record."""
_NAMED = 3
"""Most names in a line."""

_ANY = re.compile("")
_WAITS = re.compile(r"(Stream|Device|Event|Ctx)Synchronize")
_LAUNCHES = re.compile(r"Launch")
_COPIES = re.compile(r"Mem(cpy|set)")
_COMMUNICATES = re.compile(r"c10d")
_PRODUCES = re.compile(r"mm\b|matmul|linear|conv|attention|einsum")
_COMPUTES_NOTHING = re.compile(r"view|reshape|permute|transpose|::t\b|expand|slice|select|split|squeeze|alias|empty")
_FOLDED = "*"
"""In the name of a module, the numbers of all layers."""

PREFIX = "Cause: "
"""Start of the line of a reason that states the cause."""
_CALLS = "Calls: "
"""Start of the line of a reason that lists calls; those of exact metrics have it already."""
_FLOPS = "FLOPs"
_IDLE, _WAITING, _TRANSFER, _COPYING = "idle", "waiting", "transfer", "copies"
_PLACES: dict[str, Place] = {_IDLE: "host", _WAITING: "waiting", _TRANSFER: "transfer", _COPYING: "copies"}


_K = TypeVar("_K")


class Measured(NamedTuple):
    """The work passes of one report."""

    works: Sequence[Work]
    """One record for each launch; all of them ran the same batches."""
    kernel_names: Sequence[str]
    """The names that the rows refer to."""


class _Amount(NamedTuple):
    calls: float = 0
    time_s: float = 0.0

    def plus(self, calls: float, time_s: float) -> _Amount:
        return _Amount(self.calls + calls, self.time_s + time_s)


_Kernel = tuple[KernelFamily, str | None]
"""Family and name; without a name, the kernels of the family that have no row of their own."""
_Part = tuple[str, KernelFamily]
"""Module and family."""


class _Rank(NamedTuple):
    """The figures of one rank, each the median over the launches of a report. None and empty: not measured."""

    device_s: float | None
    copy_s: float
    idle_s: float
    """Without copies."""
    transfer_s: float
    wait_s: float
    kernels: dict[_Kernel, _Amount]
    modules: dict[_Part, _Amount]
    runtime_calls: dict[str, int]
    ops: dict[str, int]
    flops_by_module: dict[str, int]
    layers: int | None
    """The layers of the model."""
    forwards: int
    """The forwards of the eager pass."""

    @property
    def families(self) -> dict[KernelFamily, _Amount]:
        found: dict[KernelFamily, _Amount] = defaultdict(_Amount)
        for (family, _), (calls, time_s) in self.kernels.items():
            found[family] = found[family].plus(calls, time_s)
        return found

    @property
    def own_s(self) -> float:
        """The time of a pass in which the rank does not wait for another one."""
        return (self.device_s or 0.0) + self.copy_s + self.idle_s

    @property
    def pass_s(self) -> float:
        return self.own_s + self.transfer_s + self.wait_s

    def device_parts(self) -> dict[str, float]:
        """Return the seconds of each family of the device time."""
        return {family: amount.time_s for family, amount in self.families.items() if family != "collective"}

    def pass_parts(self) -> dict[str, float]:
        """Return the seconds of each part of a pass."""
        others = {_TRANSFER: self.transfer_s, _WAITING: self.wait_s, _COPYING: self.copy_s, _IDLE: self.idle_s}
        return {**self.device_parts(), **others}


class _Pair(NamedTuple):
    """One rank in both reports."""

    before: _Rank
    after: _Rank


def with_cause(row: Row, base: CaseResult, head: CaseResult, names: tuple[Sequence[str], Sequence[str]]) -> Row:
    """Return a row with its cause, which its reason states as well; the row itself where no cause is found."""
    if row.metric not in _EXPLAINED or not row.worse:
        return row
    launches = [launch for result in (base, head) for launch in result.launches if launch.work is not None]
    if len({launch.plan_sha256 for launch in launches}) != 1:
        return row
    of_prefill = row.metric == "first_token" or row.prefill
    passes = attrgetter("prefill_work" if of_prefill else "work")
    works = [list(filter(None, map(passes, result.launches))) for result in (base, head)]
    found = find(row.metric, *map(Measured, works, names), ratio=row.ratio)
    if found is None:
        return row
    lines = [line for line in row.reason.splitlines() if not line.startswith(ALSO_CHANGED)]
    also = [line for line in row.reason.splitlines() if line.startswith(ALSO_CHANGED)]
    listed_already = any(line.startswith(_CALLS) for line in lines)
    more = [line for line in details(found) if not (listed_already and line.startswith(_CALLS))]
    text = "\n".join([*lines, f"{PREFIX}{describe(found)}.", *more, *also])
    return msgspec.structs.replace(row, cause=found, reason=text)


def find(metric: MetricName, before: Measured, after: Measured, *, ratio: float | None = None) -> Cause | None:
    """Return the cause of a growth, or None where the work passes cannot be compared or nothing changed in them."""
    shapes = {
        (tuple(work.batches), tuple(work.eager_batches or work.batches), len(work.ranks))
        for work in (*before.works, *after.works)
    }
    if not before.works or not after.works or len(shapes) != 1 or not before.works[0].ranks:
        return None
    pairs = [_Pair(_rank(before, number), _rank(after, number)) for number in range(len(before.works[0].ranks))]
    timed = all(rank.device_s is not None for pair in pairs for rank in pair)
    if metric == "device_time":
        return _of_device_time(pairs) if timed else None
    if metric in _WALL_TIMES and timed:
        return _of_wall_time(pairs, ratio or 1.0)
    return _of_numbers(metric, pairs)


def describe(cause: Cause) -> str:
    """Return the cause as a clause for a headline."""
    if cause.rank is None:
        return _place_in_words(cause, cause.place)
    if cause.place != "waiting":
        return f"rank {cause.rank} alone: {_place_in_words(cause, cause.place)}"
    largest = _PLACES.get(cause.parts[0].name, "device") if cause.parts else "host"
    return f"waiting for rank {cause.rank}: {_place_in_words(cause, largest)}"


def module_of(cause: Cause) -> str | None:
    """Return the module with the largest part of a cause; None if no module is named."""
    if cause.modules:
        return cause.modules[0].name
    return next((call.module for call in (*cause.kernels, *cause.ops) if call.module is not None), None)


def details(cause: Cause) -> list[str]:
    """Return at most three lines: the parts of the difference, the modules, and the calls that changed."""
    lines = []
    if cause.parts and cause.before_s is not None and cause.after_s is not None:
        parts = [f"{part.name} {_ms(part.growth_s)}" for part in cause.parts if abs(part.share) > _SMALL]
        lines.append(f"Parts of {_ms(cause.after_s - cause.before_s)} in a work pass: {', '.join(parts)}.")
    if cause.modules:
        modules = [f"{part.name} {percent(part.share, 0)} ({part.family})" for part in cause.modules]
        lines.append(f"Modules: {listed(modules, _NAMED)}.")
    calls = [
        f"{_short(change.name)} {change.before:,} -> {change.after:,}"
        for changes in (cause.kernels, cause.runtime_calls, cause.ops if not cause.kernels else [])
        for change in changes[:_NAMED]
        if change.name != _FLOPS
    ]
    if calls:
        lines.append(f"{_CALLS}{', '.join(calls)}.")
    return lines


def _of_device_time(pairs: Sequence[_Pair]) -> Cause | None:
    """Return the parts of the rank whose device time grew by the largest ratio, which the verdict is about."""
    times = [(pair.before.device_s or 0.0, pair.after.device_s or 0.0) for pair in pairs]
    number = max(range(len(pairs)), key=lambda one: times[one][1] / times[one][0] if times[one][0] else 0.0)
    before_s, after_s = times[number]
    if after_s <= before_s:
        return None
    found = _timed(
        "device",
        pairs[number],
        rank=_alone(number, [after - before for before, after in times]),
        parts=_Rank.device_parts,
        total=(before_s, after_s),
    )
    # Rows that lack most of the growth are of other kernels, or of none: they explain nothing.
    return found if sum(part.growth_s for part in found.parts) > _MOST_OF_IT * (after_s - before_s) else None


def _of_wall_time(pairs: Sequence[_Pair], ratio: float) -> Cause:
    """Return the part of a pass that grew most, of the rank whose own time grew most: the others wait for it."""
    number = max(range(len(pairs)), key=lambda one: pairs[one].after.own_s - pairs[one].before.own_s)
    before, after = pairs[number]
    needed_s = _SHOWN * max(0.0, ratio - 1) * before.pass_s
    parts = before.pass_parts(), after.pass_parts()
    growth_s: dict[Place, float] = {
        "device": (after.device_s or 0.0) - (before.device_s or 0.0),
        **{place: parts[1][name] - parts[0][name] for name, place in _PLACES.items()},
    }
    place = max(growth_s, key=lambda one: growth_s[one])
    total = before.pass_s, after.pass_s
    if growth_s[place] < needed_s:
        # The GPU has the same work, and its passes show no growth: the rest of the time is the host's.
        return _timed("host", pairs[number], rank=None, parts=lambda _: {}, total=total)
    if place in ("transfer", "waiting"):
        return _timed(place, pairs[number], rank=None, parts=_Rank.pass_parts, total=total)
    rank = _alone(number, [pair.after.own_s - pair.before.own_s for pair in pairs])
    return _timed(place if rank is None else "waiting", pairs[number], rank=rank, parts=_Rank.pass_parts, total=total)


def _of_numbers(metric: MetricName, pairs: Sequence[_Pair]) -> Cause | None:
    """Return the calls that changed, of the rank where most did; those that the metric counts come first."""
    found: dict[int, Cause] = {}
    most: dict[int, int] = {}
    for number, pair in enumerate(pairs):
        kernels, ops = _kernels(pair), _ops(pair, metric)
        runtime_calls = _counts(pair.before.runtime_calls, pair.after.runtime_calls, _WAITS)
        if metric == "traffic":
            kernels = _collectives(kernels)
            ops = [change for change in ops if _COMMUNICATES.search(change.name)]
        elif metric in {"host_syncs", "runtime_calls"}:
            kernels, ops = [], []
        elif metric == "kernels":
            ops = []
        else:
            kernels = kernels if ops else []
        if metric not in {"host_syncs", "runtime_calls"}:
            runtime_calls = []
        if changes := [*kernels, *runtime_calls, *ops]:
            found[number] = Cause(place="program", kernels=kernels, runtime_calls=runtime_calls, ops=ops)
            most[number] = max(change.growth for change in changes)
    if not found:
        return None
    number = max(most, key=most.__getitem__)
    return msgspec.structs.replace(found[number], rank=number if len(found) == 1 < len(pairs) else None)


def _collectives(kernels: Iterable[CallsChange]) -> list[CallsChange]:
    return [change for change in kernels if family_of(change.name) == "collective"]


def _timed(
    place: Place,
    pair: _Pair,
    *,
    rank: int | None,
    parts: Callable[[_Rank], Mapping[str, float]],
    total: tuple[float, float],
) -> Cause:
    """Return the cause of a longer time: the parts that changed, and what was called more often."""
    before, after = parts(pair.before), parts(pair.after)
    growth_s = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
    whole_s = sum(growth for growth in growth_s.values() if growth > 0)
    families = pair.before.families | pair.after.families
    changes = [
        TimeChange(
            name=name,
            family=name if name in families else None,
            before_s=before.get(name, 0.0),
            after_s=after.get(name, 0.0),
            share=growth / whole_s if whole_s else 0.0,
        )
        for name, growth in growth_s.items()
        if growth
    ]
    grown = {change.family: change.share for change in changes if change.family and change.share > _SMALL}
    return Cause(
        place=place,
        rank=rank,
        before_s=total[0],
        after_s=total[1],
        parts=_largest_first(changes),
        modules=_largest_first(change for change in _modules(pair, grown) if change.share > _SMALL_MODULE),
        kernels=_kernels(pair),
        runtime_calls=_counts(pair.before.runtime_calls, pair.after.runtime_calls, _WAITS),
        ops=_ops(pair, "time"),
    )


def _alone(number: int, growth_s: Sequence[float]) -> int | None:
    """Return a rank if its time grew at least twice as much as that of any other rank."""
    others = [growth for other, growth in enumerate(growth_s) if other != number]
    return number if others and growth_s[number] > 0 and max(others) <= growth_s[number] / 2 else None


def _largest_first(changes: Iterable[TimeChange]) -> list[TimeChange]:
    return sorted(changes, key=lambda change: (-change.share, change.name))


def _modules(pair: _Pair, shares: Mapping[KernelFamily, float]) -> Iterator[TimeChange]:
    """Split the share of each family over the modules that grew; a family that did not grow eagerly has none.

    The eager pass runs other batches than the passes in the execution of the case, so that only proportions count.
    """
    before, after = pair.before.modules, pair.after.modules
    for family, share in shares.items():
        times = {
            module: tuple(side.get((module, family), _Amount()).time_s for side in (before, after))
            for module, of in {**before, **after}
            if of == family
        }
        growth_s = {module: after_s - before_s for module, (before_s, after_s) in times.items()}
        if sum(growth_s.values()) <= 0:
            continue
        whole_s = sum(max(0.0, growth) for growth in growth_s.values())
        for module, (before_s, after_s) in times.items():
            if growth_s[module] > 0 and module != OTHER_MODULE:
                own = share * growth_s[module] / whole_s
                layers = _layers(pair, module, _added_calls(pair, module, family))
                yield TimeChange(
                    name=module, family=family, before_s=before_s, after_s=after_s, share=own, layers=layers
                )


def _layers(pair: _Pair, module: str | None, growth: float) -> int | None:
    """Return the largest number of layers that can have the added calls of an eager pass; None if that can be all."""
    most = growth // pair.after.forwards
    total = pair.after.layers
    return int(most) if module is not None and _FOLDED in module and total is not None and 0 < most < total else None


def _added_calls(pair: _Pair, module: str | None, family: KernelFamily) -> float:
    """Return the growth of the calls of a family in a module, in the eager pass."""
    before, after = (rank.modules.get((module or "", family), _Amount()).calls for rank in pair)
    return after - before


def _kernels(pair: _Pair) -> list[CallsChange]:
    """Return kernels whose number of calls changed, growth before decline, the largest change of time first.

    A kernel that has a row in one report only can be in the sum of its family in the other: the number of calls of the
    family then decides.
    """
    families = pair.before.families, pair.after.families
    found: list[tuple[float, CallsChange]] = []
    for family, name in pair.before.kernels | pair.after.kernels:
        before, after = (rank.kernels.get((family, name), _Amount()) for rank in pair)
        if name is None or before.calls == after.calls:
            continue
        growth = round(after.calls - before.calls)
        lacking = next((rank for rank in pair if (family, name) not in rank.kernels), None)
        in_family = families[1][family].calls - families[0][family].calls
        if lacking is not None and (family, None) in lacking.kernels and in_family * growth < growth**2:
            continue
        module = _module_of_calls(pair, family, growth)
        change = CallsChange(
            name=name,
            module=module,
            layers=_layers(pair, module, _added_calls(pair, module, family)),
            before=round(before.calls),
            after=round(after.calls),
        )
        found.append((abs(after.time_s - before.time_s), change))
    ordered = sorted(found, key=lambda one: (one[1].growth < 0, -one[0], one[1].name))
    return [change for _, change in ordered[:_MOST]]


def _module_of_calls(pair: _Pair, family: KernelFamily, growth: int) -> str | None:
    """Return the module with most of the calls that a family has more than before, or fewer, in the eager pass."""
    before, after = (
        {module: amount.calls for (module, of), amount in rank.modules.items() if of == family} for rank in pair
    )
    return _module_with_most(before, after, growth)


def _module_with_most(before: Mapping[str, float], after: Mapping[str, float], growth: int) -> str | None:
    """Return the module with at least half of the changes in the direction of `growth`; None if no module has."""
    changes = {module: after.get(module, 0) - before.get(module, 0) for module in {**before, **after}}
    found = {module: abs(change) for module, change in changes.items() if change * growth > 0}
    best = max(sorted(found), key=lambda module: found[module], default=None)
    return best if best is not None and found[best] >= sum(found.values()) / 2 else None


def _ops(pair: _Pair, metric: MetricName) -> list[CallsChange]:
    """Return the ops whose number of calls changed; a product has the module whose FLOPs or kernels changed.

    Products of other sizes have equal calls: for FLOPs, the module that computes more is then named alone.
    """
    flops = pair.before.flops_by_module, pair.after.flops_by_module
    found = _counts(pair.before.ops, pair.after.ops, _COMMUNICATES if metric == "traffic" else _PRODUCES)

    def module_of(growth: int) -> str | None:
        return _module_with_most(*flops, growth) if all(flops) else None

    if metric == "flops" and (module := module_of(1)) and not any(_PRODUCES.search(change.name) for change in found):
        before, after = (sum(side.values()) for side in flops)
        return [CallsChange(name=_FLOPS, module=module, before=before, after=after)]
    for place, change in enumerate(found):
        if _PRODUCES.search(change.name):
            module = module_of(change.growth) or _module_of_calls(pair, "GEMM", change.growth)
            layers = _layers(pair, module, change.growth)
            found[place] = msgspec.structs.replace(change, module=module, layers=layers)
    return found


def _counts(before: Mapping[str, int], after: Mapping[str, int], first: re.Pattern[str]) -> list[CallsChange]:
    """Return the largest changes of numbers of calls, growth before decline, and those that `first` matches first."""
    if not before or not after:
        return []  # one of the reports did not count them
    found = [
        CallsChange(name=name, before=before.get(name, 0), after=after.get(name, 0))
        for name in {**before, **after}
        if before.get(name, 0) != after.get(name, 0)
    ]

    def order(change: CallsChange) -> tuple[bool, bool, bool, int, str]:
        last = _COMPUTES_NOTHING.search(change.name) is not None
        return change.growth < 0, not first.search(change.name), last, -abs(change.growth), change.name

    return sorted(found, key=order)[:_MOST]


def _rank(measured: Measured, number: int) -> _Rank:
    """Return the medians of one rank over the launches."""
    ranks = [work.ranks[number] for work in measured.works]
    of_kernels, of_modules = zip(*(_amounts(rank, measured.kernel_names) for rank in ranks), strict=True)
    kernels = _median_amounts(of_kernels)
    collective_s = sum(amount.time_s for (family, _), amount in kernels.items() if family == "collective")
    transfers = [
        sum(statistics.median(one.transfer_s) for one in work.collectives)
        for work in measured.works
        if work.collectives is not None and all(one.transfer_s for one in work.collectives)
    ]
    transfer_s = min(collective_s, statistics.median(transfers)) if transfers else 0.0
    copy_s = _median(rank.copy_s for rank in ranks) or 0.0
    return _Rank(
        device_s=_median(rank.device_time_s for rank in ranks),
        copy_s=copy_s,
        idle_s=max(0.0, (_median(rank.idle_s for rank in ranks) or 0.0) - copy_s),
        transfer_s=transfer_s,
        wait_s=collective_s - transfer_s,
        kernels=kernels,
        modules=_median_amounts(of_modules),
        runtime_calls=_median_counts([rank.runtime_calls for rank in ranks]),
        ops=_median_counts([rank.ops for rank in ranks]),
        flops_by_module=_median_counts([rank.flops_by_module for rank in ranks]),
        layers=min((work.model.layers for work in measured.works if work.model is not None), default=None),
        forwards=max(1, len(measured.works[0].eager_batches or measured.works[0].batches)),
    )


def _amounts(rank: RankWork, names: Sequence[str]) -> tuple[dict[_Kernel, _Amount], dict[_Part, _Amount]]:
    """Return the calls and seconds of each kernel of the passes, and of each part of a module in the eager pass."""
    kernels: dict[_Kernel, _Amount] = defaultdict(_Amount)
    modules: dict[_Part, _Amount] = defaultdict(_Amount)
    for row in rank.rows or ():
        if row.module is None:
            name = names[row.kernel] if row.kernel is not None and row.kernel < len(names) else None
            kernels[row.family, name] = kernels[row.family, name].plus(row.calls, row.time_s)
        else:
            modules[row.module, row.family] = modules[row.module, row.family].plus(row.calls, row.time_s)
    return kernels, modules


def _median(columns: Iterable[Sequence[float] | None]) -> float | None:
    """Return the median over launches of the median over passes; None where no launch has the figure."""
    found = [statistics.median(column) for column in columns if column]
    return statistics.median(found) if found else None


def _median_amounts(launches: Sequence[Mapping[_K, _Amount]]) -> dict[_K, _Amount]:
    return {
        key: _Amount(
            statistics.median_low(launch.get(key, _Amount()).calls for launch in launches),
            statistics.median(launch.get(key, _Amount()).time_s for launch in launches),
        )
        for key in {key: None for launch in launches for key in launch}
    }


def _median_counts(launches: Sequence[Mapping[str, int] | None]) -> dict[str, int]:
    known = [launch or {} for launch in launches]
    keys = {key: None for launch in known for key in launch}
    return {key: statistics.median_low(launch.get(key, 0) for launch in known) for key in keys}


def _place_in_words(cause: Cause, place: Place) -> str:
    """Return the calls that explain the difference in a place, else its share of the growth."""
    if place == "device":
        return _device_in_words(cause)
    waits = _calls_in_words(cause.runtime_calls, _WAITS)
    if waits is not None and place in {"host", "program"}:
        return f"{waits}: the host waits for the GPU"
    launched = [change for change in cause.runtime_calls if change.growth > _MORE * change.before]
    launches = _calls_in_words(launched, _LAUNCHES)
    by_calls = {
        "transfer": _calls_in_words(_collectives(cause.kernels)),
        "copies": _calls_in_words(cause.runtime_calls, _COPIES),
        "program": _calls_in_words([*cause.runtime_calls, *cause.ops, *cause.kernels]),
        "host": f"{launches}: the host launches more kernels" if launches else None,
    }
    idle = f"{_share(cause, _IDLE)} in idle time of the GPU: the host launches more slowly"
    by_share = {
        "transfer": f"{_share(cause, _TRANSFER)} in collectives",
        "waiting": f"{_share(cause, _WAITING)} in ranks that wait for each other",
        "copies": f"{_share(cause, _COPYING)} in copies",
        "program": "calls that became fewer",
        "host": idle if cause.parts else "the kernels do not explain it: the host is slower",
    }
    return by_calls.get(place) or by_share[place]


def _device_in_words(cause: Cause) -> str:
    """Return the module that has at least half of the difference, else the families that have most of it."""
    by_module: dict[str, float] = defaultdict(float)
    for part in cause.modules:
        by_module[part.name] += part.share
    best = max(by_module, key=lambda module: by_module[module], default=None)
    if best is not None and by_module[best] >= _MOST_OF_IT:
        named = [part for part in cause.modules if part.name == best]
        families = listed([str(part.family) for part in named], _NAMED)
        return f"{percent(by_module[best], 0)} in {best} ({families}{_layers_in_words(named[0].layers, ', ')})"
    parts = [part for part in cause.parts if part.family is not None and part.share > _SMALL]
    shares = [f"{percent(part.share, 0)} in {part.name}" for part in parts]
    modules = f" ({listed(by_module, _NAMED)})" if by_module else ""
    return f"{listed(shares, _NAMED)}{modules}"


def _calls_in_words(changes: Iterable[CallsChange], pattern: re.Pattern[str] = _ANY) -> str | None:
    """Return the first growth among names that a pattern matches."""
    for change in changes:
        if change.growth > 0 and pattern.search(change.name):
            layers = _layers_in_words(change.layers)
            where = "" if change.module is None else f" in {change.module}" + (f" ({layers})" if layers else "")
            return f"{change.growth:,} more {_short(change.name)}{where}"
    return None


def _layers_in_words(layers: int | None, before: str = "") -> str:
    """Return the number of layers that changed; empty where that may be all."""
    return "" if layers is None else f"{before}{'at most ' if layers > 1 else ''}{plural(layers, 'layer')}"


def _share(cause: Cause, name: str) -> str:
    return percent(sum(part.share for part in cause.parts if part.name == name), 0)


def _ms(growth_s: float) -> str:
    return f"{1e3 * growth_s:+.3g} ms"


def _short(name: str) -> str:
    """Return the name of a call without its return type, namespaces, template arguments and parameters.

    A collective has the name of its kind.
    """
    if family_of(name) == "collective":
        return collective_of(name)
    plain = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    return plain if name.startswith("aten::") else (plain.rpartition("::")[2] or plain).strip("_")
