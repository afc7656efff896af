from __future__ import annotations

import errno
import gzip
import json
import math
import os
import random
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.report_factory import (
    make_case,
    make_document,
    make_failed,
    make_full_report,
    make_report,
    make_result,
)

from pytest_llmgpu.report import file
from pytest_llmgpu.report.file import check_writable, dump, encodable, encode, load, parse
from pytest_llmgpu.report.report import SCHEMA_VERSION, next_id
from pytest_llmgpu.report.result import Failure, Metric

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize("name", ["report.json", "report.json.gz", "new/folder/report.json"])
def test_what_is_written_is_what_is_read(name: str) -> None:
    """Nothing is lost, with or without compression, in an existing folder or a new one."""
    report = make_full_report()
    dump(report, Path(name))
    assert load(Path(name)) == report


def test_only_the_gz_name_is_compressed() -> None:
    """The suffix decides if a report is compressed."""
    for name in ("report.json", "report.json.gz"):
        dump(make_full_report(), Path(name))
    assert gzip.decompress(Path("report.json.gz").read_bytes()) == Path("report.json").read_bytes()


def test_a_report_is_read_by_its_content_and_not_by_its_name() -> None:
    """An artifact that was unpacked or renamed still loads."""
    dump(make_full_report(), Path("report.json.gz"))
    Path("report.json.gz").rename("downloaded.json")
    assert load(Path("downloaded.json")) == make_full_report()


def test_each_row_of_work_passes_is_one_line() -> None:
    """Those of prefills as well: with a line for each field they would be most of a report."""
    lines = [line for line in encode(make_full_report(), compressed=False).decode().splitlines() if '"kernel":' in line]
    assert len(lines) == 16, "two passes of two ranks with four rows"
    assert all(line.strip().startswith('{"module":') for line in lines)


def test_equal_reports_are_equal_files() -> None:
    """A compressed report has no time stamp, so that it can be compared by hash."""
    for name in ("a.json.gz", "b.json.gz"):
        dump(make_full_report(), Path(name))
    written = Path("a.json.gz").read_bytes()
    assert written == Path("b.json.gz").read_bytes()
    assert written[4:8] == bytes(4)  # gzip's time stamp


def test_a_case_that_stays_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is written after each case; the time of a write does not grow with all figures of all cases."""
    encoded: list[str] = []
    text = file._text

    def count(value: Any, place: str, indent: str) -> str:
        encoded.append(place)
        return text(value, place, indent)

    monkeypatch.setattr(file, "_text", count)
    texts = file.CaseTexts()
    report = make_report([make_result(batch_size=size) for size in (1, 2)])
    path = Path("report.json")
    dump(report, path, texts)
    assert path.read_bytes() == encode(report, compressed=False)
    encoded.clear()
    report.cases[1] = make_result(batch_size=3)
    report.cases.append(make_result(batch_size=4))
    dump(report, path, texts)
    assert [place for place in encoded if re.fullmatch(r"\$\.cases\[\d+\]", place)] == ["$.cases[1]", "$.cases[2]"]
    assert load(path) == report


def test_texts_of_earlier_launches_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file takes at most about as much space again as the texts of the latest results."""
    kept = Path("kept")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **named: kept.open("w+b", **named))
    texts, report = file.CaseTexts(), make_report([make_result(batch_size=size) for size in (1, 2, 4)])
    dump(report, Path("report.json"), texts)
    whole_bytes = kept.stat().st_size
    assert whole_bytes > 0
    for launch in range(12):
        report.cases[launch % 3] = make_result(batch_size=2 ** (launch % 3))
        dump(report, Path("report.json"), texts)
        assert load(Path("report.json")) == report
        assert kept.stat().st_size <= 2.5 * whole_bytes


def test_a_full_temporary_disk_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that cannot be kept is encoded again at the next writing."""
    written: list[int] = []

    def write_a_part(_descriptor: int, text: bytes, _start: int) -> int:
        written.append(len(text) // 2)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written[0]

    monkeypatch.setattr(os, "pwrite", write_a_part)
    texts, report = file.CaseTexts(), make_report([make_result(batch_size=size) for size in (1, 2)])
    for _ in range(2):
        dump(report, Path("report.json"), texts)
        assert load(Path("report.json")) == report
    assert len(written) == 4


def test_columns_stay_on_one_line_and_records_do_not() -> None:
    """A report can be read and compared by line; a thousand latencies do not take a thousand lines."""
    dump(make_full_report(), Path("report.json"))
    lines = Path("report.json").read_text(encoding="utf-8").splitlines()
    assert '            "latency_s": [0.75,0.75,0.75,0.75],' in lines
    assert f'  "schema_version": {SCHEMA_VERSION},' in lines
    row = '{"module": "layers.*.mlp.down_proj", "kernel": 0, "family": "GEMM", "calls": 100, "time_s": 0.1},'
    assert row in [line.strip() for line in lines]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_is_refused_with_its_place(value: float) -> None:
    """NaN never becomes null, which means `not measured`; the old report stays."""
    report = make_full_report()
    dump(report, Path("report.json"))
    profile = report.cases[0].launches[0].profile
    assert profile is not None
    profile.devices[1].metrics["power_w"] = Metric(mean=value, max=None, method="x", coverage=None)
    with pytest.raises(
        ValueError, match=r"\$\.cases\[0\]\.launches\[0\]\.profile\.devices\[1\]\.metrics\.power_w\.mean"
    ):
        dump(report, Path("report.json"))
    assert load(Path("report.json")) == make_full_report()


def test_a_column_with_nan_is_refused_with_the_row() -> None:
    """The message names the row of the column."""
    report = make_full_report()
    report.cases[0].launches[0].batches.latency_s[2] = math.nan
    with pytest.raises(ValueError, match=r"latency_s\[2\] is nan"):
        dump(report, Path("report.json"))


def test_a_write_that_fails_leaves_the_old_report_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the old report is kept."""
    dump(make_full_report(), Path("report.json"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        dump(make_report(), Path("report.json"))
    assert load(Path("report.json")) == make_full_report()
    assert [path.name for path in Path().iterdir()] == ["report.json"]


def test_a_symbolic_link_stays_a_link() -> None:
    """The target of the link is written."""
    Path("real").mkdir()
    Path("report.json").symlink_to("real/report.json")
    dump(make_full_report(), Path("report.json"))
    assert Path("report.json").is_symlink()
    assert load(Path("real/report.json")) == make_full_report()


def test_a_report_has_the_permissions_of_any_new_file() -> None:
    """A later step under another user can read the report."""
    Path("other").touch()
    dump(make_report(), Path("report.json"))
    assert stat.S_IMODE(Path("report.json").stat().st_mode) == stat.S_IMODE(Path("other").stat().st_mode)


def test_text_that_is_not_utf8_loses_no_report() -> None:
    """A path of other bytes, a variable or the text of an exception may have any letter; a report keeps its code."""
    result = make_failed("error", Failure(phase="load", message="bad \udcff", log_tail="\ud800"))
    report = make_report([result])
    report.argv.append(os.fsdecode(b"caf\xe9/"))
    report.environment.variables["NCCL_DEBUG_FILE"] = os.fsdecode(b"/tmp/\xe9")
    dump(report, Path("report.json"))
    read = load(Path("report.json"))
    assert read.argv[-1] == "caf\\udce9/"
    assert read.environment.variables["NCCL_DEBUG_FILE"] == "/tmp/\\udce9"
    assert read.cases[0].failure is not None
    assert (read.cases[0].failure.message, read.cases[0].failure.log_tail) == ("bad \\udcff", "\\ud800")


def test_a_record_with_valid_text_only_is_the_same_record() -> None:
    """A record is copied only if a text of it has to change."""
    result = make_result()
    assert encodable(result) is result
    renamed = encodable(make_result(model="caf\udce9"))
    assert renamed.case.model == "caf\\udce9"


def test_a_link_with_the_name_of_a_temporary_file_is_not_followed() -> None:
    """Another user of the folder cannot choose a file that is overwritten."""
    Path("victim").write_text("mine")
    Path(f".llmgpu-{os.getpid()}.tmp").symlink_to("victim")
    dump(make_full_report(), Path("report.json"))
    assert Path("victim").read_text() == "mine"


def test_processes_of_equal_number_write_side_by_side() -> None:
    """Containers that share a volume have equal process ids."""
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from pytest_llmgpu.report import file\n"
        "os.getpid = lambda: 7\n"
        "report, name = file.load(Path('given.json')), sys.argv[1]\n"
        "report.argv.append(name)\n"
        "for _ in range(100):\n"
        "    file.dump(report, Path(name))\n"
        "    assert file.load(Path(name)).argv[-1] == name\n"
    )
    dump(make_report([make_result()]), Path("given.json"))
    names = [f"{number}.json" for number in range(4)]
    writers = [subprocess.Popen([sys.executable, "-c", script, name]) for name in names]
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    assert sorted(path.name for path in Path().iterdir()) == [*names, "given.json"]


def test_fields_of_a_later_version_are_ignored() -> None:
    """An old reader reads the fields that it knows."""
    document = make_document(make_full_report())
    document["carbon_kg"] = 1.0
    document["cases"][0]["launches"][0]["sparkle"] = {"a": []}
    Path("report.json").write_text(json.dumps(document), encoding="utf-8")
    assert load(Path("report.json")) == make_full_report()


def test_a_reader_in_the_middle_of_a_write_keeps_the_old_report() -> None:
    """A new report is a new file: a process that has the old one open reads it to its end."""
    dump(make_full_report(), Path("report.json"))
    with Path("report.json").open(encoding="utf-8") as old:
        dump(make_report(), Path("report.json"))
        assert len(json.load(old)["cases"]) == 3


def _written(document: object) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is not valid JSON"),
        (b'{"schema_version": 1, "cases": [', "is not valid JSON"),
        (b'{"schema_version": 1, "cases": [NaN]}', "is not valid JSON.*byte"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON|is not a report"),
        (b"[1, 2]", "is not a report of pytest-llmgpu: Expected `object`"),
        (
            _written({"machine_info": {}, "benchmarks": [], "version": "5.3.1"}),
            "is not a report of pytest-llmgpu.*schema_version",
        ),
        (_written({"schema_version": "1.0", "cases": []}), r"is not a report of pytest-llmgpu.*\$\.schema_version"),
        (_written({"schema_version": 3, "cases": []}), "schema_version 3 is newer than 2.*upgrade"),
        (_written({"schema_version": 0, "cases": []}), "schema_version 0 does not exist; allowed are 1 to 2"),
        (_written({"schema_version": 1, "cases": []}), "breaks schema_version 1.*created"),
        (_written({"schema_version": 1, "cases": [], "x": math.nan}), r"is not valid JSON.*byte"),
        (_written({"schema_version": 1, "cases": [], "x": -math.inf}), r"is not valid JSON.*byte"),
        (b'{"schema_version": 1, "cases": [1e999]}', r"breaks schema_version 1: Number out of range - at `\$\.cases"),
        (b'{"schema_version": ' + b"1" * 5000 + b', "cases": []}', r"is not a report.*out of range - at `\$\.schema_v"),
        (b'{"schema_version": 1, "cases": ' + b"[" * 2_000_000, "is not valid JSON: maximum recursion depth"),
        (
            b'{"schema_version": 1, "cases": [], "x": ' + b'{"a":' * 400_000,
            "is not valid JSON: maximum recursion depth",
        ),
        (gzip.compress(b"{}", mtime=0)[:-4], "cannot be decompressed"),
    ],
)
def test_a_file_that_is_not_a_report_is_refused_in_one_line(data: bytes, reason: str) -> None:
    """The message names the file and the error."""
    Path("broken.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"^report broken\.json: ({reason})") as caught:
        load(Path("broken.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_above_the_size_limit_is_refused(compressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report up to the limit loads; one byte more is refused with the name of the file."""
    data = encode(make_full_report(), compressed=False)
    monkeypatch.setattr(file, "LIMIT_BYTES", len(data))
    for name, content in (("report.json", data), ("large.json", data + b" ")):
        Path(name).write_bytes(gzip.compress(content) if compressed else content)
    assert load(Path("report.json")) == make_full_report()
    with pytest.raises(ValueError, match=rf"^report large\.json: .* more than|larger than {len(data):,} bytes"):
        load(Path("large.json"))


def test_every_damage_to_a_file_is_reported_in_one_line() -> None:
    """A damaged file either loads or gives an error with its name, compressed or not."""
    chance = random.Random(5)
    whole = encode(make_full_report(), compressed=False)
    refused = 0
    for number in range(600):
        data = bytearray(gzip.compress(whole) if number % 3 == 0 else whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            parse(bytes(data[: chance.randrange(len(data))] if number % 5 == 0 else data), "damaged.json")
        except ValueError as error:
            assert str(error).startswith("report damaged.json: ")  # noqa: PT017 - some damages break nothing
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(("name", "reason"), [("missing.json", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(name: str, reason: str) -> None:
    """The message has the reason of the operating system."""
    with pytest.raises(ValueError, match=rf"cannot be read: {reason}"):
        load(Path(name))


def test_a_second_measurement_gets_a_number() -> None:
    """Ids of results are unique."""
    names: list[str] = []
    for _ in range(3):
        names.append(next_id(names, make_case(batch_size=8)))
    assert names == ["mp-bs8", "mp-bs8#2", "mp-bs8#3"]
    assert next_id(names, make_case(batch_size=16)) == "mp-bs16"


@pytest.mark.parametrize("name", ["report.json", "report.json.gz", "new/folder/report.json"])
def test_a_path_that_can_be_written_leaves_no_trace_of_the_check(name: str) -> None:
    """A run that ends early leaves neither an empty report nor a folder."""
    check_writable(Path(name))
    assert list(Path().iterdir()) == []


def test_an_existing_report_may_be_replaced() -> None:
    """The check passes for an existing report and does not change it."""
    dump(make_full_report(), Path("report.json"))
    check_writable(Path("report.json"))
    assert load(Path("report.json")) == make_full_report()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_inference.py", r"the name must end in \.json or \.json\.gz"),
        ("folder.json", "is a directory"),
        ("file.txt/report.json", "cannot be written: Not a directory"),
        ("pipe.json", "is not a regular file"),
        ("x" * 300 + ".json", "cannot be written: File name too long"),
        ("loop.json", "cannot be written"),
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


def test_a_folder_without_write_access_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only mount shows only when a file is created."""

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"^report out/report\.json: cannot be written: Read-only file system$"):
        check_writable(Path("out/report.json"))


def test_a_report_that_is_read_only_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The permissions of the file count, although those of the folder would allow to replace it."""
    dump(make_report(), Path("report.json"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="exists and is read-only"):
        check_writable(Path("report.json"))
