"""Tests that need a GPU: `pytest tests/gpu -m gpu` on a machine with at least one."""

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
from support import tiny_model
from support.report_factory import make_case

from pytest_llmgpu import strategies
from pytest_llmgpu.analysis import answers
from pytest_llmgpu.inference import models, tasks
from pytest_llmgpu.inference.bundled import save_tokenizer
from pytest_llmgpu.inference.cuda_graphs import GraphedDecoder
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import LocalLauncher
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, typical_difference
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import Accuracy, DeviceMemory, Launch
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
"""So many of 40 items may flip if float16 rounds differently."""
_WAIT_S = 300.0
_TOLERANCE = LOGLIKELIHOOD_TOLERANCES["float16"]
_DUMMY = ("--llmgpu-model=llama-7b", "--llmgpu-load-format=dummy", "--llmgpu-limit=32")


def _run(pytester: pytest.Pytester, *arguments: str) -> tuple[pytest.RunResult, Report]:
    pytester.makepyfile(test_it=_BENCHMARK)
    result = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider", *arguments)
    return result, file.load(pytester.path / ".llmgpu" / "last.json")


def test_a_memory_cap_leaves_the_rest_out_of_use(pytester: pytest.Pytester) -> None:
    """The memory of the device outside the hold is the cap, and torch does not count the held bytes."""
    pytester.makepyfile(
        hold="""
        import json, sys, torch
        from pytest_llmgpu.ranks import memory
        device = torch.device("cuda", 0)
        held = memory.hold([device], 8 * 2**30)
        free, total = torch.cuda.mem_get_info(device)
        print(json.dumps([held[0], free, total, torch.cuda.memory_allocated(device)]))
        """
    )
    held, free, total, counted = json.loads(pytester.runpython(pytester.path / "hold.py").stdout.str())
    assert held == total - 8 * _GIB
    assert 6 * _GIB < free < 8 * _GIB
    assert counted == 0


def test_a_gpu_is_profiled_while_it_works(pytester: pytest.Pytester) -> None:
    """Every quantity of the profile has a value on real hardware, within plausible bounds."""
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


def test_a_memory_cap_makes_large_batches_run_out_of_memory(pytester: pytest.Pytester) -> None:
    """Large batch sizes run out of memory as on a small GPU, and the held bytes do not count as used."""
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
    """The largest size that fits is next to one that does not."""
    flags = ("--llmgpu-devices=1", "--llmgpu-batch-sizes=1,2,4,128", "--llmgpu-gpu-memory=13.75GiB")
    result, written = _run(pytester, *_DUMMY, *flags, "--llmgpu-find-max-batch", "--llmgpu-cuda-graphs=off")
    assert result.ret == 0
    (found,) = written.capacity
    assert found.largest_fit is not None
    assert found.smallest_oom == found.largest_fit + 1


def test_memory_is_the_same_alone_and_in_the_sweep(pytester: pytest.Pytester) -> None:
    """Memory of smaller batch sizes does not count for a larger one."""
    peaks = []
    for sizes in ("1,2,8", "8"):
        _, written = _run(pytester, *_DUMMY, "--llmgpu-devices=1", f"--llmgpu-batch-sizes={sizes}")
        (use,) = written.cases[-1].launches[0].memory
        peaks.append((use.peak_allocated_bytes, written.cases[-1].case.execution))
    assert peaks[0] == peaks[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_counters_of_nvlink_agree_with_the_traffic(pytester: pytest.Pytester) -> None:
    """The counters of the links agree with the exact traffic within 1 %."""
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
def test_several_gpus_give_the_numbers_of_one(pytester: pytest.Pytester) -> None:
    """Spreading layers over devices does not change a log-likelihood."""
    # Rows padded for CUDA graphs round differently, and one process on two GPUs cannot use graphs.
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
    """Memory and profile of a device are joined by its UUID, which is the same in torch and NVML."""
    known = {gpu.uuid for gpu in nvml.inventory().gpus}
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    assert {f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices} <= known


class _Ranks:
    """The processes of a strategy with a loaded model, without the plugin."""

    def __init__(self, group: RankGroup, dataset_sha256: str, use: Sequence[DeviceMemory]) -> None:
        self._group = group
        self._dataset_sha256 = dataset_sha256
        self.use = use
        """The memory use of each device after loading."""

    def ask(self, fn: Any, *args: Any) -> list[Any]:
        return self._group.ask(fn, *args, phase="forward", timeout_s=_WAIT_S)

    def score(self, batch_size: int, cuda_graphs: str = "off") -> Launch:
        replies: list[Launch] = self.ask(_score, self._dataset_sha256, batch_size, cuda_graphs)
        assert len({_accuracy(reply).loglikelihoods for reply in replies}) == 1, (
            "every rank has the same log-likelihoods"
        )
        return replies[0]


@contextmanager
def _started(folder: Path, strategy: str, devices: int, backend: str, model: str = "bundled") -> Iterator[_Ranks]:
    """While entered, the ranks of a strategy have loaded a model in float16."""
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
        replies: list[list[DeviceMemory]] = group.ask(worker.load, case, source, place, phase="load", timeout_s=_WAIT_S)
        group.ask(
            worker.give, dataset.sha256, dataset.items, tasks.BUILT_IN["hellaswag"], phase="load", timeout_s=_WAIT_S
        )
        yield _Ranks(group, dataset.sha256, [use for reply in replies for use in reply])
    finally:
        group.kill()


def _score(state: RankState, sha256: str, batch_size: int, cuda_graphs: str) -> Launch:
    """In a rank: score with or without CUDA graphs."""
    changed = {"dataset_sha256": sha256, "batch_size": batch_size, "cuda_graphs": cuda_graphs}
    return worker.score(state, msgspec.structs.replace(state.case, **changed))


def _accuracy(reply: Launch) -> Accuracy:
    assert reply.accuracy is not None
    return reply.accuracy


def _workspace(launch: Launch) -> tuple[object, ...]:
    return launch.memory[0].workspace_bytes, launch.tokens_requested, launch.tokens_granted


def _held(state: RankState) -> tuple[int, int]:
    """In a rank: bytes of live tensors, and bytes that torch has reserved."""
    worker.reset(state)
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _layers(state: RankState) -> list[str]:
    """In a rank: the class of each layer."""
    model: Any = state.loaded.model
    return [type(layer).__name__ for layer in model.get_decoder().layers]


class _Replay(NamedTuple):
    """One batch as a graph and eagerly."""

    shape: tuple[int, ...]
    """The shape of the logits."""
    difference: float
    """The largest difference, as a fraction of the largest logit."""
    moved: float
    """The same between this eager batch and the one of this shape before it; infinite for the first."""
    recorded: int
    """So many shapes were recorded by then."""


_SHAPES = ((2, 32), (2, 32), (8, 64), (2, 32), (1, 16), (8, 64))


def _replay(state: RankState) -> list[_Replay]:
    """In a rank: replay batches of different ids, with a larger shape between two equal ones."""
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
            replays.append(_Replay(tuple(found.shape), difference, moved, len(decoder.shapes)))
    return replays


class _Graphs(NamedTuple):
    """The replies of one rank of mp, eager and with CUDA graphs."""

    eager: Launch
    graphs: Launch
    before: tuple[int, int]
    after: tuple[int, int]
    replays: list[_Replay]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> _Graphs:
    """The bundled model under mp on one GPU. Its process has ended when the tests start: others measure memory."""
    with _started(tmp_path_factory.mktemp("mp"), "mp", 1, "accelerate") as ranks:
        eager = ranks.score(8)
        (before,) = ranks.ask(_held)
        graphed = ranks.score(8, "on")
        (after,) = ranks.ask(_held)
        (replays,) = ranks.ask(_replay)
        return _Graphs(eager, graphed, before, after, replays)


def test_graphs_give_the_numbers_of_eager_forwards(plain: _Graphs) -> None:
    """Rows that are padded to few shapes have the same log-likelihoods except for rounding."""
    sentences = plain.eager.execution_choice, plain.graphs.execution_choice
    assert [(sentence or "").partition(":")[0] for sentence in sentences] == ["eager", "CUDA graphs"]
    assert _difference(plain.graphs, plain.eager) <= _TOLERANCE
    found, right = plain.graphs.batches, plain.eager.batches
    assert (found.sequences, found.tokens) == (right.sequences, right.tokens)
    shapes, own = ({*zip(one.sequences, one.padded_tokens, strict=True)} for one in (found, right))
    assert len(shapes) < len(own)
    assert sum(right.padded_tokens) < sum(found.padded_tokens)


def test_a_replay_computes_its_own_batch(plain: _Graphs) -> None:
    """Each batch has its own logits, not those of the batch that was recorded or ran before."""
    assert [replay.shape[:2] for replay in plain.replays] == list(_SHAPES)
    assert [replay.recorded for replay in plain.replays] == [1, 1, 2, 2, 3, 3]
    assert max(replay.difference for replay in plain.replays) < _TOLERANCE
    assert min(replay.moved for replay in plain.replays) > 20 * _TOLERANCE, "other logits would be detected"


def test_graphs_leave_no_memory(plain: _Graphs) -> None:
    """The device has the same memory in use before and after the graphs."""
    assert plain.after == plain.before


class _Kernels(NamedTuple):
    """The replies of iok on one GPU."""

    layers: list[str]
    small_large_small: list[Launch]
    """Batch sizes 4, 32 and 4, in one process."""
    large: Launch
    """Batch size 32, first in another process."""


@pytest.fixture(scope="module")
def kernel_injection(tmp_path_factory: pytest.TempPathFactory) -> _Kernels:
    """The bundled model under iok on one GPU, in two independent processes."""
    _build_kernels()

    def sweep(sizes: Sequence[int]) -> tuple[list[str], list[Launch]]:
        with _started(tmp_path_factory.mktemp("iok"), "iok", 1, "deepspeed") as ranks:
            (layers,) = ranks.ask(_layers)
            return layers, [ranks.score(size) for size in sizes]

    with ThreadPoolExecutor() as pool:
        (layers, replies), (_, (large,)) = pool.map(sweep, [(4, 32, 4), (32,)])
    return _Kernels(layers, replies, large)


def test_kernels_give_the_numbers_of_the_plain_model(kernel_injection: _Kernels, plain: _Graphs) -> None:
    """Every layer is DeepSpeed's, and the numbers differ by rounding only."""
    assert set(kernel_injection.layers) == {"DeepSpeedGPTInference"}
    for reply in kernel_injection.small_large_small:
        _agrees(reply, plain.eager)


def test_a_batch_size_is_the_same_alone_and_in_a_sweep(kernel_injection: _Kernels) -> None:
    """A smaller or larger workspace before a case changes no number."""
    small, large, small_again = kernel_injection.small_large_small
    assert _accuracy(small_again).loglikelihoods == _accuracy(small).loglikelihoods
    assert _workspace(small_again) == _workspace(small)
    assert _accuracy(large).loglikelihoods == _accuracy(kernel_injection.large).loglikelihoods
    assert _workspace(large) == _workspace(kernel_injection.large)


def test_the_stock_binding_fails_the_run(pytester: pytest.Pytester) -> None:
    """The error of DeepSpeed's residual sum is larger than rounding, at any accuracy."""
    _build_kernels()
    _write_architecture(pytester.path / "random")
    flags = ("--llmgpu-model=random", "--llmgpu-load-format=dummy", "--llmgpu-limit=8", "--llmgpu-devices=1")
    result, written = _run(pytester, *flags, "--strategy=mp,iok", "--llmgpu-iok-stock", "--llmgpu-batch-sizes=8")
    assert result.ret == 1
    codes = {case.id: [finding.code for finding in case.findings] for case in written.cases}
    assert "wrong-answers" in codes["iok-bs8"]
    assert "wrong-answers" not in codes["mp-bs8"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("strategy", "backend"), [("tp", "transformers"), ("tp", "deepspeed"), ("iok", "deepspeed")])
def test_two_gpus_give_the_numbers_of_one(tmp_path: Path, plain: _Graphs, strategy: str, backend: str) -> None:
    """Two GPUs with half of every layer each give the numbers of one, eagerly and with CUDA graphs."""
    if strategy == "iok":
        _build_kernels()
    elif backend == "deepspeed":
        _need_deepspeed()
    with _started(tmp_path, strategy, 2, backend) as ranks:
        eager, graphed = ranks.score(8), ranks.score(8, "on")
    _agrees(eager, plain.eager)
    _agrees(graphed, plain.eager)
    assert (graphed.execution_choice or "").startswith("CUDA graphs: ")


@pytest.mark.parametrize(
    ("strategy", "backend", "devices"),
    [("iok", "deepspeed", 1), ("iok", "deepspeed", 2), ("tp", "transformers", 2), ("tp", "deepspeed", 2)],
)
def test_loading_takes_little_more_than_the_weights(tmp_path: Path, strategy: str, backend: str, devices: int) -> None:
    """No rank holds the whole model while it loads its part."""
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


def _difference(reply: Launch, right: Launch) -> float:
    difference = answers.largest_difference(_accuracy(reply).loglikelihoods, _accuracy(right).loglikelihoods)
    assert difference is not None, "every log-likelihood is finite"
    return difference


def _agrees(reply: Launch, right: Launch) -> None:
    assert _difference(reply, right) < 10 * _TOLERANCE
    found, expected = _accuracy(reply), _accuracy(right)
    numbers = [decode(one.loglikelihoods) for one in (found, expected)]
    assert typical_difference(*numbers) <= _TOLERANCE
    assert len(answers.differing(expected.predictions_norm, found.predictions_norm)) <= _FEW


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
    """Write a small LLaMA without weights, whose attention matters with random weights."""
    config = tiny_model.sensitive_config(num_hidden_layers=4, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    save_tokenizer(["Someone counts and says the number. Then they stop."], 300, folder)
