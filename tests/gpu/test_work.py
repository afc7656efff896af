"""Work passes on real hardware: `pytest tests/gpu/test_work.py -m gpu`; the last tests need two GPUs."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pytest_llmgpu.inference.bundled import PRESETS, save_tokenizer
from pytest_llmgpu.ranks import work
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.work import RankWork, Work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here"),
]

_NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
_LAYERS = 4
_BENCHMARK = """
    def test_hellaswag(llm, hellaswag, batch_size, measure):
        measure(llm, hellaswag, batch_size)
"""
_SYNCING = """
    from pytest_llmgpu.strategies.mp import LayerParallel
    from pytest_llmgpu.strategies.tp import TensorParallel

    class Reading:
        def load(self, case, source):
            loaded = super().load(case, source)
            for layer in loaded.model.model.layers:
                layer.register_forward_hook(lambda module, args, answer: self.read(answer))
            return loaded

        def read(self, answer):
            (answer[0] if isinstance(answer, tuple) else answer).flatten()[0].item()

    class Syncing(Reading, LayerParallel):
        name = "syncing"

    class SyncingTp(Reading, TensorParallel):
        name = "syncing-tp"
"""
_LARGEST_CV = 0.02
"""Between passes of one process 0.02 to 0.5 % were measured."""


@pytest.fixture
def model(pytester: pytest.Pytester) -> Path:
    """A folder with a model of 7B's width and few layers, without weights."""
    folder = pytester.mkdir("narrow")
    save_tokenizer(["A person counts to ten and says the number."], 300, folder)
    config = {**PRESETS["llama-7b"], "num_hidden_layers": _LAYERS, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    return folder


def _run(pytester: pytest.Pytester, model: Path, *arguments: str) -> Report:
    pytester.makepyfile(test_it=_BENCHMARK)
    flags = (f"--llmgpu-model={model}", "--llmgpu-load-format=dummy", "--llmgpu-limit=32")
    result = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider", *flags, *arguments)
    assert result.ret == 0
    written = file.load(pytester.path / ".llmgpu" / "last.json")
    assert all(case.outcome == "completed" for case in written.cases)
    return written


def _work(result: CaseResult) -> Work:
    (launch,) = result.launches
    assert launch.work is not None, launch.why
    assert launch.work.passes == work.passes_of(len(launch.work.batches))
    assert all(rank.why.keys() <= {"flops"} for rank in launch.work.ranks), [rank.why for rank in launch.work.ranks]
    return launch.work


def _alone(result: CaseResult) -> RankWork:
    (rank,) = _work(result).ranks
    return rank


def _cv(values: list[float] | None) -> float:
    assert values
    return statistics.stdev(values) / statistics.mean(values)


def test_passes_of_one_process_hardly_differ(pytester: pytest.Pytester, model: Path) -> None:
    """The time of the kernels is quiet; idle time and copies are apart; kernels and calls are the same twice."""
    flags = ("--llmgpu-devices=1", "--llmgpu-batch-sizes=2,32", "--llmgpu-cuda-graphs=off")
    reports = [_run(pytester, model, *flags) for _ in range(2)]
    for first, second in zip(*(report.cases for report in reports), strict=True):
        one, two = _alone(first), _alone(second)
        assert _cv(one.device_time_s) < _LARGEST_CV
        assert one.device_time_s is not None
        assert two.device_time_s is not None
        assert statistics.median(one.device_time_s) == pytest.approx(statistics.median(two.device_time_s), rel=0.03)
        assert (one.kernels, one.kernels_sha256) == (two.kernels, two.kernels_sha256)
        for name in ("ops", "flops", "runtime_calls", "host_syncs"):
            assert getattr(one, name) == getattr(two, name), name
        assert 0 < (one.busy or 0) <= 1
        assert _work(first).collectives == []
        print(first.id, one.device_time_s, one.idle_s, one.copy_s, one.busy, one.kernels, one.host_syncs)


def test_every_kernel_belongs_to_a_module(pytester: pytest.Pytester, model: Path) -> None:
    """The modules of the eager pass hold the kernels of an eager case, and none was launched outside of them."""
    written = _run(pytester, model, "--llmgpu-devices=1", "--llmgpu-batch-sizes=8", "--llmgpu-cuda-graphs=off")
    rank = _alone(written.cases[0])
    assert rank.rows is not None
    modules = [row for row in rank.rows if row.module is not None]
    kernels = [row for row in rank.rows if row.module is None]
    assert work.OUTSIDE not in {row.module for row in modules}
    assert {"layers.*.mlp.down_proj", "layers.*.self_attn.q_proj", "lm_head"} <= {row.module for row in modules}
    assert sum(row.calls for row in kernels) == rank.kernels
    found = _work(written.cases[0])
    assert found.eager_batches == [found.batches[len(found.batches) // 2]]
    # Each batch runs the same kernels, or others for another width.
    assert sum(row.calls for row in modules) == pytest.approx((rank.kernels or 0) / len(found.batches), rel=0.1)
    pass_s = sum(row.time_s for row in kernels)
    assert sum(row.time_s for row in modules) == pytest.approx(pass_s / len(found.batches), rel=0.25)
    families = {row.family for row in kernels}
    assert {"GEMM", "attention", "norm", "elementwise"} <= families
    assert sum(row.time_s for row in kernels if row.family == "other") < 0.05 * pass_s, [
        written.environment.kernel_names[row.kernel]
        for row in kernels
        if row.family == "other" and row.kernel is not None
    ]
    assert "nvjet" in " ".join(written.environment.kernel_names) or "gemm" in " ".join(written.environment.kernel_names)


def test_replayed_graphs_show_their_kernels(pytester: pytest.Pytester, model: Path) -> None:
    """A replay has one launch and all of its kernels by name; modules come from the eager pass all the same."""
    written = _run(pytester, model, "--llmgpu-devices=1", "--llmgpu-batch-sizes=2", "--llmgpu-cuda-graphs=on")
    (case,) = written.cases
    assert case.case.execution == "cuda_graphs"
    rank = _alone(case)
    assert rank.rows is not None
    assert (rank.kernels or 0) > 10 * _LAYERS * len(_work(case).batches)
    assert any(row.module == "layers.*.mlp.down_proj" for row in rank.rows)
    assert _cv(rank.device_time_s) < _LARGEST_CV
    assert "cudaGraphLaunch" not in (rank.runtime_calls or {}), "runtime calls are those of the eager pass"


def test_a_host_synchronization_per_layer_is_counted(pytester: pytest.Pytester, model: Path) -> None:
    """A scalar that each layer reads back: exactly one copy and one synchronization a layer more than without."""
    pytester.makepyfile(syncing=_SYNCING)
    flags = ("--llmgpu-devices=1", "--llmgpu-batch-sizes=4", "--llmgpu-cuda-graphs=off")
    plain, syncing = (
        _run(pytester, model, *flags, f"--strategy={strategy}").cases[0] for strategy in ("mp", "syncing:Syncing")
    )
    before, after = _alone(plain), _alone(syncing)
    assert (before.host_syncs, after.host_syncs) == (2, 2 + 2 * _LAYERS)
    assert before.runtime_calls is not None
    assert after.runtime_calls is not None
    for name in ("cudaStreamSynchronize", "cudaMemcpyAsync"):
        assert after.runtime_calls.get(name, 0) == before.runtime_calls.get(name, 0) + _LAYERS, name


@pytest.mark.parametrize(
    ("strategy", "devices"), [("Syncing", 1), pytest.param("SyncingTp", 2, marks=_NEEDS_TWO)], ids=["mp", "tp"]
)
def test_forwards_that_cannot_be_recorded_run_eagerly(
    pytester: pytest.Pytester, model: Path, strategy: str, devices: int
) -> None:
    """A scalar that a layer reads back ends the recording: new ranks measure both cases, which name the operation."""
    pytester.makepyfile(syncing=_SYNCING)
    flags = (f"--strategy=syncing:{strategy}", f"--llmgpu-devices={devices}", "--llmgpu-batch-sizes=2,4")
    for case in _run(pytester, model, *flags).cases:
        assert (case.case.execution, case.case.cuda_graphs) == ("eager", "auto")
        assert ".item()" in (case.launches[0].execution_choice or ""), case.launches[0].execution_choice
        print(case.launches[0].execution_choice)


def test_small_forwards_are_recorded_by_default(pytester: pytest.Pytester, model: Path) -> None:
    """The reason has shapes and padding, and the same plan is run in every launch."""
    (case,) = _run(pytester, model, "--llmgpu-devices=1", "--llmgpu-batch-sizes=4", "--llmgpu-launches=2").cases
    assert case.case.execution == "cuda_graphs"
    first, second = case.launches
    assert (first.plan_sha256, first.execution_choice) == (second.plan_sha256, second.execution_choice)
    print(first.execution_choice, first.warmup_s)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_work_passes_disturb_no_measurement(pytester: pytest.Pytester, model: Path, graphs: str) -> None:
    """Memory and answers of the case after a profiled one are the same with and without; times are printed."""
    flags = ("--llmgpu-devices=1", "--llmgpu-batch-sizes=2,8", f"--llmgpu-cuda-graphs={graphs}")
    on, off = (_run(pytester, model, *flags, f"--llmgpu-work={switch}") for switch in ("on", "off"))
    for with_work, without in zip(on.cases, off.cases, strict=True):
        one, two = with_work.launches[0], without.launches[0]
        assert one.work is not None
        assert two.work is None
        assert one.accuracy is not None
        assert two.accuracy is not None
        assert one.accuracy.loglikelihoods == two.accuracy.loglikelihoods
        assert [use.peak_allocated_bytes for use in one.memory] == [use.peak_allocated_bytes for use in two.memory]
        print(with_work.id, graphs, with_work.inference_s, without.inference_s)


def test_the_ceilings_bound_the_time(pytester: pytest.Pytester, model: Path) -> None:
    """The rates are those of a GPU, and no case is faster than they allow."""
    written = _run(pytester, model, "--llmgpu-devices=1", "--llmgpu-batch-sizes=8,64")
    ceilings = written.environment.ceilings
    assert ceilings is not None
    (device,) = ceilings.devices
    assert device.why == {}
    assert device.gemm_flops_per_s["float16"] > 1e13
    assert (device.copy_bytes_per_s or 0) > 1e11
    for case in written.cases:
        assert case.bound is not None, case.why
        assert 0 < case.bound.share <= 1
        print(case.id, msgspec.json.encode(case.bound).decode(), case.energy_j_per_sequence)


@_NEEDS_TWO
def test_ranks_of_tp_have_half_of_the_flops(pytester: pytest.Pytester, model: Path) -> None:
    """Each has half of the linear layers' FLOPs and as many kernels as the other; collectives are joined."""
    flags = ("--llmgpu-batch-sizes=8", "--llmgpu-cuda-graphs=off")
    whole = _alone(_run(pytester, model, *flags, "--llmgpu-devices=1").cases[0])
    (case,) = _run(pytester, model, *flags, "--llmgpu-devices=2", "--strategy=tp").cases
    found = _work(case)
    first, second = found.ranks
    assert first.flops == second.flops
    assert whole.flops is not None
    assert first.flops == pytest.approx(whole.flops / 2, rel=0.01)
    assert (first.kernels, first.kernels_sha256) == (second.kernels, second.kernels_sha256)
    assert first.uuids != second.uuids
    assert found.collectives is not None, found.why
    collectives = {one.collective: one for one in found.collectives}
    reduced = collectives["all_reduce"]
    assert reduced.calls == 2 * _LAYERS * len(found.batches)
    assert all(transfer_s > 0 for transfer_s in reduced.transfer_s)
    print(json.dumps([msgspec.to_builtins(one) for one in found.collectives]))


@_NEEDS_TWO
def test_layers_over_two_gpus_are_one_rank(pytester: pytest.Pytester, model: Path) -> None:
    """Kernels of both GPUs count; the GPUs work in turn, so that the rank is at most as busy as one of them."""
    (case,) = _run(pytester, model, "--llmgpu-devices=2", "--llmgpu-batch-sizes=8", "--llmgpu-cuda-graphs=off").cases
    rank = _alone(case)
    assert len(rank.uuids) == 2
    assert 0 < (rank.busy or 0) <= 1


@_NEEDS_TWO
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")
def test_injected_kernels_have_no_flops(pytester: pytest.Pytester, model: Path) -> None:
    """DeepSpeed's kernels bypass torch's dispatcher: FLOPs are null, kernels and their time are there."""
    (case,) = _run(pytester, model, "--llmgpu-devices=2", "--llmgpu-batch-sizes=2", "--strategy=iok").cases
    for rank in _work(case).ranks:
        assert rank.flops is None
        assert "dispatcher" in rank.why["flops"]
        assert (rank.kernels or 0) > 0
        assert _cv(rank.device_time_s) < _LARGEST_CV


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_fakes_are_like_the_records_of_this_torch() -> None:
    """What the parser relies on: kernels carry the correlation id of their launch, ranges are annotations."""
    from torch.profiler import ProfilerActivity, profile, record_function

    tensor = torch.ones(1024, 1024, device="cuda")
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            with record_function(work.RANGE_PREFIX + "lm_head"):
                product = tensor @ tensor
            product.sum().item()
    results: Any = recorded.profiler
    records = work.read_records(results.kineto_results.events())
    found = work.attribute(records)
    assert {module for module, _ in found.kernels} == {"lm_head", work.OUTSIDE}
    assert not any(record.device is not None and record.name.startswith("llmgpu:") for record in records)
    assert found.host_syncs == 0
    assert work.of_pass(records).device_time_s > 0
