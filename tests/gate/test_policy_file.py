from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from support.repository import first_commit

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


def test_without_a_file_the_default_policy_is_used(tmp_path: Path) -> None:
    """A pyproject.toml without a policy gives the default policy, too."""
    assert load(None) == Policy()
    assert load(_write(tmp_path, "[project]\nname = 'x'\n", "pyproject.toml")) == Policy()
    assert load(_write(tmp_path, "[tool.llmgpu]\n", "pyproject.toml")) == Policy()


def test_a_pyproject_and_a_separate_file_give_the_same_policy(tmp_path: Path) -> None:
    """The pyproject.toml of the folder is found, and its table has the same keys."""
    assert find(tmp_path) is None
    path = _write(tmp_path, "[tool.llmgpu.gate.time]\nmargin = 0.04\n", "pyproject.toml")
    assert find(tmp_path) == path
    assert load(path) == load(_write(tmp_path, "[time]\nmargin = 0.04\n")) == Policy(time=TimeRule(margin=0.04))


def test_a_dumped_policy_is_read_back(tmp_path: Path) -> None:
    """All keys are dumped, and strings with quotes and backslashes are read back."""
    for policy in (Policy(), load(_write(tmp_path, FULL))):
        text = dump(policy)
        again = load(_write(tmp_path, text, "dumped.toml"))
        assert again == policy
        assert dump(again) == text
        assert sha256(again) == sha256(policy)
    assert sha256(policy) != sha256(Policy())


def test_overrides_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Each entry has its own keys only."""
    assert load(_write(tmp_path, FULL)).override == [
        Override(strategy="tp", time={"margin": 0.05}),
        Override(test="benchmarks/*large*", time={"absolute_s": 2.5, "gate": False}),
        Override(marker="slow", strategy="tp", time={"margin": 0.1}),
    ]


def test_a_known_regression_has_an_expiry(tmp_path: Path) -> None:
    """The expiry is a date of TOML."""
    known = load(_write(tmp_path, FULL)).known
    reason = 'the "new" kernel\\, see é'
    expires = datetime.date(2027, 1, 31)
    assert known == [Known(case="tp-bs8", metric="time", reason=reason, expires=expires)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("margin = 1", r"margin is not a key: allowed are accuracy, allow_missing, .*, traffic"),
        (
            "[time]\nmargn = 1",
            r"time\.margn is not a key \(did you mean margin\?\): allowed are absolute_s, .*",
        ),
        ("[[override]]\nstrategy = 'tp'\nspeed = {}", r"override\[0\]\.speed is not a key: allowed are accuracy, .*"),
        ("[[override]]\nstrategy = 'tp'\ntime = { margn = 1 }", r"override\[0\]\.time\.margn is not a key .*"),
        ("[[override]]\ntime = { margin = 1 }", r"override\[0\] has no strategy, test or marker: add one of them"),
        (
            "[[known]]\ncase = 'x'\nwho = 'me'",
            r"known\[0\]\.who is not a key: allowed are case, expires, metric, reason, up_to",
        ),
        (KNOWN.format("time", "-0.1"), r"known\[0\]\.up_to = -0\.1: allowed are numbers >= 0"),
        (
            KNOWN.format("accuracy", "0.1"),
            r"known\[0\]\.up_to: accuracy does not grow; allowed for device_time, time, .*flops, .*.*",
        ),
        ("[[known]]\ncase = 'x'", r"known\[0\]: object missing required field `metric`"),
        ("largest_unseen_slowdown = 0", r"largest_unseen_slowdown = 0: allowed are numbers > 0"),
        ("largest_unseen_slowdown = inf", r"largest_unseen_slowdown = inf: allowed are numbers < 9.22337e\+18"),
        ("on_inconclusive = 'maybe'", r"on_inconclusive: invalid enum value 'maybe': allowed are pass, fail"),
        ("[accuracy]\nmetric = 'f1'", r"accuracy\.metric: invalid enum value 'f1': allowed are acc, acc_norm"),
        ("[time]\nmargin = '2 %'", r"time\.margin: expected `float \| null`, got `str`"),
        ("[time]\nmargin = 3", r"time\.margin = 3: allowed are numbers < 1$"),
        (
            "[tool.llmgpu.gate]\n[time]\nmargin = 0.9",
            r"time is outside \[tool\.llmgpu\.gate\] and would be ignored: move it there",
        ),
        ("[time]\nmargin = nan", r"time\.margin = nan: allowed are numbers >= 0"),
        ("[memory]\nmargin = -0.1", r"memory\.margin = -0\.1: allowed are numbers >= 0"),
        ("[time]\nabsolute_s = inf", r"time\.absolute_s = inf: allowed are numbers < 1e\+12"),
        (
            "[[override]]\ntest = '*'\ntime = { margin = -1 }",
            r"override\[0\]\.time\.margin = -1: allowed are numbers >= 0",
        ),
        ("[device_time]\nmargin = 1", r"device_time\.margin = 1: allowed are numbers < 1"),
        ("confidence = 1.0", r"confidence = 1\.0: allowed are numbers < 1"),
        ("time = 3", r"time: expected `object`, got `int`"),
        ("tool = 3", r"the table: expected `object`, got `int`"),
        ("= 3", r"is not valid TOML: .*"),
        ("[tool.llmgpu.gate]\nfoo = 1", r"foo is not a key: .*"),
    ],
)
def test_invalid_input_is_refused_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    """The message is one line with the file, the key and what is allowed."""
    path = _write(tmp_path, text)
    with pytest.raises(ValueError, match=rf"^policy .*gate\.toml: {message}$") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_given_policy_file_must_exist(tmp_path: Path) -> None:
    """The default policy is not used instead."""
    with pytest.raises(ValueError, match=r"nowhere\.toml: cannot be read: No such file"):
        load(tmp_path / "nowhere.toml")


def test_the_policy_is_searched_up_to_the_root_of_the_repository(tmp_path: Path) -> None:
    """A pyproject.toml without a policy is skipped, and the search does not leave the repository."""
    root = _write(tmp_path, "[tool.llmgpu.gate.time]\nmargin = 0.04\n", "pyproject.toml")
    below = tmp_path / "sub" / "below"
    below.mkdir(parents=True)
    _write(tmp_path / "sub", "[project]\nname = 'x'\n", "pyproject.toml")
    assert find(below) == root
    (tmp_path / "sub" / ".git").write_text("gitdir: elsewhere")
    assert find(below) is None
    broken = _write(below, "= 3", "pyproject.toml")
    assert find(below) == broken, "a broken file is found and refused later"


def test_the_policy_is_described_in_a_line(tmp_path: Path) -> None:
    """The line has the name of the file, or `built-in` for the default policy."""
    assert in_words(None) == "policy: built-in"
    assert in_words(_write(tmp_path, "[project]\nname = 'x'\n", "pyproject.toml")) == "policy: built-in"
    assert in_words(_write(tmp_path, "[tool.llmgpu.gate]\n", "pyproject.toml")) == "policy: pyproject.toml"
    assert in_words(_write(tmp_path, "", "strict.toml")) == "policy: strict.toml"


def test_a_policy_can_be_read_from_a_commit(tmp_path: Path) -> None:
    """A change cannot edit the policy at `git:REV:PATH`; a missing file is refused."""
    _write(tmp_path, "[tool.llmgpu.gate.time]\nmargin = 0.04\n", "pyproject.toml")
    _write(tmp_path, "[time]\nmargin = 0.05\n")
    first_commit(tmp_path)
    _write(tmp_path, "[tool.llmgpu.gate.time]\nmargin = 0.5\n", "pyproject.toml")
    reference = Path("git:HEAD:pyproject.toml")
    assert load(reference, tmp_path).time.margin == 0.04
    assert load(Path("git:HEAD:gate.toml"), tmp_path).time.margin == 0.05
    assert in_words(reference, tmp_path) == "policy: git:HEAD:pyproject.toml"
    assert load(Path("git:HEAD:sub/pyproject.toml"), tmp_path) == Policy(), "a commit without a policy"
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
def test_a_table_with_a_similar_name_is_refused(tmp_path: Path, text: str, named: str) -> None:
    """It would be ignored, and the default policy used."""
    with pytest.raises(ValueError, match=rf"\[{named}\] is not allowed: allowed is \[tool.llmgpu.gate\]"):
        load(_write(tmp_path, text, "pyproject.toml"))


@pytest.mark.parametrize("part", ["a", '"a b"', "'.'"])
def test_a_key_of_thousands_of_parts_is_refused_with_its_line(tmp_path: Path, part: str) -> None:
    """The memory of a TOML parser grows with the square of the parts: 40 KB would take 1.6 GB."""
    path = tmp_path / "policy.toml"
    path.write_text("confidence = 0.9\n" + ".".join([part] * 20_000) + " = 1\n")
    with pytest.raises(ValueError, match=r"policy.toml: line 2: a key has more than 31 dots, the limit$"):
        load(path)


def test_a_long_line_without_deep_keys_is_a_policy(tmp_path: Path) -> None:
    """A pyproject.toml may have lists of dependencies in one line."""
    path = tmp_path / "pyproject.toml"
    names = ", ".join(f'"package-{number}>=1.2.3"' for number in range(500))
    path.write_text(f"[project]\ndependencies = [{names}]\n[tool.llmgpu.gate]\nconfidence = 0.9\n")
    assert load(path).confidence == 0.9


def test_a_policy_of_megabytes_is_refused(tmp_path: Path) -> None:
    """The limit is far above any policy."""
    path = tmp_path / "policy.toml"
    path.write_bytes(b"#" * 2**21)
    with pytest.raises(ValueError, match=r"^policy .*policy.toml: is larger than 1,048,576 bytes"):
        load(path)
