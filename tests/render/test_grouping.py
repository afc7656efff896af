from __future__ import annotations

from typing import Any

import pytest
from support.report_factory import make_report, make_result

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.render.table import blocks, captions
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
    assert _captions() == []


def test_a_caption_has_the_number_of_nodes() -> None:
    """On a CPU, where strategies of one table use different numbers of nodes, it is that of the run."""
    on_gpus, on_cpu = make_result(devices=4, nodes=2), make_result(device="cpu", devices=1)
    report = make_report([on_gpus, on_cpu])
    report.environment.nodes = [Node(python="3.11.7", platform="Linux")] * 2
    there = [text.split(", ")[2] for text, _ in captions([[on_gpus], [on_cpu]], report)]
    assert there == ["4 x NVIDIA H200 on 2 nodes", "CPU on 2 nodes"]


@pytest.mark.parametrize(
    ("fields", "short"),
    [
        ({"model": "gpt2"}, ("huggyllama/llama-30b", "gpt2")),
        ({"dtype": "bfloat16"}, ("float16", "bfloat16")),
        ({"devices": 1}, ("4 x NVIDIA H200", "1 x NVIDIA H200")),
        ({"gpu_memory_bytes": 18 * 2**30}, ("no memory limit", "memory limit 18.0 GiB per GPU")),
        ({"limit": 100}, ("hellaswag dataset", "hellaswag dataset (first 100 items)")),
        # Captions are equal: the fields behind them are named.
        ({"cuda_graphs": "off"}, ("cuda_graphs auto", "cuda_graphs off")),
        ({"revision": "0123456789abcdef"}, ("revision None", "revision 0123456789ab")),
    ],
)
def test_short_captions_have_only_the_differing_parts(fields: dict[str, Any], short: tuple[str, str]) -> None:
    """A default is written out where another block differs."""
    found = _captions(make_result(), make_result(**fields))
    assert tuple(text for _, text in found) == short
    assert short[1] in found[1][0]
    assert found[0][0] != found[1][0]
