from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import worlds
from support.faked_runs import BENCHMARK
from support.report_factory import known

from pytest_llmgpu.report import file


def _be_process(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    """Give this process the variables of one that torchrun starts."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("rank", "changed", "message"),
    [
        (0, {"RANK": ""}, "RANK='': a whole number from 0 to 1 is needed"),
        (0, {"LLMGPU_KEY": ""}, "LLMGPU_KEY is not set, and the processes of several nodes need a common secret"),
        # Without rank 0 each other process ends by itself.
        (1, {}, "rank 0 was not found at port .* within 0.1 s: "),
    ],
)
def test_a_world_that_cannot_work_is_refused_before_the_collection(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], rank: int, changed: dict[str, str], message: str
) -> None:
    """One line has the option, the variable and its value."""
    Path("test_it.py").write_text("open('collected', 'w')")
    _be_process(monkeypatch, {**worlds.torchrun(rank, 2, per_node=1, port=worlds.free_port()), **changed})
    line = refused("--llmgpu-launcher=env", "--llmgpu-load-timeout=0.1")
    assert re.match(f"ERROR: --llmgpu-launcher=env: .*{message}", line)
    assert not Path("collected").exists()


def test_wrong_options_are_printed_by_rank_0_only(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have the same options, and end with the same exit status."""
    printed = []
    for rank in range(2):
        _be_process(monkeypatch, worlds.torchrun(rank, 2, per_node=1))
        result = pytester.runpytest_inprocess("--llmgpu-launcher=env", "--llmgpu-limit=few")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        printed.append("".join(result.errlines + result.outlines))
    assert "--llmgpu-limit: 'few' is not allowed" in printed[0]
    assert printed[1] == ""
    unknown = pytester.runpytest_subprocess("--llmgpu-launcher=env", "--llmgpu-limits=8")
    assert (unknown.ret, unknown.errlines, unknown.outlines) == (pytest.ExitCode.USAGE_ERROR, [], [])
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--mine', action='store_true')")
    known = pytester.runpytest_subprocess("--llmgpu-launcher=env", "--llmgpu-load-timeout=0.1", "--mine")
    known.stderr.fnmatch_lines(["ERROR: *rank 0 was not found*"])
    assert pytester.runpytest_inprocess("--llmgpu-limit=few").errlines, "without the launcher each process prints"


@pytest.mark.slow
def test_two_nodes_measure_a_case(pytester: pytest.Pytester) -> None:
    """Under two torchruns the traffic is that of tensor parallelism on one machine; only rank 0 prints."""
    pytester.makepyfile(test_it=BENCHMARK)
    pytest_ = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--strategy=tp", "--llmgpu-batch-sizes=8"]
    pytest_ += ["--llmgpu-limit=4", "--llmgpu-device=cpu", "--llmgpu-work=off"]
    port = worlds.free_port()
    variables = {"LLMGPU_KEY": worlds.KEY, "LLMGPU_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={worlds.free_port()}"]
    torchrun = [[sys.executable, "-m", "torch.distributed.run", *meeting, f"--node-rank={node}"] for node in (0, 1)]
    pytest_ += ["--llmgpu-launcher=env", "--llmgpu-json=there.json"]
    to: dict[str, Any] = {"env": worlds.environment(variables), "text": True, "stdout": subprocess.PIPE}
    there = [subprocess.Popen([*command, *pytest_], stderr=subprocess.STDOUT, **to) for command in torchrun]
    try:
        printed = [process.communicate(timeout=600)[0] for process in there]
    finally:
        for process in there:
            process.kill()
    assert [process.returncode for process in there] == [0, 0], printed
    assert "1 passed" in printed[0]
    assert "pytest" not in printed[1]
    (result,) = file.load(Path("there.json")).cases
    case = result.case
    assert (case.strategy, case.devices, case.launcher, case.nodes) == ("tp", 2, "env", 2)
    assert result.outcome == "completed"
    assert result.launches[0].accuracy is not None
    traffic = known(result.traffic)
    first, second = traffic.ranks
    assert first == second
    assert [one.collective for one in first] == ["all_reduce", "all_gather"]
    assert traffic.sent_bytes == traffic.between_nodes_bytes
