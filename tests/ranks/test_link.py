from __future__ import annotations

from collections.abc import Callable

import pytest
from support.worlds import KEY, srun, torchrun

from pytest_llmgpu.ranks import link


def test_torchrun_sets_rank_and_address() -> None:
    """Rank 0 listens on the port after that of torch's own store; processes of one machine need no secret."""
    found = link.of_environment(torchrun(3, 4, per_node=2))
    assert (found.rank, found.size, found.local_rank, found.node) == (3, 4, 1, 1)
    assert (found.address, found.port, found.key) == ("127.0.0.1", 29501, KEY.encode())
    # On one machine the kernel names the user at the other end.
    assert link.of_environment(torchrun(1, 2, per_node=2)).key is None
    assert link.of_environment({**srun(1, 2, per_node=2), "LLMGPU_KEY": ""}).key is None


def test_without_a_number_of_the_node_each_has_its_share_of_the_ranks() -> None:
    """A job that is no torchrun may set four variables only."""
    variables = torchrun(5, 6, per_node=2)
    del variables["GROUP_RANK"]
    assert link.of_environment(variables).node == 2
    del variables["LOCAL_WORLD_SIZE"], variables["LOCAL_RANK"]
    found = link.of_environment(variables)
    assert (found.node, found.local_rank) == (5, 0)


def test_slurm_sets_rank_and_nodes() -> None:
    """The first node of the step has rank 0, and the numbers of job and step give the port."""
    found = link.of_environment(srun(3, 4, per_node=2))
    assert (found.rank, found.size, found.local_rank, found.node) == (3, 4, 1, 1)
    assert found.port == 20_000 + 4711 * 31 % 12_000
    other = link.of_environment({**srun(3, 4, per_node=2), "SLURM_STEP_ID": "1"})
    assert other.port == found.port + 1, "two steps of a job may run at the same time"
    assert link.of_environment({**srun(0, 2, per_node=1), "MASTER_ADDR": "10.0.0.1"}).address == "10.0.0.1"


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node7", "node7"),
        ("node[01-03,07]", "node01"),
        ("node[1,3],other[2-4]", "node1"),
        ("login,node[1-2]", "login"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("node[01-02]-ib,x", "node01-ib"),
    ],
)
def test_rank_0_is_on_the_first_host_of_a_list(nodelist: str, first: str) -> None:
    """Slurm writes ranges in brackets, with leading zeros."""
    variables = {**srun(3, 4, per_node=2), "SLURM_STEP_NODELIST": nodelist}
    assert link.of_environment(variables).address == first


@pytest.mark.parametrize(
    ("starter", "changed", "message"),
    [
        (torchrun, {"RANK": None}, "neither RANK and WORLD_SIZE nor SLURM_PROCID"),
        (torchrun, {"WORLD_SIZE": None}, "^WORLD_SIZE is not set"),
        (torchrun, {"WORLD_SIZE": "0"}, "WORLD_SIZE='0': .* at least 1"),
        (torchrun, {"RANK": "two"}, "RANK='two'"),
        (torchrun, {"RANK": "-1"}, "RANK='-1': .* from 0 to 3"),
        (torchrun, {"RANK": "4"}, "RANK='4': .* from 0 to 3"),
        (torchrun, {"LOCAL_RANK": "2"}, "LOCAL_RANK='2': .* from 0 to 1"),
        (torchrun, {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE='5': .* from 1 to 4"),
        (torchrun, {"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        (torchrun, {"MASTER_PORT": None}, "^MASTER_PORT is not set"),
        (torchrun, {"MASTER_PORT": "65535"}, "^MASTER_PORT='65535': .* from 0 to 65534"),
        (torchrun, {"LLMGPU_PORT": "0"}, "^LLMGPU_PORT='0'"),
        (torchrun, {"LLMGPU_KEY": None}, "LLMGPU_KEY is not set"),
        (torchrun, {"LLMGPU_KEY": "short"}, "LLMGPU_KEY has 5 bytes"),
        (torchrun, {"LLMGPU_KEY": "aaaaaaaaaaaaaaaa"}, "LLMGPU_KEY has 16 bytes, 1 of them different"),
        (srun, {"SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": None}, "SLURM_NTASKS is not set"),
        (srun, {"SLURM_PROCID": "4"}, "SLURM_PROCID='4': .* from 0 to 3"),
        (srun, {"SLURM_LOCALID": "4"}, "SLURM_LOCALID='4': .* from 0 to 3"),
        (srun, {"SLURM_STEP_NODELIST": "n[01-02"}, r"SLURM_STEP_NODELIST='n\[01-02'"),
        (srun, {"SLURM_STEP_NODELIST": "n1,"}, "SLURM_STEP_NODELIST='n1,'"),
        (srun, {"SLURM_STEP_NODELIST": None}, "MASTER_ADDR is not set"),
    ],
)
def test_bad_variables_are_refused_in_one_line(
    starter: Callable[..., dict[str, str]], changed: dict[str, str | None], message: str
) -> None:
    """The message has the variable by the name that its starter gives it and its value, but never a secret."""
    variables = {**starter(1, 4, per_node=2), **changed}
    with pytest.raises(ValueError, match=message) as caught:
        link.of_environment({name: value for name, value in variables.items() if value is not None})
    assert "\n" not in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("short", "aaaa"))


def test_port_and_address_have_their_sources() -> None:
    """Messages show where to change them."""
    torch, slurm = torchrun(1, 4, per_node=2), srun(1, 4, per_node=2)
    assert link.of_environment(torch).where == "port 29501 (MASTER_PORT + 1) of 127.0.0.1 (MASTER_ADDR)"
    changed = link.of_environment({**torch, "LLMGPU_PORT": "4000"})
    assert changed.where == "port 4000 (LLMGPU_PORT) of 127.0.0.1 (MASTER_ADDR)"
    assert "(by SLURM_JOB_ID) of localhost (first of SLURM_STEP_NODELIST)" in link.of_environment(slurm).where
    assert (changed.size_name, link.of_environment(slurm).size_name) == ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
