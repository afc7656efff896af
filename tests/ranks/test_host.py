from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.ranks import host
from pytest_llmgpu.report.report import Gpu
from pytest_llmgpu.report.result import Launch


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that stands for /proc: two threads, and the pressure of the machine."""
    monkeypatch.setattr(host, "_TASKS", tmp_path / "task")
    monkeypatch.setattr(host, "_PRESSURE", tmp_path / "pressure")
    _write(tmp_path, {"10": 1.0, "11": 2.0}, pressure_s=5.0)
    return tmp_path


def _write(kernel: Path, waited_s: dict[str, float], *, pressure_s: float) -> None:
    for thread, seconds in waited_s.items():
        (kernel / "task" / thread).mkdir(parents=True, exist_ok=True)
        (kernel / "task" / thread / "schedstat").write_text(f"123456789 {round(seconds * 1e9)} 42\n")
    line = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={round(pressure_s * 1e6)}"
    (kernel / "pressure").write_text(f"{line}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")


def test_the_thread_that_waited_longest_counts(kernel: Path) -> None:
    """The others wait for it at the end of each operation; a thread that was started in the window counts too."""
    ended, launch = host.watch(), Launch()
    _write(kernel, {"10": 1.25, "11": 2.125, "12": 0.5}, pressure_s=5.75)
    ended(launch)
    assert launch.host is not None
    assert (launch.host.waited_s, launch.host.pressure_s) == ([0.5], 0.75)
    assert launch.host.wall_s > 0


@pytest.mark.parametrize("text", [None, "", "unexpected text"])
def test_what_the_kernel_does_not_count_is_not_known(kernel: Path, text: str | None) -> None:
    """Some sandboxes have neither file; the CPU time is known there too."""
    for path in (kernel / "pressure", *kernel.glob("task/*/schedstat")):
        path.unlink()
        if text is not None:
            path.write_text(text)
    ended, launch = host.watch(), Launch()
    sum(range(10_000))
    ended(launch)
    assert launch.host is not None
    assert (launch.host.waited_s, launch.host.pressure_s) == ([None], None)
    assert launch.host.cpu_s[0] > 0


def _machine(device: str, nodes: list[int]) -> Machine:
    gpus = [Gpu(index=9 - number, uuid=f"GPU-{number}", name="H") for number in range(len(nodes))]
    return Machine(device=device, devices=len(nodes), gpus=gpus, facts=TorchFacts(version="2"), nodes=nodes)


def test_a_rank_has_the_devices_of_its_node() -> None:
    """They are passed by UUID, independent of CUDA_VISIBLE_DEVICES; variables are those that torchrun sets."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "LLMGPU_NODES")
    found = host.environments(_machine("cuda", [0, 0, 1]), "cuda", 3)
    assert [[variables[name] for name in names] for variables in found] == [
        ["0", "0", "3", "2", "GPU-0,GPU-1", "0,0,1"],
        ["1", "1", "3", "2", "GPU-0,GPU-1", "0,0,1"],
        ["2", "0", "3", "1", "GPU-2", "0,0,1"],
    ]
    assert host.environments(_machine("cuda", [0, 0]), "cuda", 1) == [{"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}]


@pytest.mark.parametrize(
    ("chosen", "spins", "threads"),
    [
        (None, "3000", "3"),
        ("OMP_WAIT_POLICY", None, "3"),
        ("GOMP_SPINCOUNT", None, "3"),
        ("OMP_NUM_THREADS", "3000", "5"),
    ],
)
def test_ranks_on_a_cpu_split_its_cores_and_do_not_spin_for_long(
    chosen: str | None, spins: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all cores for each rank, threads would wait for each other. A variable of the user has precedence."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv(chosen, "5")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    (alone,), pair = (host.environments(_machine("cpu", [0, 0]), "cpu", ranks) for ranks in (1, 2))
    assert [one.get("GOMP_SPINCOUNT") for one in (alone, *pair)] == [spins] * 3
    assert [one["OMP_NUM_THREADS"] for one in pair] == [threads] * 2
