from __future__ import annotations

import copy
import gzip
import json
import math
import os
import re
import stat
import tracemalloc
from pathlib import Path

import pytest
from support.report_factory import known, make_document, make_failed, make_full_report, make_report, make_result

from pytest_llmgpu.report import file
from pytest_llmgpu.report.file import check_writable, dump, encodable, encode, load, parse
from pytest_llmgpu.report.result import Failure, Metric

pytestmark = pytest.mark.usefixtures("empty_folder")

_PATH = Path("report.json")
_LAUNCH = "cases.0.launches.0"
_DATA = b"0123456789" * 1000


@pytest.mark.parametrize("name", ["report.json", "report.json.gz", "new/folder/report.json"])
def test_what_is_written_is_what_is_read(name: str) -> None:
    """Nothing is lost, with or without compression; a file that was unpacked or renamed still loads."""
    dump(make_full_report(), Path(name))
    assert Path(name).read_bytes().startswith(file.GZIP) == name.endswith(".gz")
    Path(name).rename("downloaded.json")
    assert load(Path("downloaded.json")) == make_full_report()


def test_equal_reports_are_equal_files() -> None:
    """A compressed report has no time stamp, so that it can be compared by hash."""
    written = encode(make_full_report(), compressed=True)
    assert written == encode(make_full_report(), compressed=True)
    assert written[4:8] == bytes(4)  # gzip's time stamp


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["latency_s[2]", "profile.devices[1].metrics.power_w.mean", "wall_s"])
def test_a_figure_that_is_not_finite_is_refused(place: str, value: float) -> None:
    """NaN never becomes null, which means that nothing was measured; the old report stays."""
    report = make_full_report()
    dump(report, _PATH)
    [launch] = report.cases[0].launches
    if place == "wall_s":
        launch.wall_s = value
    elif place.startswith("profile"):
        known(launch.profile).devices[1].metrics["power_w"] = Metric(mean=value, max=None, method="x", coverage=None)
    else:
        launch.batches.latency_s[2] = value
    with pytest.raises(ValueError, match=r"^a figure is NaN or infinite, which JSON does not allow"):
        dump(report, _PATH)
    assert load(_PATH) == make_full_report()


def test_a_write_that_fails_leaves_the_old_report_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the old report is kept."""
    dump(make_full_report(), _PATH)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        dump(make_report(), _PATH)
    assert load(_PATH) == make_full_report()
    assert [path.name for path in Path().iterdir()] == ["report.json"]


@pytest.mark.parametrize("planted", ["victim", "absent"])
def test_planted_links_are_replaced(planted: str) -> None:
    """A repository may have a link with the name of a report, to a file of the user."""
    Path("victim").write_text("mine")
    for name in (_PATH, Path(f".llmgpu-{os.getpid()}.tmp")):
        name.symlink_to(planted)
    check_writable(_PATH)
    dump(make_full_report(), _PATH)
    assert not _PATH.is_symlink()
    assert load(_PATH) == make_full_report()
    assert (Path("victim").read_text(), Path("absent").exists()) == ("mine", False)


def test_a_report_has_the_permissions_of_any_new_file() -> None:
    """A later step under another user can read the report."""
    Path("other").touch()
    dump(make_report(), _PATH)
    assert stat.S_IMODE(_PATH.stat().st_mode) == stat.S_IMODE(Path("other").stat().st_mode)


def test_text_that_is_not_utf8_loses_no_report() -> None:
    """A path of other bytes, a variable or the text of an exception may have any letter; a report keeps its code."""
    report = make_report([make_failed("error", Failure(phase="load", message="bad \udcff", log_tail="\ud800"))])
    report.environment.variables["NCCL_DEBUG_FILE"] = os.fsdecode(b"/tmp/\xe9")
    dump(report, _PATH)
    read = load(_PATH)
    assert read.environment.variables["NCCL_DEBUG_FILE"] == "/tmp/\\udce9"
    failure = known(read.cases[0].failure)
    assert (failure.message, failure.log_tail) == ("bad \\udcff", "\\ud800")
    result = make_result()
    assert encodable(result) is result, "a record is copied only if a text of it has to change"


def test_fields_of_a_later_version_are_ignored() -> None:
    """An old reader reads the fields that it knows."""
    document = make_document(make_full_report())
    document["carbon_kg"] = 1.0
    document["cases"][0]["launches"][0]["sparkle"] = {"a": []}
    assert parse(_written(document), "r.json") == make_full_report()


def _written(document: object) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b'{"schema_version": 2, "cases": [', "is not valid JSON"),
        (b'{"schema_version": 2, "cases": [NaN]}', "is not valid JSON.*byte"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON|is not a report"),
        (b"[1, 2]", "is not a report of pytest-llmgpu: .*Expected `object`"),
        (_written({"machine_info": {}, "version": "5.3.1"}), "is not a report of pytest-llmgpu.*schema_version"),
        (_written({"schema_version": "1.0", "cases": []}), r"is not a report of pytest-llmgpu.*\$\.schema_version"),
        (_written({"schema_version": 3, "cases": []}), "schema_version 3 is newer than 2; upgrade pytest-llmgpu"),
        (_written({"schema_version": 1, "cases": []}), "schema_version 1 is older than 2 and not read; measure it"),
        (_written({"schema_version": 2, "cases": []}), "breaks schema_version 2.*created"),
        (_written({"schema_version": 2, "cases": [], "x": math.nan}), r"is not valid JSON.*byte"),
        (b'{"schema_version": 2, "cases": [1e999]}', r"breaks schema_version 2: Number out of range - at `\$\.cases"),
        (b'{"schema_version": ' + b"1" * 5000 + b', "cases": []}', r"is not a report.*out of range - at `\$\.schema_v"),
        (b'{"schema_version": 2, "cases": ' + b"[" * 2_000_000, "is not valid JSON: maximum recursion depth"),
        (gzip.compress(b"{}", mtime=0)[:-4], "cannot be decompressed"),
    ],
)
def test_a_file_that_is_not_a_report_is_refused_in_one_line(data: bytes, reason: str) -> None:
    """The message names the file and the error."""
    Path("broken.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"^report broken\.json: ({reason})") as caught:
        load(Path("broken.json"))
    assert "\n" not in str(caught.value)


_DOCUMENT = make_document(make_full_report())


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("cases.1.case.batch_size", "two", "`int`, got `str`"),
        ("cases.1.outcome", "oomph", "'oomph'"),
        ("cases.1.case.batch_size", 0, "`int` >= 1"),
        ("cases.0.inference_s", -3.0, "`float` >= 0.0"),
        ("cases.0.acc", 82.8, "`float` <= 1.0"),
        (f"{_LAUNCH}.batches.latency_s.2", 0.0, "`float` > 0.0"),
        (f"{_LAUNCH}.batches.latency_s.2", 1e308, "`float` < 1000000000000.0"),
        (f"{_LAUNCH}.batches.tokens.0", -1, "`int` >= 0"),
        (f"{_LAUNCH}.profile.lateness_p99_s", 1e308, "`float` < 1000000000000.0"),
        (f"{_LAUNCH}.profile.devices.1.energy_j", -0.5, "`float` >= 0.0"),
        (f"{_LAUNCH}.profile.series.devices.1.power_w", [300.0], "3 values, got 1"),
        (f"{_LAUNCH}.profile.series.devices", [], "2 values, got 0"),
        (f"{_LAUNCH}.profile.series.t_s.2", -1e308, "`float` > -1000000000000.0"),
        (f"{_LAUNCH}.batches.sequences", [1, 1, 1], "4 values, got 3"),
        (f"{_LAUNCH}.batches.tokens", [1], "4 values, got 1"),
        (f"{_LAUNCH}.batches.padded_tokens", [1], "4 values, got 1"),
        (f"{_LAUNCH}.batches.launch_s", [1.0] * 3, "4 values, got 3"),
        (f"{_LAUNCH}.accuracy.predictions", [0], "5 values, got 1"),
        (f"{_LAUNCH}.accuracy.predictions_norm", [0], "5 values, got 1"),
        (f"{_LAUNCH}.accuracy.labels", [0] * 6, "5 values, got 6"),
        (f"{_LAUNCH}.accuracy.loglikelihoods", "AAA", "base64, got another text"),
        (f"{_LAUNCH}.accuracy.loglikelihoods", "\xe4AAA", "base64, got another text"),
        (f"{_LAUNCH}.accuracy.loglikelihoods", "AAA=", "numbers of 4 bytes, got 2 bytes"),
        (f"{_LAUNCH}.work.collectives.0.wait_s", [0.1], "3 values, got 1"),
        (f"{_LAUNCH}.prefill_work.ranks.1.copy_s", [0.1], "3 values, got 1"),
        ("cases.0.id", "", "an id, got an empty text"),
        ("cases.0.failure", {"phase": "load", "message": "m"}, "null, because the case completed"),
        ("cases.2.id", "mp-bs1", "a unique id, got 'mp-bs1', which $.cases[0] has too"),
    ],
)
def test_an_impossible_value_is_refused_with_its_place(place: str, value: object, reason: str) -> None:
    """The message has the place and the bound."""
    document = part = copy.deepcopy(_DOCUMENT)
    *steps, last = [int(step) if step.isdecimal() else step for step in place.split(".")]
    for step in steps:
        part = part[step]
    part[last] = value
    path = re.sub(r"\.(\d+)", r"[\1]", f"$.{place}")
    start = r"^report r\.json: breaks schema_version 2: (Expected|Invalid enum)"
    with pytest.raises(ValueError, match=f"{start}.*{re.escape(reason)}.* - at `{re.escape(path)}`$"):
        parse(_written(document), "r.json")


def test_unusual_values_that_are_possible_are_read() -> None:
    """Throttling by power and heat adds up; a reading can be from before the window; an item can have many endings."""
    document = copy.deepcopy(_DOCUMENT)
    launch = document["cases"][0]["launches"][0]
    launch["profile"]["devices"][0]["throttled_s"] = 1.5 * launch["profile"]["duration_s"]
    launch["profile"]["series"]["t_s"][0] = -0.045
    launch["accuracy"]["predictions"][0] = 300
    accuracy = parse(_written(document), "r.json").cases[0].launches[0].accuracy
    assert known(accuracy).predictions[0] == 300


@pytest.mark.parametrize("metric", ["acc", "acc_norm"])
def test_an_accuracy_that_its_predictions_contradict_is_refused(metric: str) -> None:
    """A report with the right answers has the accuracy twice."""
    document = copy.deepcopy(_DOCUMENT)
    accuracy = document["cases"][0]["launches"][0]["accuracy"]
    accuracy |= {"labels": accuracy["predictions"], "acc": 1.0, "acc_norm": 1.0}
    parse(_written(document), "r.json")
    accuracy[metric] = 0.25
    with pytest.raises(ValueError, match=rf"Expected 1, which the predictions give, got 0\.25 .*accuracy\.{metric}`$"):
        parse(_written(document), "r.json")


@pytest.mark.parametrize(("name", "reason"), [("missing.json", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(name: str, reason: str) -> None:
    """The message has the reason of the operating system."""
    with pytest.raises(ValueError, match=rf"cannot be read: {reason}"):
        load(Path(name))


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_above_the_size_limit_is_refused(compressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report up to the limit loads; one byte more is refused with the name of the file."""
    data = encode(make_full_report(), compressed=False)
    monkeypatch.setattr(file, "LIMIT_BYTES", len(data))
    _PATH.write_bytes(gzip.compress(data) if compressed else data)
    assert load(_PATH) == make_full_report()
    _PATH.write_bytes(gzip.compress(data + b" ") if compressed else data + b" ")
    with pytest.raises(ValueError, match=rf"^report report\.json: .* (more|larger) than {len(data):,} bytes"):
        load(_PATH)


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(_DATA, mtime=0)[:15],
        gzip.compress(b"{}", mtime=0) + b"more",
        gzip.compress(_DATA, mtime=0)[:-8] + bytes(8),
        b"\x1f\x8bgarbage",
        b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 20,
    ],
)
def test_broken_gzip_data_is_refused(data: bytes) -> None:
    """Truncated, extended and damaged streams are errors in one line; several whole streams are one file."""
    with pytest.raises(ValueError, match=r"^cannot be decompressed: [^\n]+$"):
        file.unpack(data)
    assert file.unpack(gzip.compress(_DATA[:1000]) + gzip.compress(_DATA[1000:]) + bytes(512)) == _DATA


def test_a_bomb_is_refused_with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that decompresses to much more than the limit takes memory for the limit alone."""
    bomb = gzip.compress(bytes(2**27), 1)
    with pytest.raises(ValueError, match=f"^decompresses to more than {100 * len(bomb):,} bytes, the limit$"):
        file.unpack(bomb)
    monkeypatch.setattr(file, "LIMIT_BYTES", 2**20)
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"^decompresses to more than {2**20:,} bytes, the limit$"):
        file.unpack(bomb)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_report_of_too_many_fields_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and texts of a report take many times their size in memory."""
    fields = encode(make_full_report(), compressed=False).count(b'":')
    dump(make_full_report(), _PATH)
    monkeypatch.setattr(file, "_MOST_FIELDS", fields)
    assert load(_PATH) == make_full_report()
    monkeypatch.setattr(file, "_MOST_FIELDS", fields - 1)
    with pytest.raises(
        ValueError, match=rf"^report report.json: has {fields:,} fields: at most {fields - 1:,} are read$"
    ):
        load(_PATH)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "the JSON is nested too deeply"),
        (b"[" + b"[]," * 2_500_001, "the JSON has more than 5,000,000 values"),
        (b"{", "not JSON (Expecting property name enclosed in double quotes, column 2)"),
        (b"{\n\n,", "not JSON (Expecting property name enclosed in double quotes, line 3, column 1)"),
        (b'"\xe9"', "byte 2 is not UTF-8: save the file as UTF-8"),
    ],
)
def test_json_that_cannot_be_read_is_one_line(data: bytes, message: str) -> None:
    """The message has the place."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        file.parse_json(data)


@pytest.mark.parametrize("name", ["report.json", "report.json.gz", "new/folder/report.json"])
def test_a_path_that_can_be_written_leaves_no_trace_of_the_check(name: str) -> None:
    """A run that ends early leaves neither an empty report nor a folder, and an existing report as it was."""
    check_writable(Path(name))
    assert list(Path().iterdir()) == []
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("a report")
    check_writable(Path(name))
    assert Path(name).read_text() == "a report"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_inference.py", r"the name must end in \.json or \.json\.gz"),
        ("folder.json", "is a directory"),
        ("file.txt/report.json", "cannot be written: Not a directory"),
        ("pipe.json", "is not a regular file"),
        ("x" * 300 + ".json", "cannot be written: File name too long"),
        ("loop.json/report.json", "cannot be written"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_run(name: str, reason: str) -> None:
    """A typing error costs neither hours of measuring nor a test file."""
    Path("folder.json").mkdir()
    Path("file.txt").touch()
    os.mkfifo("pipe.json")
    Path("loop.json").symlink_to("loop.json")
    before = sorted(Path().iterdir())
    with pytest.raises(ValueError, match=rf"^report {name[:20]}.*: {reason}"):
        check_writable(Path(name))
    assert sorted(Path().iterdir()) == before


def test_missing_rights_are_found_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only mount shows only when a file is created; of an existing report its own permissions count."""

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"^report out/report\.json: cannot be written: Read-only file system$"):
        check_writable(Path("out/report.json"))
    dump(make_report(), _PATH)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="exists and is read-only"):
        check_writable(_PATH)
