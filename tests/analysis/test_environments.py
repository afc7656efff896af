"""Differences between the machines and the software of two reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.report_factory import make_report

from pytest_llmgpu.analysis.environments import hardware_differences, software_differences
from pytest_llmgpu.report.report import Environment, Gpu

_LINKS = [["X", "NV18"], ["NV18", "X"]]


def _machine(**fields: Any) -> Environment:
    return msgspec.structs.replace(make_report().environment, **fields)


def _gpus(
    count: int = 4, name: str = "NVIDIA H200", gib: float | None = 140, uuid: str = "a", watts: float | None = None
) -> list[Gpu]:
    memory = None if gib is None else int(gib * 2**30)
    gpu = Gpu(index=0, uuid=uuid, name=name, memory_bytes=memory, power_limit_w=watts)
    return [msgspec.structs.replace(gpu, index=index, uuid=f"{uuid}{index}") for index in range(count)]


_GPUS = _machine(gpus=_gpus(), topology=_LINKS)


@pytest.mark.parametrize(
    ("base", "head", "gpu", "cpu"),
    [
        (_GPUS, _GPUS, [], []),
        (_GPUS, _machine(gpus=_gpus(8)), ["GPUs 4 -> 8"], []),
        (_GPUS, _machine(gpus=_gpus(name="NVIDIA H100")), ["GPU model NVIDIA H200 -> NVIDIA H100"], []),
        (_GPUS, _machine(gpus=_gpus(gib=80)), ["GPU memory 140.0 GiB -> 80.0 GiB"], []),
        (_GPUS, _machine(gpus=_gpus(), topology=[["X", "PIX"], ["PIX", "X"]]), ["topology 1 x NV18 -> 1 x PIX"], []),
        (_GPUS, _machine(gpus=_gpus(gib=None)), [], []),
        (_GPUS, _machine(gpus=_gpus(), nodes=[_GPUS, _GPUS]), ["nodes 1 -> 2"], ["nodes 1 -> 2"]),
        (_machine(cpu="Xeon", cores=8), _machine(cpu="EPYC", cores=8), [], ["CPU Xeon -> EPYC"]),
        (_machine(cpu="Xeon", cores=8), _machine(cpu=None, cores=None), [], []),
    ],
)
def test_other_hardware_is_a_difference(base: Environment, head: Environment, gpu: list[str], cpu: list[str]) -> None:
    """GPUs for what ran on GPUs, cores for what ran on the CPU; what a report lacks is no difference."""
    assert hardware_differences(base, head, "cuda") == gpu
    assert hardware_differences(base, head, "cpu") == cpu
    of_one = [one for one in gpu if not one.startswith(("GPUs", "topology"))]
    assert hardware_differences(base, head, "cuda", alone=True) == of_one


@pytest.mark.parametrize(
    ("base", "head", "differences"),
    [
        (_GPUS, _GPUS, []),
        (
            _machine(gpus=_gpus(), driver="570", versions={"torch": "2.6"}, variables={"NCCL_P2P_DISABLE": "1"}),
            _machine(gpus=_gpus(uuid="b"), driver="580", versions={"torch": "2.7"}),
            ["driver 570 -> 580", "torch 2.6 -> 2.7", "NCCL_P2P_DISABLE 1 -> unset", "other GPUs of the same kind"],
        ),
        (_GPUS, _machine(gpus=_gpus()), ["topology 1 x NV18 -> unknown"]),
        (_machine(gpus=_gpus()), _machine(gpus=_gpus()), []),
        (_machine(gpus=_gpus(1, watts=700)), _machine(gpus=_gpus(1, watts=550.5)), ["power limit 700 W -> 550.5 W"]),
        (_machine(gpus=_gpus(1, watts=700)), _machine(gpus=_gpus(1)), []),
    ],
)
def test_software_is_named_and_not_refused(base: Environment, head: Environment, differences: list[str]) -> None:
    """Driver, libraries, variables, power limits, which boards they were, and a topology that one report lacks."""
    assert software_differences(base, head) == differences
