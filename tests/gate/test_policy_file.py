from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import pytest

from pytest_llmgpu.gate.policy import Known, Override, Policy, TimeRule
from pytest_llmgpu.gate.policy_file import dump, find, in_words, load, sha256

FULL = """
confidence = 0.99
on_inconclusive = "fail"
allow_missing = true
require_armed = true

[time]
margin = 0.03
absolute_s = 1

[accuracy]
floor = 0.8
metric = "acc"

[predictions]
gate = true

[[override]]
strategy = "tp"
time = { margin = 0.05 }

[[override]]
test = "benchmarks/*large*"
time = { absolute_s = 2.5, gate = false }

[[override]]
marker = "slow"
strategy = "tp"
time = { margin = 0.1 }

[[known]]
case = "tp-bs8"
metric = "time"
reason = 'the "new" kernel\\, see é'
expires = 2027-01-31
"""

KNOWN = "[[known]]\ncase = 'x'\nmetric = '{}'\nreason = 'y'\nexpires = 2027-01-01\nup_to = {}"


def _write(tmp_path: Path, text: str, name: str = "gate.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    """No policy, and a pyproject.toml or another tool's table without one, are the same."""
    assert load(None) == Policy()
    assert load(_write(tmp_path, "[project]\nname = 'x'\n", "pyproject.toml")) == Policy()
    assert load(_write(tmp_path, "[tool.llmgpu]\n", "pyproject.toml")) == Policy()


def test_a_pyproject_and_a_file_of_its_own_say_the_same(tmp_path: Path) -> None:
    """The table's place differs, its keys do not; the folder's pyproject.toml is found."""
    assert find(tmp_path) is None
    path = _write(tmp_path, "[tool.llmgpu.gate.time]\nmargin = 0.04\n", "pyproject.toml")
    assert find(tmp_path) == path
    assert load(path) == load(_write(tmp_path, "[time]\nmargin = 0.04\n")) == Policy(time=TimeRule(margin=0.04))


def test_what_is_dumped_is_read_back(tmp_path: Path) -> None:
    """Every key is there with the value in force, strings with quotes and backslashes too."""
    for policy in (Policy(), load(_write(tmp_path, FULL))):
        text = dump(policy)
        again = load(_write(tmp_path, text, "dumped.toml"))
        assert again == policy
        assert dump(again) == text
        assert sha256(again) == sha256(policy)
    assert "margin = 0.02" in dump(Policy())
    assert sha256(policy) != sha256(Policy())


def test_overrides_are_read_in_the_file_s_order(tmp_path: Path) -> None:
    """Each with the keys that it has, and no others."""
    assert load(_write(tmp_path, FULL)).override == [
        Override(strategy="tp", time={"margin": 0.05}),
        Override(test="benchmarks/*large*", time={"absolute_s": 2.5, "gate": False}),
        Override(marker="slow", strategy="tp", time={"margin": 0.1}),
    ]


def test_a_known_regression_has_a_day(tmp_path: Path) -> None:
    """TOML's own dates."""
    known = load(_write(tmp_path, FULL)).known
    reason = 'the "new" kernel\\, see é'
    expires = datetime.date(2027, 1, 31)
    assert known == [Known(case="tp-bs8", metric="time", reason=reason, expires=expires)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("margin = 1", r"margin is no key: allowed are accuracy, allow_missing, .*, traffic"),
        ("[time]\nmargn = 1", r"time\.margn is no key: allowed are absolute_s, gate, margin"),
        ("[[override]]\nstrategy = 'tp'\nspeed = {}", r"override\[0\]\.speed is no key: allowed are accuracy, .*"),
        ("[[override]]\nstrategy = 'tp'\ntime = { margn = 1 }", r"override\[0\]\.time\.margn is no key: .*"),
        ("[[override]]\ntime = { margin = 1 }", r"override\[0\] is for no strategy, test or marker: name one of them"),
        (
            "[[known]]\ncase = 'x'\nwho = 'me'",
            r"known\[0\]\.who is no key: allowed are case, expires, metric, reason, up_to",
        ),
        (KNOWN.format("time", "-0.1"), r"known\[0\]\.up_to = -0\.1: allowed is 0 up to but not inf"),
        (
            KNOWN.format("accuracy", "0.1"),
            r"known\[0\]\.up_to is for time, traffic, memory, load_time: accuracy .*",
        ),
        ("[[known]]\ncase = 'x'", r"known\[0\]: object missing required field `metric`"),
        ("on_inconclusive = 'maybe'", r"on_inconclusive: invalid enum value 'maybe': allowed are pass, fail"),
        ("[accuracy]\nmetric = 'f1'", r"accuracy\.metric: invalid enum value 'f1': allowed are acc, acc_norm"),
        ("[time]\nmargin = '2 %'", r"time\.margin: expected `float`, got `str`"),
        ("[time]\nmargin = 3", r"time\.margin = 3\.0: allowed is 0 up to but not 1$"),
        (
            "[tool.llmgpu.gate]\n[time]\nmargin = 0.9",
            r"time is outside \[tool\.llmgpu\.gate\], where it counts for nothing",
        ),
        ("[time]\nmargin = nan", r"time\.margin = nan: allowed is 0 up to but not 1"),
        ("[memory]\nmargin = -0.1", r"memory\.margin = -0\.1: allowed is 0 up to but not 1"),
        ("[time]\nabsolute_s = inf", r"time\.absolute_s = inf: allowed is 0 up to but not inf"),
        ("[[override]]\ntest = '*'\ntime = { margin = -1 }", r"override\[0\]\.time\.margin = -1\.0: allowed .*"),
        ("confidence = 1.0", r"confidence = 1\.0: allowed is 0\.5 up to but not 1"),
        ("time = 3", r"time: expected `object`, got `int`"),
        ("tool = 3", r"the table: expected `object`, got `int`"),
        ("= 3", r"is no TOML: .*"),
        ("[tool.llmgpu.gate]\nfoo = 1", r"foo is no key: .*"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    """One line: the file, the key, and what is allowed."""
    path = _write(tmp_path, text)
    with pytest.raises(ValueError, match=rf"^policy .*gate\.toml: {message}$") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_policy_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    """A wrong path is no default."""
    with pytest.raises(ValueError, match=r"nowhere\.toml: cannot be read: No such file"):
        load(tmp_path / "nowhere.toml")


def test_the_policy_is_looked_for_up_to_the_repository_s_root(tmp_path: Path) -> None:
    """From a folder below it is the same; a pyproject.toml without one is passed over, another repository's is not."""
    root = _write(tmp_path, "[tool.llmgpu.gate.time]\nmargin = 0.04\n", "pyproject.toml")
    below = tmp_path / "sub" / "below"
    below.mkdir(parents=True)
    _write(tmp_path / "sub", "[project]\nname = 'x'\n", "pyproject.toml")
    assert find(below) == root
    (tmp_path / "sub" / ".git").write_text("gitdir: elsewhere")
    assert find(below) is None
    broken = _write(below, "= 3", "pyproject.toml")
    assert find(below) == broken, "which is refused, and is not the built-in one"


def test_the_policy_in_force_is_said_in_a_line(tmp_path: Path) -> None:
    """By its file's name alone; one without a policy is the built-in one."""
    assert in_words(None) == "policy: built-in"
    assert in_words(_write(tmp_path, "[project]\nname = 'x'\n", "pyproject.toml")) == "policy: built-in"
    assert in_words(_write(tmp_path, "[tool.llmgpu.gate]\n", "pyproject.toml")) == "policy: pyproject.toml"
    assert in_words(_write(tmp_path, "", "strict.toml")) == "policy: strict.toml"


def test_a_policy_of_a_commit_cannot_be_edited_by_the_change(tmp_path: Path) -> None:
    """`git:REV:PATH`; what is not there is no default."""
    _write(tmp_path, "[tool.llmgpu.gate.time]\nmargin = 0.04\n", "pyproject.toml")
    _write(tmp_path, "[time]\nmargin = 0.05\n")
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "base")):
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)
    _write(tmp_path, "[tool.llmgpu.gate.time]\nmargin = 0.5\n", "pyproject.toml")
    reference = Path("git:HEAD:pyproject.toml")
    assert load(reference, tmp_path).time.margin == 0.04
    assert load(Path("git:HEAD:gate.toml"), tmp_path).time.margin == 0.05
    assert in_words(reference, tmp_path) == "policy: git:HEAD:pyproject.toml"
    with pytest.raises(ValueError, match=r"^policy git:HEAD:other\.toml: 'HEAD' has no file 'other\.toml'"):
        load(Path("git:HEAD:other.toml"), tmp_path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tool.llmgpu.gates]\nconfidence = 0.9\n", "tool.llmgpu.gates"),
        ("[tool.llmgpu]\non_inconclusive = 'fail'\n", "tool.llmgpu.on_inconclusive"),
        ("[tool.llmgpu-gate]\nconfidence = 0.9\n", "tool.llmgpu-gate"),
    ],
)
def test_a_table_of_another_name_is_refused(tmp_path: Path, text: str, named: str) -> None:
    """It would be silently the default."""
    with pytest.raises(ValueError, match=rf"\[{named}\] is not allowed: allowed is \[tool.llmgpu.gate\]"):
        load(_write(tmp_path, text, "pyproject.toml"))
