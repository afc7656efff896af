from __future__ import annotations

from support.report_factory import make_report, make_result

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.render.grouping import blocks, captions, dataset, differing_parts, model
from pytest_llmgpu.report.report import Node


def test_strategies_and_batch_sizes_share_a_table() -> None:
    """Cases that ran differently (eager or CUDA graphs) are in the same table."""
    cases = [
        make_result(),
        make_result(strategy="tp", batch_size=4),
        make_result(execution="cuda_graphs", batch_size=2),
    ]
    assert blocks(cases) == [cases]


def test_another_model_has_a_table_of_its_own() -> None:
    """Blocks are in the order in which their first case ran."""
    first, second = make_result(), make_result(model="gpt2")
    again = make_result(batch_size=2)
    assert blocks([first, second, again]) == [[first, again], [second]]


def test_processes_on_a_cpu_share_a_table() -> None:
    """The number of processes on a CPU does not split a table; the number of GPUs does."""
    assert len(blocks([make_result(device="cpu", devices=1), make_result(device="cpu", devices=2)])) == 1
    assert len(blocks([make_result(devices=1), make_result(devices=2)])) == 2


def test_a_caption_names_the_measurement() -> None:
    """A caption has the model, the dtype, the GPUs, the dataset and the memory limit."""
    result = make_result(load_format="dummy", limit=1200, gpu_memory_bytes=32 * 2**30)
    [caption] = captions([[result]], make_report([result]))
    assert caption.split(", ") == [
        "huggyllama/llama-30b (random weights)",
        "float16",
        "4 x NVIDIA H200",
        "hellaswag dataset (first 1,200 items)",
        "memory limit 32.0 GiB per GPU",
    ]
    assert (model(make_result().case), dataset(make_result().case)) == ("huggyllama/llama-30b", "hellaswag dataset")


def test_a_caption_has_the_number_of_nodes() -> None:
    """On a CPU, where strategies of one table use different numbers of nodes, it is that of the run."""
    on_gpus, on_cpu = make_result(devices=4, nodes=2), make_result(device="cpu", devices=1)
    report = make_report([on_gpus, on_cpu])
    report.environment.nodes = [Node(python="3.11.7", platform="Linux")] * 2
    there = [text.split(", ")[2] for text in captions([[on_gpus], [on_cpu]], report)]
    assert there == ["4 x NVIDIA H200 on 2 nodes", "CPU on 2 nodes"]


def test_a_caption_names_scoring_by_the_harness() -> None:
    """This scoring needs more memory, and a caption has it; the default scoring is left out."""
    result = make_result(scoring=scoring.HARNESS)
    usual = make_result()
    [caption] = captions([[result]], make_report([result]))
    assert [*captions([[usual]], make_report([usual])), "every logit and a KV cache"] == caption.rsplit(", ", 1)


def test_short_captions_have_only_the_differing_parts() -> None:
    """A default value is written out where another block differs; a single block has an empty text."""
    tables = [[make_result()], [make_result(model="gpt2", gpu_memory_bytes=2**30)]]
    report = make_report([tables[0][0], tables[1][0]])
    assert differing_parts(tables, report) == [
        "huggyllama/llama-30b, no memory limit",
        "gpt2, memory limit 1.0 GiB per GPU",
    ]
    assert differing_parts(tables[:1], report) == [""]
    assert differing_parts([], report) == []


def test_equal_captions_get_the_differing_field() -> None:
    """Two revisions of a model have different captions."""
    tables = [[make_result(revision="a" * 40)], [make_result(revision="b" * 40)]]
    first, second = captions(tables, make_report([tables[0][0], tables[1][0]]))
    assert first.endswith(", revision aaaaaaaaaaaa")
    assert second.endswith(", revision bbbbbbbbbbbb")
