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
    """This process is no rank of anything, and is none afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LLMGPU_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize(("started", "needed"), [(None, 2), ("1", 2), ("4", 2), ("2", 1)])
def test_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, started: str | None, needed: int) -> None:
    """Too few would wait for ever; the message has the command that starts as many as are needed."""
    if started is not None:
        monkeypatch.setenv("WORLD_SIZE", started)
    message = (
        rf"^tp-bs1 needs {needed} ranks, and {started or 1} were started: "
        rf"torchrun --nproc-per-node={needed} .*starts as many$"
    )
    with pytest.raises(ValueError, match=message):
        process_group.join(msgspec.structs.replace(_CASE, devices=needed))
    assert not distributed.is_initialized()


def test_a_rank_without_siblings_joins_nobody() -> None:
    """One device needs no process group, and no library that has none."""
    seat = process_group.join(msgspec.structs.replace(_CASE, devices=1))
    assert seat == (torch.device("cpu"), 0, 1)
    assert not distributed.is_initialized()


def test_ranks_meet_in_the_launchers_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """No port is taken: the file, the number of the rank and the count make the group, over gloo on a CPU."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LLMGPU_RENDEZVOUS", "/a/file")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    opened, begun = _record(monkeypatch)
    assert process_group.join(_CASE) == (torch.device("cpu"), 1, 2)
    assert opened == [("/a/file", 2)]
    (group,) = begun
    assert (group["backend"], group["rank"], group["world_size"]) == ("gloo", 1, 2)
    assert group["store"] == ("/a/file", 2)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "the name of the host need not resolve"


def test_without_a_file_they_meet_where_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads MASTER_ADDR and MASTER_PORT itself where it is given no store."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    opened, begun = _record(monkeypatch)
    process_group.join(_CASE)
    assert opened == []
    assert begun[0]["store"] is None


def test_a_group_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is in one already, as a user's own launcher may leave it, stays there."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, begun = _record(monkeypatch)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    assert process_group.join(_CASE) == (torch.device("cpu"), 0, 2)
    assert begun == []


def test_a_rank_on_gpus_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number on the node, over NCCL, which connects to that device at once."""
    for name, value in (("RANK", "9"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "16")):
        monkeypatch.setenv(name, value)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    _, begun = _record(monkeypatch)
    own = torch.device("cuda", 1)
    assert process_group.join(msgspec.structs.replace(_CASE, device="cuda", devices=16)) == (own, 9, 16)
    assert chosen == [own]
    assert (begun[0]["backend"], begun[0]["device_id"]) == ("nccl", own)


def _record(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, int]], list[dict[str, object]]]:
    """Have torch write down what it is asked for: which files are opened, which groups begun."""
    opened: list[tuple[str, int]] = []
    begun: list[dict[str, object]] = []

    def open_store(path: str, world_size: int) -> tuple[str, int]:
        opened.append((path, world_size))
        return opened[-1]

    monkeypatch.setattr("torch._C._distributed_c10d.FileStore", open_store)
    monkeypatch.setattr(distributed, "init_process_group", lambda **named: begun.append(named))
    return opened, begun
