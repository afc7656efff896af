"""What only real hardware shows: `pytest tests/gpu -m gpu` on a machine with at least one GPU."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from support.report_factory import make_case

from pytest_llmgpu import strategies
from pytest_llmgpu.analysis import reference
from pytest_llmgpu.inference import cuda_graphs as graphs
from pytest_llmgpu.inference import models, tasks
from pytest_llmgpu.inference.bundled.tokenizer import save_tokenizer
from pytest_llmgpu.inference.cuda_graphs import GraphedDecoder
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.ranks import device_memory, worker
from pytest_llmgpu.ranks.device_memory import DeviceUse
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import LocalLauncher
from pytest_llmgpu.ranks.worker import RankState, ScoreReply
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, typical_difference
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.strategies.deepspeed import kernels
from pytest_llmgpu.strategies.protocol import Loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here"),
]

_GIB = 2**30
_BENCHMARK = """
    def test_hellaswag(llm, hellaswag, batch_size, measure):
        measure(llm, hellaswag, batch_size)
"""
_ITEMS = 40
_FEW = 3
"""Of 40 items, how many may flip where float16 is rounded otherwise."""
_WAIT_S = 300.0
_TOLERANCE = LOGLIKELIHOOD_TOLERANCES["float16"]
_DUMMY = ("--llmgpu-model=llama-7b", "--llmgpu-load-format=dummy", "--llmgpu-limit=32")


def _run(pytester: pytest.Pytester, *arguments: str) -> tuple[pytest.RunResult, Report]:
    pytester.makepyfile(test_it=_BENCHMARK)
    result = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider", *arguments)
    return result, file.load(pytester.path / ".llmgpu" / "last.json")


def test_held_memory_leaves_the_cap(pytester: pytest.Pytester) -> None:
    """After a hold, what the device has free or in use by us is the cap, and torch counts none of it."""
    pytester.makepyfile(
        hold="""
        import json, sys, torch
        from pytest_llmgpu.ranks import device_memory
        device = torch.device("cuda", 0)
        held = device_memory.hold([device], 8 * 2**30)
        free, total = torch.cuda.mem_get_info(device)
        print(json.dumps([held[0], free, total, torch.cuda.memory_allocated(device)]))
        """
    )
    held, free, total, counted = json.loads(pytester.runpython(pytester.path / "hold.py").stdout.str())
    assert held == total - 8 * _GIB
    assert 6 * _GIB < free < 8 * _GIB
    assert counted == 0


def test_a_gpu_is_profiled_while_it_works(pytester: pytest.Pytester) -> None:
    """Every quantity of the profile has a reading on real hardware, in sensible bounds."""
    result, written = _run(pytester, *_DUMMY, "--llmgpu-devices=1", "--llmgpu-batch-sizes=1")
    assert result.ret == 0
    profile = written.cases[0].launches[0].profile
    assert profile is not None
    assert profile.missed == 0
    (device,) = profile.devices
    (gpu,) = (gpu for gpu in written.environment.gpus if gpu.index == device.index)
    assert set(device.why) <= (set() if gpu.nvlinks else {"nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"})
    highest = {name: metric.max for name, metric in device.metrics.items()}
    assert set(highest) >= {"utilization_pct", "memory_used_bytes", "pcie_tx_bytes_per_s", "power_w", "sm_clock_mhz"}
    assert 0 < (highest["utilization_pct"] or 0) <= 100
    assert 12 * _GIB < (highest["memory_used_bytes"] or 0) < 40 * _GIB
    (use,) = written.cases[0].launches[0].memory
    assert 12 * _GIB < (use.weights_bytes or 0) < (use.peak_allocated_bytes or 0) < 20 * _GIB


def test_a_cap_puts_out_of_memory_inside_the_list(pytester: pytest.Pytester) -> None:
    """Large batch sizes run out of memory as on a small card, and the held bytes are no use of ours."""
    flags = ("--llmgpu-devices=1", "--llmgpu-batch-sizes=1,2,128", "--llmgpu-gpu-memory=13.75GiB")
    result, written = _run(pytester, *_DUMMY, *flags)
    assert result.ret == 0
    assert [case.outcome for case in written.cases] == ["completed", "completed", "oom"]
    (use,) = written.cases[0].launches[0].memory
    assert use.held_bytes > 0
    assert (use.nvml_used_max_bytes or 0) < 14 * _GIB
    failure = written.cases[2].failure
    assert failure is not None
    assert failure.evidence


def test_the_largest_batch_that_fits_is_found(pytester: pytest.Pytester) -> None:
    """Two neighbours, of which one fits and one does not, near to what the smaller sizes predict."""
    flags = ("--llmgpu-devices=1", "--llmgpu-batch-sizes=1,2,4,128", "--llmgpu-gpu-memory=13.75GiB")
    result, written = _run(pytester, *_DUMMY, *flags, "--llmgpu-find-max-batch", "--llmgpu-cuda-graphs=off")
    assert result.ret == 0
    (found,) = written.capacity
    assert found.largest_fit is not None
    assert found.smallest_oom == found.largest_fit + 1
    assert found.prediction is not None
    # Of so little room as there is beside the weights here torch leaves a fifth in the gaps of its segments.
    assert 0.7 * found.prediction.max_batch_size <= found.largest_fit <= 1.05 * found.prediction.max_batch_size


def test_memory_is_the_same_alone_and_in_the_sweep(pytester: pytest.Pytester) -> None:
    """What smaller batch sizes have left behind is no memory of a larger one."""
    peaks = []
    for sizes in ("1,2,8", "8"):
        _, written = _run(pytester, *_DUMMY, "--llmgpu-devices=1", f"--llmgpu-batch-sizes={sizes}")
        (use,) = written.cases[-1].launches[0].memory
        peaks.append((use.peak_allocated_bytes, written.cases[-1].case.execution))
    assert peaks[0] == peaks[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_what_went_over_nvlink_is_what_the_program_sent(pytester: pytest.Pytester) -> None:
    """The links' own counters agree with the exact account within 1 %."""
    _, written = _run(pytester, *_DUMMY, "--strategy=tp", "--llmgpu-devices=2", "--llmgpu-batch-sizes=8")
    (case,) = written.cases
    assert case.traffic is not None
    path = case.traffic.path
    assert path is not None
    if not any(gpu.nvlinks for gpu in written.environment.gpus):
        pytest.skip("these GPUs have no NVLink")
    assert path.link == "nvlink"
    assert path.nvlink_bytes == pytest.approx(path.expected_bytes, rel=0.01)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus_answer_as_one_does(pytester: pytest.Pytester) -> None:
    """Spreading layers moves numbers between devices and changes none of them."""
    # Rows that are padded for graphs, which one process on two GPUs cannot have, round otherwise.
    flags = (*_DUMMY, "--llmgpu-batch-sizes=8", "--llmgpu-cuda-graphs=off")
    answers: list[Any] = []
    for devices in ("1", "2"):
        _, written = _run(pytester, *flags, f"--llmgpu-devices={devices}")
        accuracy = written.cases[0].launches[0].accuracy
        assert accuracy is not None
        answers.append(accuracy.loglikelihoods)
        assert len(written.cases[0].launches[0].memory) == int(devices)
    assert answers[0] == answers[1]


def test_uuids_join_nvml_and_torch() -> None:
    """The name by which a device's memory and profile are joined is the same on both sides."""
    known = {gpu.uuid for gpu in nvml.inventory().gpus}
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    zeros = [0] * len(devices)
    used = device_memory.usage(devices, weights_bytes=zeros, loading_peak_bytes=zeros, held_bytes=zeros)
    assert {use.uuid for use in used} <= known


class _Ranks:
    """The processes of a strategy with a loaded model, without the plugin around them."""

    def __init__(self, group: RankGroup, dataset_sha256: str, use: Sequence[DeviceUse]) -> None:
        self._group = group
        self._dataset_sha256 = dataset_sha256
        self.use = use
        """What each device held once the model was loaded."""

    def ask(self, fn: Any, *args: Any) -> list[Any]:
        return self._group.ask(fn, *args, phase="forward", timeout_s=_WAIT_S)

    def score(self, batch_size: int, cuda_graphs: str = "off") -> ScoreReply:
        replies: list[ScoreReply] = self.ask(_score, self._dataset_sha256, batch_size, cuda_graphs)
        assert len({reply.accuracy.loglikelihoods for reply in replies}) == 1, "every rank gives the same answers"
        return replies[0]


@contextmanager
def _started(folder: Path, strategy: str, devices: int, backend: str, model: str = "bundled") -> Iterator[_Ranks]:
    """While entered, the ranks of a strategy hold a model in float16."""
    dataset = HellaSwag().load("bundled", rootdir=folder, limit=_ITEMS)
    load_format = "dummy" if models.is_preset(model) else "auto"
    source = models.resolve(model, load_format=load_format, texts=dataset.texts(), rootdir=folder)
    case = make_case(strategy=strategy, backend=backend, model=source.name, load_format=load_format, devices=devices)
    place = strategies.find(strategy)
    ranks = strategies.make(place).ranks(devices)
    numbers = [
        {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        for number in range(ranks)
    ]
    folder.mkdir(exist_ok=True)
    group = RankGroup(LocalLauncher(folder), numbers if ranks > 1 else [{}])
    try:
        replies: list[list[DeviceUse]] = group.ask(worker.load, case, source, place, phase="load", timeout_s=_WAIT_S)
        group.ask(
            worker.give, dataset.sha256, dataset.items, tasks.BUILT_IN["hellaswag"], phase="load", timeout_s=_WAIT_S
        )
        yield _Ranks(group, dataset.sha256, [use for reply in replies for use in reply])
    finally:
        group.kill()


def _score(state: RankState, sha256: str, batch_size: int, cuda_graphs: str) -> ScoreReply:
    """In a rank: score with or without graphs, whatever the case says."""
    assert state.case is not None
    state.case = msgspec.structs.replace(state.case, cuda_graphs=cuda_graphs)
    return worker.score(state, sha256, batch_size)


def _held(state: RankState) -> tuple[int, int]:
    """In a rank: bytes of live tensors, and those that torch keeps for them."""
    worker.reset(state)
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _layers(state: RankState) -> list[str]:
    """In a rank: the class of each layer."""
    assert state.loaded is not None
    model: Any = state.loaded.model
    return [type(layer).__name__ for layer in model.get_decoder().layers]


class _Replay(NamedTuple):
    """One batch as a graph and eagerly."""

    shape: tuple[int, ...]
    """Of its logits."""
    difference: float
    """Largest, as a fraction of the largest logit."""
    moved: float
    """The same between the eager answer and that of the batch of this shape before it; infinite for the first."""
    recorded: int
    """Shapes that were recorded by then."""


_SHAPES = ((2, 32), (2, 32), (8, 64), (2, 32), (1, 16), (8, 64))


def _replay(state: RankState) -> list[_Replay]:
    """In a rank: run batches of other ids through recordings, a larger shape between two equal ones."""
    assert state.loaded is not None
    return _compare(state.loaded)


@torch.inference_mode()
def _compare(loaded: Loaded) -> list[_Replay]:
    model, device = loaded.model, loaded.devices[0]
    generator = torch.Generator().manual_seed(0)
    before: dict[tuple[int, int], torch.Tensor] = {}
    replays = []
    with GraphedDecoder(model, device) as decoder:
        for shape in _SHAPES:
            ids_BS = torch.randint(0, loaded.config.vocab_size, shape, generator=generator).to(device)
            with decoder.suspended():
                right = model(input_ids=ids_BS, use_cache=False).logits.float()
            found = model(input_ids=ids_BS, use_cache=False).logits.float()
            largest = right.abs().max()
            difference = float((found - right).abs().max() / largest)
            moved = float((before[shape] - right).abs().max() / largest) if shape in before else float("inf")
            before[shape] = right
            replays.append(_Replay(tuple(found.shape), difference, moved, len(decoder.capture_s)))
    return replays


class _Graphs(NamedTuple):
    """What one rank of mp said of its forwards, eager and as graphs."""

    eager: ScoreReply
    graphs: ScoreReply
    before: tuple[int, int]
    after: tuple[int, int]
    replays: list[_Replay]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> _Graphs:
    """The bundled model under mp on one GPU. Its process is gone when the tests begin: others measure memory."""
    with _started(tmp_path_factory.mktemp("mp"), "mp", 1, "accelerate") as ranks:
        eager = ranks.score(8)
        (before,) = ranks.ask(_held)
        graphed = ranks.score(8, "on")
        (after,) = ranks.ask(_held)
        (replays,) = ranks.ask(_replay)
        return _Graphs(eager, graphed, before, after, replays)


def test_graphs_answer_as_eager_forwards_do(plain: _Graphs) -> None:
    """The same sequences in rows of 16, 32, ... tokens have the same log-likelihoods but for rounding."""
    assert (plain.eager.execution, plain.graphs.execution) == ("eager", "cuda_graphs")
    assert _difference(plain.graphs, plain.eager) <= _TOLERANCE
    found, right = plain.graphs.batches, plain.eager.batches
    assert (found.sequences, found.tokens) == (right.sequences, right.tokens)
    widths = [padded // rows for padded, rows in zip(found.padded_tokens, found.sequences, strict=True)]
    longest = max(right.padded_tokens[i] // rows for i, rows in enumerate(right.sequences))
    assert all(width % graphs.MULTIPLE == 0 or width == longest for width in widths)


def test_a_recorded_shape_answers_the_batch_it_is_given(plain: _Graphs) -> None:
    """Each batch gets its own answer, in its own shape, not that of the batch that was recorded or ran before."""
    assert [replay.shape[:2] for replay in plain.replays] == list(_SHAPES)
    assert [replay.recorded for replay in plain.replays] == [1, 1, 2, 2, 3, 3]
    assert max(replay.difference for replay in plain.replays) < _TOLERANCE
    assert min(replay.moved for replay in plain.replays) > 20 * _TOLERANCE, "another answer would be seen"


def test_graphs_leave_no_memory_behind(plain: _Graphs) -> None:
    """What the next case finds on the device is what this one found."""
    assert plain.after == plain.before


class _Kernels(NamedTuple):
    """What iok said on one GPU."""

    layers: list[str]
    small_large_small: list[ScoreReply]
    """Batch sizes 4, 32 and 4, in one process."""
    large: ScoreReply
    """Batch size 32, first in another process."""


@pytest.fixture(scope="module")
def kernel_injection(tmp_path_factory: pytest.TempPathFactory) -> _Kernels:
    """The bundled model under iok on one GPU, in two processes that know nothing of each other."""
    _build_kernels()

    def sweep(sizes: Sequence[int]) -> tuple[list[str], list[ScoreReply]]:
        with _started(tmp_path_factory.mktemp("iok"), "iok", 1, "deepspeed") as ranks:
            (layers,) = ranks.ask(_layers)
            return layers, [ranks.score(size) for size in sizes]

    with ThreadPoolExecutor() as pool:
        (layers, replies), (_, (large,)) = pool.map(sweep, [(4, 32, 4), (32,)])
    return _Kernels(layers, replies, large)


def test_kernels_answer_as_the_plain_model_does(kernel_injection: _Kernels, plain: _Graphs) -> None:
    """Every layer is DeepSpeed's, and what differs is rounding."""
    assert set(kernel_injection.layers) == {"DeepSpeedGPTInference"}
    for reply in kernel_injection.small_large_small:
        _agrees(reply, plain.eager)


def test_a_batch_size_is_the_same_alone_and_in_a_sweep(kernel_injection: _Kernels) -> None:
    """Neither a smaller nor a larger workspace before it changes a number."""
    small, large, small_again = kernel_injection.small_large_small
    assert small_again.accuracy.loglikelihoods == small.accuracy.loglikelihoods
    assert small_again.workspace == small.workspace
    assert large.accuracy.loglikelihoods == kernel_injection.large.accuracy.loglikelihoods
    assert large.workspace == kernel_injection.large.workspace


def test_the_stock_binding_fails_the_run(pytester: pytest.Pytester) -> None:
    """DeepSpeed's own residual sum is told from rounding, whatever the accuracy is."""
    _build_kernels()
    _write_architecture(pytester.path / "random")
    flags = ("--llmgpu-model=random", "--llmgpu-load-format=dummy", "--llmgpu-limit=8", "--llmgpu-devices=1")
    result, written = _run(pytester, *flags, "--strategy=mp,iok", "--llmgpu-iok-stock", "--llmgpu-batch-sizes=8")
    assert result.ret == 1
    codes = {case.id: [finding.code for finding in case.findings] for case in written.cases}
    assert "loglikelihood-mismatch" in codes["iok-bs8"]
    assert "loglikelihood-mismatch" not in codes["mp-bs8"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("strategy", "backend"), [("tp", "transformers"), ("tp", "deepspeed"), ("iok", "deepspeed")])
def test_halves_of_every_layer_answer_as_the_whole(tmp_path: Path, plain: _Graphs, strategy: str, backend: str) -> None:
    """Two GPUs that sum up their parts give the numbers of one, eagerly and as graphs."""
    if strategy == "iok":
        _build_kernels()
    elif backend == "deepspeed":
        _need_deepspeed()
    with _started(tmp_path, strategy, 2, backend) as ranks:
        eager, graphed = ranks.score(8), ranks.score(8, "on")
    _agrees(eager, plain.eager)
    _agrees(graphed, plain.eager)
    assert graphed.execution == "cuda_graphs"


@pytest.mark.parametrize(
    ("strategy", "backend", "devices"),
    [("iok", "deepspeed", 1), ("iok", "deepspeed", 2), ("tp", "transformers", 2), ("tp", "deepspeed", 2)],
)
def test_loading_takes_little_more_than_the_weights(tmp_path: Path, strategy: str, backend: str, devices: int) -> None:
    """A model that fits once it is loaded can be loaded: no rank ever holds the whole of it beside its part."""
    if torch.cuda.device_count() < devices:
        pytest.skip("needs two GPUs")
    if strategy == "iok":
        _build_kernels()
    elif backend == "deepspeed":
        _need_deepspeed()
    with _started(tmp_path, strategy, devices, backend, "llama-7b") as ranks:
        use = ranks.use
    assert len(use) == devices
    for device in use:
        assert device.weights_bytes is not None
        assert device.loading_peak_bytes is not None
        assert 12 * _GIB / devices < device.weights_bytes < 16 * _GIB / devices
        assert device.loading_peak_bytes <= 1.25 * device.weights_bytes + 2 * _GIB


def _difference(reply: ScoreReply, right: ScoreReply) -> float:
    difference = reference.largest_difference(reply.accuracy.loglikelihoods, right.accuracy.loglikelihoods)
    assert difference is not None, "every log-likelihood is finite"
    return difference


def _agrees(reply: ScoreReply, right: ScoreReply) -> None:
    assert _difference(reply, right) < 10 * _TOLERANCE
    found, expected = reply.accuracy, right.accuracy
    numbers = [decode(one.loglikelihoods) for one in (found, expected)]
    assert typical_difference(*numbers) <= _TOLERANCE
    assert len(reference.flipped(found, expected, "acc_norm")) <= _FEW


def _need_deepspeed() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs the extra deepspeed")


def _build_kernels() -> None:
    _need_deepspeed()
    try:
        kernels.check()
    except ValueError as error:
        pytest.skip(str(error))
    kernels.build(print)


def _write_architecture(folder: Path) -> None:
    """Write a small LLaMA without weights, whose attention counts for something where they are random."""
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=300,
        initializer_range=0.12,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    save_tokenizer(["Someone counts and says the number. Then they stop."], 300, folder)
