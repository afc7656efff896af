from __future__ import annotations

import os
from unittest.mock import Mock

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
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # what a test sets ends with it
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LLMGPU_RENDEZVOUS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


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


@pytest.mark.parametrize(
    ("device", "variables", "backend", "store"),
    [
        ("cpu", {"RANK": "1", "WORLD_SIZE": "2", "LLMGPU_RENDEZVOUS": "/a/file"}, "gloo", ("/a/file", 2)),
        ("cpu", {"RANK": "1", "WORLD_SIZE": "2"}, "gloo", None),  # torch reads MASTER_ADDR and MASTER_PORT
        ("cuda:1", {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, "nccl", None),
    ],
)
def test_ranks_meet_through_the_file_of_the_launcher_or_as_torchrun_sets(
    monkeypatch: pytest.MonkeyPatch, device: str, variables: dict[str, str], backend: str, store: tuple[str, int] | None
) -> None:
    """The group has the number of the rank and the number of ranks; NCCL connects to the GPU of the rank at once."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    open_store, chosen, start = Mock(side_effect=lambda *given: given), Mock(), Mock()
    monkeypatch.setattr("torch._C._distributed_c10d.FileStore", open_store)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    monkeypatch.setattr(distributed, "init_process_group", start)
    own, rank, size = torch.device(device), int(variables["RANK"]), int(variables["WORLD_SIZE"])
    assert process_group.join(msgspec.structs.replace(_CASE, device=own.type, devices=size)) == (own, rank, size)
    group = start.call_args.kwargs
    assert (group["backend"], group["rank"], group["world_size"], group["store"]) == (backend, rank, size, store)
    assert open_store.call_count == (store is not None)
    if own.type == "cuda":
        chosen.assert_called_once_with(own)
        assert group["device_id"] == own
    else:
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "the name of the host may not resolve"
