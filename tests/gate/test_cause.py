"""Causes of a longer wall time and of traffic, by the work passes of both reports, and the words for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.program_factory import ADD, MLP, PROJECTION, REDUCED, Program, between, measured, pairs, report_of
from support.prose import Prose
from support.report_factory import known
from support.verdict_factory import make_row

from pytest_llmgpu.gate import cause, program
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import CallsChange, Cause, Row, Verdict

_BASE = Program()
_SYNCS = dataclasses.replace(
    _BASE, idle_s=0.02, syncs=130, runtime_calls={**_BASE.runtime_calls, "cudaStreamSynchronize": 132}
)
_LAUNCHES = dataclasses.replace(_BASE, idle_s=0.02, runtime_calls={**_BASE.runtime_calls, "cudaLaunchKernel": 700})
_FAULTS: dict[str, tuple[MetricName, Sequence[Program]]] = {
    "a host that sleeps": ("time", [dataclasses.replace(_BASE, idle_s=0.02)] * 2),
    "a host that calls more": ("time", [dataclasses.replace(_BASE, idle_s=0.02, files={"own/hooks.py": 99})] * 2),
    "a host that waits for the GPU": ("time", [_SYNCS] * 2),
    "a host that launches more": ("time", [_LAUNCHES] * 2),
    "more kernels": ("time", [_BASE.more(MLP, ADD, 64, 0.01, op="aten::mul")] * 2),
    "slower kernels": ("time", [_BASE.slower("", 1.5)] * 2),
    "one more all-reduce": ("traffic", [_BASE.more(MLP, REDUCED, 64, 0.002)] * 2),
    "one more all-reduce in time": ("time", [_BASE.more(MLP, REDUCED, 64, 0.004)] * 2),
    "a rank with a slower host": ("time", [Program(wait_s=0.01), Program(idle_s=0.02)]),
    "a rank with a slower GPU": ("time", [Program(wait_s=0.008), _BASE.slower("nvjet_hsh_128x256", 2.0)]),
    "work passes that show nothing": ("time", [_BASE] * 2),
    "one rank computes more": ("device_time", [_BASE, _BASE.more(MLP, ADD, 64, 0.01, op="aten::mul")]),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_cause_is_worded(fault: str, prose: Prose) -> None:
    """A clause for the headline, with the rank that alone became slower, and at most two lines of details."""
    metric, after = _FAULTS[fault]
    found = known(cause.find(metric, pairs(_BASE, *after), ratio=1.1))
    _, words, *lines = cause.stated(make_row("REGRESSED", reason="x."), found).reason.splitlines()
    assert words == f"Cause: {cause.describe(found)}."
    assert len(lines) <= 2
    assert prose == "\n".join([cause.describe(found), *lines])


@pytest.mark.parametrize("metric", ["device_time", "traffic"])
def test_nothing_is_named_where_nothing_changed(metric: MetricName) -> None:
    """Equal programs have no cause, nor has the device time of an equal program."""
    assert cause.find(metric, pairs(_BASE, _BASE)) is None
    assert cause.find(metric, pairs(_BASE, _BASE.slower("", 2.0))) is None
    assert cause.find(metric, []) is None


def test_a_case_on_a_cpu_has_the_ops_that_changed() -> None:
    """Without kernels there are no times to split."""

    def found(after: Program) -> Cause | None:
        both = between(measured(_BASE, on_cpu=True), measured(after, on_cpu=True))
        return cause.find("time", both, ratio=1.5)

    changed = known(found(_BASE.more(PROJECTION, "gemm", 4, 0.1, op="aten::mm")))
    assert [(one.name, one.module, one.before, one.after) for one in changed.ops] == [("aten::mm", PROJECTION, 2, 4)]
    assert found(_BASE) is None
    for module, words in ((PROJECTION, "1 more mm in place of aten::mm in each"), (MLP, "1 more mm in each")):
        other = {
            **_BASE.ops,
            PROJECTION: {},
            module: {**({} if module == PROJECTION else _BASE.ops[module]), "own::mm": 2},
        }
        renamed = dataclasses.replace(_BASE, ops=other)
        assert cause.describe(known(found(renamed))).startswith(words)


@pytest.mark.parametrize("module", ["other", "(outside)"])
def test_calls_outside_of_modules_are_named_as_such(module: str) -> None:
    """A recorded program has short names for them."""
    added = CallsChange(name="aten::cat", module=module, before=1, after=2)
    assert cause.describe(Cause(place="program", ops=[added])) == "1 more aten::cat outside modules"
    moved = cause.describe(Cause(place="program", moved=f"{module} to layers.*.mlp"))
    assert moved == "ops moved from outside modules to layers.*.mlp"
    named = CallsChange(name="aten::cat", module=f"{module}.mlp", before=1, after=2)
    assert cause.describe(Cause(place="program", ops=[named])) == f"1 more aten::cat in {module}.mlp"


def test_transfers_that_take_longer_and_more_of_them_are_named() -> None:
    """They are collectives and copies between GPUs."""
    longer = Cause(place="transfer", before_s=0.001, after_s=0.003, forwards=4)
    assert cause.describe(longer) == "transfers between GPUs +2 ms in a work pass of 4 forwards"
    more = CallsChange(name="Memcpy PtoP (Device -> Device)", module=None, before=8, after=12)
    assert cause.describe(msgspec.structs.replace(longer, kernels=[more])) == "4 more peer_copy"


def test_one_launch_that_differs_does_not_change_the_cause() -> None:
    """Every figure is the median of the launches."""
    programs = (_BASE, _BASE.more(MLP, ADD, 64, 0.01, op="aten::mul"), _BASE.more(MLP, ADD, 999, 9.0))
    before, after, odd = map(measured, programs)
    several = after._replace(works=[*after.works, *odd.works, *after.works])
    first, second = (cause.find("device_time", between(before, one)) for one in (several, after))
    assert first == second


def _caused(base: Report, head: Report, metric: MetricName, verdict: Any = "REGRESSED") -> Row:
    """Return a row that is twice as slow, with its cause."""
    row = Row.of(head.cases[0], metric, verdict, "Time +100 %.", ratio=2.0, low=1.01)
    names = base.environment.kernel_names, head.environment.kernel_names
    return cause.with_cause(row, base.cases[0], head.cases[0], names)


@pytest.mark.parametrize(
    ("metric", "verdict", "plan", "is_caused"),
    [
        ("time", "REGRESSED", "f", True),
        ("device_time", "REGRESSED", "f", True),
        ("time", "REGRESSED", "e", False),
        ("memory", "REGRESSED", "f", False),
        ("time", "UNDECIDED", "f", False),
        ("time", "OK", "f", False),
    ],
)
def test_a_row_that_is_worse_has_a_cause(metric: MetricName, verdict: Verdict, plan: str, is_caused: bool) -> None:
    """An undecided row has none, even where its interval lies above no change; nor has one of another plan."""
    after = _BASE.more(MLP, ADD, 64, 0.01, op="aten::mul")
    base, head = report_of(measured(_BASE)), report_of(measured(after))
    head.cases[0].launches[0].plan_sha256 = plan * 64
    row = _caused(base, head, metric, verdict)
    found = cause.find(metric, pairs(_BASE, after), ratio=2.0)
    assert row.cause == (found if is_caused else None)
    first, *stated = row.reason.splitlines()
    assert first == "Time +100 %."
    if found is not None:
        _, *lines = cause.stated(make_row("REGRESSED", id=row.id, reason="x."), found).reason.splitlines()
        assert stated == (lines if is_caused else [])
    assert msgspec.json.decode(msgspec.json.encode(row), type=Row) == row


@pytest.mark.parametrize("metric", ["first_token", "token_time"])
@pytest.mark.parametrize("passes", ["work", "prefill_work"])
def test_a_slower_token_has_the_cause_of_its_forwards(metric: MetricName, passes: str) -> None:
    """The first token takes a prefill, the others take decode steps: each has work passes of its own."""
    healthy, slower = measured(_BASE), measured(_BASE.more(PROJECTION, ADD, 64, 0.5, op="aten::mul"))
    base, head = report_of(healthy), report_of(healthy)
    for report in (base, head):
        report.cases[0].launches[0].prefill_work = healthy.works[0]
    setattr(head.cases[0].launches[0], passes, slower.works[0])
    found = _caused(base, head, metric).cause
    module = PROJECTION if (metric == "first_token") is (passes == "prefill_work") else None
    assert (None if found is None else cause.module_of(found)) == module


def test_synchronisations_beside_ops_that_moved_are_the_cause() -> None:
    """A module that is wrapped costs nothing, a host that waits does."""
    waits = CallsChange(name=program.SYNCS, before=0, after=32)
    found = Cause(place="program", moved="layers.*.mlp to layers.*.mlp.mlp", runtime_calls=[waits])
    assert "synchroni" in cause.describe(found)
    assert "moved" not in cause.describe(found)


@pytest.mark.parametrize(
    ("modules", "where"),
    [(["layers.*.mlp.up", "layers.*.mlp.down"], " of layers.*.mlp"), (["mlp", "head"], ""), ([".x", "/y"], "")],
)
def test_modules_that_changed_alike_are_counted(modules: list[str], where: str) -> None:
    """A stored name may have any letters."""
    ops = [CallsChange(name="aten::mm", module=module, before=1, after=2) for module in modules]
    assert cause.describe(Cause(place="program", ops=ops)) == f"1 more aten::mm in each of 2 modules{where}"
