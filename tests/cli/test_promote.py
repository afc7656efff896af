from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.report_factory import GIB, known, make_check, make_failed, make_memory, make_profile
from support.verdict_factory import H200, gpus, noise, on_h200, timed

from pytest_llmgpu.cli import main
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.report.report import Commit, Report, Session
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import MIB
from pytest_llmgpu.report.verdicts import Baseline
from pytest_llmgpu.store.store import BASELINE, resolve, save, stored

TARGET = Path("benchmarks/baseline.json.gz")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in an empty folder on a quiet machine, where one launch suffices."""
    monkeypatch.chdir(tmp_path)
    with noise():
        yield


def _promote(report: Report, *arguments: str) -> int:
    dump(report, Path("new.json"))
    return main(["promote", "new.json", *arguments])


def _to_file(report: Report) -> int:
    return _promote(report, "--to", str(TARGET))


def _wrong() -> CaseResult:
    wrong = timed()
    wrong.accuracy_check = make_check()
    return wrong


def test_a_report_becomes_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """The next one keeps its verdicts against it; items of the gate that failed against another do not prevent it."""
    passed = Session(complete=True, exit_status=1, failed_tests=0)
    report = on_h200([timed(), make_failed("oom", batch_size=2)], session=passed)
    assert _to_file(report) == 0
    step = f"next: pytest --llmgpu-compare={TARGET}"
    assert capsys.readouterr().out == f"promoted: new.json is the baseline {TARGET}; commit it\n{step}\n"
    assert load(TARGET) == report
    old = resolve(str(TARGET), Path(".llmgpu")).sha256
    assert _to_file(on_h200([timed(0.9), make_failed("oom", batch_size=2)], sha="b" * 40)) == 0
    verdicts = known(load(TARGET).verdicts)
    baseline = known(verdicts.baseline)
    assert (baseline.sha256, baseline.commit) == (old, "a" * 40)
    assert [row.result for row in verdicts.rows if row.metric == "time"] == ["IMPROVED"]


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (on_h200(commit=Commit(sha="a" * 40, dirty=True)), "files were changed"),
        (on_h200(commit=Commit()), "the report does not record its commit: commit the"),
        (on_h200(session=Session(complete=False)), "the run did not complete"),
        (on_h200(session=Session(complete=True, exit_status=1)), "the run did not complete, or tests failed"),
        (on_h200(session=Session(complete=True, exit_status=3, failed_tests=0)), "the run did not complete, or"),
        (on_h200([timed(), make_failed("crashed", batch_size=2)]), "failed: mp-bs2 crashed"),
        (on_h200([make_failed("oom")]), "failed: no case completed"),
        (on_h200([_wrong()]), "failed: wrong answers of mp-bs1"),
    ],
)
def test_an_unfit_report_is_refused(report: Report, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 1 also without an existing baseline, and no file is written."""
    assert _to_file(report) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"llmgpu: new.json is not promoted: {reason}" in printed.err
    assert not TARGET.exists()


@pytest.mark.parametrize("launches", [1, 2])
def test_disturbed_launches_are_noted(launches: int, capsys: pytest.CaptureFixture[str]) -> None:
    """No later time can be compared with them, also where others are undisturbed; their exact figures can."""
    result = timed(*[1.0] * launches)
    result.launches[0].profile = make_profile(invalid=["processes of other programs: GPU 0 has 1"])
    assert _to_file(on_h200([result])) == 0
    out = capsys.readouterr().out
    assert f"note: disturbed launches, whose wall times are not compared: {result.id} (1 of {launches}). " in out
    assert "End the other programs on these GPUs" in out


@pytest.mark.parametrize(
    ("head", "deselected", "status", "reason"),
    [
        ([timed(1.1)], [], 1, "REGRESSED: mp-bs1 wall time"),
        ([make_failed("oom"), timed(batch_size=2)], [], 1, "REGRESSED: mp-bs1: "),
        ([timed(dtype="float32")], [], 3, "NOT COMPARABLE: mp-bs1"),
        (
            [timed(batch_size=2)],
            [],
            3,
            "NOTHING COMPARED: no case in common: mp-bs1 in the baseline, mp-bs2 in the candidate",
        ),
        # The gate leaves it out; a baseline without it would hide later regressions.
        (
            [timed(batch_size=2)],
            ["test_a.py::test_b[1]"],
            3,
            "NOTHING COMPARED: no case in common: mp-bs1 in the baseline, mp-bs2 in the candidate",
        ),
    ],
)
def test_a_report_that_the_gate_fails_is_refused(
    head: list[CaseResult], deselected: list[str], status: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is that of the gate, and the baseline does not change; with a reason it is replaced."""
    kept = timed()
    kept.nodeid = "test_a.py::test_b[1]"
    _to_file(on_h200([kept]))
    before = TARGET.read_bytes()
    capsys.readouterr()
    report = on_h200(head, sha="b" * 40, session=Session(complete=True, exit_status=0, deselected=deselected))
    assert _to_file(report) == status
    error = capsys.readouterr().err
    assert f"llmgpu: new.json is not promoted: {reason}" in error
    assert ("Next: Measure a case that the baseline has." in error) is reason.startswith("NOTHING")
    assert "--force REASON promotes the report as it is" in error
    assert TARGET.read_bytes() == before
    assert _promote(report, "--to", str(TARGET), "--force", "wanted") == 0


@pytest.mark.parametrize(
    ("seconds", "batch_size", "status", "reason"),
    [(1.1, 1, 1, "REGRESSED: mp-bs1 wall time"), (1.0, 2, 3, "NOTHING COMPARED"), (1.0, 1, 0, "")],
)
@pytest.mark.parametrize("target", ["new", "another baseline", "the same"])
def test_a_run_that_failed_against_its_own_baseline_is_refused(
    seconds: float, batch_size: int, status: int, reason: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where there is no baseline at the target yet, or another one; those against the same one are made again."""
    base, report = on_h200([timed()]), on_h200([timed(seconds, batch_size=batch_size)], sha="b" * 40)
    sha256 = "1" * 64
    if target != "new":
        _to_file(base if target == "the same" else on_h200([timed(1.001 * seconds, batch_size=batch_size)]))
    if target == "the same":
        sha256 = known(resolve(str(TARGET), Path(".llmgpu")).sha256)
    baseline = Baseline(name="own.json", sha256=sha256)
    report.verdicts = judge(base, report, Policy(), today=datetime.date(2026, 6, 1), baseline=baseline)
    capsys.readouterr()
    assert _to_file(report) == status
    assert capsys.readouterr().err.count(f"not promoted: {reason}") == bool(status)
    assert _promote(report, "--to", str(TARGET), "--force", "wanted") == 0
    assert (load(TARGET).promotion is None) == (not status)


def test_a_refused_report_can_be_promoted_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """The baseline keeps the reason and what it overrules, and the gate shows it."""
    dirty = on_h200(commit=Commit(sha="a" * 40, dirty=True))
    assert _promote(dirty, "--to", str(TARGET), "--force", "the machine is gone") == 0
    promotion = known(load(TARGET).promotion)
    assert (promotion.reason, len(promotion.refused)) == ("the machine is gone", 1)
    main(["gate", str(TARGET), "new.json"])
    assert "promoted by force: the machine is gone" in " ".join(capsys.readouterr().out.split())
    assert _promote(on_h200(sha="b" * 40), "--to", str(TARGET), "--force", "not needed") == 0
    assert load(TARGET).promotion is None


def _using(mib: float, number: int) -> Report:
    result = timed()
    result.launches[0].memory = make_memory(1, peak=10 * GIB + mib * MIB)
    return on_h200([result], f"{number:x}" * 40, created=f"2026-10-0{number}T03:04:05Z")


def test_a_growth_over_three_promotions_is_refused_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Each step is below the threshold. With a reason the growth is accepted: the next baseline starts again."""
    for number, mib in enumerate((0, 60, 120), 1):
        assert _to_file(_using(mib, number)) == 0
    assert [one.commit for one in load(TARGET).promotions] == ["1" * 40, "2" * 40]
    capsys.readouterr()
    assert _to_file(_using(180, 4)) == 1
    grown = "Memory +180 MiB (+1.8 %) since 11111111 of 2026-10-01, 3 promotions ago"
    assert f"llmgpu: new.json is not promoted: REGRESSED: mp-bs1 creep: {grown}" in capsys.readouterr().err
    assert main(["gate", str(TARGET), "new.json"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert grown in printed
    assert "Next: Find the commits that added it with llmgpu trend, or accept it: llmgpu promote --force" in printed
    assert _promote(_using(180, 4), "--to", str(TARGET), "--force", "a larger workspace") == 0
    assert load(TARGET).promotions == []
    for number, mib, status in ((5, 240, 0), (6, 300, 0), (7, 360, 1)):
        assert _to_file(_using(mib, number)) == status
    assert [one.commit for one in load(TARGET).promotions] == ["4" * 40, "5" * 40]


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
    """The newest of the name `baseline`; an interrupted report that is promoted by force is that, too."""
    store = Path(".llmgpu")
    other = on_h200(sha="c" * 40)
    other.environment.gpus = gpus("NVIDIA A100")
    save(other, store, BASELINE)
    assert _promote(on_h200()) == 0
    assert _promote(on_h200(sha="b" * 40)) == 0
    kept = [(one.machine, one.number, one.name, one.commit) for one in stored(store)]
    assert sorted(kept, key=str) == [
        ("1x-NVIDIA-A100-140GiB", 1, BASELINE, "c" * 8),
        (H200, 1, BASELINE, "a" * 8),
        (H200, 2, BASELINE, "b" * 8),
    ]
    found = resolve(BASELINE, store, machine=H200)
    assert found.report().verdicts is not None
    assert main(["gate", BASELINE, "new.json"]) == 3, "it is the file of the baseline"
    forced = on_h200(sha="d" * 40, session=Session(complete=False))
    assert _promote(forced, "--force", "wanted") == 0
    assert resolve(BASELINE, store, machine=H200).report().commit.sha == "d" * 40
