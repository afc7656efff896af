"""Finds how the machines and libraries of two reports differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.text import gib

_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "torchao")

_WIDTH = 40
"""A value with more characters, such as a digest, is cut."""


def _devices(environment: Environment) -> dict[str, str | None]:
    """Return what the GPUs of a machine are, in words; None where it is not known."""
    gpus, topology = environment.gpus, environment.topology
    sizes = sorted({gpu.memory_bytes for gpu in gpus if gpu.memory_bytes})
    lanes = sorted({f"gen {gpu.pcie_gen} x{gpu.pcie_width}" for gpu in gpus if gpu.pcie_gen})
    limits = [f"{gpu.power_limit_w:g} W" for gpu in gpus if gpu.power_limit_w]
    links = Counter(link for number, row in enumerate(topology or ()) for link in row[:number])
    joined = ", ".join(f"{count} x {link}" for link, count in sorted(links.items())) or "one device"
    return {
        "GPU model": ", ".join(sorted({gpu.name for gpu in gpus})) or "none",
        "GPU memory": ", ".join(gib(size, 1) for size in sizes) or None,
        "topology": None if topology is None else joined,
        "PCIe": ", ".join(lanes) or None,
        # Old reports do not have the power limits.
        "power limit": ", ".join(limits[:1] if len(set(limits)) == 1 else limits) if len(limits) == len(gpus) else None,
    }


def hardware_differences(base: Environment, head: Environment, device: str, *, alone: bool = False) -> list[str]:
    """Return the differences of the device, `cuda` or `cpu`, that make figures incomparable, as `name then -> now`.

    With `alone` a single GPU is used: how many others a machine has makes no difference.
    """
    seen: list[tuple[str, Any, Any]] = [("nodes", len(base.nodes) or 1, len(head.nodes) or 1)]
    if device == "cpu":
        seen += [("CPU", base.cpu, head.cpu), ("cores", base.cores, head.cores)]
    else:
        then, now = _devices(base), _devices(head)
        if not alone:
            seen += [("GPUs", len(base.gpus), len(head.gpus)), ("topology", then["topology"], now["topology"])]
        seen += [(name, then[name], now[name]) for name in ("GPU model", "GPU memory")]
    known = [one for one in seen if None not in one]
    return [f"{name} {before} -> {after}" for name, before, after in known if before != after]


def software_differences(base: Environment, head: Environment) -> list[str]:
    """Return the other differences between machines: they may explain a change, but figures stay comparable."""
    then, now = _devices(base), _devices(head)
    variables = sorted(base.variables.keys() | head.variables.keys())
    seen: list[tuple[str, Any, Any]] = [
        ("driver", base.driver, head.driver),
        ("CUDA", base.cuda, head.cuda),
        ("NCCL", base.nccl, head.nccl),
        ("Python", base.python, head.python),
        *((name, base.versions.get(name), head.versions.get(name)) for name in _LIBRARIES),
        *((name, base.variables.get(name, "unset"), head.variables.get(name, "unset")) for name in variables),
        ("PCIe", then["PCIe"], now["PCIe"]),
    ]
    if (base.topology is None) != (head.topology is None) and base.gpus and head.gpus:
        # Two known topologies that differ are a hardware difference.
        seen.append(("topology", then["topology"] or "unknown", now["topology"] or "unknown"))
    if then["power limit"] and now["power limit"]:
        seen.append(("power limit", then["power limit"], now["power limit"]))
    found = [f"{name} {shortened(before)} -> {shortened(after)}" for name, before, after in seen if before != after]
    gpus, others = ({gpu.uuid for gpu in one.gpus} for one in (base, head))
    if gpus and others and not (gpus <= others or others <= gpus):
        found.append("other GPUs of the same kind")
    return found


def shortened(value: Any) -> str:
    """Return a value as text; of a digest only its beginning."""
    text = "none" if value is None else str(value)
    return text if len(text) <= _WIDTH else f"{text[:12]}..."
