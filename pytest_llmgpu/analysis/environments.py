"""Finds how the machines and libraries of two reports differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.text import gib

_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed")

_WIDTH = 40
"""A value with more characters, such as a digest, is cut."""


def hardware_differences(base: Environment, head: Environment, device: str) -> list[str]:
    """Return the differences between machines that make figures incomparable, each as `name then -> now`.

    Args:
        base: The machine of the baseline.
        head: The machine of the candidate.
        device: `cuda` or `cpu`, where the case ran; only differences of that device count.
    """
    seen: list[tuple[str, Any, Any]] = [("nodes", len(base.nodes) or 1, len(head.nodes) or 1)]
    if device == "cpu":
        seen += [("CPU", base.cpu, head.cpu), ("cores", base.cores, head.cores)]
    else:
        seen += [
            ("GPUs", len(base.gpus), len(head.gpus)),
            ("GPU model", _models(base), _models(head)),
            ("GPU memory", _memory(base), _memory(head)),
            ("topology", _links(base), _links(head)),
        ]
    return [f"{name} {then} -> {now}" for name, then, now in seen if None not in {then, now} and then != now]


def software_differences(base: Environment, head: Environment) -> list[str]:
    """Return the other differences between machines: they may explain a change, but figures stay comparable."""
    seen: list[tuple[str, Any, Any]] = [
        ("driver", base.driver, head.driver),
        ("CUDA", base.cuda, head.cuda),
        ("NCCL", base.nccl, head.nccl),
        ("Python", base.python, head.python),
        *((name, base.versions.get(name), head.versions.get(name)) for name in _LIBRARIES),
        *(
            (name, base.variables.get(name, "unset"), head.variables.get(name, "unset"))
            for name in sorted(base.variables.keys() | head.variables.keys())
        ),
        ("PCIe", _lanes(base), _lanes(head)),
    ]
    if (base.topology is None) != (head.topology is None) and base.gpus and head.gpus:
        # Two known topologies that differ are a hardware difference.
        seen.append(("topology", _links(base) or "unknown", _links(head) or "unknown"))
    # Old reports do not have the power limits.
    if None not in (limits := (_power_limits(base), _power_limits(head))):
        seen.append(("power limit", *limits))
    found = [f"{name} {shortened(then)} -> {shortened(now)}" for name, then, now in seen if then != now]
    if base.gpus and head.gpus and {gpu.uuid for gpu in base.gpus} != {gpu.uuid for gpu in head.gpus}:
        found.append("other boards of the same kind")
    return found


def _models(environment: Environment) -> str:
    return ", ".join(sorted({gpu.name for gpu in environment.gpus})) or "none"


def _memory(environment: Environment) -> str | None:
    sizes = [gpu.memory_bytes for gpu in environment.gpus]
    return ", ".join(gib(size, 1) for size in sorted({size for size in sizes if size})) or None


def _links(environment: Environment) -> str | None:
    if environment.topology is None:
        return None
    links = Counter(link for number, row in enumerate(environment.topology) for link in row[:number])
    return ", ".join(f"{count} x {link}" for link, count in sorted(links.items())) or "one device"


def _lanes(environment: Environment) -> str | None:
    lanes = sorted({f"gen {gpu.pcie_gen} x{gpu.pcie_width}" for gpu in environment.gpus if gpu.pcie_gen})
    return ", ".join(lanes) or None


def _power_limits(environment: Environment) -> str | None:
    limits = [gpu.power_limit_w for gpu in environment.gpus]
    if not limits or not all(limits):
        return None
    return f"{limits[0]:g} W" if len(set(limits)) == 1 else ", ".join(f"{limit:g} W" for limit in limits)


def shortened(value: Any) -> str:
    """Return a value as text; of a digest only its beginning."""
    text = "none" if value is None else str(value)
    return text if len(text) <= _WIDTH else f"{text[:12]}..."
