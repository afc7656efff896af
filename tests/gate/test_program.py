"""Programs that differ, as work passes record them, and the row `program` of the gate."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.program_factory import (
    ADD,
    CLONE,
    FLASH,
    MLP,
    PROJECTION,
    REDUCED,
    Program,
    between,
    measured,
    pairs,
    report_of,
)
from support.prose import Prose
from support.report_factory import known, make_profile

from pytest_llmgpu.analysis.merging import merge
from pytest_llmgpu.gate import program
from pytest_llmgpu.gate.cause import with_slower_kernels
from pytest_llmgpu.gate.headline import headline
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.verdicts import Row

_BASE = Program()
_DEVICE_S = 0.027
"""Device time of a pass: without collectives."""
_CLONES = _BASE.more(MLP, CLONE, 4, 0.005 * _DEVICE_S, op="aten::clone")
_MATH = dataclasses.replace(
    _BASE, kernels={(module, name.replace(FLASH, "fmha_math")): one for (module, name), one in _BASE.kernels.items()}
)


def _rows(before: Any, after: Any, seconds: float = 1.0, **policy: Any) -> dict[str, Row]:
    head = report_of(after, seconds=seconds)
    head.cases[0].launches[0].traces = [
        f"a-rank{rank}-{name}.json.gz" for rank in (1, 0) for name in ("modules", "passes")
    ]
    verdicts = judge(report_of(before), head, Policy(**policy), today=datetime.date(2026, 6, 1))
    return {row.metric: row for row in verdicts.rows}


@pytest.mark.parametrize("clock_ghz", [1.7, 1.5])
def test_the_price_of_added_kernels_is_exact_at_every_clock(clock_ghz: float) -> None:
    """The factor that all unchanged kernels have in common is that of the clock; a renamed kernel has an error."""
    (pair,) = pairs(_BASE, _CLONES, clock_ghz=clock_ghz)
    assert program.price(pair) == pytest.approx((0.005, 0.015 * 0.005))
    assert program.price(pairs(_BASE, _BASE, clock_ghz=clock_ghz)[0]) == (0.0, 0.0)
    expected = (0.0, 0.015 * 0.004 / _DEVICE_S)
    assert program.price(pairs(_BASE, _MATH, clock_ghz=clock_ghz)[0]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("excess", [0.005, 0.004 / _DEVICE_S], ids=["slightly slower", "twice as long"])
def test_one_kernel_that_became_slower_than_the_others_is_found_at_every_clock(excess: float) -> None:
    """Its excess is a fraction of device time; what all kernels have in common is none."""
    after = _BASE.slower(FLASH, 1 + excess * _DEVICE_S / 0.004)
    for clock_ghz in (1.7, 1.6):
        first, *others = program.slower_kernels(pairs(_BASE, after, clock_ghz=clock_ghz)[0])
        assert (first.name, first.module) == (FLASH, "layers.*.self_attn")
        assert first.excess == pytest.approx(excess, rel=0.03)
        assert max(one.excess for one in others) < 1e-3
    assert max(one.excess for one in program.slower_kernels(pairs(_BASE, _BASE.slower("", 1.2))[0])) < 1e-9


def test_copies_between_gpus_are_no_slower_kernel() -> None:
    """They wait, as collectives do; older reports call them copies. A softmax whose name is cut stays in its family."""
    peer, softmax = "Memcpy PtoP (Device -> Device)", f"cunn_SoftMaxForward{'<float>' * 40}LogSoftMax"
    base = _BASE.more("layers.*", peer, 8, 0.001).more("(scoring)", softmax, 2, 0.001)
    before, after = measured(base), measured(base.slower(peer, 3))
    rows: Any = before.works[0].ranks[0].rows
    for number, row in enumerate(rows):
        if row.kernel is not None and before.kernel_names[row.kernel] == peer:
            rows[number] = msgspec.structs.replace(row, family="copy")
    (pair,) = between(before, after)
    assert max(one.excess for one in program.slower_kernels(pair)) < 1e-3
    assert pair.before.kernels.keys() == pair.after.kernels.keys()
    cut = next(name for name in after.kernel_names if name.startswith("cunn"))
    assert "LogSoftMax" not in cut
    assert ("other", cut) in pair.after.kernels


def test_a_kernel_with_most_of_the_time_is_compared_with_the_others() -> None:
    """Not with itself."""
    name, share = "nvjet_hsh_128x256", 0.016 / _DEVICE_S
    assert share > 0.5
    first, *_ = program.slower_kernels(pairs(_BASE, _BASE.slower(name, 1.01))[0])
    assert first.name == name
    assert first.excess == pytest.approx(0.01 * share, rel=0.03)


@pytest.mark.parametrize(("gpus", "ranks", "found"), [("01", 1, True), ("23", 1, False), ("23", 2, True)])
def test_on_other_gpus_a_kernel_has_to_be_slower_on_every_rank(gpus: str, ranks: int, found: bool) -> None:
    """One GPU may be slower than the others of its kind."""
    slower = _BASE.slower(FLASH, 1.05)
    compared = [
        pair._replace(
            before=pair.before._replace(uuids=frozenset(uuid)), after=pair.after._replace(uuids=frozenset(gpu))
        )
        for pair, uuid, gpu in zip(pairs(_BASE, slower, [_BASE, slower][ranks - 1]), "01", gpus, strict=True)
    ]
    row = with_slower_kernels(
        Row(key="a", id="mp-bs1", metric="device_time", verdict="OK", base=1.0, reason="It is."), compared
    )
    assert (row.result == "REGRESSED") == found
    assert row.cause is None or FLASH in row.reason


_SYNCS = dataclasses.replace(_BASE, syncs=34, runtime_calls={**_BASE.runtime_calls, "cudaStreamSynchronize": 36})
_HOOK = dataclasses.replace(_BASE, files={**_BASE.files, "own/hooks.py": 2})
_SMALL = _BASE.more(PROJECTION, "nvjet_small", 2, 0.0008 * _DEVICE_S, op="aten::mm")


@pytest.mark.parametrize(
    ("before", "after", "program_row", "device_time"),
    [
        (_BASE, _BASE, "OK", "OK"),
        (_BASE, _CLONES, "REGRESSED", "OK"),
        (_CLONES, _BASE, "CHANGED", "OK"),
        (_BASE, _SMALL, "CHANGED", "OK"),
        (_BASE, _SYNCS, "REGRESSED", "OK"),
        (_BASE, _SYNCS.slower("", 0.9), "CHANGED", "OK improved"),
        (_BASE, _HOOK, "CHANGED", "OK"),
        (_BASE, _MATH, "CHANGED", "OK"),
        (_BASE, _CLONES.slower("nvjet_hsh_128x256", 0.9), "CHANGED", "OK improved"),
        (_BASE, _BASE.slower(FLASH, 1.05), "OK", "REGRESSED"),
        (_BASE, _BASE.slower(FLASH, 1.03), "OK", "REGRESSED"),
        (_BASE, _BASE.slower("", 1.015), "OK", "REGRESSED"),
    ],
    ids=[
        "equal", "a copy in each layer", "a copy less", "a small product", "host synchronizations",
        "host synchronizations of a faster program", "a hook", "another kernel", "a copy in a faster program",
        "one slower kernel", "one slightly slower kernel", "all kernels slower",
    ],
)  # fmt: skip
def test_a_change_of_the_program_is_stated_and_fails_by_its_price(
    before: Program, after: Program, program_row: str, device_time: str, prose: Prose
) -> None:
    """One launch in each report decides; what is faster in spite of it does not fail."""
    found = _rows(measured(before), measured(after), seconds=0.9 if "improved" in device_time else 1.0)
    row = found["program"]
    assert row.verdict == program_row
    assert row.trace == ("a-rank0-passes.json.gz" if row.worse else None)
    timed = found["device_time"]
    assert f"{timed.verdict}{' improved' * timed.improved}" == device_time
    assert prose == f"{row.reason}\n{timed.reason}"
    if timed.cause is not None and timed.cause.kernel is not None:
        assert timed.cause.kernel.growth > timed.cause.kernel.excess > 0.003
    assert msgspec.json.decode(msgspec.json.encode(row), type=Row) == row


def test_a_gpu_that_idles_for_another_part_of_a_pass_decides_less() -> None:
    """Its kernels seem slower, some of them more than others; more launches do not decide that."""
    slower = _BASE.slower(FLASH, 1.03)
    for head, verdict, seen in (
        (slower, "REGRESSED", 0.02),
        (dataclasses.replace(slower, idle_s=0.2), "UNDECIDED", 0.2),
    ):
        row = _rows(measured(_BASE), measured(head))["device_time"]
        assert row.verdict == verdict
        assert seen / 2 < (row.smallest_seen or 0.0) < seen
    alike, other = (measured(dataclasses.replace(_BASE.slower("", 1.05), idle_s=idle_s)) for idle_s in (0.01, 0.2))
    assert _rows(measured(_BASE), alike)["device_time"].verdict == "REGRESSED"
    undecided = _rows(measured(_BASE), other)["device_time"]
    assert (undecided.verdict, undecided.launches_needed) == ("UNDECIDED", None)


def test_a_rank_that_idles_does_not_hide_another_one() -> None:
    """It seems to have become slower still."""
    noisy = dataclasses.replace(_BASE.slower("", 1.032), idle_s=0.2)
    row = _rows(measured(_BASE, _BASE), measured(_BASE.slower("", 1.03), noisy))["device_time"]
    assert row.verdict == "REGRESSED"
    assert row.reason.startswith("Device time of rank 0 +3.0 %")


def test_a_gpu_at_a_lower_clock_is_no_regression() -> None:
    """The same program takes 10 % longer; the row has the ratio of the clocks."""
    found = _rows(measured(_BASE), measured(_BASE, clock_ghz=1.7 / 1.1))
    assert (found["program"].verdict, found["device_time"].verdict) == ("OK", "OK")
    assert found["device_time"].clock_ratio == pytest.approx(1 / 1.1)


@pytest.mark.parametrize(
    ("ratio", "limited", "words"),
    [
        (0.9, (True, True), "10 % slower (limit of power or heat) than in the baseline: times"),
        (0.9, (True, False), "10 % slower than in the baseline: times"),
        (1.1, (True, False), "10 % faster than in the baseline (limit of power or heat): times"),
        (1.1, (False, True), "10 % faster than in the baseline: times"),
    ],
)
def test_a_lower_clock_at_the_limit_of_power_is_stated(ratio: float, limited: tuple[bool, bool], words: str) -> None:
    """The report with the lower clock counts: `limited` are baseline and candidate."""
    both = [report_of(measured(_BASE)), report_of(measured(_BASE, clock_ghz=1.7 * ratio))]
    for report, is_limited in zip(both, limited, strict=True):
        texts = ["throttled by power or heat: GPU 0 for 9.0 % of the time"] * is_limited
        report.cases[0].launches[0].profile = make_profile(invalid=texts)
    verdicts = judge(both[0], both[1], Policy(), today=datetime.date(2026, 6, 1))
    assert f"the GPU ran {words}" in headline(verdicts, Policy()).text


@pytest.mark.parametrize(
    ("clocks_ghz", "in_turn", "verdict"),
    [
        ((1.65, 1.65, 1.65), True, "CHANGED"),
        ((1.65, 1.65, 1.65), False, "OK"),
        ((1.65, 1.65, 1.7), True, "OK"),
        ((1.65, 1.65), True, "OK"),
        ((1.75, 1.75, 1.75), True, "OK"),
    ],
)
def test_a_program_that_lowers_its_own_clock_is_stated(
    clocks_ghz: Sequence[float], in_turn: bool, verdict: str
) -> None:
    """At an equal clock it is as fast as before; launches in turn exclude a drift of the machine."""
    both = []
    for clocks in ([1.7] * len(clocks_ghz), clocks_ghz):
        launches = [report_of(measured(_BASE, clock_ghz=ghz)) for ghz in clocks]
        both.append(merge(launches, [str(number) for number in range(len(launches))]))
        both[-1].cases[0].energy_j_per_sequence = 3.4 / min(clocks)
    rows = judge(both[0], both[1], Policy(), today=datetime.date(2026, 6, 1), in_turn=in_turn).rows
    (row,) = [row for row in rows if row.metric == "device_time"]
    assert row.verdict == verdict
    if verdict == "CHANGED":
        assert row.reason.startswith(
            "More power per forward: the clock was 2.9 % lower in each of 3 launches in turn, energy per sequence "
            "+3.0 %. At an equal clock: Device time "
        )


@pytest.mark.parametrize(
    ("after", "verdict", "ratio", "words"),
    [
        (_BASE, "OK", None, "equal"),
        (dataclasses.replace(_BASE, flops={PROJECTION: 1020}), "REGRESSED", 1.02, "FLOPs +2.00 %"),
        (dataclasses.replace(_BASE, flops={PROJECTION: 1000, MLP: 1}), "CHANGED", 1.001, "FLOPs +0.10 %"),
        (_HOOK, "CHANGED", 1.0, "own/hooks.py"),
        (dataclasses.replace(_BASE, files={**_BASE.files, "<string>": 2}), "CHANGED", 1.0, "Cause: 2 more <string>."),
        (_CLONES, "CHANGED", 1.0, "1 more aten::clone in each layers.*.mlp"),
    ],
)
def test_without_device_time_flops_decide(after: Program, verdict: str, ratio: float | None, words: str) -> None:
    """On a CPU ops and calls of the host are the cause of a longer time, and fail nothing by themselves."""
    row = _rows(measured(_BASE, on_cpu=True), measured(after, on_cpu=True))["program"]
    assert (row.verdict, row.ratio) == (verdict, ratio)
    assert words in row.reason


def test_a_change_without_another_kernel_is_free_where_kernels_are_known() -> None:
    """Where they were not recorded, nothing is known of its price."""
    head = measured(_CLONES)
    (rank,) = head.works[0].ranks
    head.works[0].ranks[0] = msgspec.structs.replace(rank, rows=None, device_time_s=None)
    for after, ratio in ((measured(_HOOK), 1.0), (head, None)):
        row = _rows(measured(_BASE), after)["program"]
        assert (row.verdict, row.ratio) == ("CHANGED", ratio)


def test_other_versions_of_python_make_other_calls() -> None:
    """Their numbers are not compared."""
    after = measured(_HOOK, on_cpu=True)
    (rank,) = after.works[0].ranks
    calls = msgspec.structs.replace(known(rank.host_calls), python_version="3.13")
    after.works[0].ranks[0] = msgspec.structs.replace(rank, host_calls=calls)
    assert _rows(measured(_BASE, on_cpu=True), after)["program"].verdict == "OK"


def test_an_earlier_baseline_without_every_kernel_is_not_compared() -> None:
    """It has no ops by module either."""
    before = measured(_BASE)
    (rank,) = before.works[0].ranks
    before.works[0].ranks[0] = msgspec.structs.replace(rank, ops_by_module=None)
    assert "program" not in _rows(before, measured(_CLONES))
    assert _rows(measured(_CLONES), before)["program"].verdict == "MISSING"


def test_the_rank_whose_change_costs_most_decides() -> None:
    """A change of one rank names it; collectives wait, and have no price."""
    found = _rows(measured(_BASE, _BASE), measured(_BASE, _CLONES))["program"]
    assert (found.verdict, found.cause and found.cause.rank) == ("REGRESSED", 1)
    more = _BASE.more(MLP, REDUCED, 64, 0.002)
    row = _rows(measured(_BASE, _BASE), measured(more, more))["program"]
    assert (row.verdict, row.cause and row.cause.rank, row.cause and row.cause.price) == ("CHANGED", None, 0.0)


def test_passes_of_other_batches_are_not_compared() -> None:
    """Neither are those of other ranks, or of none."""
    healthy = measured(_BASE)
    others: list[dict[str, list[Any]]] = [{"batches": [1]}, {"eager_batches": [1]}, {"ranks": []}]
    for changed in others:
        other = healthy._replace(works=[msgspec.structs.replace(healthy.works[0], **changed)])
        assert between(healthy, other) == []
    assert between(healthy, healthy._replace(works=[])) == []


def test_calls_that_fewer_than_all_layers_can_have_name_their_number() -> None:
    """Numbers of layers are folded in the name of a module; views launch nothing and come last."""
    one = _BASE.more(MLP, ADD, 2, 1e-5, op="aten::mul").more(MLP, ADD, 0, 0.0, op="")
    (op,) = known(program.changes(pairs(_BASE, one)[0])).ops
    assert (op.name, op.module, op.layers, op.per_layer) == ("aten::mul", MLP, 1, None)
    ops = {MLP: {"aten::view": 96, "aten::mul": 32, "aten::mm": 3}}
    cause = known(program.changes(pairs(_BASE, dataclasses.replace(_BASE, ops=ops))[0]))
    growing = [change.name for change in cause.ops if change.growth > 0]
    assert growing == ["aten::mm", "aten::mul", "aten::view"]


def test_another_implementation_is_named_with_the_kernels_that_ran() -> None:
    """Attention of one kind of layer that falls back to products of its own, and experts that run in a loop."""
    base, head = report_of(measured(_BASE)), report_of(measured(_MATH))
    for report, attention, experts in ((base, "flash", "grouped_mm"), (head, "math", "eager")):
        (launch,) = report.cases[0].launches
        ran = {"sliding attention": "sdpa (flash)", "full attention": f"sdpa ({attention})", "experts": experts}
        (rank,) = known(launch.work).ranks
        rank = msgspec.structs.replace(rank, implementations=ran)
        launch.work = msgspec.structs.replace(known(launch.work), ranks=[rank])
    rows = judge(base, head, Policy(), today=datetime.date(2026, 6, 1)).rows
    (row,) = [row for row in rows if row.metric == "program"]
    names = "full attention: sdpa (flash) -> sdpa (math). experts: grouped_mm -> eager."
    assert row.reason.startswith(f"{names} The program ")


def _wrapped(calls: int) -> Program:
    """Return the program whose MLP is in a wrapper that calls it once or twice, and adds where it does so twice."""
    ops: dict[str, dict[str, int]] = {module: {} for module in _OPS if module.startswith(MLP)}
    for module in list(ops):
        ops[module.replace(MLP, f"{MLP}.mlp")] = {op: calls * count for op, count in _OPS[module].items()}
    return dataclasses.replace(_MLP, ops={**_OPS, **ops}, files={**_BASE.files, "own/wrapper.py": 2})


_OPS = {**_BASE.ops, f"{MLP}.up_proj": {"aten::mm": 2}}
_MLP = dataclasses.replace(_BASE, ops=_OPS)


def test_ops_that_moved_to_another_module_are_none_more() -> None:
    """A wrapper moves the ops of a module to other names; where it calls the module twice, the net growth is stated."""
    once = _rows(measured(_MLP, on_cpu=True), measured(_wrapped(1), on_cpu=True))["program"]
    assert once.reason.splitlines()[1] == "Cause: ops moved from layers.*.mlp to layers.*.mlp.mlp."
    assert "aten" not in once.reason
    twice = _rows(measured(_MLP, on_cpu=True), measured(_wrapped(2), on_cpu=True))["program"]
    assert "Cause: 1 more aten::mm in each of 2 modules of layers.*.mlp.mlp." in twice.reason
    assert "Calls of mp-bs1: aten::mm 2 -> 4 in 2 modules, aten::add 2 -> 4, aten::view 2 -> 4" in twice.reason


def test_an_op_that_is_called_elsewhere_is_more_there() -> None:
    """Both modules were there before: nothing was wrapped."""
    first, second = list(_OPS)[:2]
    before = dataclasses.replace(_MLP, ops={**_OPS, first: {**_OPS[first], "aten::clone": 16}})
    after = dataclasses.replace(_MLP, ops={**_OPS, second: {**_OPS[second], "aten::clone": 8}})
    reason = _rows(measured(before, on_cpu=True), measured(after, on_cpu=True))["program"].reason
    assert "more aten::clone" in reason
    assert second in reason
    assert "moved" not in reason
