from __future__ import annotations

import torch

from pytest_llmgpu.ranks import ceilings
from pytest_llmgpu.report.work import Ceilings, DeviceCeilings


def test_a_cpu_has_no_ceilings() -> None:
    """They are null with the reason."""
    found = ceilings.measure([torch.device("cpu")], "float32", 2, ["product", "copy", "all_reduce"])
    assert found.devices == []
    assert found.all_reduce_bytes_per_s is None
    assert found.all_reduce_latency_s is None
    assert set(found.why) == {"devices", "all_reduce_bytes_per_s", "all_reduce_latency_s"}


def _of_device(uuid: str, copy_bytes_per_s: float | None = None, why: str = "", **gemm: float) -> DeviceCeilings:
    reasons = {"copy_bytes_per_s": why} if why else {}
    return DeviceCeilings(uuid=uuid, gemm_flops_per_s=gemm, copy_bytes_per_s=copy_bytes_per_s, why=reasons)


def test_ceilings_of_ranks_and_cases_are_merged() -> None:
    """Each GPU keeps its first rates; the slowest all-reduce counts; a reason stays until the figure is there."""
    alone = Ceilings(
        devices=[_of_device("a", why="no memory", float16=10.0)],
        why={"all_reduce_bytes_per_s": "alone", "all_reduce_latency_s": "alone"},
    )
    first = Ceilings(
        devices=[_of_device("a", 5.0, float16=9.0, float32=1.0)], all_reduce_bytes_per_s=40.0, all_reduce_latency_s=2.0
    )
    other = Ceilings(devices=[_of_device("b", 4.0, float16=8.0)], all_reduce_bytes_per_s=30.0, all_reduce_latency_s=3.0)
    assert ceilings.merged([alone, first, other]) == Ceilings(
        devices=[_of_device("a", 5.0, float16=10.0, float32=1.0), _of_device("b", 4.0, float16=8.0)],
        all_reduce_bytes_per_s=30.0,
        all_reduce_latency_s=3.0,
    )
    assert ceilings.merged([alone, alone]) == alone
