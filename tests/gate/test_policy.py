from __future__ import annotations

import argparse

import pytest
from support.report_factory import make_result

from pytest_llmgpu.gate.policy import Override, Policy, TimeRule, idle_overrides, switched
from pytest_llmgpu.report.result import CaseResult


def _case(strategy: str, nodeid: str | None, *markers: str) -> CaseResult:
    result = make_result(strategy=strategy)
    result.nodeid, result.markers = nodeid, list(markers)
    return result


def test_an_override_applies_to_its_strategy_and_its_test() -> None:
    """A later entry takes precedence, and keys that an entry lacks do not change."""
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


def test_a_pattern_matches_the_whole_node_id() -> None:
    """The brackets of a node id are matched literally."""
    named = Policy(override=[Override(test="b.py::test_x[mp-bs64]", time={"margin": 0.1})])
    assert named.rules(_case("mp", "b.py::test_x[mp-bs64]")).time.margin == 0.1
    assert named.rules(_case("mp", "b.py::test_x[mp-bs6]")).time.margin is None


def test_an_override_may_select_by_marker() -> None:
    """With a strategy in addition both must match."""
    policy = Policy(override=[Override(marker="slow", strategy="tp", time={"margin": 0.1})])
    cases = [_case("tp", "x", "parametrize", "slow"), _case("tp", "x", "slower"), _case("mp", "x", "slow")]
    assert [policy.rules(one).time.margin for one in cases] == [0.1, None, None]


def test_only_the_star_is_special_in_a_pattern() -> None:
    """`[mp-*]` and `?` are literal, and each entry that applies to no case is reported in a line."""
    policy = Policy(
        override=[
            Override(test="*::test_x[mp-*]", time={"margin": 0.1}),
            Override(test="b.py::test_?[mp-bs1]", time={"margin": 0.2}),
            Override(strategy="tq", time={"margin": 0.3}),
        ]
    )
    result = _case("mp", "b.py::test_x[mp-bs1]")
    assert policy.rules(result).time.margin == 0.1
    assert policy.rules(_case("mp", "b.py::test_xm")).time.margin is None
    assert idle_overrides(policy, [result]) == [
        f"override[{number}] of the policy matches no case: check its strategy, test and marker" for number in (1, 2)
    ]


def test_options_take_precedence_over_the_policy() -> None:
    """An option that is not given changes nothing."""
    given = argparse.Namespace(on_inconclusive="fail", require_armed=None, verbose=True)
    assert switched(Policy(require_armed=True), given) == Policy(require_armed=True, on_inconclusive="fail")


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*", "", True),
        ("a*", "a", True),
        ("*a", "aa", True),
        ("a*a", "a", False),
        ("a*b*a", "abba", True),
        ("*ab*ab", "abab", True),
        ("*ab*ab", "ab", False),
        ("a**b", "ab", True),
        ("*a" * 30 + "b", "a" * 200, False),
    ],
)
def test_a_pattern_with_several_stars(pattern: str, name: str, matches: bool) -> None:
    """The time does not grow with the combinations of places."""
    policy = Policy(override=[Override(test=pattern, time={"margin": 0.1})])
    assert (policy.rules(_case("mp", name)).time.margin == 0.1) is matches
