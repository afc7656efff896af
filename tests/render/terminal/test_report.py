from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import (
    GIB,
    known,
    make_accuracy,
    make_answers,
    make_case,
    make_check,
    make_failed,
    make_finding,
    make_memory,
    make_profile,
    make_report,
    make_result,
    make_traffic,
    paper_results,
)

from pytest_llmgpu.analysis.assess import assess
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.render.terminal.report import (
    WIDTH,
    LiveLine,
    device_tables,
    headline,
    painter,
    progress,
    summary_table,
    tables,
)
from pytest_llmgpu.report.case import next_id
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Environment, Report
from pytest_llmgpu.report.result import (
    Accuracy,
    CaseResult,
    Collective,
    DeviceMemory,
    Failure,
    HostUse,
    Link,
    Path,
    Traffic,
)

_PLAIN = painter(color=False)
_CPU: dict[str, Any] = {"device": "cpu", "devices": 1}
_ENVIRONMENT = make_report().environment


def _report(results: Sequence[CaseResult]) -> Report:
    """Return the report that a session makes of these results."""
    report = make_report()
    for result in results:
        result.id = next_id([one.id for one in report.cases], result.case)
        options = Options(accuracy_baseline=0.828)
        report.cases.append(assess([result], earlier=report.cases, environment=report.environment, options=options))
    return report


def test_the_headline_names_everything_that_is_measured() -> None:
    """The first line of a log names the machine, the models, the strategies and the batch sizes."""
    machine = Machine(device="cuda", devices=4, gpus=_ENVIRONMENT.gpus, facts=TorchFacts(version="2.13.0"))
    cases = [make_case(strategy=name, batch_size=size) for name in ("mp", "tp") for size in (8, 1)]
    assert headline(machine, cases, [8, 1, 8]) == (
        "llmgpu: 4 x NVIDIA H200 (cuda); huggyllama/llama-30b; float16; hellaswag dataset; strategies mp, tp; "
        "batch sizes 1, 8"
    )


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "batch_size", "line"),
    [
        (120, 502, 12.9, 132, "mp-bs8  120/502 batches  1 228 seq/s  ETA 0:41"),
        (0, 502, 12.4, 8, "mp-bs8  0/502 batches  0:12"),
        (0, 502, 0.0, 8, "mp-bs8  0/502 batches  0:00"),
        (0, 0, 213.0, 8, "mp-bs8  warm-up  3:33"),
        (3, 3, 6.0, 1, "mp-bs8  3/3 batches  0.50 seq/s  ETA 0:00"),
        (1, 3601, 1.0, 8, "mp-bs8  1/3601 batches  8.00 seq/s  ETA 1:00:00"),
    ],
)
def test_the_live_line(done: int, total: int, elapsed_s: float, batch_size: int, line: str) -> None:
    """It has the finished batches, the rate and the remaining time; before the first batch the elapsed time."""
    assert progress("mp-bs8", "warm-up", done, total, elapsed_s, batch_size=batch_size) == line


def test_tables_come_before_findings() -> None:
    """The worst finding is the first one."""
    text = tables(_report(paper_results()), verbose=True)
    parts = ["hellaswag dataset", "Time for 10,042", "Communication per GPU", "Memory per GPU", "FAILURE  iok-bs32: "]
    places = [text.index(part) for part in (*parts, "INFO     iok-bs64: ")]
    assert places == sorted(places)
    assert text.count("-> ") == 2


def test_many_cases_are_folded() -> None:
    """The text stays short and narrow, and names the number of cases that it leaves out."""
    series = 72
    names = [f"s{number}" for number in range(series)]
    results = [make_result(1.0 / size, strategy=name, batch_size=size) for name in names for size in (1, 2)]
    lines = tables(make_report(results)).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert any(line.startswith(f"{2 * series - 30:,} cases not shown") for line in lines)
    assert len(tables(make_report(results), verbose=True).splitlines()) > 2 * series
    # The fastest of each series with right answers stands for it.
    text, rows = summary_table(_checked(paper_results()), _PLAIN, 20)
    assert rows == 3
    assert re.findall(r"^(\w+) +(\d+) +\*", text, re.MULTILINE) == [("mp", "32"), ("tp", "64"), ("iok", "16")]


def test_colour_changes_no_text() -> None:
    """Without the styles the coloured report is the plain report, in which no line is wider than 100 columns."""
    failure = Failure(phase="forward", message="a very long message " * 20)
    report = _report([*paper_results(), make_failed("error", failure, batch_size=128)])
    lines = [line for verbose in (False, True) for line in tables(report, verbose=verbose).splitlines()]
    assert max(map(len, lines)) <= WIDTH
    assert all(line == line.rstrip() for line in lines)
    coloured = tables(report, color=True)
    for style in ("0", "1", "31", "32", "33"):
        assert f"\x1b[{style}m" in coloured
        coloured = coloured.replace(f"\x1b[{style}m", "")
    assert coloured == tables(report)


def test_findings_with_the_same_next_step_are_joined() -> None:
    """Three findings have their text, the other cases are named, and the next step is written once."""
    results = [make_result(batch_size=size) for size in (2, 4, 8, 16, 32)]
    for result in results:
        result.findings = [make_finding()]
    lines = [line.strip() for line in tables(make_report(results), verbose=True).splitlines()[-5:]]
    assert lines == [
        "FAILURE  mp-bs2: It is slow.",
        *("mp-bs4: It is slow.", "mp-bs8: It is slow."),
        *("The same finding: mp-bs16, mp-bs32.", "-> Look."),
    ]


def _answers(flipped: Sequence[int], difference: float = 0.0, items: int = 200) -> Accuracy:
    """Return answers of which nine in ten are right; these items flip, and all log-likelihoods differ by this."""
    right = [number % 10 != 0 for number in range(items)]
    numbers = [-1.0 - difference] * (4 * items)
    return make_answers([hit != (number in flipped) for number, hit in enumerate(right)], numbers)


def test_each_strategys_worst_batch_size_is_compared_with_mp(prose: Prose) -> None:
    """Below the table are flips, items lost and won, their probability, and the difference of log-likelihoods."""
    cases = {("mp", 1): _answers([]), ("mp", 8): _answers([])}
    cases |= {("tp", 1): _answers([0], 1e-4), ("tp", 8): _answers([0, 1, 10], 2e-3), ("iok", 1): _answers([])}
    results = [make_result(1.0, given, strategy=name, batch_size=size) for (name, size), given in cases.items()]
    _, block, *_ = tables(_report(results), verbose=True).split("\n\n")
    text = block.partition("\n* fastest of its strategy\n")[2]
    assert "worst at batch size 8: 3 of 200 items flipped (1 lost, 2 won, p = 1)" in text
    assert prose == text


def test_the_short_text_counts_the_comparisons_that_it_leaves_out() -> None:
    """Three strategies are compared with mp; the verbose text has all. Without labels there is no probability."""
    assert "0 of 10,042 items flipped, log-likelihoods equal" in tables(_report(paper_results()), verbose=True)
    names = ("mp", "a", "b", "c", "d", "e")
    report = _report([make_result(1.0, _answers([0] * (name != "mp")), strategy=name) for name in names])
    assert "\nand 2 more (-v shows all)\n" in tables(report)
    assert "e compared with mp" in tables(report, verbose=True)


def test_random_weights_are_compared_by_their_log_likelihoods() -> None:
    """Their predictions are chance; log-likelihoods that are not finite are the worst case."""
    texts = {-1.002: "log-likelihoods differ by 0.2 % (largest)", math.nan: "not all log-likelihoods are finite"}
    for number, text in texts.items():
        results = []
        for name, size, value in (("mp", 1, -1.0), ("tp", 1, -1.0), ("tp", 2, number), ("tp", 4, -1.001)):
            answers = make_accuracy(0.25, 1, [1], [value] * 4)
            results.append(make_result(1.0, answers, strategy=name, batch_size=size, load_format="dummy"))
        assert f"tp compared with mp, worst at batch size 2: {text}" in tables(_report(results)).splitlines()


def _summary(results: Sequence[CaseResult], most: int | None = None) -> str:
    return summary_table(results, _PLAIN, most)[0]


def _checked(results: list[CaseResult]) -> list[CaseResult]:
    for result in results:
        result.accuracy_check = make_check(ok=result.acc_norm != 0.26)
    return results


def test_each_case_is_a_row(prose: Prose) -> None:
    """Time, throughput, accuracy, memory and traffic of a case; best times, wrong answers and OOM are marked."""
    assert prose == _summary(_checked(paper_results()))


def test_a_text_has_its_first_token_first_and_the_star_beside_tokens_per_second() -> None:
    """Then the time per token and its 95th percentile; the speed-up is over mp at the same batch size."""
    cases = []
    for number, (strategy, size) in enumerate([("mp", 1), ("mp", 8), ("compile", 8), ("mp", 8)], 1):
        result = make_result(strategy=strategy, batch_size=size, workload="generate", prompt_tokens=9, new_tokens=4)
        result.first_token_s, result.token_p50_s, result.token_p95_s = 0.2, 0.01 * number, 0.02
        result.inference_s, result.sequences_per_s, result.tokens_per_s = 1 / number, 10.0 * number, 40.0 * number
        result.launches[0].compile_s = 12.0 if strategy == "compile" else None
        cases.append(result)
    head, _, _, *rows = summary_table(cases, painter(False))[0].splitlines()[1:]
    assert re.findall(r"\S+(?: \S+)*", head)[:8] == [
        *("strategy", "batch", "time to", "time", "p95", "tokens", "speed-up", "compile")
    ]
    assert "* 80" in rows[1]
    assert "1.50" not in rows[2], "mp, measured twice, has no speed-up over itself"
    (compiled,) = (row.split()[:10] for row in rows if row.startswith("compile"))
    assert compiled == [*("compile", "8", "200", "ms", "30.0", "ms", "20", "120"), compiled[8], "12"]


def test_a_time_that_the_server_does_not_send_has_its_reason() -> None:
    """The reason is below the table, once."""
    cases = [make_result(strategy="openai", batch_size=size, workload="generate", new_tokens=4) for size in (1, 8)]
    why = "engine openai does not report the time of each further token"
    for result in cases:
        result.launches[0].why["step_s"] = why
    assert tables(make_report(cases)).count(f"\nNo time: {why}.") == 1
    short = make_result(workload="generate", new_tokens=1)
    short.launches[0].why["step_s"] = why
    assert "No time" not in tables(make_report([short])), "there is no further token"


def test_a_cpu_case_has_the_threads_and_the_memory_of_its_ranks() -> None:
    """The rank with the fewest threads counts: two ranks of one thread are slower than one of two; and the largest."""
    result = make_result(1.0, **_CPU)
    assert "threads" not in _summary([result])
    result.launches[0].host = HostUse(wall_s=1.0, threads=[3, 2], cpu_s=[1.0, 1.0], waited_s=[0.0, None])
    sizes = (GIB, 3 * GIB)
    result.launches[0].memory = [DeviceMemory(index=0, peak_resident_bytes=size) for size in sizes]
    [header, _, _, row] = _summary([result]).splitlines()[-4:]
    assert (header.split()[-2:], row.split()[-2:]) == (["RSS", "threads"], ["3", "2"])


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ([0.01234, 100.0], ["0.012 s", "100.000 s"]),
        ([8.3, 2.913], ["8.30 s", "2.91 s"]),
        ([599.0, 10_258.0], ["599 s", "10258 s"]),
        ([600.0, 10_258.0], ["10.0 min", "171.0 min"]),
    ],
)
def test_one_unit_and_as_many_decimals_as_the_smallest_time_needs(seconds: list[float], shown: list[str]) -> None:
    """Times of a table have one unit: minutes if the smallest is ten minutes or more."""
    text = _summary([make_result(s, batch_size=size) for size, s in zip((1, 2), seconds, strict=True)])
    assert all(time in text for time in shown)


def test_a_title_has_unusual_settings_and_differing_settings() -> None:
    """An option that is set and an unusual backend are always in the title."""
    options: list[dict[str, Any]] = [{"stock": stock, "min_tokens": None} for stock in (False, True)]
    results = [make_result(1.0, strategy="iok", backend="deepspeed", strategy_options=one) for one in options]
    results += [make_result(1.0, strategy="tp", backend=name) for name in ("deepspeed", "transformers")]
    results.append(make_result(1.0, backend="accelerate", strategy_options={"stock": None}))
    titles = [re.split(" {2,}", line)[0] for line in _summary(results).splitlines()[4:]]
    assert titles == ["iok stock=False", "iok stock=True", "tp deepspeed", "tp transformers", "mp"]
    assert "iok stock=True" in _summary(results[1:2])
    assert "stock" not in _summary(results[:1])
    assert "tp deepspeed" in _summary([make_result(1.0, strategy="tp", backend="deepspeed")])


def test_communication_and_memory_are_means_with_the_largest_device() -> None:
    """In the test's data the last GPU is 10 % busier and has 1 GiB more in use."""
    profile = make_profile(4, tx=1e9, rx=2e9, busy=40.0, nvlink=3e9)
    memory = make_memory(4, peak=16 * GIB, used=18 * GIB)
    result = make_result(1.0, None, profile, memory, traffic=make_traffic(wire_bytes_per_sequence=40e6), batch_size=8)
    communication, held = (table.splitlines() for table in device_tables([result], _ENVIRONMENT).split("\n\n"))
    assert communication[0] == "Communication per GPU: mean over the GPUs (largest)"
    cells = "mp 8 41.0 (44.0) 1.02 (1.10) 2.05 (2.20) 3.08 (3.30) 10.0"
    assert communication[4].split() == cells.split()
    assert held[0] == "Memory per GPU: mean over the GPUs (largest)"
    names = ["strategy", "batch", "weights", "activations", "rest", "cached", "torch peak", "NVML peak"]
    assert re.split(" {2,}", held[1]) == names
    cells = "15.0 (15.0) 1.25 (2.00) 2.00 (2.00) 0.00 (0.00) 16.2 (17.0) 18.2 (19.0)"
    assert held[4].split() == ["mp", "8", *cells.split()]


def _sending(ranks: Sequence[int], devices: int = 4, **fields: Any) -> CaseResult:
    """Return a case of two batches of 32 sequences with 480 all-reduces each, and these bytes per rank."""
    sent = [Collective(collective="all_reduce", calls=960, payload_bytes=size, wire_bytes=size) for size in ranks]
    traffic = Traffic(ranks=[[one] for one in sent], wire_bytes_per_sequence=sum(ranks) / 64)
    profile = make_profile(devices)
    return make_result(1.0, None, profile, traffic=traffic, devices=devices, **{"batch_size": 32, **fields})


@pytest.mark.parametrize(("ranks", "cell"), [([64] * 4, "1.00"), ([64, 128, 64, 64], "1.25 (2.00)"), ([256], "1.00")])
def test_sent_bytes_are_per_device(ranks: list[int], cell: str) -> None:
    """The bytes of a process with several devices are split over the devices."""
    lines = device_tables([_sending([size * 10**6 for size in ranks])], _ENVIRONMENT).splitlines()
    assert " ".join(lines[4].split()).endswith(f") {cell}")


def test_collectives_are_counted_per_batch_and_sequence() -> None:
    """Each strategy has a line: calls per batch and wire bytes per sequence, as a range over the batch sizes."""
    several = [_sending([size] * 4, strategy="tp", batch_size=32) for size in (64_000_000, 128_000_000)]
    gathered = Collective(collective="all_gather", calls=2, payload_bytes=1, wire_bytes=16_000_000)
    for result in several:
        for rank in known(result.traffic).ranks:
            rank.append(gathered)
    uneven = _sending([64_000_000, 192_000_000], strategy="iok")
    first, _ = device_tables([_sending([256_000_000]), *several, uneven], _ENVIRONMENT).split("\n\n", 1)
    assert first.replace("\n  ", " ").splitlines()[-3:] == [
        "mp, one process: 480 all_reduce per batch (4 MB/sequence)",
        "tp, each rank: 480 all_reduce per batch (1 to 2 MB/sequence), 1 all_gather per batch (0.250 MB/sequence)",
        "iok, mean over the ranks: 480 all_reduce per batch (2 MB/sequence)",
    ]
    texts = _sending([64_000_000] * 2, devices=2, device="cpu")
    texts.traffic = msgspec.structs.replace(known(texts.traffic), step=[[gathered]] * 2)
    assert device_tables([texts], _ENVIRONMENT).splitlines() == [
        "mp, each rank: 480 all_reduce per batch (1 MB/sequence)",
        "mp, each rank: 2 all_gather per decode step (0.500 MB/token)",
    ]


def _going(link: Link | None, counted: float, text: str, **fields: Any) -> CaseResult:
    """Return a case whose links counted this multiple of the sent bytes."""
    result = _sending([64_000_000] * 4, strategy="tp", **fields)
    path = Path(link=link, expected_bytes=100, nvlink_bytes=100 * counted, pcie_bytes=100 * counted, text=text)
    result.traffic = msgspec.structs.replace(known(result.traffic), path=path)
    return result


def test_the_path_of_each_strategy_has_one_line_per_link() -> None:
    """The line is about the case with the largest error; a text that is also a finding is left out."""
    results = [
        _going("nvlink", 1.001, "Over NVLink: near.", batch_size=1),
        _going("nvlink", 0.9, "Over NVLink: far.", batch_size=2),
        _going("nvlink", 2.0, "Over NVLink: twice.", batch_size=4),
        _going("host", 1.2, "Over PCIe.", batch_size=8),
        _going(None, 0.0, "Not known.", batch_size=16),
    ]
    results[2].findings = [make_finding(text="Over NVLink: twice.")]
    lines = device_tables(results, _ENVIRONMENT).splitlines()
    assert lines[lines.index("") - 3 : lines.index("")] == [
        "tp (largest error at batch size 2): Over NVLink: far.",
        "tp at batch size 8: Over PCIe.",
        "tp at batch size 16: Not known.",
    ]


@pytest.mark.parametrize(
    ("workspace", "dropped"),
    [(GIB // 2, "cached GiB, rest GiB"), (None, "cached GiB"), (120 * GIB, "cached GiB")],
)
def test_dropped_columns_are_named(workspace: int | None, dropped: str) -> None:
    """Weights, activations, workspace and the peak of NVML are never dropped."""
    sizes = {"weights_bytes": 15 * GIB, "peak_allocated_bytes": 15 * GIB + GIB // 16}
    sizes |= {"peak_reserved_bytes": 15 * GIB + GIB // 8, "nvml_used_max_bytes": 19 * GIB + (workspace or 0)}
    memory = [DeviceMemory(index=index, workspace_bytes=workspace, **sizes) for index in range(4)]  # type: ignore[arg-type]
    table = device_tables([make_result(1.0, None, make_profile(4), memory)], _ENVIRONMENT).split("\n\n")[1]
    assert table.endswith(f": {dropped}.")
    assert max(map(len, table.splitlines())) <= WIDTH
    for name in ("weights", "activations", "NVML peak", *(["workspace"] if workspace else [])):
        assert name in table.splitlines()[1]


def test_an_unknown_part_of_memory_has_its_reason() -> None:
    """The other parts are shown."""
    result = make_result(1.0, None, make_profile(1), make_memory(1, peak=16 * GIB, used=10 * GIB), devices=1)
    text = device_tables([result], _ENVIRONMENT)
    assert "No rest: nvml_used_max_bytes is 6,442,450,944 bytes less than peak_reserved_bytes" in text
    assert "activations" in text


@pytest.mark.parametrize("place", ["profile", "launch", "environment"])
def test_missing_nvml_has_its_reason(place: str) -> None:
    """The reason may be in the profile, the launch or the environment; the memory counted by torch is shown."""
    result = make_result(1.0, None, None, make_memory(1), devices=1)
    environment, why = Environment(python="3", platform="Linux"), {"profile": "no NVML here"}
    if place == "profile":
        result.launches[0].profile = make_profile(0, samples=0, why=why)
    elif place == "launch":
        result.launches[0].why = why
    else:
        environment.why = {"nvml": "no NVML here"}
    lines = device_tables([result], environment).splitlines()
    assert lines[-1] == "No GPU busy, PCIe TX, PCIe RX: no NVML here."
    assert lines[0] == "Memory per GPU"
    assert "16.0" in lines[4]


def test_a_metric_that_the_gpu_lacks_has_its_reason() -> None:
    """The table has no empty column, and the last line has the reason."""
    profile = make_profile(1)
    [device] = profile.devices
    for name in ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"):
        del device.metrics[name]
        device.why[name] = "Not Supported"
    lines = device_tables([make_result(1.0, None, profile, make_memory(1), devices=1)], _ENVIRONMENT).splitlines()
    assert "GPU busy" in lines[1]
    assert lines[-1] == "No PCIe TX, PCIe RX: Not Supported."


def test_cases_that_did_not_complete_are_left_out() -> None:
    """The traffic of an incomplete case does not compare with that of a complete one."""
    assert device_tables([make_failed("oom")], _ENVIRONMENT) == ""
    assert device_tables([make_result(1.0, **_CPU)], _ENVIRONMENT) == ""
    text = device_tables([make_result(1.0, None, make_profile()), make_failed("oom", batch_size=2)], _ENVIRONMENT)
    assert len(text.split("\n\n")[0].splitlines()) == 5


class _Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "drawn"),
    [(True, "\x1b7\x1b[K1/9 batches\x1b8\x1b[K2/9 batches\x1b8\x1b[K"), (False, "")],
)
def test_the_line_is_redrawn_and_removed(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, drawn: str) -> None:
    """The last call leaves nothing on the screen, and a log file gets no control sequences."""
    screen = _Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stdout", screen)
    line = LiveLine(contextlib.nullcontext, lambda: 40)
    line.show("1/9 batches")
    line.show("2/9 batches")
    line.clear()
    assert screen.getvalue() == drawn


def test_a_log_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that takes minutes is no silence; a note counts, and quick cases write nothing."""
    log, now_s = _Terminal(is_terminal=False), [0.0]
    monkeypatch.setattr(sys, "stdout", log)
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    line = LiveLine(contextlib.nullcontext, lambda: 40)
    for second in range(0, 300, 10):
        now_s[0] = float(second)
        line.show(f"llmgpu: mp-bs8  warm-up  {second}")
        if second == 130:
            line.show("llmgpu: launch 2 of 2", at_once=True)
    line.clear()
    assert log.getvalue().split("\n")[1::2] == [
        *("llmgpu: mp-bs8  warm-up  60", "llmgpu: mp-bs8  warm-up  120", "llmgpu: launch 2 of 2"),
        *("llmgpu: mp-bs8  warm-up  190", "llmgpu: mp-bs8  warm-up  250"),
    ]


def test_the_width_is_read_from_the_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured standard output has no width."""
    screen = _Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", _Terminal(is_terminal=False))

    @contextlib.contextmanager
    def uncaptured() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            yield

    LiveLine(uncaptured, lambda: 31 if sys.stdout is screen else 21).show("x" * 100)
    assert screen.getvalue().count("x") == 30
