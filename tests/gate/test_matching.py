from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.report_factory import make_report, make_result

from pytest_llmgpu.analysis.environments import hardware_differences, software_differences
from pytest_llmgpu.gate.judge import pairs
from pytest_llmgpu.report.file import encode, parse
from pytest_llmgpu.report.report import Environment, Gpu
from pytest_llmgpu.report.result import CaseResult


def _named(name: str, **fields: Any) -> CaseResult:
    result = make_result(**fields)
    result.id = name
    return result


def _machine(**fields: Any) -> Environment:
    return msgspec.structs.replace(make_report().environment, **fields)


def _gpus(count: int = 4, name: str = "NVIDIA H200", gib: float | None = 140, uuid: str = "a") -> list[Gpu]:
    memory = None if gib is None else int(gib * 2**30)
    return [Gpu(index=index, uuid=f"{uuid}{index}", name=name, memory_bytes=memory) for index in range(count)]


def test_cases_match_by_key_whatever_their_ids() -> None:
    """A run of fewer tests numbers its cases differently; the second one of a key is compared with the second."""
    base = [_named("mp-bs1"), _named("mp-bs1#2", model="other"), _named("mp-bs1#3", model="other")]
    head = [_named("mp-bs1", model="other"), _named("mp-bs1#2", model="other")]
    matched = pairs(base, head)
    assert [(pair.base, pair.head) for pair in matched] == [(base[1], head[0]), (base[2], head[1]), (base[0], None)]
    assert not any(pair.differing for pair in matched)


def test_one_id_and_another_case_differ_by_name() -> None:
    """Digests are cut; `execution` is an answer and no difference."""
    base = _named("mp-bs1", dtype="float16", dataset_sha256="a" * 64, execution="eager")
    head = _named("mp-bs1", dtype="bfloat16", dataset_sha256="b" * 64, execution="cuda_graphs")
    (pair,) = pairs([base], [head])
    assert pair.differing == ["dtype float16 -> bfloat16", "dataset_sha256 aaaaaaaaaaaa... -> bbbbbbbbbbbb..."]


@pytest.mark.parametrize(("field", "value"), [("limit", 100), ("dataset_sha256", "b" * 64)])
def test_other_items_under_a_stored_key_that_is_equal_differ(field: str, value: Any) -> None:
    """A key is computed when a report is read; the stored one does not count."""
    base, head = make_report([_named("mp-bs1")]), make_report([_named("mp-bs1", **{field: value})])
    head.cases[0].key = base.cases[0].key
    base, head = (parse(encode(report, compressed=False), "report") for report in (base, head))
    (pair,) = pairs(base.cases, head.cases)
    assert [name.split()[0] for name in pair.differing] == [field]


def test_new_and_gone() -> None:
    """Each stands alone, the gone ones last."""
    gone, new = _named("mp-bs1"), _named("tp-bs1", strategy="tp")
    assert pairs([gone], [new]) == [(None, new, []), (gone, None, [])]


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"gpus": _gpus(8)}, "GPUs 4 -> 8"),
        ({"gpus": _gpus(name="NVIDIA H100")}, "GPU model NVIDIA H200 -> NVIDIA H100"),
        ({"gpus": _gpus(gib=80)}, "GPU memory 140.0 GiB -> 80.0 GiB"),
        ({"gpus": _gpus(), "topology": [["X", "PIX"], ["PIX", "X"]]}, "topology 1 x NV18 -> 1 x PIX"),
    ],
)
def test_other_gpus_are_another_machine(fields: dict[str, Any], difference: str) -> None:
    """For what ran on GPUs; a case of the CPU does not care."""
    base = _machine(gpus=_gpus(), topology=[["X", "NV18"], ["NV18", "X"]])
    head = _machine(**{"topology": base.topology, **fields})
    assert hardware_differences(base, head, "cuda") == [difference]
    assert hardware_differences(base, base, "cuda") == hardware_differences(base, head, "cpu") == []


def test_other_cores_are_another_machine_for_the_cpu() -> None:
    """What a report does not know is no difference."""
    base = _machine(cpu="Xeon", cores=8, gpus=_gpus())
    assert hardware_differences(base, _machine(cpu="EPYC", cores=8), "cpu") == ["CPU Xeon -> EPYC"]
    assert hardware_differences(base, _machine(cpu=None, cores=None, gpus=_gpus(gib=None)), "cpu") == []
    assert hardware_differences(base, _machine(cpu="EPYC", gpus=_gpus(gib=None)), "cuda") == []


def test_software_is_named_and_not_refused() -> None:
    """Driver, libraries, variables, the slot, and which GPUs they were."""
    base = _machine(gpus=_gpus(), driver="570", versions={"torch": "2.6"}, variables={"NCCL_P2P_DISABLE": "1"})
    head = _machine(gpus=_gpus(uuid="b"), driver="580", versions={"torch": "2.7"})
    assert software_differences(base, head) == [
        "driver 570 -> 580",
        "torch 2.6 -> 2.7",
        "NCCL_P2P_DISABLE 1 -> unset",
        "other GPUs of the same kind",
    ]
    assert software_differences(base, base) == []


def test_another_power_limit_is_named() -> None:
    """Where both sides know theirs: reports of before it was recorded do not."""
    full, less = (_machine(gpus=[msgspec.structs.replace(_gpus()[0], power_limit_w=watts)]) for watts in (700, 550.5))
    assert software_differences(full, less) == ["power limit 700 W -> 550.5 W"]
    assert software_differences(full, _machine(gpus=_gpus()[:1])) == []


def test_other_numbers_of_nodes_are_another_machine() -> None:
    """On CPUs, too."""
    base, head = _machine(gpus=_gpus()), _machine(gpus=_gpus())
    head.nodes = [head, head]
    assert hardware_differences(base, head, "cuda") == hardware_differences(base, head, "cpu") == ["nodes 1 -> 2"]


def test_a_topology_that_one_side_does_not_know_is_named() -> None:
    """The links may be others: that is no reason to refuse, and one to know."""
    links = [["X", "NV18"], ["NV18", "X"]]
    base, head = _machine(gpus=_gpus(), topology=links), _machine(gpus=_gpus())
    assert hardware_differences(base, head, "cuda") == []
    assert software_differences(base, head) == ["topology 1 x NV18 -> unknown"]
    assert software_differences(head, head) == []


def test_two_tests_of_one_case_are_held_against_themselves() -> None:
    """Leaving the first test out does not put the second in its place; a test that was renamed is found by its case."""
    base = [_named("mp-bs1"), _named("mp-bs1#2")]
    head = [_named("mp-bs1")]
    base[0].nodeid, base[1].nodeid, head[0].nodeid = "test_a", "test_b", "test_b"
    assert [(pair.base, pair.head) for pair in pairs(base, head)] == [(base[1], head[0]), (base[0], None)]
    head[0].nodeid = "test_renamed"
    assert [(pair.base, pair.head) for pair in pairs(base, head)] == [(base[0], head[0]), (base[1], None)]
