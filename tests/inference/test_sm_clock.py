from __future__ import annotations

import pytest
import torch

from pytest_llmgpu.inference import sm_clock
from pytest_llmgpu.inference.sm_clock import SmClock


def test_the_clock_of_a_gpu_is_the_median_over_its_sms() -> None:
    """An SM without a stamp has zeros and does not count; without any there is no clock."""
    earlier = torch.tensor([[100, 10], [0, 0], [300, 10], [500, 10]])
    later = torch.tensor([[1700, 1010], [9, 9], [1800, 1010], [2300, 1010]])
    assert sm_clock.between(earlier, later) == pytest.approx((1e-6, 1.6))
    assert sm_clock.between(torch.zeros(2, 2), torch.zeros(2, 2)) == (0, 0)


@pytest.mark.parametrize(
    ("device", "reason"), [("cpu", "the case ran on a CPU"), ("cuda", "the kernel that reads the SM clock cannot run")]
)
def test_without_a_clock_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, device: str, reason: str) -> None:
    """Stamps do nothing then."""

    def no_driver(_: torch.device) -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "get_device_properties", no_driver)
    clock = SmClock([torch.device(device)], stamps=2)
    clock.stamp(0)
    assert clock.ghz([(0, 1)]) is None
    assert clock.seconds([(0, 1)]) is None
    assert reason in (clock.why or "")
