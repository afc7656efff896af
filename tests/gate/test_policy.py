from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.repository import first_commit
from support.verdict_factory import make_row

from pytest_llmgpu.gate.policy import (
    Allowed,
    AmountRule,
    ExactRule,
    Policy,
    ProgramRule,
    TimeRule,
    dump_policy,
    find_policy,
    in_force,
    load_policy,
    policy_of,
    with_allowed,
)
from pytest_llmgpu.report.metrics import METRICS
from pytest_llmgpu.report.verdicts import Verdicts

FULL = """
confidence = 0.99
strict = true

[time]
threshold = 0.03

[accuracy]
floor = 0.8
metric = "acc"

[predictions]
gate = true

[[allow]]
case = "tp-*"
metric = "time"
reason = 'the "new" kernel\\, see é'
up_to = 0.05
expires = 2027-01-31
"""

_FOUR_PERCENT = msgspec.structs.replace(Policy(), time=TimeRule(threshold=0.04))
ALLOW = "[[allow]]\ncase = 'x'\nmetric = '{}'\nreason = 'y'\nup_to = {}"


def _write(tmp_path: Path, text: str, name: str = "gate.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_each_metric_has_the_gate_of_the_table() -> None:
    """The rules are generated from the table of metrics."""
    for spec in METRICS:
        if spec.rule and spec.name != "outcome":
            assert getattr(Policy(), spec.name).gate is spec.gate
    assert (Policy().traffic, Policy().time) == (AmountRule(threshold=0.001), TimeRule())
    assert (Policy().memory.threshold, Policy().device_time.threshold, Policy().program.flops) == (0.005, 0.005, 0.001)


def test_a_table_changes_the_keys_that_it_has(tmp_path: Path) -> None:
    """The others keep the default of their metric."""
    more = "[device_time]\ngate = false\n[host_calls]\ngate = true\n[program]\nflops = 0.01\n"
    policy = load_policy(_write(tmp_path, FULL + more))
    assert policy.device_time == AmountRule(gate=False, threshold=0.005)
    assert policy.host_calls == ExactRule()
    assert policy.program == ProgramRule(threshold=0.002, flops=0.01)
    assert policy.time == TimeRule(threshold=0.03)
    assert (policy.accuracy.floor, policy.accuracy.threshold, policy.accuracy.metric) == (0.8, 0.005, "acc")
    reason, expires = 'the "new" kernel\\, see é', datetime.date(2027, 1, 31)
    assert policy.allow == [Allowed(case="tp-*", metric="time", reason=reason, up_to=0.05, expires=expires)]


@pytest.mark.parametrize(
    ("name", "text", "policy"),
    [
        ("pyproject.toml", "[project]\nname = 'x'\n", Policy()),
        ("pyproject.toml", "[tool.llmgpu]\n", Policy()),
        ("pyproject.toml", "[tool.llmgpu.gate.time]\nthreshold = 0.04\n", _FOUR_PERCENT),
        ("gate.toml", "[time]\nthreshold = 0.04\n", _FOUR_PERCENT),
    ],
)
def test_a_pyproject_and_a_separate_file_have_the_same_keys(
    tmp_path: Path, name: str, text: str, policy: Policy
) -> None:
    """Without a file, and in a pyproject.toml without a policy, the default policy is used."""
    assert load_policy(_write(tmp_path, text, name)) == policy
    assert load_policy(None) == Policy()
    assert find_policy(tmp_path) == (tmp_path / name if "tool.llmgpu.gate" in text else None)


def test_a_dumped_policy_is_read_back(tmp_path: Path) -> None:
    """All keys are dumped, and strings with quotes and backslashes are read back, from verdicts too."""
    for policy in (Policy(), load_policy(_write(tmp_path, FULL))):
        text = dump_policy(policy)
        again = load_policy(_write(tmp_path, text, "dumped.toml"))
        assert again == policy == policy_of(Verdicts(policy=text))
        assert dump_policy(again) == text
    assert policy_of(None) == policy_of(Verdicts(policy="allow_missing = true")) == Policy()


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("tp-bs8", "tp-bs8", True),
        ("tp-bs8", "tp-bs80", False),
        ("*", "", True),
        ("a*a", "a", False),
        ("a*b*a", "abba", True),
        ("*[mp-*]", "b.py::test_x[mp-bs1]", True),
        ("tp-?", "tp-1", False),
    ],
)
def test_only_the_star_is_special_in_a_pattern(pattern: str, name: str, matches: bool) -> None:
    """It stands for any text; the whole name is matched."""
    assert Allowed(case=pattern, metric="time", reason="x").matches(name) is matches


_TODAY = datetime.date(2026, 6, 1)


@pytest.mark.parametrize(
    ("fields", "row", "is_allowed", "warning"),
    [
        ({}, {}, True, None),
        ({"case": "mp-*"}, {}, True, None),
        ({"case": "tp-*"}, {}, False, None),
        ({"metric": "memory"}, {}, False, None),
        ({"expires": _TODAY}, {}, True, None),
        ({"expires": _TODAY - datetime.timedelta(days=1)}, {}, False, "expired on 2026-05-31: it counts again"),
        ({}, {"verdict": "OK"}, False, None),
        ({"expires": _TODAY}, {"verdict": "UNDECIDED"}, True, None),
        ({"expires": _TODAY}, {"verdict": "MISSING", "ratio": None}, True, None),
        ({"up_to": 0.5}, {}, True, None),
        ({"up_to": 0.3}, {"ratio": 1.25}, True, None),
        ({"up_to": 0.1}, {}, False, None),
        ({"up_to": 0.1}, {"verdict": "UNDECIDED"}, False, None),
        ({"case": "mp-bs*"}, {"id": "mp-bs16"}, True, None),
        ({"case": "mp-bs1"}, {"id": "mp-bs16"}, False, None),
    ],
)
def test_a_regression_is_allowed_until_its_day_and_up_to_its_growth(
    fields: dict[str, Any], row: dict[str, Any], is_allowed: bool, warning: str | None
) -> None:
    """The id matches; an entry that expired warns."""
    entry = Allowed(**{"case": "mp-bs1", "metric": "time", "reason": "bug 7", **fields})
    judged = make_row(**{"id": "mp-bs1", "ratio": 1.3, **row})
    ([found], warnings) = with_allowed([judged], Policy(allow=[entry]), _TODAY)
    assert (found.allowed is not None) is is_allowed
    assert warnings == ([] if warning is None else [f"allowed {entry.case} {entry.metric} (bug 7) {warning}"])


def test_switches_take_precedence_over_the_policy(tmp_path: Path) -> None:
    """A switch that is not given changes nothing."""
    given = argparse.Namespace(strict=True, allow_no_baseline=None, verbose=True)
    path = _write(tmp_path, "allow_no_baseline = true\n")
    assert in_force(path, given)[0] == Policy(allow_no_baseline=True, strict=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threshold = 1", "threshold is not allowed: allowed are execution, .*, allow"),
        ("[time]\nmargn = 1", r"time\.margn is not allowed: allowed are gate, threshold"),
        ("[[allow]]\ncase = 'x'", r"allow\[0\]\.metric is missing: allowed are case, metric, .*"),
        (ALLOW.format("time", "-0.1"), r"allow\[0\]\.up_to = -0\.1 is not allowed: expected `float` >= 0\.0"),
        (ALLOW.format("accuracy", "0.1"), r"allow\[0\]\.up_to: accuracy does not grow; allowed for program, .*"),
        ("[accuracy]\nmetric = 'f1'", r"accuracy\.metric = .f1. is not allowed: allowed are acc, acc_norm"),
        ("[time]\nthreshold = '2 %'", r'time\.threshold = "2 %" is not allowed: expected `float \| null`, got `str`'),
        ("[memory]\nthreshold = 3", r"memory\.threshold = 3 is not allowed: expected `float` < 1\.0"),
        ("[time]\nthreshold = nan", r"time\.threshold = nan: a finite number is needed"),
        ("confidence = 1.0", r"confidence = 1\.0 is not allowed: expected `float` < 1\.0"),
        ("time = 3", r"time = 3 is not allowed: expected `object`, got `int`"),
        ("= 3", "is not valid TOML: .*"),
        ("[tool.llmgpu.gate]\nfoo = 1", "foo is not allowed: allowed are execution, .*, allow"),
        ("[hit_rate]\nthreshold = 3", "hit_rate: no metric, and for .* own: threshold = 3 is not allowed: expected .*"),
        ("[figures.x]\nthreshold = 1", "figures: no metric, .*: x is not allowed: allowed are threshold, at_least, .*"),
        ("[tool.llmgpu.gate]\n[time]\nthreshold = 0.9", r"time is not allowed: allowed is \[tool\.llmgpu\.gate\]"),
        ("'x` - at `$.y' = 1", "y.x is not allowed: allowed are .*"),
        ("[tool.llmgpu.gates]\nx = 1", r"tool\.llmgpu\.gates is not allowed: allowed is \[tool\.llmgpu\.gate\]"),
        ("[tool.other]\nx = 1", r"\[tool\.llmgpu\.gate\] is missing, or rules without \[tool\]"),
        ("#" * 2**21, "is larger than 1,048,576 bytes.*"),
    ],
)
def test_invalid_input_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    """The message is one line with the file, the error and its place."""
    path = _write(tmp_path, text)
    with pytest.raises(ValueError, match=rf"^policy .*gate\.toml: {message}$") as caught:
        load_policy(path)
    assert "\n" not in str(caught.value)


def test_the_policy_is_searched_up_to_the_root_of_the_repository(tmp_path: Path) -> None:
    """A pyproject.toml without a policy is skipped, and the search does not leave the repository."""
    root = _write(tmp_path, "[tool.llmgpu.gate.time]\nthreshold = 0.04\n", "pyproject.toml")
    below = tmp_path / "sub" / "below"
    below.mkdir(parents=True)
    _write(tmp_path / "sub", "[project]\nname = 'x'\n", "pyproject.toml")
    assert find_policy(below) == root
    (tmp_path / "sub" / ".git").write_text("gitdir: elsewhere")
    assert find_policy(below) is None
    broken = _write(below, "= 3", "pyproject.toml")
    assert find_policy(below) == broken, "a broken file is found and refused later"


def test_a_policy_can_be_read_from_a_commit(tmp_path: Path) -> None:
    """A change cannot edit the policy at `git:REV:PATH`; a missing file is refused. The line has no folder."""
    _write(tmp_path, "[tool.llmgpu.gate.time]\nthreshold = 0.04\n", "pyproject.toml")
    path = _write(tmp_path, "[time]\nthreshold = 0.05\n")
    first_commit(tmp_path)
    _write(tmp_path, "[tool.llmgpu.gate.time]\nthreshold = 0.5\n", "pyproject.toml")
    reference = Path("git:HEAD:pyproject.toml")
    assert load_policy(reference, tmp_path).time.threshold == 0.04
    assert load_policy(Path("git:HEAD:gate.toml"), tmp_path).time.threshold == 0.05
    assert load_policy(Path("git:HEAD:sub/pyproject.toml"), tmp_path) == Policy(), "a commit without a policy"
    words = [in_force(one, None, tmp_path)[1] for one in (Path("git:HEAD:sub/pyproject.toml"), reference, path)]
    assert words == ["policy: built-in", "policy: git:HEAD:pyproject.toml", "policy: gate.toml"]
    for absent, message in (
        (Path("git:HEAD:other.toml"), "policy git:HEAD:other.toml: 'HEAD' has no file 'other.toml'"),
        (tmp_path / "other.toml", "other.toml: cannot be read: No such file"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            load_policy(absent, tmp_path)
