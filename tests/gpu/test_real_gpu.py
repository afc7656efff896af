"""What only real hardware shows: `pytest tests/gpu -m gpu` on a machine with at least one GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pytest_llmgpu import memory, report
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.report import Report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here"),
]

_GIB = 2**30
_BENCHMARK = """
    def test_hellaswag(llm, hellaswag, batch_size, measure):
        measure(llm, hellaswag, batch_size)
"""
_DUMMY = ("--llmgpu-model=llama-7b", "--llmgpu-load-format=dummy", "--llmgpu-limit=32")


def _run(pytester: pytest.Pytester, *arguments: str) -> tuple[pytest.RunResult, Report]:
    pytester.makepyfile(test_it=_BENCHMARK)
    result = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider", *arguments)
    return result, report.load(pytester.path / ".llmgpu" / "last.json")


def test_held_memory_leaves_the_cap(pytester: pytest.Pytester) -> None:
    """After a hold, what the device has free or in use by us is the cap, and torch counts none of it."""
    pytester.makepyfile(
        hold="""
        import json, sys, torch
        from pytest_llmgpu import memory
        device = torch.device("cuda", 0)
        held = memory.hold([device], 8 * 2**30)
        free, total = torch.cuda.mem_get_info(device)
        print(json.dumps([held[0], free, total, torch.cuda.memory_allocated(device)]))
        """
    )
    held, free, total, counted = json.loads(pytester.runpython(pytester.path / "hold.py").stdout.str())
    assert held == total - 8 * _GIB
    assert 6 * _GIB < free < 8 * _GIB
    assert counted == 0


def test_a_gpu_is_profiled_while_it_works(pytester: pytest.Pytester) -> None:
    """Every quantity of the profile has a reading on real hardware, in sensible bounds."""
    result, written = _run(pytester, *_DUMMY, "--llmgpu-devices=1", "--llmgpu-batch-sizes=1")
    assert result.ret == 0
    profile = written.cases[0].launches[0].profile
    assert profile is not None
    assert profile.missed == 0
    (device,) = profile.devices
    assert device.why == {}
    highest = {name: metric.max for name, metric in device.metrics.items()}
    assert set(highest) >= {"utilization_pct", "memory_used_bytes", "pcie_tx_bytes_per_s", "power_w", "sm_clock_mhz"}
    assert 0 < (highest["utilization_pct"] or 0) <= 100
    assert 12 * _GIB < (highest["memory_used_bytes"] or 0) < 40 * _GIB
    (use,) = written.cases[0].launches[0].memory
    assert 12 * _GIB < (use.weights_bytes or 0) < (use.peak_allocated_bytes or 0) < 20 * _GIB


def test_a_cap_puts_out_of_memory_inside_the_list(pytester: pytest.Pytester) -> None:
    """Large batch sizes run out of memory as on a small card, and the held bytes are no use of ours."""
    flags = ("--llmgpu-devices=1", "--llmgpu-batch-sizes=1,2,128", "--llmgpu-gpu-memory=13.75GiB")
    result, written = _run(pytester, *_DUMMY, *flags)
    assert result.ret == 0
    assert [case.outcome for case in written.cases] == ["completed", "completed", "oom"]
    (use,) = written.cases[0].launches[0].memory
    assert use.held_bytes > 0
    assert (use.nvml_used_max_bytes or 0) < 14 * _GIB
    failure = written.cases[2].failure
    assert failure is not None
    assert failure.evidence


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus_answer_as_one_does(pytester: pytest.Pytester) -> None:
    """Spreading layers moves numbers between devices and changes none of them."""
    flags = (*_DUMMY, "--llmgpu-batch-sizes=8")
    answers: list[Any] = []
    for devices in ("1", "2"):
        _, written = _run(pytester, *flags, f"--llmgpu-devices={devices}")
        accuracy = written.cases[0].launches[0].accuracy
        assert accuracy is not None
        answers.append(accuracy.loglikelihoods)
        assert len(written.cases[0].launches[0].memory) == int(devices)
    assert answers[0] == answers[1]


def test_uuids_join_nvml_and_torch() -> None:
    """The name by which a device's memory and profile are joined is the same on both sides."""
    known = {gpu.uuid for gpu in nvml.inventory().gpus}
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    used = memory.usage(devices, [0] * len(devices), [0] * len(devices), [0] * len(devices))
    assert {use.uuid for use in used} <= known
