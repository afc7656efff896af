from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmgpu.ranks import host
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
