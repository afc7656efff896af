"""Several machines that measure together: the facts of each, their differences, and their part of a report."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pytest_llmgpu.profiling import machine
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.report.report import Environment, Gpu, Node
from pytest_llmgpu.report.text import listed

_LIBRARIES = ("pytest-llmgpu", "torch", "transformers", "accelerate", "deepspeed", "triton")
"""Distributions that every node must have in one version: their code computes and communicates."""
_OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
"""Variables that differ between nodes without an effect on the measurement."""
_BETWEEN = "NET"
"""The path between two GPUs of different nodes in a topology."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one node reports about itself before a model is loaded."""

    torch: TorchFacts
    """The installed torch and the GPUs that it can use."""
    node: Node
    """The machine and its libraries, as the report has them."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One fact that is not the same on all nodes."""

    name: str
    """The name of the fact, such as `torch`."""
    values: list[str]
    """The value on each node; `none` where a node has none."""
    refused: bool
    """True if nodes with such a difference must not measure together."""


def gather(torch: TorchFacts | None = None) -> NodeFacts:
    """Return the facts of this machine. Torch is imported in a child process, unless its facts are known.

    Raises:
        ValueError: Torch cannot be imported.
    """
    torch = machine.probe() if torch is None else torch
    return NodeFacts(torch=torch, node=Node(**_fields(machine.fingerprint(torch))))


def differences(nodes: Sequence[NodeFacts]) -> list[Difference]:
    """Return the facts in which nodes differ, those that are refused first.

    Libraries that compute or communicate, Python and this package must be equal. Drivers, devices and variables may
    differ: the report has those of each node.
    """
    found = [one.node for one in nodes]
    must: dict[str, Sequence[object]] = {
        "Python": [node.python for node in found],
        **{name: [node.versions.get(name) for node in found] for name in _LIBRARIES},
        "CUDA": [node.cuda for node in found],
        "NCCL": [node.nccl for node in found],
    }
    names = sorted({name for node in found for name in node.variables} - {*_OWN_VARIABLES})
    may: dict[str, Sequence[object]] = {
        "driver": [node.driver for node in found],
        "GPUs": [", ".join(gpu.name for gpu in node.gpus) or None for node in found],
        "CPU": [node.cpu for node in found],
        "cores": [node.cores for node in found],
        **{name: [node.variables.get(name) for node in found] for name in names},
    }
    return [
        Difference(name=name, values=["none" if value is None else str(value) for value in values], refused=refused)
        for facts, refused in ((must, True), (may, False))
        for name, values in facts.items()
        if len(set(values)) > 1
    ]


def describe(difference: Difference) -> str:
    """Return a difference in words: `torch 2.10.0 on nodes 0 and 2, 2.9.1 on node 1`."""
    numbers: dict[str, list[str]] = {}
    for number, value in enumerate(difference.values):
        numbers.setdefault(value, []).append(str(number))
    parts = [f"{value} on node{'s' * (len(on) > 1)} {listed(on)}" for value, on in numbers.items()]
    return f"{difference.name} {', '.join(parts)}"


def file_differences(files: Sequence[Mapping[str, str]]) -> list[Difference]:
    """Return the files of a model that differ between nodes, each with the start of its hash.

    Args:
        files: Name to SHA-256 of the files on each node.
    """
    return [
        Difference(name=name, values=[of_node.get(name, "none")[:12] for of_node in files], refused=True)
        for name in sorted({name for of_node in files for name in of_node})
        if len({of_node.get(name) for of_node in files}) > 1
    ]


def check(nodes: Sequence[NodeFacts]) -> list[str]:
    """Refuse nodes that must not measure together; return the other differences in words.

    Raises:
        ValueError: The message names what differs, with the value on each node.
    """
    found = differences(nodes)
    if refused := [describe(one) for one in found if one.refused]:
        raise ValueError(f"the nodes differ: {'; '.join(refused)}; install the same versions on every node")
    return [describe(one) for one in found]


def environment(devices: Machine) -> Environment:
    """Return the machine and its libraries for a report: the first node, the GPUs of all, and each node by itself."""
    if not devices.node_facts:
        return machine.fingerprint(devices.facts)
    nodes = devices.node_facts
    first = _fields(nodes[0])
    if len(nodes) == 1:
        return Environment(**first)
    gpus = [gpu for node, offset in zip(nodes, _offsets(nodes), strict=True) for gpu in numbered(node.gpus, offset)]
    return Environment(**{**first, "gpus": gpus, "topology": _topology(nodes)}, nodes=list(nodes))


def _fields(node: Node) -> dict[str, Any]:
    """Return the fields that an environment and a node have in common."""
    return {name: getattr(node, name) for name in Node.__struct_fields__}


def _offsets(nodes: Sequence[Node]) -> list[int]:
    """Return the number of GPUs of the nodes before each node."""
    return [0, *itertools.accumulate(len(node.gpus) for node in nodes)][: len(nodes)]


def numbered(gpus: Sequence[Gpu], offset: int) -> list[Gpu]:
    """Return the GPUs of one node with the indices that they have among those of all nodes."""
    return [msgspec.structs.replace(gpu, index=offset + gpu.index) for gpu in gpus]


def _topology(nodes: Sequence[Node]) -> list[list[str]] | None:
    """Return the [gpu, gpu] matrix of the paths of all nodes; None if that of a node is unknown."""
    rows = []
    for node, offset in zip(nodes, _offsets(nodes), strict=True):
        after = sum(len(other.gpus) for other in nodes) - offset - len(node.gpus)
        if node.topology is None:
            return None
        rows += [[*[_BETWEEN] * offset, *row, *[_BETWEEN] * after] for row in node.topology]
    return rows
