from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support import traffic_functions as ranks
from support.report_factory import make_case
from support.request_factory import make_prompts
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from pytest_llmgpu.inference import batching, scoring
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.ranks import graph_choice, traffic, worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.report.result import Collective, CollectiveKind
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import Loaded

_CASE = make_case(strategy="tp", backend="transformers", model="bundled", dtype="float32", device="cpu", devices=2)
_NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")
_TP, _IOK = "support.rank_functions:UncompiledTensorParallel", "support.emulated_iok:EmulatedInjection"
_LAYERS, _HIDDEN, _ELEMENT = 2, 256, 4


def _one(kind: CollectiveKind, payload_bytes: int, wire_bytes: int, calls: int = 1) -> Collective:
    return Collective(collective=kind, calls=calls, payload_bytes=payload_bytes, wire_bytes=wire_bytes)


@pytest.fixture(scope="module")
def four() -> Iterator[None]:
    """This process is rank 1 of 4; the others do not exist, and data for them is dropped."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


def _world() -> Any:
    return distributed.group.WORLD


def _redistribute(tensor: torch.Tensor) -> None:
    mesh = init_device_mesh("cpu", (4,))
    DTensor.from_local(tensor, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local() + 1


def _need_the_sum(tensor: torch.Tensor) -> None:
    torch.relu(DTensor.from_local(tensor, init_device_mesh("cpu", (4,)), [Partial()]))


def _send_and_receive(tensor: torch.Tensor) -> None:
    sent, received = (distributed.isend, tensor, 2), (distributed.irecv, torch.empty(2), 0)
    for work in distributed.batch_isend_irecv([distributed.P2POp(*sent), distributed.P2POp(*received)]):
        work.wait()


def _reduced(tensor: torch.Tensor) -> torch.Tensor:
    reduced: torch.Tensor = functional.all_reduce(tensor, "sum", _world())
    return reduced


# 24 floats in 4 ranks: 96 bytes.
_KNOWN: dict[str, tuple[Callable[[torch.Tensor], object], list[Collective]]] = {
    "all_reduce": (distributed.all_reduce, [_one("all_reduce", 96, 144)]),
    "two all_reduces": (
        lambda tensor: (distributed.all_reduce(tensor), distributed.all_reduce(tensor[:12])),
        [_one("all_reduce", 96 + 48, 144 + 72, calls=2)],
    ),
    "all_gather": (lambda tensor: distributed.all_gather([torch.empty(24)] * 4, tensor), [_one("all_gather", 96, 288)]),
    "reduce_scatter": (
        lambda tensor: distributed.reduce_scatter(torch.empty(6), list(tensor.split(6))),
        [_one("reduce_scatter", 96, 72)],
    ),
    "broadcast": (lambda tensor: distributed.broadcast(tensor, src=0), [_one("broadcast", 96, 96)]),
    "broadcast that ends here": (lambda tensor: distributed.broadcast(tensor, src=2), [_one("broadcast", 96, 0)]),
    "functional broadcast": (lambda tensor: functional.broadcast(tensor, 2, _world()) + 1, [_one("broadcast", 96, 0)]),
    "send": (lambda tensor: distributed.send(tensor, 2), [_one("send", 96, 96)]),
    "receive": (lambda tensor: distributed.recv(tensor, 2), [_one("recv", 96, 96)]),
    "send and receive": (_send_and_receive, [_one("send", 96, 96), _one("recv", 8, 8)]),
    "all_to_all": (lambda tensor: distributed.all_to_all_single(torch.empty(24), tensor), [_one("all_to_all", 96, 72)]),
    "uneven all_to_all": (
        lambda tensor: distributed.all_to_all_single(torch.empty(24), tensor, [6] * 4, [0, 18, 6, 0]),
        [_one("all_to_all", 96, 24)],
    ),
    "all_to_all of a list": (
        lambda tensor: distributed.all_to_all(
            list(torch.empty(24).split([1, 12, 11, 0])), list(tensor.split([1, 12, 11, 0]))
        ),
        [_one("all_to_all", 96, 48)],
    ),
    "functional all_reduce": (lambda tensor: _reduced(_reduced(tensor)) + 1, [_one("all_reduce", 192, 288, calls=2)]),
    "coalesced": (
        lambda tensor: [one + 1 for one in functional.all_reduce_coalesced([tensor, tensor[:1]], "sum", _world())],
        [_one("all_reduce", 100, 150)],
    ),
    "redistribution": (_redistribute, [_one("all_reduce", 96, 144)]),
    "op on parts of a sum": (_need_the_sum, [_one("all_reduce", 96, 144)]),
    "barrier": (lambda _tensor: distributed.barrier(), []),
    "computation": (lambda tensor: tensor.to(torch.float16) @ tensor.half(), []),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")
@pytest.mark.parametrize("inference", [True, False], ids=["inference mode", "autograd"])
@pytest.mark.parametrize("name", _KNOWN)
@pytest.mark.usefixtures("four")
def test_known_collectives_are_counted(name: str, inference: bool) -> None:
    """Payload and wire bytes are the expected ones, with and without autograd."""
    call, expected = _KNOWN[name]
    with torch.inference_mode(inference):
        tensor = torch.ones(24)
        assert traffic.count(lambda: call(tensor), world_size=4) == expected


# Rank 1 of 4; the next rank of the ring is 2.
_BETWEEN: dict[str, dict[str, int]] = {
    "0,0,1,1": {
        "all_reduce": 144,
        "all_gather": 288,
        "reduce_scatter": 72,
        "broadcast": 96,
        "broadcast that ends here": 0,
        "send": 96,
        "receive": 0,
        "all_to_all": 48,
        "uneven all_to_all": 24,
        "all_to_all of a list": 44,
        "redistribution": 144,
    },
    "0,1,1,0": {"all_reduce": 0, "broadcast": 0, "send": 0, "all_to_all": 48, "uneven all_to_all": 0},
    "0,1,0,1": {"all_reduce": 144, "send": 96, "all_to_all": 48, "all_to_all of a list": 48},
}


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")
@pytest.mark.parametrize(("nodes", "name"), [(nodes, name) for nodes, names in _BETWEEN.items() for name in names])
@pytest.mark.usefixtures("four")
def test_bytes_between_nodes_go_to_other_nodes(nodes: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other figures are the same as on one node."""
    monkeypatch.setenv(traffic.NODES, nodes)
    call, expected = _KNOWN[name]
    with torch.inference_mode():
        tensor = torch.ones(24)
        counted = traffic.count(lambda: call(tensor), world_size=4)
    assert [msgspec.structs.replace(one, between_nodes_bytes=None) for one in counted] == expected
    assert sum(one.between_nodes_bytes or 0 for one in counted) == _BETWEEN[nodes][name]
    assert None not in [one.between_nodes_bytes for one in counted]


@pytest.mark.parametrize(
    ("members", "wire", "between"), [([1, 3], 96, 0), ([1, 2], 96, 96), ([0, 1], 96, 96), ([1], 0, 0)]
)
@pytest.mark.usefixtures("four")
def test_the_ring_is_that_of_the_group(
    members: list[int], wire: int, between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group on one node sends nothing to others, and a single rank nothing at all; ranks are counted in the group."""
    monkeypatch.setenv(traffic.NODES, "0,1,0,1")
    group, tensor = distributed.new_group(members), torch.ones(24)
    [one] = traffic.count(lambda: distributed.all_reduce(tensor, group=group), world_size=4)
    assert traffic.count(lambda: functional.all_reduce(tensor, "sum", group) + 1, world_size=4) == [one]
    assert (one.payload_bytes, one.wire_bytes, one.between_nodes_bytes) == (96, wire, between)


@pytest.mark.usefixtures("four")
def test_an_unknown_op_is_an_error_and_is_not_run() -> None:
    """The message has the known ops of its namespace. After a transfer the others would wait for the next one."""
    ran: list[torch.Tensor] = []
    library = torch.library.Library("symm_mem", "FRAGMENT")
    library.define("notify_all(Tensor self) -> ()")
    library.impl("notify_all", ran.append, "CPU")
    tensor = torch.ones(2)
    with pytest.raises(ValueError, match=r"^symm_mem::notify_all: .*: none$"):
        traffic.count(lambda: torch.ops.symm_mem.notify_all(tensor), world_size=4)
    assert ran == []
    with pytest.raises(ValueError, match=r"^c10d::reduce_: .*: c10d::"):
        traffic.count(lambda: distributed.reduce(tensor, 0), world_size=4)


def test_every_known_op_of_torch_has_its_payload_argument() -> None:
    """A release of torch that renames an argument fails this test."""
    there = {schema.name: schema for schema in torch._C._jit_get_all_schemas()}
    assert {"c10d::allreduce_", "_c10d_functional::all_gather_into_tensor"} <= set(traffic.KINDS) & set(there)
    for op in traffic.KINDS.keys() & there.keys():
        assert len({one.name for one in there[op].arguments}.intersection(traffic.PAYLOADS)) == 1, op


@pytest.mark.parametrize("inference", [True, False], ids=["inference mode", "autograd"])
def test_copies_between_devices_are_counted(inference: bool) -> None:
    """Copies on a device or from the host do not count; the dtype of the source decides the bytes."""
    with FakeTensorMode(), torch.inference_mode(inference):
        first, second, host = (torch.empty(10, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
        assert traffic.count(lambda: first.to("cuda:1"), world_size=1) == [_one("peer_copy", 40, 40)]
        assert traffic.count(lambda: second.to("cuda:1", copy=True), world_size=1) == []
        assert traffic.count(lambda: host.to("cuda:1"), world_size=1) == []
        half, copy = first.half(), torch.ops.aten.copy_.default  # Tensor.copy_ of a torch without CUDA refuses
        assert traffic.count(lambda: copy(second, half), world_size=1) == [_one("peer_copy", 20, 20)]
        assert traffic.count(lambda: copy(second, second), world_size=1) == []


def _run(group: RankGroup, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return group.ask(worker.call, fn, args, phase="forward", timeout_s=300)


def _assert_plan_is_its_batches(group: RankGroup, logits: str) -> list[Collective]:
    """Check that the traffic of the plan is the sum over its batches; return it."""
    first, second = _run(group, ranks.of_plan, logits)
    assert first == second
    batches = _run(group, ranks.of_each_batch, logits)[0]
    summed = [
        _one(
            same[0].collective,
            sum(one.payload_bytes for one in same),
            sum(one.wire_bytes for one in same),
            calls=sum(one.calls for one in same),
        )
        for same in zip(*batches, strict=True)
    ]
    assert first == summed
    return summed


def _hidden(vocabulary: int = 0) -> tuple[int, int]:
    """Return bytes of the plan's hidden states, and of the logits of the tokens that it predicts."""
    plan = ranks.make_plan()
    tokens = sum(batch.padded_tokens for batch in plan.batches)
    predicted = sum(batch.predicted for batch in plan.batches)
    return tokens * _HIDDEN * _ELEMENT, predicted * vocabulary * _ELEMENT


@pytest.mark.slow
@pytest.mark.parametrize("scored", scoring.SCORINGS)
@pytest.mark.parametrize(
    ("place", "strategy", "backend", "reductions"),
    [
        (_TP, "tp", "transformers", 2 * _LAYERS + 1),
        pytest.param(_TP, "tp", "deepspeed", 2 * _LAYERS, marks=_NEEDS_DEEPSPEED),
        pytest.param(_IOK, "iok", "deepspeed", 2 * _LAYERS, marks=_NEEDS_DEEPSPEED),
    ],
)
def test_each_strategy_sends_hidden_states_and_logits(
    gloo_pair: RankGroup, bundled: ModelSource, place: str, strategy: str, backend: str, reductions: int, scored: str
) -> None:
    """Two all-reduces per layer; transformers adds one of the embedding and gathers logits, AutoTP sums its logits."""
    case = msgspec.structs.replace(_CASE, load_format=bundled.load_format, strategy=strategy, backend=backend)
    gloo_pair.ask(worker.load, case, bundled, place, phase="load", timeout_s=300)
    found = _assert_plan_is_its_batches(gloo_pair, scored)
    plan, vocabulary = ranks.make_plan(), bundled.config["vocab_size"]
    hidden, logits = _hidden(vocabulary)
    if scored == scoring.HARNESS:
        logits = sum(batch.padded_tokens for batch in plan.batches) * vocabulary * _ELEMENT
    size, calls = reductions * hidden, reductions * len(plan.batches)
    gathered = []
    if backend == "transformers":
        gathered = [_one("all_gather", logits // 2, logits // 2, calls=len(plan.batches))]
    elif strategy == "tp":
        size, calls = size + logits, calls + len(plan.batches)
    assert found == [_one("all_reduce", size, size, calls=calls), *gathered]
    if (strategy, backend, scored) == ("tp", "deepspeed", scoring.LEAN):
        gloo_pair.ask(ranks.reduce_through_shared_memory, phase="forward", timeout_s=300)
        try:
            assert _assert_plan_is_its_batches(gloo_pair, scored) == found
        finally:
            gloo_pair.ask(ranks.reduce_through_the_group, phase="forward", timeout_s=300)


def test_ranks_without_traffic_are_an_error() -> None:
    """A model that each rank holds as a whole must not be measured as a split one."""
    with pytest.raises(ValueError, match="rank 1 of 2"):
        traffic.check([[_one("all_reduce", 40, 40)], []])
    traffic.check([[]])
    traffic.check([[_one("all_reduce", 40, 40)]] * 2)


@pytest.mark.parametrize("logits", scoring.SCORINGS)
def test_copies_of_accelerate_are_counted(monkeypatch: pytest.MonkeyPatch, bundled: ModelSource, logits: str) -> None:
    """Hidden states move once, rotary tables to every layer, by the row length only; on one device nothing moves."""
    alone = LayerParallel().load(msgspec.structs.replace(_CASE, strategy="mp", devices=1), bundled)
    assert ranks.of_plan(alone) == []
    model: Any = alone.model
    second = {"model.layers.1": "meta", "model.norm": "meta", "lm_head": "meta"}
    for name, device in second.items():
        module = model.get_submodule(name).to(device)
        # As in mp, the KV cache stays on the device of its layer.
        add_hook_to_module(module, AlignDevicesHook(execution_device=device, skip_keys="past_key_values"))
    # The meta device, which computes nothing, stands for a second GPU.
    monkeypatch.setattr(traffic, "between_gpus", lambda source, target: source != target)
    cpu = torch.device("cpu")
    loaded = Loaded(model=model, config=model.config, input_device=cpu, devices=(cpu,))
    (copies,) = ranks.of_plan(loaded, logits)
    each = [ranks.of_batch(loaded, batch, logits)[0] for batch in ranks.make_plan().batches]
    assert copies.collective == "peer_copy"
    assert copies.calls == sum(one.calls for one in each)
    assert copies.payload_bytes == copies.wire_bytes == sum(one.payload_bytes for one in each)
    assert _hidden()[0] < copies.payload_bytes < 2 * _hidden()[0]


@pytest.mark.usefixtures("four")
def test_prompts_that_share_lines_send_less(bundled: ModelSource) -> None:
    """What is computed for a generation from small forwards is what it sends."""
    loaded = LayerParallel().load(msgspec.structs.replace(_CASE, strategy="mp", devices=1), bundled)
    loaded.model.register_forward_pre_hook(
        lambda _model, _arguments, named: distributed.all_reduce(torch.ones(named["input_ids"].numel())),
        with_kwargs=True,
    )
    prompts = make_prompts([range(2, 2 + length) for length in (30, 3, 9, 12, 7, 4)], max_length=32, new_tokens=3)
    tokens = []
    for pack in (False, True):
        plan = batching.plan(prompts, 3, pack=pack)
        computed, _ = traffic.of_generation(loaded, plan)
        with graph_choice.generator(loaded, plan) as generator:
            assert computed == traffic.count(generator.generate, world_size=4)
        tokens.append(sum(batch.padded_tokens for batch in plan.batches))
    assert tokens == [3 * 30 + 3 * 7, 56 + 16]


@pytest.mark.usefixtures("four")
def test_small_forwards_are_counted_once(bundled: ModelSource) -> None:
    """Another plan of the same model runs its smallest batch alone, which shows where the model was changed."""
    loaded = LayerParallel().load(msgspec.structs.replace(_CASE, strategy="mp", devices=1), bundled)
    ran, sent = [], [1]

    def send(_model: object, _arguments: object, named: dict[str, Any]) -> None:
        ran.append(named["input_ids"].shape)
        distributed.all_reduce(torch.ones(sent[0] * named["input_ids"].numel()))

    loaded.model.register_forward_pre_hook(send, with_kwargs=True)
    plan = ranks.make_plan()
    counted: traffic.Counted = {}
    once = traffic.of_plan(loaded, plan, counted=counted)
    assert (len(ran), traffic.of_plan(loaded, plan, counted=counted), len(ran)) == (6, once, 7)
    sent[0] = 2
    with pytest.raises(ValueError, match="but smaller forwards predict"):
        traffic.of_plan(loaded, plan, counted=counted)
    assert ran[-1:] == [plan.batches[-1].shape]


@pytest.mark.usefixtures("four")
def test_traffic_that_depends_on_more_is_an_error(bundled: ModelSource) -> None:
    """A wrong prediction for the smallest batch is refused."""
    loaded = LayerParallel().load(msgspec.structs.replace(_CASE, strategy="mp", devices=1), bundled)

    def send_square(_model: object, _arguments: object, named: dict[str, Any]) -> None:
        rows, width = named["input_ids"].shape
        distributed.all_reduce(torch.ones(rows * width**2))

    loaded.model.register_forward_pre_hook(send_square, with_kwargs=True)
    with pytest.raises(ValueError, match=r"the traffic of 2 rows of \d+ tokens .* 1 all_reduce of \d+ bytes, but"):
        ranks.of_plan(loaded)
