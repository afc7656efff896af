from __future__ import annotations

import msgspec
import pytest

from pytest_llmgpu.profiling import nodes
from pytest_llmgpu.profiling.machine import Machine, TorchDevice, TorchFacts
from pytest_llmgpu.profiling.nodes import Difference, NodeFacts, describe
from pytest_llmgpu.report.report import Gpu, Node


def _facts(letters: str = "ab", torch: str = "2.13.0", driver: str = "580.1", **variables: str) -> NodeFacts:
    """Return the facts of a node with a GPU for each letter."""
    gpus = [Gpu(index=index, uuid=f"GPU-{letter}", name="NVIDIA H200") for index, letter in enumerate(letters)]
    topology = [["X" if a is b else "NV18" for a in gpus] for b in gpus]
    listed = [TorchDevice(name=gpu.name, uuid=gpu.uuid, memory_bytes=1) for gpu in gpus]
    node = Node(
        python="3.12.1",
        platform="Linux",
        gpus=gpus,
        topology=topology,
        driver=driver,
        nccl="2.29.1",
        versions={"torch": torch, "pytest-llmgpu": "0.1.0"},
        variables=variables,
    )
    return NodeFacts(torch=TorchFacts(version=torch, cuda="13.0", devices=listed), node=node)


def test_the_facts_of_this_machine_travel_as_json() -> None:
    """An agent sends them to the process of pytest."""
    found = nodes.gather()
    assert found.node.versions["torch"] == found.torch.version
    assert msgspec.json.decode(msgspec.json.encode(found), type=NodeFacts) == found


def test_equal_nodes_do_not_differ() -> None:
    """CUDA_VISIBLE_DEVICES is set for each node by its scheduler."""
    alike = [_facts(CUDA_VISIBLE_DEVICES="0"), _facts("cd", CUDA_VISIBLE_DEVICES="1")]
    assert nodes.check(alike) == []


def test_nodes_of_different_versions_are_refused() -> None:
    """The message has the value of each node, and the numbers of the nodes that have it."""
    with pytest.raises(ValueError, match=r"torch 2\.13\.0 on nodes 0, 2, 2\.12\.1 on node 1; install"):
        nodes.check([_facts(), _facts("cd", torch="2.12.1"), _facts("ef")])


def test_other_differences_are_stated() -> None:
    """A driver or a variable may differ, and a node without a value has `none`."""
    found = nodes.differences([_facts(), _facts("c", driver="570.2", NCCL_DEBUG="INFO")])
    assert {one.name: one.values for one in found} == {
        "driver": ["580.1", "570.2"],
        "GPUs": ["NVIDIA H200, NVIDIA H200", "NVIDIA H200"],
        "NCCL_DEBUG": ["none", "INFO"],
    }
    assert not any(one.refused for one in found)


def test_files_of_a_model_are_compared_by_name_and_hash() -> None:
    """A file that a node lacks differs, too."""
    files = [{"config.json": "a" * 64, "tokenizer": "b" * 64}, {"config.json": "c" * 64}]
    assert [(one.name, one.values) for one in nodes.file_differences(files)] == [
        ("config.json", ["a" * 12, "c" * 12]),
        ("tokenizer", ["b" * 12, "none"]),
    ]
    assert nodes.file_differences([files[0], dict(files[0])]) == []


def test_a_difference_in_words() -> None:
    """Each value is written once."""
    assert (
        describe(Difference(name="NCCL", values=["2", "3", "2"], refused=True)) == "NCCL 2 on nodes 0, 2, 3 on node 1"
    )


def _machine(*facts: NodeFacts) -> Machine:
    torch = TorchFacts(version="2.13.0")
    return Machine(device="cpu", devices=1, gpus=[], facts=torch, node_facts=[one.node for one in facts])


def test_a_report_has_the_gpus_of_all_nodes_and_each_node() -> None:
    """The indices of a node continue those of the node before."""
    written = nodes.environment(_machine(_facts("ab"), _facts("cd")))
    assert [(gpu.index, gpu.uuid) for gpu in written.gpus] == [(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-c"), (3, "GPU-d")]
    assert [[gpu.index for gpu in node.gpus] for node in written.nodes] == [[0, 1], [0, 1]]
    assert written.topology == [
        ["X", "NV18", "NET", "NET"],
        ["NV18", "X", "NET", "NET"],
        ["NET", "NET", "X", "NV18"],
        ["NET", "NET", "NV18", "X"],
    ]


def test_one_node_is_written_as_a_machine_alone() -> None:
    """A report of one node is the same whoever started its ranks."""
    written = nodes.environment(_machine(_facts("ab")))
    assert (written.nodes, len(written.gpus)) == ([], 2)
