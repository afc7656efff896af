from __future__ import annotations

from support.report_factory import make_report, make_result

from pytest_llmgpu.inference import logits
from pytest_llmgpu.render.grouping import apart, blocks, captions, dataset, model


def test_strategies_and_batch_sizes_share_a_table() -> None:
    """How the forwards ran does not part them either: that is an answer."""
    cases = [
        make_result(),
        make_result(strategy="tp", batch_size=4),
        make_result(execution="cuda_graphs", batch_size=2),
    ]
    assert blocks(cases) == [cases]


def test_another_model_has_a_table_of_its_own() -> None:
    """In the order in which they ran."""
    first, second = make_result(), make_result(model="gpt2")
    again = make_result(batch_size=2)
    assert blocks([first, second, again]) == [[first, again], [second]]


def test_processes_on_a_cpu_share_a_table() -> None:
    """Each strategy has as many as it needs; on GPUs another number of them is another measurement."""
    assert len(blocks([make_result(device="cpu", devices=1), make_result(device="cpu", devices=2)])) == 1
    assert len(blocks([make_result(devices=1), make_result(devices=2)])) == 2


def test_a_caption_says_what_was_measured() -> None:
    """Model, type, GPUs, dataset, and what memory they had."""
    result = make_result(load_format="dummy", limit=1200, gpu_memory_bytes=32 * 2**30)
    report = make_report([result])
    [caption] = captions([[result]], report)
    assert caption == (
        "huggyllama/llama-30b (random weights), float16, 4 x NVIDIA H200, hellaswag dataset (first 1,200 items), "
        "32.0 GiB allowed of each"
    )
    assert (model(make_result().case), dataset(make_result().case)) == ("huggyllama/llama-30b", "hellaswag dataset")


def test_a_caption_says_how_it_was_scored_where_that_is_not_usual() -> None:
    """As the study's harness did, memory is another."""
    result = make_result(workload=logits.FULL_LOGITS)
    [caption] = captions([[result]], make_report([result]))
    assert caption.endswith("hellaswag dataset, every logit and a KV cache")


def test_blocks_are_told_apart_by_what_differs_only() -> None:
    """In the words of the captions, and in words where a caption has none; a single one needs none."""
    tables = [[make_result()], [make_result(model="gpt2", gpu_memory_bytes=2**30)]]
    report = make_report([tables[0][0], tables[1][0]])
    assert apart(tables, report) == ["huggyllama/llama-30b, all of the memory", "gpt2, 1.0 GiB allowed of each"]
    assert apart(tables[:1], report) == [""]
    assert apart([], report) == []


def test_captions_that_read_the_same_name_what_differs() -> None:
    """Two revisions of a model are not confused."""
    tables = [[make_result(revision="a" * 40)], [make_result(revision="b" * 40)]]
    first, second = captions(tables, make_report([tables[0][0], tables[1][0]]))
    assert first.endswith(", revision aaaaaaaaaaaa")
    assert second.endswith(", revision bbbbbbbbbbbb")
