"""Cases that pytest measures on GPUs: profile, work passes, memory cap, ceilings. One run of pytest has many cases."""

from __future__ import annotations

import datetime
import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import gpu
from support.gpu import LAYERS
from support.report_factory import known

from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.inference.sm_clock import SmClock
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import LocalLauncher
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.recording import work
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.work import RankWork, Work

pytestmark = gpu.ONE_GPU

_GIB = 2**30
_LARGEST_CV = 0.02
"""Between passes of one process 0.02 to 0.5 % were measured."""
_CASES = """
import pytest

def cases(limit=32, **options):
    @pytest.mark.llmgpu(limit=limit, **options)
    def test(llm, hellaswag, batch_size, measure):
        measure(llm, hellaswag, batch_size)
    return test

"""
_MEASURE = "test_hellaswag = cases()"
_MAIN = """
test_eager = cases(batch_sizes=[2, 4, 8, 32], cuda_graphs="off")
test_graphs = cases(batch_sizes=[2, 8], cuda_graphs="on")
test_default = cases(batch_sizes=[4])
test_long = cases(batch_sizes=[4], cuda_graphs="off", limit=400, work="off")
test_syncing = cases(strategy=["own:Syncing"], batch_sizes=[4], cuda_graphs="off")
test_unrecordable = cases(strategy=["own:Syncing"], batch_sizes=[2, 4])
"""
_AGAIN = """
test_eager = cases(batch_sizes=[2], cuda_graphs="off")
test_default = cases(batch_sizes=[4])
test_eager_without = cases(batch_sizes=[8], cuda_graphs="off", work="off")
test_graphs_without = cases(batch_sizes=[8], cuda_graphs="on", work="off")
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
_CHOICES = """
import own
import pytest

@pytest.mark.llmgpu(batch_sizes=[8])
@pytest.mark.parametrize("change", own.CHANGES)
def test_hellaswag(llm, hellaswag, batch_size, measure, change):
    llm.run(own.choose, change)
    measure(llm, hellaswag, batch_size)
"""
_CHOOSE = """
import torch

CHANGES = ["none", "experts", "attention", "mask"]

def choose(loaded, change):
    loaded.model.set_experts_implementation("eager" if change == "experts" else "grouped_mm")
    loaded.model.set_attn_implementation("eager" if change == "attention" else "sdpa")
    for layer in loaded.model.model.layers if change == "mask" else []:
        layer.self_attn.register_forward_pre_hook(lambda *given: ((), build(given[2])), with_kwargs=True)

def build(named):
    hidden = named["hidden_states"]
    mask = torch.ones(hidden.shape[1], hidden.shape[1], device=hidden.device).tril().bool()
    return named | {"attention_mask": mask[None, None]}
"""
_EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 300,
}
"""The config of a mixture of experts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of 7B's width and few layers, without weights."""
    folder = tmp_path_factory.mktemp("model") / "narrow"
    gpu.write_narrow_model(folder, ["A person counts to ten and says the number."], vocabulary=300)
    return folder


def _run(folder: Path, model: Path, tests: str, *flags: str) -> Report:
    """Run pytest with the narrow model and 32 items, all of whose cases complete."""
    given = (f"--llmgpu-model={model}", "--llmgpu-load-format=dummy", *flags)
    status, written = gpu.run_pytest(folder / "run", _CASES + tests, *given, strategies=_SYNCING)
    assert status == 0
    return written


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Report:
    """Most cases of this file, on one GPU, in one run."""
    return _run(tmp_path_factory.mktemp("main"), model, _MAIN, "--llmgpu-devices=1")


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Report:
    """Some of them in another run, partly without work passes."""
    return _run(tmp_path_factory.mktemp("again"), model, _AGAIN, "--llmgpu-devices=1")


def _case(report: Report, batch_size: int, cuda_graphs: str, strategy: str = "mp", items: int = 32) -> Any:
    """Return a result; what it lacks fails the test that reads it."""
    (found,) = (
        case
        for case in report.cases
        if (case.case.strategy, case.case.batch_size, case.case.cuda_graphs) == (strategy, batch_size, cuda_graphs)
        and (accuracy := case.launches[0].accuracy) is not None
        and accuracy.items == items
    )
    assert found.outcome == "completed"
    return found


def _work(result: CaseResult) -> Work:
    (launch,) = result.launches
    assert launch.work is not None, launch.why
    assert launch.work.passes == work.PASSES
    assert all(rank.why.keys() <= {"flops"} for rank in launch.work.ranks), [rank.why for rank in launch.work.ranks]
    return launch.work


def _alone(result: CaseResult) -> Any:
    (rank,) = _work(result).ranks
    return rank


def _kernels(report: Report, rank: RankWork) -> dict[str, int]:
    names = report.environment.kernel_names
    return {names[row.kernel]: row.calls for row in rank.rows or () if row.module is None and row.kernel is not None}


def _cv(values: Sequence[float] | None) -> float:
    assert values
    return statistics.stdev(values) / statistics.mean(values)


def test_a_gpu_is_profiled_while_it_works(main: Report) -> None:
    """Every quantity of the profile has a value on real hardware, within plausible bounds."""
    (launch,) = _case(main, 4, "off", items=400).launches
    profile = launch.profile
    assert profile.missed == 0
    (device,) = profile.devices
    (found,) = (gpu for gpu in main.environment.gpus if gpu.index == device.index)
    assert set(device.why) <= (set() if found.nvlinks else {"nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"})
    highest = {name: metric.max for name, metric in device.metrics.items()}
    assert set(highest) >= {"utilization_pct", "memory_used_bytes", "pcie_tx_bytes_per_s", "power_w", "sm_clock_mhz"}
    assert 0 < (highest["utilization_pct"] or 0) <= 100
    assert 1.9 * _GIB < (highest["memory_used_bytes"] or 0) < 12 * _GIB
    (use,) = launch.memory
    assert 1.9 * _GIB < (use.weights_bytes or 0) < (use.peak_allocated_bytes or 0) < 8 * _GIB


def test_passes_of_one_process_hardly_differ(main: Report, again: Report) -> None:
    """The time of the kernels is quiet; idle time and copies are apart; kernels and calls are the same twice."""
    first, second = (_case(report, 2, "off") for report in (main, again))
    one, two = _alone(first), _alone(second)
    assert _cv(one.device_time_s) < _LARGEST_CV
    assert _cv(_alone(_case(main, 32, "off")).device_time_s) < _LARGEST_CV
    assert statistics.median(one.device_time_s) == pytest.approx(statistics.median(two.device_time_s), rel=0.03)
    assert (one.kernels, _kernels(main, one)) == (two.kernels, _kernels(again, two))
    for name in ("ops", "ops_by_module", "flops", "runtime_calls", "host_syncs", "host_calls"):
        assert getattr(one, name) == getattr(two, name), name
    assert 0 < (one.busy or 0) <= 1
    assert _work(first).collectives == []


def test_the_clock_is_measured_with_each_pass_and_batch(main: Report) -> None:
    """An SM of a GPU that computes has between 0.3 and 4 GHz, and the stamps are in no row."""
    case = _case(main, 8, "on")
    (launch,) = case.launches
    clocks_ghz = [*_alone(case).clock_ghz, *launch.batches.clock_ghz]
    assert list(map(len, clocks_ghz)) == [_work(case).passes, len(launch.batches.latency_s)]
    assert all(0.3 < clock_ghz < 4 for of_gpu in clocks_ghz for clock_ghz in of_gpu), clocks_ghz
    assert not any("llmgpu" in name for name in main.environment.kernel_names)
    ahead = {execution: _alone(_case(main, 8, execution)).launched_ahead for execution in ("on", "off")}
    assert ahead == {"on": False, "off": True}
    print(clocks_ghz)


def test_every_kernel_belongs_to_a_module(main: Report) -> None:
    """The modules of the eager pass hold the kernels of an eager case, and none was launched outside of them."""
    case = _case(main, 8, "off")
    found, rank = _work(case), _alone(case)
    modules = [row for row in rank.rows if row.module is not None]
    kernels = [row for row in rank.rows if row.module is None]
    assert work.OUTSIDE not in {row.module for row in modules}
    assert {"layers.*.mlp.down_proj", "layers.*.self_attn.q_proj", "lm_head"} <= {row.module for row in modules}
    names = main.environment.kernel_names
    copies = [row for row in kernels if names[row.kernel].startswith("Mem")]
    assert copies
    kernels = [row for row in kernels if row not in copies]
    modules = [row for row in modules if row.kernel is None or not names[row.kernel].startswith("Mem")]
    assert sum(row.calls for row in kernels) == rank.kernels
    assert found.eager_batches == [found.batches[len(found.batches) // 2]]
    # Each batch runs the same kernels, or others for another width.
    assert sum(row.calls for row in modules) == pytest.approx((rank.kernels or 0) / len(found.batches), rel=0.1)
    pass_s = sum(row.time_s for row in kernels)
    assert sum(row.time_s for row in modules) == pytest.approx(pass_s / len(found.batches), rel=0.25)
    assert {"GEMM", "attention", "norm", "elementwise"} <= {row.family for row in kernels}
    others = [row for row in kernels if row.family == "other"]
    assert sum(row.time_s for row in others) < 0.05 * pass_s, [names[row.kernel] for row in others if row.kernel]
    assert "nvjet" in " ".join(names) or "gemm" in " ".join(names)


def test_replayed_graphs_show_their_kernels(main: Report) -> None:
    """A replay has one launch and all of its kernels by name; modules come from the eager pass all the same."""
    case = _case(main, 2, "on")
    assert case.case.execution == "cuda_graphs"
    rank = _alone(case)
    assert (rank.kernels or 0) > 10 * LAYERS * len(_work(case).batches)
    assert any(row.module == "layers.*.mlp.down_proj" for row in rank.rows)
    assert _cv(rank.device_time_s) < _LARGEST_CV
    assert "cudaGraphLaunch" not in (rank.runtime_calls or {}), "runtime calls are those of the eager pass"
    kernels_s = statistics.fmean(rank.device_time_s)
    assert len(rank.replays_s) == len(*rank.replays_ghz) == _work(case).passes // 2
    assert all(0.97 * kernels_s < one < 2 * kernels_s for one in rank.replays_s), (kernels_s, rank.replays_s)
    assert case.launches[0].batches.launch_s == []
    eager = _case(main, 2, "off")
    assert _alone(eager).replays_s is None
    (batches,) = (launch.batches for launch in eager.launches)
    assert all(0 < one < s for one, s in zip(batches.launch_s, batches.latency_s, strict=True))
    assert all(0.0005 < one < 0.1 for one in batches.reference_s), "a program of a few milliseconds"


def test_small_forwards_are_recorded_by_default(main: Report, again: Report) -> None:
    """The reason has shapes and padding, and the same plan is run in every launch."""
    cases = [_case(report, 4, "auto") for report in (main, again)]
    assert [case.case.execution for case in cases] == ["cuda_graphs"] * 2
    first, second = (case.launches[0] for case in cases)
    assert (first.plan_sha256, first.execution_choice) == (second.plan_sha256, second.execution_choice)
    print(first.execution_choice, first.warmup_s)


def test_a_host_synchronization_per_layer_is_counted(main: Report) -> None:
    """A scalar that each layer reads back: exactly one copy and one synchronization a layer more than without."""
    before, after = (_alone(_case(main, 4, "off", strategy)) for strategy in ("mp", "syncing"))
    assert (before.host_syncs, after.host_syncs) == (2, 2 + 2 * LAYERS)
    for name in ("cudaStreamSynchronize", "cudaMemcpyAsync"):
        assert after.runtime_calls.get(name, 0) == before.runtime_calls.get(name, 0) + LAYERS, name


def _assert_not_recorded(case: CaseResult) -> None:
    assert (case.case.execution, case.case.cuda_graphs) == ("eager", "auto")
    assert ".item()" in (case.launches[0].execution_choice or ""), case.launches[0].execution_choice


def test_forwards_that_cannot_be_recorded_run_eagerly(main: Report) -> None:
    """A scalar that a layer reads back ends the recording: new ranks measure both cases, which name the operation."""
    for batch_size in (2, 4):
        _assert_not_recorded(_case(main, batch_size, "auto", "syncing"))


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_work_passes_disturb_no_measurement(main: Report, again: Report, graphs: str) -> None:
    """Memory and answers of the case after a profiled one are the same with and without; times are printed."""
    with_work, without = (_case(report, 8, graphs) for report in (main, again))
    one, two = with_work.launches[0], without.launches[0]
    assert (one.work is None, two.work is None) == (False, True)
    assert one.accuracy.loglikelihoods == two.accuracy.loglikelihoods
    assert [use.peak_allocated_bytes for use in one.memory] == [use.peak_allocated_bytes for use in two.memory]
    print(with_work.id, graphs, with_work.inference_s, without.inference_s)


def test_the_ceilings_bound_the_time(main: Report) -> None:
    """The rates are those of a GPU, and no case is faster than they allow."""
    (device,) = known(main.environment.ceilings).devices
    assert device.why == {}
    assert device.gemm_flops_per_s["float16"] > 1e13
    assert (device.copy_bytes_per_s or 0) > 1e11
    for batch_size in (8, 32):
        case = _case(main, batch_size, "off")
        assert case.bound is not None, case.why
        assert 0 < case.bound.share <= 1
        print(case.id, msgspec.json.encode(case.bound).decode(), case.energy_j_per_sequence)


def test_a_memory_cap_makes_large_batches_run_out_of_memory(tmp_path: Path, model: Path) -> None:
    """Large batch sizes run out of memory as on a small GPU, and the held bytes do not count as used."""
    flags = ("--llmgpu-devices=1", "--llmgpu-batch-sizes=1,2,128", "--llmgpu-gpu-memory=3.25GiB", "--llmgpu-work=off")
    written = _run(tmp_path, model, _MEASURE, *flags)
    assert [case.outcome for case in written.cases] == ["completed", "completed", "oom"]
    (use,) = written.cases[0].launches[0].memory
    assert use.held_bytes > 0
    assert (use.nvml_used_max_bytes or 0) < 3.5 * _GIB
    assert known(written.cases[2].failure).evidence


def _records(_state: RankState) -> list[work.Record]:
    """In a rank: record a product that belongs to a module and a sum that belongs to none."""
    from torch.profiler import ProfilerActivity, profile, record_function

    tensor = torch.ones(1024, 1024, device="cuda")
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            with record_function(work.RANGE_PREFIX + "lm_head"):
                product = tensor @ tensor
            product.sum().item()
    results: Any = recorded.profiler
    return work.read_records(results.kineto_results.events())


def test_a_change_of_a_choice_is_found_and_named(tmp_path: Path) -> None:
    """A hook of the test suite changes the experts, the attention, or where the mask is built."""
    folder = tmp_path / "experts"
    gpu.write_narrow_model(folder, ["A person counts to ten and says the number."], vocabulary=300)
    (folder / "config.json").write_text(json.dumps(_EXPERTS))
    given = [f"--llmgpu-model={folder}", "--llmgpu-load-format=dummy", "--llmgpu-dtype=bfloat16", "--llmgpu-limit=16"]
    _, report = gpu.run_pytest(tmp_path / "run", _CHOICES, *given, "--llmgpu-devices=1", strategies=_CHOOSE)
    cases = [msgspec.structs.replace(case, id=case.case.id) for case in report.cases]
    base, *changed = (msgspec.structs.replace(report, cases=[case]) for case in cases)
    found = []
    for head in changed:
        rows = judge(base, head, Policy(), today=datetime.date(2026, 6, 1)).rows
        (row,) = (row for row in rows if row.metric == "program")
        assert row.verdict in {"CHANGED", "REGRESSED"}
        print(row.verdict, row.reason)
        found.append(row)
    experts, attention, mask = found
    assert re.search(r"experts: grouped_mm \(\S.*\) -> eager", experts.reason)
    assert re.search(r"attention: sdpa \(\S.*\) -> eager", attention.reason)
    changes = {change.name: change for change in known(mask.cause).ops}
    assert (changes["aten::tril"].module, changes["aten::tril"].per_layer) == ("layers.*.self_attn", 1)


def test_fakes_are_like_the_records_of_this_torch(tmp_path: Path) -> None:
    """What the parser relies on: kernels carry the correlation id of their launch, ranges are annotations."""
    # A rank, because a CUDA context of this process would stay on the GPU and disturb the cases of later tests.
    group = RankGroup(LocalLauncher(tmp_path), [{}])
    try:
        (records,) = group.ask(_records, phase="forward", timeout_s=gpu.WAIT_S)
    finally:
        group.kill()
    found = work.attribute(records)
    assert {module for module, _ in found.kernels} == {"lm_head", work.OUTSIDE}
    assert not any(record.device is not None and record.name.startswith("llmgpu:") for record in records)
    assert found.host_syncs == 0
    assert work.of_pass(records).device_time_s > 0


@gpu.TWO_GPUS
def test_ranks_of_tp_have_half_of_the_flops(tmp_path: Path, model: Path, main: Report) -> None:
    """Each has half of the FLOPs; collectives are joined, and NVLink's counters agree with them within 1 %."""
    flags = ("--llmgpu-batch-sizes=8", "--llmgpu-cuda-graphs=off", "--llmgpu-devices=2", "--strategy=tp")
    written = _run(tmp_path, model, _MEASURE, *flags)
    case = _case(written, 8, "off", "tp")
    found = _work(case)
    first, second = found.ranks
    whole = _alone(_case(main, 8, "off"))
    assert first.flops == second.flops == pytest.approx(whole.flops / 2, rel=0.01)
    assert (first.kernels, _kernels(written, first)) == (second.kernels, _kernels(written, second))
    assert first.uuids != second.uuids
    assert found.collectives is not None, found.why
    (reduced,) = (one for one in found.collectives if one.collective == "all_reduce")
    assert reduced.calls == 2 * LAYERS * len(found.batches)
    assert all(transfer_s > 0 for transfer_s in reduced.transfer_s)
    if any(gpu.nvlinks for gpu in written.environment.gpus):
        path = case.traffic.path
        assert path.link == "nvlink"
        assert path.nvlink_bytes == pytest.approx(path.expected_bytes, rel=0.01)


@gpu.TWO_GPUS
@pytest.mark.parametrize("strategy", ["mp", "own:SyncingTp", "iok"])
def test_two_gpus_are_measured(tmp_path: Path, model: Path, strategy: str) -> None:
    """Mp is one rank of both GPUs, a recording that fails is the same on all ranks, and DeepSpeed has no FLOPs."""
    if strategy == "iok":
        gpu.need_deepspeed()
    written = _run(tmp_path, model, _MEASURE, "--llmgpu-devices=2", "--llmgpu-batch-sizes=8", f"--strategy={strategy}")
    case = written.cases[-1]
    ranks = _work(case).ranks
    if strategy == "mp":
        assert len(ranks[0].uuids) == 2
        assert ranks[0].launched_ahead
        assert all(0.3 < clock_ghz < 4 for of_gpu in known(ranks[0].clock_ghz) for clock_ghz in of_gpu), (
            "each of its layers"
        )
        assert [one.collective for one in known(_work(case).collectives)] == ["peer_copy"]
        assert 0 < (ranks[0].busy or 0) <= 1
    elif strategy == "iok":
        for rank in ranks:
            assert rank.flops is None
            assert "dispatcher" in rank.why["flops"]
            assert (rank.kernels or 0) > 0
            assert _cv(rank.device_time_s) < _LARGEST_CV
    else:
        _assert_not_recorded(case)


def test_a_gpu_waits_until_the_host_releases_it() -> None:
    """However slow the host is, no wait for it is between the stamps; without a release a GPU goes on by itself."""
    device = torch.device("cuda", 0)
    clock, tensor = SmClock([device], stamps=4), torch.zeros(8, device=device)
    tensor.add_(1)  # its kernel is loaded, for which the host waits for the GPU
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    clock.hold(0)
    clock.stamp(0)
    tensor.add_(1)
    while time.perf_counter() - began_s < 0.02:
        assert not clock.is_late()
    clock.stamp(1)
    clock.release(0)
    torch.cuda.synchronize()
    held_s = (clock.seconds([(0, 1)]) or [1.0])[0]
    assert 0 < held_s < 0.005
    assert not clock.is_late()
    clock.hold(1)
    torch.cuda.synchronize()
    assert clock.is_late()
