from __future__ import annotations

import os

import msgspec
import pytest
import torch
from support.report_factory import make_case
from torch import distributed

from pytest_llmgpu.strategies import process_group

_CASE = make_case(strategy="tp", device="cpu", devices=2)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is no rank, before the test and after it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LLMGPU_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize(("started", "needed"), [(None, 2), ("1", 2), ("4", 2), ("2", 1)])
def test_a_wrong_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, started: str | None, needed: int) -> None:
    """The message has both numbers and the command that starts the right number."""
    if started is not None:
        monkeypatch.setenv("WORLD_SIZE", started)
    message = rf"^tp-bs1 needs {needed} ranks?, but {started or 1} (was|were) started: .*--nproc-per-node={needed}$"
    with pytest.raises(ValueError, match=message):
        process_group.join(msgspec.structs.replace(_CASE, devices=needed))
    assert not distributed.is_initialized()


def test_a_single_rank_joins_no_group() -> None:
    """One device needs no process group."""
    member = process_group.join(msgspec.structs.replace(_CASE, devices=1))
    assert member == (torch.device("cpu"), 0, 1)
    assert not distributed.is_initialized()


def test_ranks_meet_through_the_file_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group on a CPU has the file, the number of the rank and the number of ranks, and uses gloo."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LLMGPU_RENDEZVOUS", "/a/file")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    opened, groups = _record(monkeypatch)
    assert process_group.join(_CASE) == (torch.device("cpu"), 1, 2)
    assert opened == [("/a/file", 2)]
    (group,) = groups
    assert (group["backend"], group["rank"], group["world_size"]) == ("gloo", 1, 2)
    assert group["store"] == ("/a/file", 2)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "the name of the host may not resolve"


def test_without_a_file_ranks_meet_as_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a store torch reads MASTER_ADDR and MASTER_PORT."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    opened, groups = _record(monkeypatch)
    process_group.join(_CASE)
    assert opened == []
    assert groups[0]["store"] is None


def test_a_rank_uses_the_gpu_of_its_number_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects to that GPU at once."""
    for name, value in (("RANK", "9"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "16")):
        monkeypatch.setenv(name, value)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    _, groups = _record(monkeypatch)
    own = torch.device("cuda", 1)
    assert process_group.join(msgspec.structs.replace(_CASE, device="cuda", devices=16)) == (own, 9, 16)
    assert chosen == [own]
    assert (groups[0]["backend"], groups[0]["device_id"]) == ("nccl", own)


def _record(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, int]], list[dict[str, object]]]:
    """Record the files that torch opens and the groups that it starts."""
    opened: list[tuple[str, int]] = []
    groups: list[dict[str, object]] = []

    def open_store(path: str, world_size: int) -> tuple[str, int]:
        opened.append((path, world_size))
        return opened[-1]

    monkeypatch.setattr("torch._C._distributed_c10d.FileStore", open_store)
    monkeypatch.setattr(distributed, "init_process_group", lambda **named: groups.append(named))
    return opened, groups
