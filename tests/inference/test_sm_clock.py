from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

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


def test_gpus_are_stamped_and_wait_until_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that waits in vain writes the second word of the wait."""
    launched = list[tuple[int | None, str, int]]()

    def launcher(gpu: torch.device, name: str, blocks: int) -> Callable[[int], None]:
        return lambda parameter: launched.append((gpu.index, f"{name} x{blocks}", parameter))

    def word(place: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(launched[0][2] + 8 * place)

    monkeypatch.setattr(sm_clock, "_launcher", launcher)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    clock = SmClock([torch.device("cuda", 0), torch.device("cuda", 1)], stamps=2)
    clock.hold(1)
    clock.stamp(1)
    assert [one[:2] for one in launched] == [
        *[(gpu, f"{sm_clock.HOLD} x1") for gpu in (0, 1)],
        *[(gpu, f"{sm_clock.STAMP} x6") for gpu in (0, 1)],
    ]
    assert launched[0][2] == launched[1][2], "both wait for one release"
    assert (word(0).value, clock.is_late()) == (0, False)
    clock.release(1)
    assert (word(0).value, word(1).value) == (1, 0)
    word(1).value = 1
    assert clock.is_late()
    for number, cycles, ns in ((0, 0, 10), (1, 1600, 1010)):
        clock._stamps[0][number] = torch.tensor([[cycles, ns]] * 3)
    assert clock.seconds([(0, 1)]) == pytest.approx([1e-6])
    assert clock.ghz([(0, 1)]) == [pytest.approx([1.6]), [0.0]], "the second GPU has no stamp"
