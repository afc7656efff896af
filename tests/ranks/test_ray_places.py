"""The launcher `ray` on several raylets of one machine. `tox -e ray` runs these tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import rank_functions as ranks
from support import worlds

from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.protocol import RankFailedError
from pytest_llmgpu.ranks.ray_places import RayPlaces
from pytest_llmgpu.report import file

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_LIMIT_S = 300
_BENCHMARK = """
def test_hellaswag(llm, hellaswag, batch_size, measure):
    measure(llm, hellaswag, batch_size)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with one CPU each; pytest is on the first."""
    from ray.cluster_utils import Cluster

    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()
    os.environ.pop("PYTHONPATH")
    if path is not None:
        os.environ["PYTHONPATH"] = path


@contextlib.contextmanager
def _group(cluster: Any, folder: Path, size: int) -> Iterator[tuple[RayPlaces, RankGroup]]:
    places = RayPlaces(cluster.address, "cpu", size)
    try:
        places.wait(_LIMIT_S)
        group = RankGroup(places.launcher(folder), [{"RANK": str(rank)} for rank in range(size)])
        try:
            yield places, group
        finally:
            group.kill()
    finally:
        places.close()


def _pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strategy=tp"]
    command += ["--llmgpu-batch-sizes=8", "--llmgpu-limit=4", "--llmgpu-device=cpu", "--llmgpu-work=off"]
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = worlds.environment(variables)
    return subprocess.run([*command, *arguments], env=environment, text=True, capture_output=True, check=False)


def test_two_nodes_measure_what_one_machine_measures(cluster: Any, pytester: pytest.Pytester) -> None:
    """Predictions and traffic are those of the local launcher."""
    pytester.makepyfile(test_it=_BENCHMARK)
    there = _pytest(
        *("--llmgpu-launcher=ray", f"--llmgpu-ray-address={cluster.address}"),
        *("--llmgpu-devices=2", "--llmgpu-json=there.json"),
    )
    assert there.returncode == 0, there.stdout + there.stderr
    here = _pytest("--llmgpu-devices=2", "--llmgpu-json=here.json")
    assert here.returncode == 0, here.stdout
    [ours], [theirs] = (file.load(Path(name)).cases for name in ("here.json", "there.json"))
    assert (theirs.case.launcher, theirs.case.nodes) == ("ray", 2)
    assert ours.launches[0].accuracy == theirs.launches[0].accuracy
    assert ours.traffic is not None
    assert theirs.traffic is not None
    assert ours.traffic.sent_bytes == theirs.traffic.sent_bytes == theirs.traffic.between_nodes_bytes
    assert ours.traffic.between_nodes_bytes is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--llmgpu-devices=3"], "ERROR: --llmgpu-devices=3: the Ray cluster at * has 2 CPUs on 2 nodes"),
        (["--llmgpu-ray-address=127.0.0.1:1"], "ERROR: --llmgpu-ray-address=127.0.0.1:1: no Ray cluster answers: *"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused_in_one_line(
    cluster: Any, pytester: pytest.Pytester, arguments: list[str], message: str
) -> None:
    """No model is loaded."""
    pytester.makepyfile(test_it=_BENCHMARK)
    done = _pytest("--llmgpu-launcher=ray", f"--llmgpu-ray-address={cluster.address}", *arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    pytest.LineMatcher(done.stderr.splitlines()).fnmatch_lines([message])


def test_a_killed_actor_is_a_crash_of_its_node(cluster: Any, tmp_path: Path) -> None:
    """Its rank ends with it; ranks that need no actor run on."""
    with _group(cluster, tmp_path, 2) as (places, group):
        pids = [pid for pid, _ in group.ask(ranks.identity, phase="forward", timeout_s=_LIMIT_S)]
        _, actor = group.ask(ranks.parent, phase="forward", timeout_s=_LIMIT_S)
        os.kill(actor, signal.SIGKILL)
        with pytest.raises(RankFailedError) as caught:
            group.ask(ranks.hang_in_a_collective, str(tmp_path / "begun"), phase="forward", timeout_s=_LIMIT_S)
        assert (caught.value.outcome, caught.value.failure.rank) == ("crashed", 1)
        assert caught.value.failure.message.endswith("(node 1)")
        group.kill()
        assert all(map(worlds.ends, pids))
        alone = RankGroup(places.launcher(tmp_path), [{"RANK": "0"}])
        assert alone.ask(ranks.add, 1, 1, phase="forward", timeout_s=_LIMIT_S) == [2]
        alone.kill()


def test_a_killed_raylet_is_a_crash_of_its_node(cluster: Any, tmp_path: Path) -> None:
    """Nothing of it is left."""
    third = cluster.add_node(num_cpus=1)
    with _group(cluster, tmp_path, 3) as (_, group):
        pids = [pid for pid, _ in group.ask(ranks.identity, phase="forward", timeout_s=_LIMIT_S)]
        actors = group.ask(ranks.parent, phase="forward", timeout_s=_LIMIT_S)
        cluster.remove_node(third, allow_graceful=False)
        with pytest.raises(RankFailedError) as caught:
            group.ask(ranks.hang_in_a_collective, str(tmp_path / "begun"), phase="forward", timeout_s=_LIMIT_S)
        assert caught.value.outcome == "crashed"
        lost = caught.value.failure.rank
        assert lost in (1, 2)
        assert caught.value.failure.message.endswith(f"(node {lost})")
        group.kill()
        assert all(map(worlds.ends, [*pids, actors[lost]]))
