from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import worlds
from support.faked_runs import BENCHMARK
from support.report_factory import known

from pytest_llmgpu import cli
from pytest_llmgpu.cli.commands import ray as command
from pytest_llmgpu.report import file

_PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strategy=tp", "--llmgpu-batch-sizes=8"]
_PYTEST += ["--llmgpu-limit=4", "--llmgpu-device=cpu", "--llmgpu-work=off"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "llmgpu: a command is needed, such as: llmgpu ray -n 16 -- pytest benchmarks --strategy=tp"),
        (["-n", "2", "--", "pytest"], "llmgpu: llmgpu ray needs ray: pip install 'pytest-llmgpu[ray]'"),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line has the command that helps."""
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert cli.main(["ray", *words]) == 2
    assert capsys.readouterr().err.strip() == message


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with one CPU each; this process is on the first."""
    pytest.importorskip("ray", reason="needs the extra ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        before = signal.getsignal(signal.SIGTERM)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=1)
        signal.signal(signal.SIGTERM, before)  # each node has a handler that ends the process
        yield made
        made.shutdown()


def _run(*words: str, address: str | None = None) -> subprocess.CompletedProcess[str]:
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **({"RAY_ADDRESS": address} if address else {})}
    environment = worlds.environment(variables)
    return subprocess.run(words, env=environment, text=True, capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_nodes_of_a_cluster_measure_what_one_machine_measures(cluster: Any, pytester: pytest.Pytester) -> None:
    """Predictions and traffic are those of the local launcher, and more processes than CPUs are refused."""
    pytester.makepyfile(test_it=BENCHMARK)
    llmgpu = [sys.executable, "-m", "pytest_llmgpu.cli", "ray"]
    there = _run(*llmgpu, "-n", "2", "--", *_PYTEST, "--llmgpu-json=there.json", address=cluster.address)
    assert there.returncode == 0, there.stdout + there.stderr
    assert "1 passed" in there.stdout
    here = _run(*_PYTEST, "--llmgpu-devices=2", "--llmgpu-json=here.json")
    assert here.returncode == 0, here.stdout
    [ours], [theirs] = (file.load(Path(name)).cases for name in ("here.json", "there.json"))
    assert (theirs.case.launcher, theirs.case.nodes) == ("env", 2)
    assert ours.launches[0].accuracy == theirs.launches[0].accuracy
    traffic = known(theirs.traffic)
    assert known(ours.traffic).sent_bytes == traffic.sent_bytes == traffic.between_nodes_bytes
    refused = _run(*llmgpu, "-n", "3", "--", *_PYTEST, address=cluster.address)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == "llmgpu: -n 3: the Ray cluster has 2 CPUs on 2 nodes"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_is_started_where_none_runs(pytester: pytest.Pytester) -> None:
    """The exit status is that of pytest, whose output is on this terminal; wrong options are printed once."""
    pytest.importorskip("ray", reason="needs the extra ray")
    pytester.makepyfile(test_it=BENCHMARK)
    done = _run(sys.executable, "-m", "pytest_llmgpu.cli", "ray", "-n", "2", "--", *_PYTEST, "--llmgpu-limit=few")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert (done.stdout + done.stderr).count("--llmgpu-limit: 'few' is not allowed") == 1
