from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.judged_reports import on_h200, timed
from support.quiet_policy import calibrated
from support.report_factory import make_failed
from support.stored_reports import H200, gpus
from support.verdict_factory import make_invalid

from pytest_llmgpu.cli import main
from pytest_llmgpu.gate.calibration import default_path, dump, measure
from pytest_llmgpu.gate.promotion import NAME
from pytest_llmgpu.report.file import dump as write
from pytest_llmgpu.report.file import load
from pytest_llmgpu.report.report import Commit, Report, Session
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Finding
from pytest_llmgpu.store.references import resolve
from pytest_llmgpu.store.store import save, stored

TARGET = Path("benchmarks/baseline.json.gz")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder on a calibrated machine, where one launch suffices."""
    monkeypatch.chdir(tmp_path)
    _calibrate(0.001)


def _calibrate(sd: float) -> None:
    cases = [timed(batch_size=size) for size in (1, 2)]
    dump(calibrated(H200, *cases, sd=sd), default_path(Path(".llmgpu"), H200))


def _promote(report: Report, *arguments: str) -> int:
    write(report, Path("new.json"))
    return main(["promote", "new.json", *arguments])


def _to_file(report: Report) -> int:
    return _promote(report, "--to", str(TARGET))


def test_the_first_report_becomes_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """The file has the same content."""
    report = on_h200()
    assert _to_file(report) == 0
    assert capsys.readouterr().out == f"promoted: new.json is the baseline {TARGET}\n"
    assert load(TARGET) == report


def test_a_baseline_with_launches_far_apart_has_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """It is promoted, because the machine may give none better."""
    report = on_h200()
    code = "times-far-apart"
    report.cases[0].findings = [Finding(code=code, severity="warning", text="Launches differ.", next_step="Look.")]
    assert _to_file(report) == 0
    (note,) = capsys.readouterr().out.splitlines()[1:]
    assert note.startswith("note: ")
    assert report.cases[0].id in note


def test_a_better_report_replaces_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """The new baseline keeps the verdicts against the old one, with its sha256 and commit."""
    _to_file(on_h200([timed(), timed(batch_size=2)]))
    old = resolve(str(TARGET), Path(".llmgpu")).sha256
    assert _to_file(on_h200([timed(0.9), timed(batch_size=2)], sha="b" * 40)) == 0
    verdicts = load(TARGET).verdicts
    assert verdicts is not None
    assert verdicts.baseline is not None
    assert (verdicts.baseline.sha256, verdicts.baseline.commit) == (old, "a" * 40)
    assert [row.result for row in verdicts.rows if row.metric == "time"] == ["IMPROVED", "OK"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"replaces commit aaaaaaaa, sha256 {old}: 4 OK"


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (on_h200(commit=Commit(sha="a" * 40, dirty=True)), "dirty: files were changed"),
        (on_h200(commit=Commit()), "nameless: the report does not record its commit"),
        (on_h200(session=Session(complete=False)), "failed: the run did not complete"),
        (on_h200(session=Session(complete=True, interrupted=True)), "failed: the run did not complete"),
        (on_h200(session=Session(complete=True, exit_status=1)), "failed: pytest ended with exit status 1"),
        (on_h200(session=Session(complete=True, exit_status=1, failed_tests=1)), "failed: pytest ended with exit"),
        (on_h200(session=Session(complete=True, exit_status=3, failed_tests=0)), "failed: pytest ended with exit"),
        (on_h200([timed(), make_failed("crashed", batch_size=2)]), "failed: mp-bs2 crashed"),
        (on_h200([make_failed("oom")]), "failed: no case completed"),
    ],
)
def test_an_unfit_report_is_refused(report: Report, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 1 also without an existing baseline, and no file is written."""
    assert _to_file(report) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"llmgpu: new.json is not promoted: {reason}" in printed.err
    assert not TARGET.exists()


def test_failed_items_of_the_gate_are_no_objection() -> None:
    """The comparison with another baseline failed, and the measurement is sound."""
    assert _to_file(on_h200(session=Session(complete=True, exit_status=1, failed_tests=0))) == 0


def test_a_baseline_needs_the_launches_of_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of one launch are one launch, and disturbed launches do not count."""
    Path("policy.toml").write_text("min_launches = 2\n")
    arguments = ["--to", str(TARGET), "--policy", "policy.toml"]
    disturbed = timed(1.0, 1.001)
    make_invalid(disturbed.launches[1], "other programs")
    for case in (timed(1.0), timed(1.0, 1.0), disturbed):
        assert _promote(on_h200([case]), *arguments) == 1
        assert "`min_launches` of the policy: mp-bs1 has 1 of 2" in capsys.readouterr().err
    assert _promote(on_h200([timed(1.0, 1.001)]), *arguments) == 0


@pytest.mark.parametrize(("why", "passes"), [("CPU cores too busy", True), ("processes of other programs", False)])
def test_disturbed_times_are_no_objection_where_no_time_is_gated(
    why: str, passes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A busy CPU changes times alone, which a gate of FLOPs and traffic does not need; a launch still counts."""
    Path("policy.toml").write_text("min_launches = 2\n[time]\ngate = false\n")
    case = timed(1.0, 1.001)
    for launch in case.launches:
        make_invalid(launch, f"{why}: rank 0")
    arguments = ["--to", str(TARGET), "--policy", "policy.toml"]
    assert _promote(on_h200([case]), "--to", str(TARGET)) == 1
    refused = capsys.readouterr().err
    assert f"invalid: mp-bs1 ({why}: rank 0)" in refused
    assert ("gate = false in [tool.llmgpu.gate.time]" in refused) == passes
    assert (_promote(on_h200([case]), *arguments) == 0) == passes
    assert (f"gates none of them: mp-bs1 ({why}: rank 0)" in capsys.readouterr().out) == passes


def test_objections_can_be_overruled_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """The baseline keeps the reason and the objections, and the gate shows them."""
    dirty = on_h200(commit=Commit(sha="a" * 40, dirty=True))
    assert _promote(dirty, "--to", str(TARGET), "--force", "the machine is gone") == 0
    promotion = load(TARGET).promotion
    assert promotion is not None
    assert promotion.reason == "the machine is gone"
    assert [text.partition(":")[0] for text in promotion.objections] == ["dirty"]
    assert main(["gate", str(TARGET), "new.json"]) == 0
    assert "promoted by force (the machine is gone)" in " ".join(capsys.readouterr().out.split())
    assert _promote(on_h200(sha="b" * 40), "--to", str(TARGET), "--force", "not needed") == 0
    assert load(TARGET).promotion is None


def test_force_needs_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty one is refused."""
    with pytest.raises(SystemExit) as caught:
        _promote(on_h200(), "--force", " ")
    assert caught.value.code == 2
    assert "a reason is needed" in capsys.readouterr().err


def test_more_launches_replace_a_noisy_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """Not enough data is no objection to a report that has more launches; a regression is one."""
    default_path(Path(".llmgpu"), H200).unlink()
    _to_file(on_h200([timed(1.0)]))
    assert _to_file(on_h200([timed(1.02)], sha="b" * 40)) == 1
    assert "UNDECIDED" in capsys.readouterr().err
    assert _to_file(on_h200([timed(1.0, 1.03, 1.01)], sha="c" * 40)) == 0
    assert _to_file(on_h200([timed(2.0, 2.1, 2.05, 2.02)], sha="d" * 40)) == 1


def test_noise_that_was_calibrated_from_the_candidate_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own launches always agree with it."""
    report = on_h200([timed(1.0, 1.01)])
    dump(measure(report), default_path(Path(".llmgpu"), H200))
    _to_file(report)
    assert main(["gate", str(TARGET), "new.json"]) == 0
    assert "calibrated from the candidate" in capsys.readouterr().out
    write(on_h200([timed(1.0, 1.01)], created="2026-05-05T05:05:05Z"), Path("new.json"))
    assert main(["gate", str(TARGET), "new.json"]) == 0
    assert "calibrated from the candidate" not in capsys.readouterr().out


def test_wrong_answers_and_disturbed_launches_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A case with an undisturbed launch is not refused."""
    wrong, spoilt = timed(), timed(batch_size=2)
    wrong.accuracy_check = AccuracyCheck(
        metric="acc", value=0.2, baseline=0.8, source="x", tolerance=0.0, ok=False, text="is wrong"
    )
    make_invalid(spoilt.launches[0], "throttled")
    assert _to_file(on_h200([wrong, spoilt])) == 1
    assert capsys.readouterr().err.splitlines() == [
        "llmgpu: new.json is not promoted: failed: wrong answers of mp-bs1",
        "llmgpu: new.json is not promoted: invalid: mp-bs2 (throttled)",
        "llmgpu: remove the cause and measure again, or pass --force REASON, which the baseline keeps",
    ]
    several = timed(1.0, 1.0)
    make_invalid(several.launches[0], "throttled")
    assert _to_file(on_h200([several])) == 0


def test_a_baseline_may_have_a_case_that_ran_out_of_memory() -> None:
    """Out of memory is an outcome, not a failure."""
    assert _to_file(on_h200([timed(), make_failed("oom", batch_size=2)])) == 0


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ([timed(1.1)], "REGRESSED: mp-bs1 time"),
        ([timed(calls=65)], "REGRESSED: mp-bs1 traffic"),
        ([make_failed("oom")], "REGRESSED: mp-bs1 outcome"),
        ([timed(dtype="float32")], "NOT_COMPARABLE: mp-bs1 outcome"),
        ([timed(batch_size=2)], "MISSING: mp-bs1 outcome"),
    ],
)
def test_a_report_worse_than_the_baseline_is_refused(
    head: list[CaseResult], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verdicts with not enough data are refused too, and the baseline does not change."""
    _to_file(on_h200())
    before = TARGET.read_bytes()
    capsys.readouterr()
    assert _to_file(on_h200(head, sha="b" * 40)) == 1
    assert f"llmgpu: new.json is not promoted: {reason}" in capsys.readouterr().err
    assert TARGET.read_bytes() == before


def test_an_undecided_report_is_refused_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """The remedy is more launches, or a calibration if there is none."""
    _to_file(on_h200())
    _calibrate(0.02)
    assert _to_file(on_h200([timed(1.02)], sha="b" * 40)) == 1
    line, way_out = capsys.readouterr().err.splitlines()
    assert "UNDECIDED: mp-bs1 time" in line
    assert "--force REASON" in way_out
    default_path(Path(".llmgpu"), H200).unlink()
    assert _to_file(on_h200([timed(1.02)], sha="b" * 40)) == 1
    objection, remedy = capsys.readouterr().err.splitlines()
    assert "UNDECIDED: mp-bs1 time" in objection
    assert "llmgpu calibrate" in remedy


@pytest.mark.parametrize("head", [timed(dtype="float32"), timed(batch_size=2)])
def test_other_cases_need_the_removal_of_the_baseline(head: CaseResult, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line names the file to remove; nothing is replaced automatically."""
    _to_file(on_h200())
    capsys.readouterr()
    assert _to_file(on_h200([head], sha="b" * 40)) == 1
    assert f"remove {TARGET} and promote again" in capsys.readouterr().err.splitlines()[-1]
    TARGET.unlink()
    assert _to_file(on_h200([head], sha="b" * 40)) == 0


def test_a_narrowed_run_cannot_drop_cases_from_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """The gate excuses cases that `-k` deselected; a baseline without them would hide later regressions."""
    gone = timed(batch_size=2)
    gone.nodeid = "test_a.py::test_b[2]"
    _to_file(on_h200([timed(), gone]))
    narrowed = on_h200(sha="b" * 40)
    narrowed.session.deselected = [gone.nodeid]
    assert _to_file(narrowed) == 1
    assert "MISSING: mp-bs2 outcome" in capsys.readouterr().err


def test_a_known_regression_may_become_the_baseline() -> None:
    """The policy names an accepted change until its expiry."""
    _to_file(on_h200())
    Path("policy.toml").write_text(
        '[[known]]\ncase = "mp-bs1"\nmetric = "time"\nreason = "safer"\nexpires = 2026-06-01\n'
    )
    slower = on_h200([timed(1.1)], sha="b" * 40)
    arguments = ["--to", str(TARGET), "--policy", "policy.toml"]
    assert _promote(slower, *arguments, "--today", "2026-06-02") == 1
    assert _promote(slower, *arguments, "--today", "2026-06-01") == 0
    assert load(TARGET).commit.sha == "b" * 40


def test_promoting_the_baseline_again_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Its verdicts against the previous baseline are kept."""
    _to_file(on_h200())
    report = on_h200(sha="b" * 40)
    _to_file(report)
    before = TARGET.read_bytes()
    capsys.readouterr()
    assert _to_file(report) == 0
    assert capsys.readouterr().out == "new.json is already the baseline\n"
    assert main(["promote", str(TARGET), "--to", str(TARGET)]) == 0
    assert TARGET.read_bytes() == before


def test_the_store_has_one_baseline_per_machine() -> None:
    """It has the name `baseline`; the previous one keeps its number."""
    store = Path(".llmgpu")
    other = on_h200(sha="c" * 40)
    other.environment.gpus = gpus("NVIDIA A100")
    save(other, store, NAME)
    assert _promote(on_h200()) == 0
    assert _promote(on_h200(sha="b" * 40)) == 0
    kept = [(one.machine, one.number, one.name, one.commit) for one in stored(store)]
    assert sorted(kept, key=str) == [
        ("1x-NVIDIA-A100-140GiB", 1, NAME, "c" * 8),
        (H200, 1, None, "a" * 8),
        (H200, 2, NAME, "b" * 8),
    ]
    found = resolve(NAME, store, machine=H200)
    assert found.report().verdicts is not None
    assert main(["gate", NAME, "new.json"]) == 0


def _broken() -> None:
    TARGET.parent.mkdir()
    TARGET.write_text("{")


@pytest.mark.parametrize(
    ("arguments", "reason", "prepare"),
    [
        (["--to", str(TARGET)], f"report {TARGET}: is not valid JSON", _broken),
        (["--to", "baseline.txt"], "the name must end in .json", None),
        (["--policy", "none.toml"], "policy none.toml: cannot be read", None),
        ([], "name 'baseline': is a file or folder here", lambda: Path(NAME).mkdir()),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], reason: str, prepare: Callable[[], None] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken baseline is not replaced."""
    if prepare is not None:
        prepare()
    assert _promote(on_h200(), *arguments) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert reason in printed.err
