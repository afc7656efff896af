"""The numbers of each strategy on GPUs, eagerly and as CUDA graphs: one start of ranks per strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from support import gpu
from support.gpu import Ranks
from support.report_factory import known, make_case

from pytest_llmgpu.analysis import answers
from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.cuda_graphs import GraphedDecoder
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.profiling import machine, nvml
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, typical_difference
from pytest_llmgpu.report.result import Launch

pytestmark = gpu.ONE_GPU

_GIB = 2**30
_ITEMS = 40
_FEW = 3
"""So many of 40 items may flip if float16 rounds differently."""
_TOLERANCE = LOGLIKELIHOOD_TOLERANCES["float16"]


def _started(folder: Path, strategy: str, devices: int, backend: str, **options: Any) -> Any:
    """Return a context manager of the ranks of a strategy with the bundled model in float16."""
    dataset = HellaSwag().load("bundled", rootdir=folder, limit=_ITEMS)
    source = models.resolve("bundled", texts=[], rootdir=folder)
    case = make_case(
        strategy=strategy,
        backend=backend,
        model="bundled",
        load_format="auto",
        devices=devices,
        dataset_sha256=dataset.sha256,
        strategy_options=options,
    )
    return gpu.started(folder / strategy, case, source, dataset)


def _score(ranks: Ranks, batch_size: int, cuda_graphs: str = "off") -> Launch:
    """Return the launch of the first rank; every rank has the same log-likelihoods."""
    case = msgspec.structs.replace(ranks.case, batch_size=batch_size, cuda_graphs=cuda_graphs)
    launches: list[Launch] = ranks.ask(worker.score, case)
    assert len({known(launch.accuracy).loglikelihoods for launch in launches}) == 1
    return launches[0]


def _difference(launch: Launch, right: Launch) -> float:
    # It is None where a log-likelihood is not finite.
    return known(
        answers.largest_difference(known(launch.accuracy).loglikelihoods, known(right.accuracy).loglikelihoods)
    )


def _agrees(launch: Launch, right: Launch) -> None:
    assert _difference(launch, right) < 10 * _TOLERANCE
    found, expected = known(launch.accuracy), known(right.accuracy)
    assert typical_difference(decode(found.loglikelihoods), decode(expected.loglikelihoods)) <= _TOLERANCE
    assert len(answers.differing(expected.predictions_norm, found.predictions_norm)) <= _FEW


def _held(state: RankState) -> tuple[int, int]:
    """In a rank: bytes of live tensors, and bytes that torch has reserved."""
    worker.reset(state)
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


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


@torch.inference_mode()
def _replay(state: RankState) -> list[_Replay]:
    """In a rank: replay batches of different ids, with a larger shape between two equal ones."""
    model, device, config = state.loaded.model, state.loaded.devices[0], known(state.loaded.config)
    generator = torch.Generator().manual_seed(0)
    before: dict[tuple[int, int], torch.Tensor] = {}
    replays = []
    with GraphedDecoder(model, device) as decoder:
        for shape in _SHAPES:
            ids_BS = torch.randint(0, config.vocab_size, shape, generator=generator).to(device)
            with decoder.suspended():
                right = model(input_ids=ids_BS, use_cache=False).logits.float()
            found = model(input_ids=ids_BS, use_cache=False).logits.float()
            largest = right.abs().max()
            difference = float((found - right).abs().max() / largest)
            moved = float((before[shape] - right).abs().max() / largest) if shape in before else float("inf")
            before[shape] = right
            replays.append(_Replay(tuple(found.shape), difference, moved, len(decoder.graphs)))
    return replays


class _Plain(NamedTuple):
    """The launches of mp on one GPU, in one process."""

    small_large_small: list[Launch]
    """Batch sizes 8, 32 and 8, eager."""
    graphs: Launch
    """Batch size 8 as CUDA graphs."""
    before: tuple[int, int]
    after: tuple[int, int]
    replays: list[_Replay]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> _Plain:
    """The bundled model under mp. Its process has ended when the tests start: others measure memory."""
    with _started(tmp_path_factory.mktemp("plain"), "mp", 1, "accelerate") as ranks:
        sweep = [_score(ranks, size) for size in (8, 32, 8)]
        (before,) = ranks.ask(_held)
        graphs = _score(ranks, 8, "on")
        (after,) = ranks.ask(_held)
        (replays,) = ranks.ask(_replay)
        return _Plain(sweep, graphs, before, after, replays)


def test_graphs_give_the_numbers_of_eager_forwards(plain: _Plain) -> None:
    """Small forwards have the same few shapes in both, and the same log-likelihoods except for rounding."""
    eager = plain.small_large_small[0]
    sentences = [eager.execution_choice or "", plain.graphs.execution_choice or ""]
    assert [sentence.partition(":")[0] for sentence in sentences] == ["eager", "CUDA graphs"]
    assert _difference(plain.graphs, eager) <= _TOLERANCE
    found, right = plain.graphs.batches, eager.batches
    assert (found.sequences, found.tokens, found.padded_tokens) == (right.sequences, right.tokens, right.padded_tokens)
    assert len({*zip(found.sequences, found.padded_tokens, strict=True)}) < len(found.sequences)


def test_a_replay_computes_its_own_batch(plain: _Plain) -> None:
    """Each batch has its own logits, not those of the batch that was recorded or ran before."""
    assert [replay.shape[:2] for replay in plain.replays] == list(_SHAPES)
    assert [replay.recorded for replay in plain.replays] == [1, 1, 2, 2, 3, 3]
    assert max(replay.difference for replay in plain.replays) < _TOLERANCE
    assert min(replay.moved for replay in plain.replays) > 20 * _TOLERANCE, "other logits would be detected"


def test_a_case_is_the_same_alone_and_in_a_sweep(plain: _Plain) -> None:
    """Memory and answers are those of a case that runs first, and graphs leave no memory."""
    alone, _, in_a_sweep = plain.small_large_small
    assert known(in_a_sweep.accuracy).loglikelihoods == known(alone.accuracy).loglikelihoods
    peaks = [[device.peak_allocated_bytes for device in launch.memory] for launch in (alone, in_a_sweep)]
    assert peaks[0] == peaks[1]
    assert plain.after == plain.before


def test_uuids_join_nvml_and_torch() -> None:
    """Memory and profile of a device are joined by its UUID, which is the same in torch and NVML."""
    assert {found.uuid for found in machine.probe().devices} <= {found.uuid for found in nvml.inventory().gpus}


def _layers(state: RankState) -> list[str]:
    """In a rank: the class of each layer."""
    model: Any = state.loaded.model
    return [type(layer).__name__ for layer in model.get_decoder().layers]


def test_kernels_give_the_numbers_of_the_plain_model(tmp_path: Path, plain: _Plain) -> None:
    """Every layer is DeepSpeed's, numbers differ by rounding only, and no batch size changes those of another."""
    with _started(tmp_path, "iok", 1, "deepspeed") as ranks:
        assert {*ranks.ask(_layers)[0]} == {"DeepSpeedGPTInference"}
        small, large, again = (_score(ranks, size) for size in (4, 32, 4))
    for launch in (small, large):
        _agrees(launch, plain.small_large_small[0])
    assert known(again.accuracy).loglikelihoods == known(small.accuracy).loglikelihoods
    assert again.memory[0].workspace_bytes == small.memory[0].workspace_bytes
    assert (again.tokens_requested, again.tokens_granted) == (small.tokens_requested, small.tokens_granted)


def test_the_stock_binding_computes_other_numbers(tmp_path: Path, plain: _Plain) -> None:
    """The error of DeepSpeed's residual sum is larger than rounding."""
    with _started(tmp_path, "iok", 1, "deepspeed", stock=True) as ranks:
        found = decode(known(_score(ranks, 8).accuracy).loglikelihoods)
    right = decode(known(plain.small_large_small[0].accuracy).loglikelihoods)
    assert typical_difference(found, right) > 10 * _TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "backend", "devices"),
    [
        ("iok", "deepspeed", 1),
        pytest.param("iok", "deepspeed", 2, marks=gpu.TWO_GPUS),
        pytest.param("tp", "transformers", 2, marks=gpu.TWO_GPUS),
        pytest.param("tp", "deepspeed", 2, marks=gpu.TWO_GPUS),
    ],
)
def test_loading_takes_little_more_than_the_weights(tmp_path: Path, strategy: str, backend: str, devices: int) -> None:
    """No rank holds the whole model while it loads its part."""
    gpu.write_narrow_model(tmp_path / "narrow", ["A person counts."], layers=16, vocabulary=300)
    source = models.resolve(str(tmp_path / "narrow"), load_format="dummy", texts=[], rootdir=tmp_path)
    case = make_case(strategy=strategy, backend=backend, model="narrow", load_format="dummy", devices=devices)
    dataset = HellaSwag().load("bundled", rootdir=tmp_path, limit=1)
    with gpu.started(tmp_path / "ranks", case, source, dataset) as ranks:
        memory = ranks.memory
    assert len(memory) == devices
    for device in memory:
        weights_bytes = known(device.weights_bytes)
        assert 6 * _GIB / devices < weights_bytes < 8.5 * _GIB / devices
        assert known(device.loading_peak_bytes) <= 1.25 * weights_bytes + 2 * _GIB


@gpu.TWO_GPUS
@pytest.mark.parametrize(
    ("strategy", "backend"), [("mp", "accelerate"), ("tp", "transformers"), ("tp", "deepspeed"), ("iok", "deepspeed")]
)
def test_two_gpus_give_the_numbers_of_one(tmp_path: Path, plain: _Plain, strategy: str, backend: str) -> None:
    """Two GPUs give the numbers of one; ranks with half of every layer each also as CUDA graphs."""
    with _started(tmp_path, strategy, 2, backend) as ranks:
        eager, graphed = _score(ranks, 8), _score(ranks, 8, "on")
    for launch in (eager, graphed):
        _agrees(launch, plain.small_large_small[0])
    assert len(eager.memory) == (2 if strategy == "mp" else 1)
    assert (graphed.execution_choice or "").startswith("CUDA graphs: ") == (strategy != "mp")
