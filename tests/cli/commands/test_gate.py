from __future__ import annotations

import datetime
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from support.judged_reports import on_h200, timed
from support.quiet_policy import calibrated
from support.report_factory import make_failed
from support.repository import first_commit
from support.stored_reports import H200, gpus
from support.verdict_factory import BATCHES, make_invalid

from pytest_llmgpu.cli import main
from pytest_llmgpu.gate import calibration, policy_file
from pytest_llmgpu.gate import judge as gate
from pytest_llmgpu.gate.calibration import default_path, load
from pytest_llmgpu.gate.classify import ExitStatus
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Candidate, Verdicts
from pytest_llmgpu.store.store import save

pytestmark = pytest.mark.usefixtures("empty_folder")

STORE = Path(".llmgpu")


def _write(base: Report | None = None, head: Report | None = None) -> None:
    dump(base or on_h200(), Path("base.json"))
    dump(head or on_h200(sha="b" * 40), Path("head.json"))


def _gate(*arguments: str) -> int:
    """Run the gate on one launch in each report, which shows no slowdown of 50 %; other tests are about that."""
    return main(["gate", "base.json", "head.json", "--largest-unseen-slowdown=99", *arguments])


def _verdicts(path: str = "verdicts.json") -> Verdicts:
    return msgspec.json.decode(Path(path).read_bytes(), type=Verdicts)


def _invalid() -> CaseResult:
    result = timed()
    make_invalid(result.launches[0], "throttled")
    result.traffic = None
    return result


@pytest.mark.parametrize(
    ("head", "arguments", "status", "text"),
    [
        ([timed()], [], 0, "PASSED: "),
        ([timed(40.0)], [], 1, "REGRESSED: "),
        ([timed(calls=65)], [], 1, "REGRESSED: "),
        ([make_failed("oom")], [], 1, "REGRESSED: mp-bs1: Out of memory"),
        ([timed(1.03)], [], 0, "PASSED: 1 case; "),
        ([timed(1.03)], ["--on-inconclusive", "fail"], 3, "UNDECIDED"),
        ([timed(), timed(batch_size=2)], [], 0, "PASSED: "),
        ([timed(), timed(batch_size=2)], ["--require-armed"], 3, "NOTHING COMPARED: "),
        ([timed(dtype="float32")], [], 3, "NOT COMPARABLE"),
        ([timed(batch_size=2)], [], 1, "MISSING: "),
        ([timed(batch_size=2)], ["--allow-missing"], 3, "NOTHING COMPARED: "),
    ],
)
def test_the_exit_status_is_the_result(
    head: Sequence[CaseResult], arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is 0, 1, 3, 4 or 5, and the first line has the result in words."""
    _write(head=on_h200(head, sha="b" * 40))
    assert _gate(*arguments) == status
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith(text)


def test_a_slowdown_that_one_launch_would_not_show_is_not_passed() -> None:
    """Exit status 3 whatever `on_inconclusive` is; it is 1 if something regressed, and 0 if time is not gated."""
    _write()
    gate = ["gate", "base.json", "head.json"]
    assert main([*gate, "--on-inconclusive", "pass", "--json", "verdicts.json"]) == 3
    assert [row.metric for row in _verdicts().rows if row.unseen] == ["time"]
    assert main([*gate, "--largest-unseen-slowdown", "99"]) == 0
    Path("policy.toml").write_text("time = { gate = false }\n")
    assert main([*gate, "--policy", "policy.toml"]) == 0
    _write(head=on_h200([timed(calls=65)]))
    assert main(gate) == 1


def test_another_machine_is_not_comparable() -> None:
    """The figures do not matter."""
    other = on_h200()
    other.environment.gpus = gpus(*["NVIDIA A100"] * 4)
    _write(head=other)
    assert _gate() == 3


def test_compare_shows_the_same_table_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    """`compare` shows and `gate` decides."""
    _write(head=on_h200([timed(40.0)]))
    assert _gate() == 1
    text = capsys.readouterr().out
    assert text.startswith("REGRESSED: mp-bs1 wall time +3900.0 %")
    assert main(["compare", "base.json", "head.json"]) == 0
    assert capsys.readouterr().out == text


def test_json_has_the_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the record `verdicts` of a report, and is written before the table is shown."""
    base, head = on_h200([timed(), timed(batch_size=2)]), on_h200([timed(40.0), timed(batch_size=2)])
    _write(base, head)
    assert _gate("--json", "new/verdicts.json") == 1
    found, lenient = _verdicts("new/verdicts.json"), Policy(largest_unseen_slowdown=99.0)
    assert found.rows == judge(base, head, lenient, today=datetime.date(2026, 1, 1)).rows
    assert found.baseline is not None
    assert (found.baseline.name, found.baseline.commit) == ("base.json", "a" * 40)
    assert found.policy_sha256 == policy_file.sha256(lenient)
    assert found.calibration_sha256 is None
    assert found.head == Candidate(created=head.created, commit="a" * 40)
    capsys.readouterr()
    assert _gate("--json", "-") == 1
    assert capsys.readouterr().out == Path("new/verdicts.json").read_text()


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """The process, its hash seed and its folder do not matter."""
    _write(head=on_h200([timed(1.5), timed(calls=65, batch_size=2), make_failed("crashed", strategy="tp")]))
    seen = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "pytest_llmgpu.cli", "gate", str(tmp_path / "base.json"), "head.json"]
        done = subprocess.run(
            [*command, "--json", "-", "--today", "2026-01-01"],
            check=False,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.returncode == 1
        seen.add(done.stdout)
    assert len(seen) == 1
    assert str(tmp_path).encode() not in seen.pop()


def test_the_policy_of_the_folder_is_in_force_unless_another_is_named() -> None:
    """Flags override the policy of pyproject.toml and of a file."""
    _write(head=on_h200([timed(1.03)]))
    assert _gate() == 0
    Path("pyproject.toml").write_text('[tool.llmgpu.gate]\non_inconclusive = "fail"\n')
    assert _gate() == 3
    assert _gate("--on-inconclusive", "pass") == 0
    Path("mine.toml").write_text("[time]\ngate = false\n")
    assert _gate("--policy", "mine.toml", "--on-inconclusive", "fail") == 0


def test_a_folder_below_has_the_same_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line below that of the noise names the policy."""
    _write(head=on_h200([timed(1.03)]))
    assert _gate() == 0
    assert "policy: built-in" in capsys.readouterr().out.splitlines()
    Path("pyproject.toml").write_text('[tool.llmgpu.gate]\non_inconclusive = "fail"\n')
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    for command, status in (("gate", 3), ("compare", 0)):
        assert main([command, "../base.json", "../head.json"]) == status
        lines = capsys.readouterr().out.splitlines()
        noise = next(number for number, line in enumerate(lines) if line.startswith("noise: "))
        assert lines[noise + 1] == "policy: pyproject.toml"


def test_policy_and_calibration_of_a_commit_cannot_be_edited_by_the_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Both are read from the commit that the command line names."""
    dump(on_h200([timed(*(1 + 0.0002 * number for number in range(10)))]), Path("launches.json"))
    assert main(["calibrate", "launches.json", "--output", "noise.json"]) == 0
    Path("pyproject.toml").write_text("[tool.llmgpu.gate.time]\nmargin = 0.04\n")
    first_commit(Path())
    Path("pyproject.toml").write_text("[tool.llmgpu.gate.time]\nmargin = 0.5\n")
    Path("noise.json").write_text("{}")
    _write(head=on_h200([timed(1.05)]))
    capsys.readouterr()
    assert _gate() == 0
    assert _gate("--policy", "git:main:pyproject.toml", "--calibration", "git:main:noise.json") == 1
    assert "policy: git:main:pyproject.toml" in capsys.readouterr().out
    assert _gate("--calibration", "git:main:other.json") == 2
    assert "llmgpu: calibration git:main:other.json: 'main' has no file 'other.json'" in capsys.readouterr().err


def test_dump_policy_prints_the_policy_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    """It is TOML that gives the same policy; reports are not needed."""
    Path("pyproject.toml").write_text("[tool.llmgpu.gate.time]\nmargin = 0.1\n")
    assert main(["gate", "--dump-policy", "--require-armed"]) == 0
    Path("dumped.toml").write_text(capsys.readouterr().out)
    found = policy_file.load(Path("dumped.toml"))
    assert (found.time.margin, found.require_armed) == (0.1, True)


def test_known_regressions_expire_on_their_day() -> None:
    """The day is today unless --today gives another."""
    _write(head=on_h200([timed(calls=65)]))
    Path("pyproject.toml").write_text(
        '[[tool.llmgpu.gate.known]]\ncase = "mp-bs1"\nmetric = "traffic"\nreason = "x"\nexpires = 2020-05-01\n'
    )
    assert _gate("--today", "2020-05-01") == 0
    assert _gate("--today", "2020-05-02") == 1
    assert _gate() == 1


def test_an_absent_baseline_passes_only_if_it_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag or the policy allows it; the rows then have no baseline, and the first line shows that."""
    _write()
    for reference in ("none.json", "baseline", "latest"):
        assert main(["gate", reference, "head.json"]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.endswith("; use --allow-no-baseline if this is the first run\n")
        assert main(["gate", reference, "head.json", "--allow-no-baseline", "--json", "verdicts.json"]) == 0
        assert capsys.readouterr().out.startswith("PASSED: there is no baseline")
        assert _verdicts().baseline is None
        assert [row.result for row in _verdicts().rows] == ["NEW"]
    Path("pyproject.toml").write_text("[tool.llmgpu.gate]\nallow_no_baseline = true\n")
    assert main(["gate", "none.json", "head.json"]) == 0


def test_the_baseline_of_a_commit_cannot_be_edited_by_the_change(capsys: pytest.CaptureFixture[str]) -> None:
    """`git:REV:PATH` is read from the commit; an unknown path is an absent baseline, an unknown commit is an error."""
    _write()
    first_commit(Path())
    dump(on_h200([timed(40.0)]), Path("base.json"))
    dump(on_h200([timed(40.0)]), Path("head.json"))
    assert _gate() == 0
    assert main(["gate", "git:main:base.json", "head.json"]) == 1
    allowed = ["head.json", "--allow-no-baseline"]
    assert main(["gate", "git:main:other.json", *allowed]) == 0
    capsys.readouterr()
    assert main(["gate", "git:unknown:base.json", *allowed]) == 2
    assert "no commit 'unknown'" in capsys.readouterr().err


def test_reports_of_the_store_are_named_by_number_and_name() -> None:
    """A name that several machines have means the candidate's machine."""
    save(on_h200([timed(40.0)]), STORE, "good")
    other = on_h200()
    other.environment.gpus = gpus("NVIDIA A100")
    save(other, STORE, "good")
    save(on_h200(), STORE)
    assert main(["gate", f"{H200}/1", f"{H200}/2", "--json", "verdicts.json"]) == 0
    assert main(["gate", "good", f"{H200}/2", "--json", "other.json"]) == 0
    assert _verdicts().rows == _verdicts("other.json").rows
    assert _verdicts().rows[0].improved


@pytest.mark.slow
@pytest.mark.parametrize("command", ["html", "plot"])
def test_a_name_of_several_machines_means_the_machine_of_the_report(command: str) -> None:
    """`html` and `plot` resolve names as `gate` does."""
    pytest.importorskip("jinja2")
    save(on_h200(), STORE, "good")
    other = on_h200()
    other.environment.gpus = gpus("NVIDIA A100")
    save(other, STORE, "good")
    _write()
    assert main([command, "head.json", "good", "--output", f"out{'.html' * (command == 'html')}"]) == 0


def test_a_run_that_is_compared_with_itself_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that overwrote its baseline is visible."""
    same = on_h200()
    _write(same, same)
    assert _gate() == 0
    assert "note: baseline and candidate are of the same run: 1 case" in capsys.readouterr().out


def test_the_gate_uses_the_calibration_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """A change that has not enough data with assumed noise is decided with the measured noise."""
    quiet = [1 + 0.0002 * number for number in range(10)]
    dump(on_h200([timed(*quiet)]), Path("launches.json"))
    _write(head=on_h200([timed(1.05)]))
    assert _gate() == 0
    assert main(["calibrate", "launches.json"]) == 0
    printed = capsys.readouterr().out
    assert f"written: {default_path(STORE, H200)}" in printed
    assert "fewer than 10" not in printed
    assert "previous" not in printed
    first = default_path(STORE, H200).read_bytes()
    assert main(["calibrate", "launches.json"]) == 0
    kept = default_path(STORE, H200).with_name("calibration-before.json")
    assert f"(previous: {kept})" in capsys.readouterr().out
    assert kept.read_bytes() == first
    assert _gate("--json", "verdicts.json") == 1
    assert _verdicts().calibration_sha256 == load(default_path(STORE, H200)).sha256
    assert _gate("--storage", "elsewhere") == 0
    assert _gate("--storage", "elsewhere", "--calibration", str(default_path(STORE, H200))) == 1


def test_calibrate_notes_launches_far_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Such noise comes from a disturbance, not from the runner."""
    dump(on_h200([timed(1.0, 1.1, 4.0)]), Path("a.json"))
    dump(on_h200([timed(1.2)]), Path("b.json"))
    assert main(["calibrate", "a.json", "b.json"]) == 0
    assert "differ so much that only large changes can be seen" in capsys.readouterr().out


def test_the_noise_estimate_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """`gate` and `compare` name the calibration or the built-in priors."""
    dump(on_h200([timed(1.0, 1.001, 1.002)]), Path("launches.json"))
    _write()

    def noises(*arguments: str) -> set[str]:
        assert _gate(*arguments) == main(["compare", "base.json", "head.json", *arguments]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("noise: ")]
        assert len(lines) == 2
        return set(lines)

    assert noises() == {"noise: built-in priors of each regime and these launches; llmgpu calibrate adds launches"}
    for path in ([], ["--output", "mine.json"]):
        assert main(["calibrate", "launches.json", *path]) == 0
    capsys.readouterr()
    assert noises() == {"noise: calibration.json, 3 launches"}
    assert noises("--calibration", str(Path("mine.json").resolve())) == {"noise: mine.json, 3 launches"}
    assert main(["gate", "none.json", "head.json", "--allow-no-baseline"]) == 0
    assert "noise: " not in capsys.readouterr().out, "it was not needed"


def test_calibrate_takes_several_reports_of_one_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """A few launches are accepted with a note."""
    for number in range(3):
        save(on_h200([timed(1 + number / 1000), make_failed(batch_size=2)]), STORE)
    assert main(["calibrate", "1", "2", "3", "--output", "noise.json"]) == 0
    assert [(noise.launches, noise.time.degrees) for noise in load(Path("noise.json")).cases.values()] == [(3, 2)]
    printed = capsys.readouterr().out
    assert "1 case with fewer than 10 launches" in printed
    assert "left out: 1 case with fewer than 2 undisturbed launches" in printed


def test_in_turn_has_the_smaller_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    """A host drifts from day to day: 3 % is a regression only if the launches alternated."""
    dump(calibrated_report := on_h200([timed(1.0, 1.001, 1.002)]), Path("base.json"))
    dump(on_h200([timed(1.03, 1.031, 1.032)]), Path("head.json"))
    calibration.dump(calibrated(H200, *calibrated_report.cases), Path("noise.json"))
    for command, status in (("gate", 1), ("compare", 0)):
        sides = [command, "base.json", "head.json", "--calibration", "noise.json"]
        assert main(sides) == 0
        assert "noise: noise.json, 10,000 launches\n" in capsys.readouterr().out
        assert main([*sides, "--in-turn"]) == status
        assert "REGRESSED  time: mp-bs1" in capsys.readouterr().out


def test_reports_of_one_day_are_one_session() -> None:
    """Differences between days are no noise of launches."""
    for day, level in ((1, 1.0), (1, 1.001), (2, 1.03), (3, 0.97), (3, 0.972)):
        save(on_h200([timed(level)], created=f"2026-01-0{day}T03:04:05Z"), STORE)
    assert main(["calibrate", "1", "2", "3", "4", "5", "--output", "noise.json"]) == 0
    [noise] = load(Path("noise.json")).cases.values()
    assert (noise.launches, noise.time.degrees) == (5, 2)
    assert noise.time.sd < 0.002


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([], "no case has 2 undisturbed launches"),
        (["head.json"], "two launches have identical times"),
        (["commit.json"], "measured commit"),
        (["none.json"], "cannot be read"),
    ],
)
def test_unusable_launches_are_no_calibration(others: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are a single launch, one launch twice and launches of different commits; no file is written."""
    _write(on_h200(), on_h200())
    dump(on_h200([timed(1.001)], sha="c" * 40), Path("commit.json"))
    assert main(["calibrate", "base.json", *others]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert text in printed.err
    assert not STORE.exists()


def _broken(name: str) -> bytes:
    whole = Path("base.json").read_bytes()
    text = json.loads(whole)
    if name == "negative.json":
        text["cases"][0]["launches"][0]["batches"]["latency_s"][3] = -1.0
    elif name == "overflow.json":
        text["cases"][0]["launches"][0]["batches"]["latency_s"] = [1e308] * BATCHES
    elif name == "huge.json":
        text["cases"][0]["traffic"]["ranks"][0][0]["wire_bytes"] = 10**400
    elif name == "newer.json":
        text["schema_version"] = 99
    elif name == "twice.json":
        text["cases"] *= 2
    elif name == "nan.json":
        return whole.replace(b'"wall_s": 62.0', b'"wall_s": NaN')
    else:
        return {
            "text.json": b"hello",
            "truncated.json": whole[:1000],
            "other.json": b'{"benchmarks": [], "version": "5.3.1"}',
            "nested.json": b"[" * 10_000_000,
            "gzip.json.gz": b"\x1f\x8b\x08\x00",
        }[name]
    return json.dumps(text).encode()


_PLACES = {
    "overflow.json": "$.cases[0].launches[0].batches.latency_s[0]",
    "huge.json": "$.cases[0].traffic.ranks[0][0].wire_bytes",
    "negative.json": "$.cases[0].launches[0].batches.latency_s[3]",
    "newer.json": "schema_version 99 is newer",
    "twice.json": "$.cases[1].id",
    "nan.json": "is not valid JSON",
    "text.json": "is not valid JSON",
    "truncated.json": "is not valid JSON",
    "other.json": "is not a report of pytest-llmgpu",
    "nested.json": "report nested.json",
    "gzip.json.gz": "cannot be decompressed",
}


@pytest.mark.parametrize("name", _PLACES)
@pytest.mark.parametrize("command", ["compare", "gate"])
def test_a_broken_report_is_one_line_and_exit_2(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the file and the place; a broken baseline is not an absent one."""
    _write()
    broken = _broken(name)
    assert broken != Path("base.json").read_bytes()
    Path(name).write_bytes(broken)
    extra = ["--allow-no-baseline"] if command == "gate" else []
    for sides in ([name, "head.json"], ["base.json", name]):
        assert main([command, *sides, *extra]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert printed.err.startswith(f"llmgpu: report {name}: ")
        assert _PLACES[name] in printed.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gate"], "BASE and HEAD are needed"),
        (["gate", "base.json"], "BASE and HEAD are needed"),
        (["gate", "base.json", "none.json", "--allow-no-baseline"], "report none.json: cannot be read"),
        (["gate", "base.json", "head.json", "--policy", "none.toml"], "policy none.toml: cannot be read"),
        (["gate", "base.json", "head.json", "--calibration", "none.json"], "calibration none.json: cannot be read"),
        (["gate", "base.json", "head.json", "--json", "base.json/x"], "base.json/x: cannot be written"),
        (["gate", "--dump-policy", "--policy", "bad.toml"], "policy bad.toml: margn is not a key: allowed are "),
        (["compare", "none.json", "head.json"], "report none.json: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout is empty."""
    _write()
    Path("bad.toml").write_text("margn = 1\n")
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("llmgpu: ")
    assert text in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "base.json"],
        ["gate", "a", "b", "--today", "yesterday"],
        ["gate", "a", "b", "--on-inconclusive", "ignore"],
        ["gate", "a", "b", "--largest-unseen-slowdown", "0"],
        ["calibrate"],
        ["promote"],
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """This holds for every command."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_overflow_is_exit_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status 1 of an exception would mean a regression."""

    def overflow(*_: object, **__: object) -> Verdicts:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(gate, "judge", overflow)
    _write()
    assert _gate() == 2
    text = "llmgpu: a figure is too large to compute with: int too large to convert to float\n"
    assert capsys.readouterr() == ("", text)


def test_latencies_of_zero_have_a_documented_exit_status() -> None:
    """They may be in either report."""
    nothing = on_h200([timed(0.0)])
    _write(nothing, on_h200())
    assert _gate() in set(ExitStatus)
    _write(on_h200(), nothing)
    assert _gate() in set(ExitStatus)


def test_disturbed_launches_are_not_compared() -> None:
    """Their figures neither pass nor fail the gate."""
    _write(head=on_h200([_invalid()]))
    _write(on_h200([_invalid()]), on_h200([_invalid()], sha="b" * 40))
    assert _gate() == 3


def test_garbage_collection_is_on_after_a_command() -> None:
    """It is off while a command runs."""
    _write()
    assert _gate() == 0
    assert gc.isenabled()
    assert main(["gate", "none.json", "head.json"]) == 2
    assert gc.isenabled()
