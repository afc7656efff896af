"""What a report was measured on, beside what its baseline was, where that differs."""

from __future__ import annotations

import msgspec

from pytest_llmgpu.render.grouping import listed
from pytest_llmgpu.report.machine import Gpu
from pytest_llmgpu.report.report import OptionValue, Report

__all__ = ["Fact", "libraries", "machine", "options"]

_GIB = 2**30
_NONE = "-"
_DEFAULT = "default"
_BYTES = ("--llmgpu-gpu-memory",)  # options that are amounts of memory


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to know."""

    name: str
    value: str
    was: str | None = None
    """The baseline's, where it is another."""


def machine(report: Report, baseline: Report | None) -> list[Fact]:
    """Return when, on what and of which commit it was measured."""
    return _beside(_machine(report), None if baseline is None else _machine(baseline))


def libraries(report: Report, baseline: Report | None) -> list[Fact]:
    """Return the versions of the libraries that were installed."""
    return _beside(_libraries(report), None if baseline is None else _libraries(baseline))


def options(report: Report, baseline: Report | None) -> list[Fact]:
    """Return the options that were in force and are not the defaults of today."""
    return _beside(_options(report), None if baseline is None else _options(baseline), lacking=_DEFAULT)


def _beside(own: dict[str, str], other: dict[str, str] | None, *, lacking: str = _NONE) -> list[Fact]:
    if other is None:
        return [Fact(name=name, value=value) for name, value in own.items()]
    facts = []
    for name in listed([*own, *other]):
        value, was = own.get(name, lacking), other.get(name, lacking)
        facts.append(Fact(name=name, value=value, was=None if was == value else was))
    return facts


def _libraries(report: Report) -> dict[str, str]:
    return {name: version for name, version in report.environment.versions.items() if version}


def _options(report: Report) -> dict[str, str]:
    """Return them; none where pytest is not installed, with which the defaults are declared: judging does without."""
    try:
        from pytest_llmgpu.report.options import Options
    except ImportError:
        return {}
    defaults = {flag: _shown(flag, value) for flag, value in Options().in_force().items()}
    found = {flag: _shown(flag, value) for flag, value in report.options.items()}
    return {flag: value for flag, value in found.items() if value != defaults.get(flag, _shown(flag, None))}


def _shown(flag: str, value: OptionValue | tuple[str | int | float, ...]) -> str:
    if flag in _BYTES and isinstance(value, int):
        return f"{value / _GIB:.6g} GiB"  # with digits enough that the baseline's other one does not look alike
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _gpu(gpu: Gpu) -> str:
    size = f"{gpu.memory_bytes / _GIB:.0f} GiB" if gpu.memory_bytes else ""
    link = f"PCIe {gpu.pcie_gen}.0 x{gpu.pcie_width}" if gpu.pcie_gen and gpu.pcie_width else ""
    power = f"{gpu.power_limit_w:g} W" if gpu.power_limit_w else ""
    return ", ".join(filter(None, (gpu.name, size, link, power)))


def _machine(report: Report) -> dict[str, str]:
    environment, commit = report.environment, report.commit
    gpus = listed(map(_gpu, environment.gpus))
    links = listed(link for row in environment.topology or [] for link in row if link != "X")
    source = [commit.sha, f"({commit.branch})" if commit.branch else None, "with changes" if commit.dirty else None]
    found = {
        "Measured": report.created,
        "Commit": " ".join(part for part in source if part),
        "GPUs": f"{len(environment.gpus)} x {'; '.join(gpus)}" if gpus else "none",
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
