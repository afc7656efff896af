from __future__ import annotations

from support.report_factory import make_report, make_result

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.render.grouping import blocks, captions
from pytest_llmgpu.report.report import Node
from pytest_llmgpu.report.result import CaseResult


def _captions(*results: CaseResult) -> list[tuple[str, str]]:
    return captions([[result] for result in results], make_report(results))


def test_cases_that_differ_in_strategy_and_batch_size_share_a_table() -> None:
    """Eager or CUDA graphs, and the number of processes on a CPU, split none; another model or number of GPUs does."""
    first, second = make_result(), make_result(model="gpt2")
    others = [make_result(strategy="tp", batch_size=4), make_result(execution="cuda_graphs", batch_size=2)]
    assert blocks([first, second, *others]) == [[first, *others], [second]]
    assert len(blocks([make_result(device="cpu", devices=devices) for devices in (1, 2)])) == 1
    assert len(blocks([make_result(devices=devices) for devices in (1, 2)])) == 2


def test_a_caption_names_the_measurement() -> None:
    """A caption has model, dtype, GPUs, dataset, memory limit and unusual scoring; a default is left out."""
    [(caption, short)] = _captions(make_result(load_format="dummy", limit=1200, gpu_memory_bytes=32 * 2**30))
    assert caption == (
        "huggyllama/llama-30b (random weights), float16, 4 x NVIDIA H200, hellaswag dataset (first 1,200 items), "
        "memory limit 32.0 GiB per GPU"
    )
    assert short == ""
    [(usual, _)], [(harness, _)] = _captions(make_result()), _captions(make_result(scoring=scoring.HARNESS))
    assert harness == f"{usual}, every logit and a KV cache"


def test_a_caption_has_the_number_of_nodes() -> None:
    """On a CPU, where strategies of one table use different numbers of nodes, it is that of the run."""
    on_gpus, on_cpu = make_result(devices=4, nodes=2), make_result(device="cpu", devices=1)
    report = make_report([on_gpus, on_cpu])
    report.environment.nodes = [Node(python="3.11.7", platform="Linux")] * 2
    there = [text.split(", ")[2] for text, _ in captions([[on_gpus], [on_cpu]], report)]
    assert there == ["4 x NVIDIA H200 on 2 nodes", "CPU on 2 nodes"]


def test_short_captions_have_only_the_differing_parts() -> None:
    """A default is written out where another block differs; fields behind equal captions are named."""
    found = _captions(make_result(), make_result(model="gpt2", gpu_memory_bytes=2**30))
    assert [short for _, short in found] == [
        "huggyllama/llama-30b, no memory limit",
        "gpt2, memory limit 1.0 GiB per GPU",
    ]
    assert _captions() == []
    for letter, (caption, short) in zip("ab", _captions(*(make_result(revision=one) for one in "ab")), strict=True):
        assert caption.endswith(f", revision {letter}")
        assert short == f"revision {letter}"
