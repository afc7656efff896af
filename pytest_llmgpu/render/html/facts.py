"""The facts of the page: commit, machine, libraries and options, with the value of the baseline where it differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pytest_llmgpu.render.grouping import unique
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import OptionValue, Report
from pytest_llmgpu.report.text import GIB, gib, plural

_BYTES = ("--llmgpu-gpu-memory",)  # options whose value is a number of bytes


class Fact(NamedTuple):
    """One line of a list of facts."""

    name: str
    """The name of the fact."""
    value: str
    """The value in the report."""
    baseline: str | None = None
    """The value in the baseline; None if it is equal or there is no baseline."""


def compared(
    facts_of: Callable[[Report], Mapping[str, str]], report: Report, baseline: Report | None, *, absent: str = "-"
) -> list[Fact]:
    """Return facts of a report with those of its baseline; `absent` stands for a fact that one of them lacks."""
    own = facts_of(report)
    before = own if baseline is None else facts_of(baseline)
    values = [(name, own.get(name, absent), before.get(name, absent)) for name in unique([*own, *before])]
    return [Fact(name, value, None if then == value else then) for name, value, then in values]


def libraries(report: Report) -> dict[str, str]:
    """Return the versions of the installed libraries."""
    return {name: version for name, version in report.environment.versions.items() if version}


def options(report: Report) -> dict[str, str]:
    """Return the options of this version whose value is not the default."""
    defaults = {flag: _shown(flag, value) for flag, value in Options().in_force().items()}
    found = {flag: _shown(flag, value) for flag, value in report.options.items()}
    return {flag: value for flag, value in found.items() if value != defaults.get(flag, value)}


def _shown(flag: str, value: OptionValue | tuple[str | int | float, ...]) -> str:
    if flag in _BYTES and isinstance(value, int):
        return f"{value / GIB:.6g} GiB"  # six digits: 31.7 and 31.6973 GiB are different limits
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def machine(report: Report) -> dict[str, str]:
    """Return the time, the commit and the machine of the measurement."""
    environment, commit = report.environment, report.commit
    gpus = []
    for gpu in environment.gpus:
        size = gib(gpu.memory_bytes, 0) if gpu.memory_bytes else ""
        link = f"PCIe {gpu.pcie_gen}.0 x{gpu.pcie_width}" if gpu.pcie_gen and gpu.pcie_width else ""
        power = f"{gpu.power_limit_w:g} W" if gpu.power_limit_w else ""
        gpus.append(", ".join(filter(None, (gpu.name, size, link, power))))
    links = unique(link for row in environment.topology or [] for link in row if link != "X")
    branch = f"({commit.branch})" if commit.branch else None
    source = [commit.sha, branch, "with uncommitted changes" if commit.dirty else None]
    found = {
        "Measured": report.created,
        "Resumed": ", ".join(f"{one.created}, with {plural(one.kept, 'case')}" for one in report.resumed),
        "Commit": " ".join(part for part in source if part),
        "Nodes": str(len(environment.nodes) or ""),
        "GPUs": f"{len(environment.gpus)} x {'; '.join(unique(gpus))}" if gpus else "none",
        "Links": ", ".join(links),
        "CPU": f"{environment.cpu or 'unknown'}, {environment.cores or 'unknown number of'} cores",
        "Platform": environment.platform,
        "Python": environment.python,
        "Driver": environment.driver or "",
        "CUDA": environment.cuda or "",
        "NCCL": environment.nccl or "",
        **environment.variables,
    }
    return {name: value for name, value in found.items() if value}
