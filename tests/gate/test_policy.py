from __future__ import annotations

import argparse

from support.report_factory import make_result

from pytest_llmgpu.gate.policy import Override, Policy, TimeRule, idle_overrides, switched
from pytest_llmgpu.report.result import CaseResult


def _case(strategy: str, nodeid: str | None, *markers: str) -> CaseResult:
    result = make_result(strategy=strategy)
    result.nodeid, result.markers = nodeid, list(markers)
    return result


def test_a_key_holds_for_its_strategy_and_its_test() -> None:
    """The later entry wins; what an entry leaves out stays."""
    policy = Policy(
        time=TimeRule(margin=0.03, absolute_s=1),
        override=[
            Override(strategy="tp", time={"margin": 0.05}),
            Override(test="benchmarks/*large*", time={"absolute_s": 2.5, "gate": False}),
        ],
    )
    assert policy.rules(_case("mp", "benchmarks/test_a.py::test_small")).time == TimeRule(margin=0.03, absolute_s=1)
    assert policy.rules(_case("tp", None)).time == TimeRule(margin=0.05, absolute_s=1)
    both = policy.rules(_case("tp", "benchmarks/test_a.py::test_large[tp-bs8]"))
    assert both.time == TimeRule(margin=0.05, absolute_s=2.5, gate=False)
    assert both.accuracy == policy.accuracy


def test_a_test_is_named_by_its_whole_id() -> None:
    """Brackets, which a pattern reads as a choice of letters, are part of every id."""
    named = Policy(override=[Override(test="b.py::test_x[mp-bs64]", time={"margin": 0.1})])
    assert named.rules(_case("mp", "b.py::test_x[mp-bs64]")).time.margin == 0.1
    assert named.rules(_case("mp", "b.py::test_x[mp-bs6]")).time.margin == 0.02


def test_a_test_may_be_named_by_its_marker() -> None:
    """Together with a strategy both have to be right."""
    policy = Policy(override=[Override(marker="slow", strategy="tp", time={"margin": 0.1})])
    cases = [_case("tp", "x", "parametrize", "slow"), _case("tp", "x", "slower"), _case("mp", "x", "slow")]
    assert [policy.rules(one).time.margin for one in cases] == [0.1, 0.02, 0.02]


def test_a_pattern_knows_the_star_alone() -> None:
    """`[mp-*]` is no choice of letters, `?` is no letter; a line names each entry that is for no case."""
    policy = Policy(
        override=[
            Override(test="*::test_x[mp-*]", time={"margin": 0.1}),
            Override(test="b.py::test_?[mp-bs1]", time={"margin": 0.2}),
            Override(strategy="tq", time={"margin": 0.3}),
        ]
    )
    result = _case("mp", "b.py::test_x[mp-bs1]")
    assert policy.rules(result).time.margin == 0.1
    assert policy.rules(_case("mp", "b.py::test_xm")).time.margin == 0.02
    assert idle_overrides(policy, [result]) == [
        f"override[{number}] of the policy matched no case" for number in (1, 2)
    ]


def test_a_command_line_goes_before_the_policy() -> None:
    """Where it says something."""
    given = argparse.Namespace(on_inconclusive="fail", require_armed=None, verbose=True)
    assert switched(Policy(require_armed=True), given) == Policy(require_armed=True, on_inconclusive="fail")
