"""Compare reports with the claims of Shin et al. 2024; prints Markdown.

    python benchmarks/paper/claims.py benchmarks/paper/report.json.gz

Each report of the three strategies gets a column. A claim that a report has no data for is `not shown` and not judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import figures
from figures import Cases

from pytest_llmgpu.analysis import capacity
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult

PUBLISHED_S: dict[str, dict[int, float]] = {
    "mp": {1: 10258, 2: 6159, 4: 4622, 8: 4043, 16: 3807, 32: 3705, 64: 3800},
    "tp": {1: 6548, 2: 5084, 4: 4538, 8: 4280, 16: 4164, 32: 4087, 64: 4079},
    "iok": {1: 4959, 2: 4171, 4: 4250, 8: 4152, 16: 4027, 32: 4201},
}
"""Table 2 of Shin et al. 2024: strategy and batch size to seconds for the 40,168 sequences of HellaSwag."""

_COLLAPSED, _OUT_OF_MEMORY = ("iok", 32), ("iok", 64)
_CAP_BYTES = 32 << 30
_SCORING = {"lean": "lean scoring", "harness": "every logit and a KV cache"}
_NOT_SHOWN = "not shown"
_TOLERANCE = 0.02
"""Two values of a strategy within this relative difference count as equal."""
_CLEAR = -0.5
"""At this rank correlation or less, one value falls as the other grows."""


class Claim(NamedTuple):
    """A row of the table."""

    text: str
    """The claim."""
    published: str
    """The value that was published."""
    ours: str = _NOT_SHOWN
    """The value of the report."""
    holds: bool | None = None
    """None if the report has no data for it, and for values of the hardware."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of one or more reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT")
    paths = parser.parse_args(arguments).reports
    try:
        print(markdown({path.name.partition(".json")[0]: file.load(path) for path in paths}))
    except ValueError as error:
        parser.error(str(error))


def markdown(reports: dict[str, Report]) -> str:
    """Return for each report what was measured and its times, then the claims with a column for each report.

    Args:
        reports: Report by its name.

    Raises:
        ValueError: A report has no case of mp, tp or iok.
    """
    parts = []
    for name, report in reports.items():
        series = figures.by_strategy(report.cases, PUBLISHED_S)
        if not series:
            raise ValueError(f"{name}: this report has no case of {', '.join(PUBLISHED_S)}")
        parts += [f"{name}: {_measured(report, series)}", _times(series)]
    columns = [claims(report) for report in reports.values()]
    rows = [[row[0].text, row[0].published, *map(_judged, row)] for row in zip(*columns, strict=True)]
    return "\n\n".join([*parts, _table(["claim", "Shin et al.", *reports], rows)])


def claims(report: Report) -> list[Claim]:
    """Return the claims with the values of a report."""
    series = {name: figures.by_strategy(report.cases, [name]).get(name, {}) for name in PUBLISHED_S}
    return [
        *(_best(name, cases) for name, cases in series.items()),
        *_compared(series),
        *_ratios(series),
        *(_rate(name, series[name], published) for name, published in (("mp", "0.085"), ("tp", "6.7"), ("iok", "6.5"))),
        *(_utilization(name, cases) for name, cases in series.items()),
        *(_memory(name, cases) for name, cases in series.items()),
        *_thresholds(report),
        *(_accuracy(name, cases) for name, cases in series.items()),
    ]


def _best(name: str, cases: Cases) -> Claim:
    published, ours = PUBLISHED_S[name], figures.seconds(cases)
    theirs = min(published, key=published.__getitem__)
    claim = Claim(f"{name}: best batch size", f"{theirs} ({published[theirs]:,} s)")
    if not ours:
        return claim
    best = min(ours, key=ours.__getitem__)
    holds = ours[theirs] <= (1 + _TOLERANCE) * ours[best] if theirs in ours and len(ours) > 1 else None
    return claim._replace(ours=f"{best} ({ours[best]:.2f} s)", holds=holds)


def _compared(series: dict[str, Cases]) -> Iterable[Claim]:
    """Yield the claims that compare the times of the strategies."""
    ours = {name: figures.seconds(cases) for name, cases in series.items()}
    at_1 = {name: times[1] for name, times in ours.items() if 1 in times}
    order = sorted(at_1, key=at_1.__getitem__)
    claim = Claim("order at batch size 1", "iok 4,959 s, tp 6,548 s, mp 10,258 s")
    if len(at_1) == len(PUBLISHED_S):
        text = ", ".join(f"{name} {at_1[name]:.2f} s" for name in order)
        claim = claim._replace(ours=text, holds=order == ["iok", "tp", "mp"])
    yield claim
    claim = Claim("mp passes iok as the batch grows", "at 8")
    if both := [size for size in ours["iok"] if size in ours["mp"]]:
        first = next((size for size in both if ours["mp"][size] < ours["iok"][size]), None)
        text = f"at {first}" if first else f"nowhere up to {both[-1]}"
        claim = claim._replace(ours=text, holds=first is not None)
    yield claim
    published_gains, gains = (
        {name: times[1] / min(times.values()) for name, times in each.items() if 1 in times}
        for each in (PUBLISHED_S, ours)
    )
    claim = Claim("iok gains least by batching (time at 1 over the best)", _listed(published_gains))
    if len(gains) == len(PUBLISHED_S):
        claim = claim._replace(ours=_listed(gains), holds=min(gains, key=gains.__getitem__) == "iok")
    yield claim


def _ratios(series: dict[str, Cases]) -> Iterable[Claim]:
    """Yield the ratio of the traffic of tp to that of mp, by each way of counting."""
    ways = {
        "PCIe TX": figures.seen(figures.pcie),
        "PCIe and NVLink TX": figures.seen(figures.links),
        "sent by the program": figures.sent,
    }
    for title, figure in ways.items():
        mp, tp = (figures.of(series[name], figure) for name in ("mp", "tp"))
        ratios = {size: tp[size] / mp[size] for size in tp if mp.get(size)}
        # The claim is two orders of magnitude; the digits depend on the server.
        claim = Claim(f"tp sends two orders more a second than mp: {title}", "up to 292 times")
        if ratios:
            most = max(ratios, key=ratios.__getitem__)
            text = f"{min(ratios.values()):.0f} to {ratios[most]:.0f} times (at {most})"
            claim = claim._replace(ours=text, holds=ratios[most] >= 100)
        elif not figures.of(series["mp"], figure) and figures.of(series["mp"], figures.pcie):
            claim = claim._replace(ours=f"{_NOT_SHOWN}: mp's copies took another link")
        yield claim


def _rate(name: str, cases: Cases, published: str) -> Claim:
    over_pcie, links = figures.of(cases, figures.pcie), figures.of(cases, figures.links)
    claim = Claim(f"{name}: PCIe TX at the largest batch size, GB/s", published)
    if not over_pcie:
        return claim
    size = max(over_pcie)
    text = f"{over_pcie[size] / 1e9:.3g} (at {size})"
    if size not in figures.of(cases, figures.seen(figures.links)):
        text += "; it sent more, over a link that was not counted"
    if links[size] > (1 + _TOLERANCE) * over_pcie[size]:
        text += f"; with NVLink {links[size] / 1e9:.3g}"
    return claim._replace(ours=text)


def _utilization(name: str, cases: Cases) -> Claim:
    until = 8 if name == "mp" else max(PUBLISHED_S[name])
    busy = figures.of(cases, figures.busy)
    traffic = figures.of(cases, figures.seen(figures.links)) or figures.of(cases, figures.sent)
    claim = Claim(f"{name}: utilisation falls as traffic grows", f"up to {until}" if name == "mp" else "yes")
    sizes = [size for size in traffic if size in busy and size <= until]
    if len(sizes) < 3:
        return claim
    order = figures.rank_correlation([traffic[size] for size in sizes], [busy[size] for size in sizes])
    text = (
        f"{busy[sizes[0]]:.0f} % at {sizes[0]}, {busy[sizes[-1]]:.0f} % at {sizes[-1]}; rank correlation {order:+.2f}"
    )
    return claim._replace(ours=text, holds=order <= _CLEAR)


def _memory(name: str, cases: Cases) -> Claim:
    used = figures.of(cases, figures.used)
    claim = Claim(f"{name}: memory in use grows with the batch", "yes")
    if len(used) < 2:
        return claim
    sizes = list(used)
    steady = all(used[after] >= used[size] * (1 - _TOLERANCE) for size, after in pairwise(sizes))
    text = f"{used[sizes[0]] / 2**30:.1f} GiB at {sizes[0]}, {used[sizes[-1]] / 2**30:.1f} at {sizes[-1]}"
    return claim._replace(ours=text, holds=steady and used[sizes[-1]] > used[sizes[0]])


def _thresholds(report: Report) -> Iterable[Claim]:
    found = {one.strategy: one for one in reversed(capacity.capacities(report.cases))}
    caps = {result.case.strategy: result.case.gpu_memory_bytes for result in reversed(report.cases)}
    for name, published in (("mp", 64), ("tp", 64), ("iok", 32)):
        claim = Claim(f"{name}: largest batch size in 32 GiB a GPU", str(published))
        if (one := found.get(name)) is not None:
            text, cap = _largest(one.largest_fit, one.smallest_oom), caps[name]
            if cap != _CAP_BYTES:
                text += f" (with {'no cap' if cap is None else f'{cap / 2**30:.4g} GiB'})"
            known = one.smallest_oom is not None or (one.largest_fit or 0) > published
            comparable = cap is not None and abs(cap / _CAP_BYTES - 1) <= _TOLERANCE and known
            claim = claim._replace(ours=text, holds=one.largest_fit == published if comparable else None)
        yield claim


def _largest(fits: int | None, out_of_memory: int | None) -> str:
    """Describe the largest batch size by the largest one that fits and the smallest one that does not."""
    if fits is None:
        return "not known: none completed" if out_of_memory is None else f"below {out_of_memory}"
    if out_of_memory is None:
        return f"{fits} or above: nothing was out of memory"
    if out_of_memory <= fits:
        return f"not clear: {out_of_memory} was out of memory and {fits} completed"
    if out_of_memory == fits + 1:
        return f"{fits}: {out_of_memory} is out of memory"
    return f"between {fits}, which fits, and {out_of_memory}, which does not"


def _accuracy(name: str, cases: Cases) -> Claim:
    collapses = name == _COLLAPSED[0]
    right = figures.of(cases, figures.accuracy)
    claim = Claim(f"{name}: accuracy over batch sizes", "82 % up to 16, 26 % at 32" if collapses else "82 %")
    if not right:
        return claim
    low, high = 100 * min(right.values()), 100 * max(right.values())
    text = f"{low:.1f} %" if low == high else f"{low:.1f} to {high:.1f} %"
    text += "".join(_clamped(size, cases[size]) for size in right)
    if any(cases[size].case.load_format == "dummy" for size in right):
        return claim._replace(ours=f"{text} (random weights: chance)")
    constant = high - low <= 100 * _TOLERANCE
    return claim._replace(ours=text, holds=constant != collapses if len(right) > 1 else None)


def _clamped(size: int, result: CaseResult) -> str:
    wanted, granted = result.launches[0].tokens_requested, result.launches[0].tokens_granted
    return f"; {granted} of {wanted} tokens at {size}" if wanted and granted and granted < wanted else ""


def _measured(report: Report, series: dict[str, Cases]) -> str:
    """Return a sentence on the model, the data and the machine of a report."""
    case = next(result.case for cases in series.values() for result in cases.values())
    items = next((a.items for result in report.cases for one in result.launches if (a := one.accuracy)), None)
    names = sorted({gpu.name for gpu in report.environment.gpus})
    cap = f", {case.gpu_memory_bytes / 2**30:.4g} GiB each" if case.gpu_memory_bytes else ""
    peers = ", NCCL_P2P_DISABLE=1" if report.environment.variables.get("NCCL_P2P_DISABLE") == "1" else ""
    weights = "random weights" if case.load_format == "dummy" else "real weights"
    data = f"{items:,} items of {case.dataset}" if items else case.dataset
    return (
        f"{case.model}, {weights}, {case.dtype}, on {case.devices} {' and '.join(names) or case.device}{cap}{peers}; "
        f"{data}, {_SCORING[case.scoring]}."
    )


def _times(series: dict[str, Cases]) -> str:
    """Return the published Table 2 and the times of the report."""
    measured = {size for cases in series.values() for size, one in cases.items() if one.outcome != "skipped_after_oom"}
    headers = ["batch size", *(f"Shin et al. {name}, s" for name in PUBLISHED_S), *(f"{name}, s" for name in series)]
    rows = [
        [
            str(size),
            *(_published_cell(name, size) for name in PUBLISHED_S),
            *(_cell(cases, size) for cases in series.values()),
        ]
        for size in sorted(measured.union(*PUBLISHED_S.values()))
    ]
    graphed = any(one.case.execution == "cuda_graphs" for cases in series.values() for one in cases.values())
    return _table(headers, rows) + ("\n\ng: replayed from CUDA graphs." if graphed else "")


def _published_cell(name: str, size: int) -> str:
    if size not in PUBLISHED_S[name]:
        return "OoM" if (name, size) == _OUT_OF_MEMORY else ""
    text = f"{PUBLISHED_S[name][size]:,}" + (" (26 %)" if (name, size) == _COLLAPSED else "")
    return f"**{text}**" if PUBLISHED_S[name][size] == min(PUBLISHED_S[name].values()) else text


def _cell(cases: Cases, size: int) -> str:
    result = cases.get(size)
    if result is None or result.outcome == "skipped_after_oom":
        return ""
    if result.inference_s is None:
        return "OoM" if result.outcome == "oom" else result.outcome
    text = f"{result.inference_s:.2f}" + (" g" if result.case.execution == "cuda_graphs" else "")
    if result.has_wrong_answers:
        right = figures.accuracy(result)
        return f"{text} (wrong answers)" if right is None else f"{text} ({100 * right:.0f} %)"
    return f"**{text}**" if result.inference_s == min(figures.seconds(cases).values()) else text


def _judged(claim: Claim) -> str:
    return claim.ours if claim.holds is None else f"{'holds' if claim.holds else '**not**'}: {claim.ours}"


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
