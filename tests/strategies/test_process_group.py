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


_CPU, _SECOND_GPU = torch.device("cpu"), torch.device("cuda", 1)
_FILE = ("/a/file", 2)


@pytest.mark.parametrize(
    ("device", "variables", "member", "group"),
    [
        (
            "cpu",
            {"RANK": "1", "WORLD_SIZE": "2", "LLMGPU_RENDEZVOUS": "/a/file"},
            (_CPU, 1, 2),
            {"backend": "gloo", "rank": 1, "world_size": 2, "store": _FILE},
        ),
        # Without a store torch reads MASTER_ADDR and MASTER_PORT.
        ("cpu", {"WORLD_SIZE": "2"}, (_CPU, 0, 2), {"store": None}),
        # NCCL connects to that GPU at once.
        (
            "cuda",
            {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"},
            (_SECOND_GPU, 9, 16),
            {"backend": "nccl", "device_id": _SECOND_GPU},
        ),
    ],
    ids=["file of the launcher", "as torchrun sets", "GPU of its number on the node"],
)
def test_ranks_meet(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    variables: dict[str, str],
    member: tuple[torch.device, int, int],
    group: dict[str, object],
) -> None:
    """The group has the file, the number of the rank and the number of ranks; a rank uses the GPU of its number."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    opened, chosen, groups = Mock(side_effect=lambda *given: given), Mock(), Mock()
    monkeypatch.setattr("torch._C._distributed_c10d.FileStore", opened)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    monkeypatch.setattr(distributed, "init_process_group", groups)
    case = msgspec.structs.replace(_CASE, device=device, devices=member[2])
    assert process_group.join(case) == member
    assert groups.call_args.kwargs.items() >= group.items()
    assert opened.call_count == ("LLMGPU_RENDEZVOUS" in variables)
    if device == "cuda":
        chosen.assert_called_once_with(_SECOND_GPU)
    else:
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "the name of the host may not resolve"
