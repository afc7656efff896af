from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
import torch
from support import tiny_model
from support.report_factory import make_case

from pytest_llmgpu.inference import models, tasks
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.ranks import device_memory, worker
from pytest_llmgpu.ranks.device_memory import DeviceUse
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import Loaded

_CPU = (torch.device("cpu"),)
_GPU = (torch.device("cuda", 0),)
_WEIGHTS = 1000


def test_a_cpu_has_no_cap_and_no_figures() -> None:
    """A figure that torch does not count on a CPU is None with a reason, never 0."""
    assert device_memory.hold(_CPU, 2**30) == [0]
    assert device_memory.allocated(_CPU) == [None]
    device_memory.reset(_CPU)
    (use,) = device_memory.usage(_CPU, weights_bytes=[None], loading_peak_bytes=[None], held_bytes=[0])
    assert (use.uuid, use.peak_allocated_bytes, use.weights_bytes) == (None, None, None)
    assert set(use.why) == {"weights_bytes", "loading_peak_bytes", "peak_allocated_bytes", "peak_reserved_bytes"}


class _Allocator:
    """torch's caching allocator, reduced to the figures of a case: freed memory stays reserved, peaks stay.

    cuBLAS keeps a workspace among the live tensors, as large as the largest batch needed.
    """

    def __init__(self) -> None:
        self.cublas = 0
        self.allocated = self.peak_allocated = _WEIGHTS
        self.reserved = self.peak_reserved = _WEIGHTS

    def forward(self, batch_size: int) -> None:
        self.cublas = max(self.cublas, 8 * batch_size)
        self.allocated = _WEIGHTS + self.cublas
        self.peak_allocated = max(self.peak_allocated, self.allocated + 100 * batch_size)
        self.reserved = max(self.reserved, self.peak_allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def clear_cublas_workspaces(self) -> None:
        self.cublas = 0
        self.allocated = _WEIGHTS

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset_peaks(self, _device: torch.device) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> _Allocator:
    """The allocator of an emulated GPU."""
    emulated = _Allocator()
    cuda = torch.cuda
    # A wheel without CUDA lacks it.
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", emulated.clear_cublas_workspaces, raising=False)
    monkeypatch.setattr(cuda, "empty_cache", emulated.empty_cache)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", emulated.reset_peaks)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda _: emulated.peak_allocated)
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda _: emulated.peak_reserved)
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0"))
    return emulated


def _sweep(allocator: _Allocator, batch_sizes: Sequence[int]) -> dict[int, DeviceUse]:
    uses = {}
    for batch_size in batch_sizes:
        device_memory.reset(_GPU)
        allocator.forward(batch_size)
        (uses[batch_size],) = device_memory.usage(
            _GPU, weights_bytes=[_WEIGHTS], loading_peak_bytes=[_WEIGHTS], held_bytes=[0]
        )
    return uses


@pytest.mark.slow
@pytest.mark.parametrize("order", [(1, 2, 4, 8), (8, 4, 2, 1), (4, 8, 4)])
def test_a_case_has_the_same_memory_alone_and_in_a_sweep(allocator: _Allocator, order: tuple[int, ...]) -> None:
    """Peaks, cached blocks and workspaces of cuBLAS from earlier cases do not count."""
    for batch_size, use in _sweep(allocator, order).items():
        (alone,) = _sweep(_fresh(allocator), (batch_size,)).values()
        assert use == alone
        assert use.peak_allocated_bytes == use.peak_reserved_bytes == _WEIGHTS + 108 * batch_size
        assert use.weights_bytes == _WEIGHTS


def _fresh(allocator: _Allocator) -> _Allocator:
    """Put the emulated GPU into the state of a new process."""
    vars(allocator).update(vars(_Allocator()))
    return allocator


def test_garbage_is_collected_before_the_caches_are_emptied(
    allocator: _Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors in reference cycles are freed before a case, not during it."""
    events: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: events.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: events.append("forget"))
    device_memory.reset(_GPU)
    assert events == ["collect", "empty", "forget"]
    assert allocator.cublas == 0


class Preparing(LayerParallel):
    """A strategy that records its calls of `prepare`."""

    name = "preparing"
    events: ClassVar[list[object]] = []

    def prepare(self, loaded: Loaded, batch_size: int, tokens: int) -> None:
        """Record the number of rows."""
        assert loaded.devices
        assert tokens
        self.events.append(batch_size)


def test_every_case_of_a_sweep_begins_with_a_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each case, larger or smaller than the one before, caches are emptied and the workspace is rebuilt."""
    events: list[object] = []
    monkeypatch.setattr(Preparing, "events", events)
    monkeypatch.setattr(device_memory, "reset", lambda _: events.append("reset"))
    tiny_model.write_model(tmp_path / "tiny")
    tiny_model.write_dataset(tmp_path / "items.jsonl")
    dataset = HellaSwag().load(str(tmp_path / "items.jsonl"), rootdir=tmp_path)
    source = models.resolve(str(tmp_path / "tiny"), texts=dataset.texts(), rootdir=tmp_path)
    case = make_case(dtype="float32", device="cpu", devices=1, dataset_sha256=dataset.sha256)
    state = RankState(on_batch=lambda _: None)
    worker.load(state, case, source, f"{__name__}:Preparing")
    worker.give(state, dataset.sha256, dataset.items, tasks.BUILT_IN["hellaswag"])
    for batch_size in (2, 8, 2):
        events.clear()
        reply = worker.score(state, msgspec.structs.replace(case, batch_size=batch_size))
        assert sum(reply.batches.sequences) == tiny_model.SEQUENCES
        assert events[:2] == ["reset", batch_size]
