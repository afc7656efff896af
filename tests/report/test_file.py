from __future__ import annotations

import gc
import gzip
import json
import math
import os
import random
import stat
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.report_factory import (
    make_accuracy,
    make_case,
    make_failed,
    make_memory,
    make_profile,
    make_report,
    make_result,
    paper_results,
)

from pytest_llmgpu.report import decompression
from pytest_llmgpu.report.file import check_writable, dump, encode, load, parse
from pytest_llmgpu.report.machine import Commit
from pytest_llmgpu.report.report import Report, Session, next_id
from pytest_llmgpu.report.result import Collective, Comparison, Failure, Metric, Series, Traffic
from pytest_llmgpu.report.schema import schema


def _full_report() -> Report:
    """Return a report in which every part of the object occurs."""
    series = Series(t_s=[0.0, 0.5, 1.0], devices=[{"power_w": [300.0, None, 310.5]}] * 2)
    report = make_report(
        [
            make_result(3.0, make_accuracy(items=5), make_profile(2, series=series), make_memory(2), sequences=4),
            make_failed("oom", Failure(phase="load", message="too large"), batch_size=2),
            make_failed("skipped_after_oom", batch_size=4),
        ]
    )
    report.cases[0].comparison = Comparison(
        reference="mp-bs1#2",
        items=5,
        flipped=[1, 3],
        lost=2,
        won=0,
        mcnemar_p=0.5,
        largest_difference=1e-3,
        typical_difference=1e-4,
    )
    report.options = {"--llmgpu-batch-sizes": [1, 2, 4], "--llmgpu-limit": None, "--llmgpu-timeout": 600.0}
    report.session = Session(complete=True, exit_status=0, collected=3, deselected=["a.py::test[mp-bs8]"])
    report.commit = Commit(sha="a" * 40, branch="main", dirty=False, source="git")
    return report


def _document(report: Report) -> dict[str, Any]:
    path = Path("report.json")
    dump(report, path)
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["report.json", "report.json.gz", "new/folder/report.json"])
def test_what_is_written_is_what_is_read(name: str) -> None:
    """Nothing is lost, compressed or not, in a folder that is there or not."""
    report = _full_report()
    dump(report, Path(name))
    assert load(Path(name)) == report


def test_only_the_gz_name_is_compressed() -> None:
    """The name says what is inside."""
    for name in ("report.json", "report.json.gz"):
        dump(_full_report(), Path(name))
    assert gzip.decompress(Path("report.json.gz").read_bytes()) == Path("report.json").read_bytes()


def test_a_report_is_read_by_its_content_and_not_by_its_name() -> None:
    """An artifact that was unpacked or renamed on its way still loads."""
    dump(_full_report(), Path("report.json.gz"))
    Path("report.json.gz").rename("downloaded.json")
    assert load(Path("downloaded.json")) == _full_report()


def test_equal_reports_are_equal_files() -> None:
    """No clock gets into a compressed report, so that it can be compared by hash."""
    for name in ("a.json.gz", "b.json.gz"):
        dump(_full_report(), Path(name))
    written = Path("a.json.gz").read_bytes()
    assert written == Path("b.json.gz").read_bytes()
    assert written[4:8] == bytes(4)  # gzip's time stamp


def test_columns_stay_on_one_line_and_records_do_not() -> None:
    """People can read and compare a report, and a thousand latencies do not fill a thousand lines of it."""
    dump(_full_report(), Path("report.json"))
    lines = Path("report.json").read_text(encoding="utf-8").splitlines()
    assert '            "latency_s": [0.75,0.75,0.75,0.75],' in lines
    assert '  "schema_version": 1,' in lines


@pytest.mark.parametrize("make", [_full_report, make_report])
def test_a_report_fits_its_schema(make: Callable[[], Report]) -> None:
    """Other people's tools can rely on `llmgpu schema`."""
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    validator.validate(_document(make()))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("schema_version",), "1"),
        (("schema_version",), 2),
        (("cases", 0, "outcome"), "fine"),
        (("cases", 0, "launches", 0, "batches"), []),
    ],
)
def test_the_schema_refuses_what_is_wrong(place: tuple[Any, ...], value: object) -> None:
    """The schema says something: a wrong type or a word that does not exist breaks it."""
    document: Any = _document(_full_report())
    part = document
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema())


@pytest.mark.parametrize(
    "place",
    [("cases",), ("verdicts",), ("cases", 0, "failure"), ("cases", 0, "case", "limit"), ("environment", "why")],
)
def test_the_schema_wants_every_field(place: tuple[Any, ...]) -> None:
    """What could not be had is null, never absent: other people's tools need not ask whether a field is there."""
    document: Any = _document(_full_report())
    part = document
    for step in place[:-1]:
        part = part[step]
    del part[place[-1]]
    with pytest.raises(jsonschema.ValidationError, match=f"'{place[-1]}' is a required property"):
        jsonschema.validate(document, schema())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_no_number_is_refused_with_its_place(value: float) -> None:
    """NaN never becomes a null that reads as `could not be had`; the report before stays."""
    report = _full_report()
    dump(report, Path("report.json"))
    profile = report.cases[0].launches[0].profile
    assert profile is not None
    profile.devices[1].metrics["power_w"] = Metric(mean=value, max=None, method="x", coverage=None)
    with pytest.raises(
        ValueError, match=r"\$\.cases\[0\]\.launches\[0\]\.profile\.devices\[1\]\.metrics\.power_w\.mean"
    ):
        dump(report, Path("report.json"))
    assert load(Path("report.json")) == _full_report()


def test_a_column_with_nan_is_refused_with_the_row() -> None:
    """The message of our bug leads to the very figure."""
    report = _full_report()
    report.cases[0].launches[0].batches.latency_s[2] = math.nan
    with pytest.raises(ValueError, match=r"latency_s\[2\] is nan"):
        dump(report, Path("report.json"))


def test_a_write_that_fails_leaves_the_old_report_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs the new report, not the one before."""
    dump(_full_report(), Path("report.json"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        dump(make_report(), Path("report.json"))
    assert load(Path("report.json")) == _full_report()
    assert [path.name for path in Path().iterdir()] == ["report.json"]


def test_a_symbolic_link_stays_a_link() -> None:
    """A report that a link leads to is written where the link leads."""
    Path("real").mkdir()
    Path("report.json").symlink_to("real/report.json")
    dump(_full_report(), Path("report.json"))
    assert Path("report.json").is_symlink()
    assert load(Path("real/report.json")) == _full_report()


def test_a_report_has_the_rights_of_any_new_file() -> None:
    """Who may read a file that this user makes may read the report: a later step under another user, say."""
    Path("other").touch()
    dump(make_report(), Path("report.json"))
    assert stat.S_IMODE(Path("report.json").stat().st_mode) == stat.S_IMODE(Path("other").stat().st_mode)


def test_fields_of_a_later_version_are_ignored() -> None:
    """An old reader still reads what it knows."""
    document = _document(_full_report())
    document["carbon_kg"] = 1.0
    document["cases"][0]["launches"][0]["sparkle"] = {"a": []}
    Path("report.json").write_text(json.dumps(document), encoding="utf-8")
    assert load(Path("report.json")) == _full_report()


def test_a_reader_in_the_middle_of_a_write_keeps_the_old_report() -> None:
    """A new report is a new file in the old one's place: who has the old one open reads it to its end."""
    dump(_full_report(), Path("report.json"))
    with Path("report.json").open(encoding="utf-8") as old:
        dump(make_report(), Path("report.json"))
        assert len(json.load(old)["cases"]) == 3


def _written(document: object) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is no JSON"),
        (b'{"schema_version": 1, "cases": [', "is no JSON"),
        (b'{"schema_version": 1, "cases": [NaN]}', "is no JSON.*byte"),
        (b"\xff\xfe{}", "is no JSON"),
        (b"[" * 100_000, "is no JSON|is no report"),
        (b"[1, 2]", "is no report of pytest-llmgpu: Expected `object`"),
        (
            _written({"machine_info": {}, "benchmarks": [], "version": "5.3.1"}),
            "is no report of pytest-llmgpu.*schema_version",
        ),
        (_written({"schema_version": "1.0", "cases": []}), r"is no report of pytest-llmgpu.*\$\.schema_version"),
        (_written({"schema_version": 2, "cases": []}), "schema_version 2 is newer than 1.*upgrade"),
        (_written({"schema_version": 0, "cases": []}), "schema_version 0 does not exist; allowed are 1 to 1"),
        (_written({"schema_version": 1, "cases": []}), "breaks schema_version 1.*created"),
        (_written({"schema_version": 1, "cases": [], "x": math.nan}), r"is no JSON.*byte"),
        (_written({"schema_version": 1, "cases": [], "x": -math.inf}), r"is no JSON.*byte"),
        (b'{"schema_version": 1, "cases": [1e999]}', r"breaks schema_version 1: Number out of range - at `\$\.cases"),
        (b'{"schema_version": ' + b"1" * 5000 + b', "cases": []}', r"is no report.*out of range - at `\$\.schema_v"),
        (b'{"schema_version": 1, "cases": ' + b"[" * 2_000_000, "is no JSON: maximum recursion depth"),
        (b'{"schema_version": 1, "cases": [], "x": ' + b'{"a":' * 400_000, "is no JSON: maximum recursion depth"),
        (gzip.compress(b"{}", mtime=0)[:-4], "cannot be decompressed: the file ends before its gzip stream does"),
        (gzip.compress(b"{}" * 1000, mtime=0)[:15], "cannot be decompressed: the file ends before"),
        (gzip.compress(b"{}", mtime=0) + b"more", "cannot be decompressed: Error -3"),
        (b"\x1f\x8bgarbage", "cannot be decompressed: Error -3"),
        (b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 20, "cannot be decompressed: Error -3"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(data: bytes, reason: str) -> None:
    """The message names the file and what is wrong with it."""
    Path("broken.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"^report broken\.json: ({reason})") as caught:
        load(Path("broken.json"))
    assert "\n" not in str(caught.value)


def test_a_broken_field_is_named_with_its_place() -> None:
    """A report that somebody edited says where it broke."""
    document = _document(_full_report())
    document["cases"][1]["case"]["batch_size"] = "two"
    Path("report.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$\.cases\[1\]\.case\.batch_size`"):
        load(Path("report.json"))


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_made_to_fill_the_memory_is_refused(compressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes that decompress to gigabytes end with a line; up to the limit a report loads."""
    data = encode(_full_report(), compressed=False)
    monkeypatch.setattr(decompression, "LIMIT_BYTES", len(data))
    Path("report.json").write_bytes(gzip.compress(data) if compressed else data)
    assert load(Path("report.json")) == _full_report()
    Path("bomb.json").write_bytes(gzip.compress(data + b" ") if compressed else data + b" ")
    what = "holds more than [0-9,]+ bytes decompressed" if compressed else "is larger than [0-9,]+ bytes"
    with pytest.raises(ValueError, match=rf"^report bomb\.json: {what}, the most that is read$"):
        load(Path("bomb.json"))


def test_a_bomb_is_refused_before_it_is_unpacked_whole() -> None:
    """Of a gigabyte of zeros no more than the limit is ever held."""
    zeros = zlib.compressobj(9, wbits=31)
    bomb = b"".join(zeros.compress(bytes(2**20)) for _ in range(64)) + zeros.flush()
    tracemalloc.start()
    with pytest.raises(ValueError, match="holds more than 1,000,000 bytes"):
        decompression.unpack(bomb, limit_bytes=1_000_000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4_000_000


def test_parts_that_were_compressed_one_after_the_other_are_one_file() -> None:
    """What `cat a.gz b.gz` makes is a gzip file, padded or not."""
    data = encode(_full_report(), compressed=False)
    parts = gzip.compress(data[:1000]) + gzip.compress(data[1000:]) + bytes(512)
    assert parse(parts, "report.json.gz") == _full_report()


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("cases.0.launches.0.batches.latency_s.2", -0.5, "at least 0, got -0.5"),
        ("cases.0.launches.0.batches.tokens.0", -1, "at least 0, got -1"),
        ("cases.0.launches.0.batches.sequences", [1, 1, 1], "4 values, got 3"),
        ("cases.0.launches.0.wall_s", -1e-9, "at least 0, got -1e-09"),
        ("cases.0.launches.0.memory.1.peak_allocated_bytes", -1, "at least 0, got -1"),
        ("cases.0.launches.0.profile.duration_s", -60.0, "at least 0, got -60.0"),
        ("cases.0.launches.0.profile.lateness_p99_s", 1e308, "less than 1e\\+12, got 1e\\+308"),
        ("cases.0.launches.0.profile.sampler_cpu_s", -1.0, "at least 0, got -1.0"),
        ("cases.0.launches.0.profile.devices.1.throttled_s", -1e308, "at least 0, got -1e\\+308"),
        ("cases.0.launches.0.profile.devices.1.energy_j", -0.5, "at least 0, got -0.5"),
        ("cases.0.launches.0.profile.devices.0.counters.xids", -1.0, "at least 0, got -1.0"),
        ("cases.0.launches.0.profile.devices.0.metrics.utilization_pct.mean", -1e308, "at least 0, got -1e\\+308"),
        ("cases.0.launches.0.profile.devices.0.metrics.utilization_pct.mean", 1e308, "got 1e\\+308"),
        ("cases.0.launches.0.profile.devices.1.metrics.utilization_pct.max", 1e308, "got 1e\\+308"),
        ("cases.0.launches.0.profile.devices.1.metrics.utilization_pct.coverage", 1.5, "from 0 to 1, got 1.5"),
        ("cases.0.launches.0.profile.series.devices.1.power_w", [300.0], "3 values, got 1"),
        ("cases.0.launches.0.profile.series.devices", [], "2 values, got 0"),
        ("cases.0.launches.0.profile.series.t_s.2", -1e308, "at least -1e\\+12, got -1e\\+308"),
        ("cases.0.launches.0.accuracy.predictions.3", -7, "at least 0, got -7"),
        ("cases.0.launches.0.accuracy.predictions_norm.0", 10**400, "got one of 1329 bits"),
        ("cases.0.launches.0.accuracy.acc_norm", 82.8, "a fraction from 0 to 1, got 82.8"),
        ("cases.0.launches.0.accuracy.predictions", [0], "5 values, got 1"),
        ("cases.0.launches.0.accuracy.labels", [0] * 6, "5 values, got 6"),
        ("cases.0.launches.0.accuracy.loglikelihoods", "AAA", "base64, got another text"),
        ("cases.0.launches.0.accuracy.loglikelihoods", "\xe4AAA", "base64, got another text"),
        ("cases.0.launches.0.accuracy.loglikelihoods", "AAA=", "numbers of 4 bytes, got 2 bytes"),
        ("cases.0.traffic.ranks.1.0.wire_bytes", -8, "at least 0, got -8"),
        ("cases.0.traffic.wire_bytes_per_sequence", -8, "at least 0, got -8"),
        ("cases.0.inference_s", -3.0, "at least 0, got -3.0"),
        ("cases.0.launches.0.batches.latency_s.2", 1e308, "less than 1e\\+12, got 1e\\+308"),
        ("cases.0.launches.0.batches.tokens.0", 10**400, r"less than 9\.22337e\+18, got one of 1329 bits"),
        ("cases.0.traffic.ranks.1.0.wire_bytes", 10**400, r"less than 9\.22337e\+18, got one of 1329 bits"),
        ("cases.1.case.batch_size", 2**63, "got one of 64 bits"),
        ("cases.1.case.batch_size", 0, "at least 1, got 0"),
        ("cases.2.id", "mp-bs1", r"an id of its own, got 'mp-bs1', which \$\.cases\[0\] has"),
    ],
)
def test_a_figure_that_cannot_be_is_named_with_its_place(place: str, value: object, reason: str) -> None:
    """Nothing is judged by a negative time, a column that lost a row, or two cases of one id."""
    report = _full_report()
    sent = Collective(collective="all_reduce", calls=1, payload_bytes=8, wire_bytes=8)
    report.cases[0].traffic = Traffic(ranks=[[], [sent]], wire_bytes_per_sequence=8.0)
    document: Any = _document(report)
    assert parse(_written(document), "report.json") == report
    part = document
    *steps, last = [int(step) if step.isdecimal() else step for step in place.split(".")]
    for step in steps:
        part = part[step]
    part[last] = value
    written = "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in place.split("."))
    with pytest.raises(ValueError, match=reason) as caught:
        parse(_written(document), "report.json")
    assert str(caught.value).startswith("report report.json: breaks schema_version 1: Expected ")
    assert str(caught.value).endswith(f" - at `${written}`")


def test_figures_that_look_odd_and_can_be_are_read() -> None:
    """Power and heat throttle at once; the nearest reading is from before the window; an item has many endings."""
    document: Any = _document(_full_report())
    launch = document["cases"][0]["launches"][0]
    launch["profile"]["devices"][0]["throttled_s"] = 1.5 * launch["profile"]["duration_s"]
    launch["profile"]["series"]["t_s"][0] = -0.045
    launch["accuracy"]["predictions"][0] = 300
    assert parse(_written(document), "report.json").cases[0].launches[0].accuracy.predictions[0] == 300  # type: ignore[union-attr]  # it has one


def test_whatever_breaks_in_a_file_is_one_line() -> None:
    """No damage to a file, in its text or compressed, gets past as anything but a line that names the file."""
    chance = random.Random(5)
    whole = encode(_full_report(), compressed=False)
    refused = 0
    for number in range(600):
        data = bytearray(gzip.compress(whole) if number % 3 == 0 else whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            parse(bytes(data[: chance.randrange(len(data))] if number % 5 == 0 else data), "damaged.json")
        except ValueError as error:
            assert str(error).startswith("report damaged.json: ")  # noqa: PT017 - not every damage breaks a file
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert refused > 300


def test_reading_leaves_the_garbage_collector_as_it_was() -> None:
    """A broken report does not leave the caller without it."""
    for enabled in (False, True):
        (gc.enable if enabled else gc.disable)()
        try:
            with pytest.raises(ValueError, match="is no JSON"):
                parse(b"", "report.json")
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def test_every_field_with_a_docstring_has_it_in_the_schema() -> None:
    """Who reads `llmgpu schema` finds the unit and the meaning of a figure there."""
    defined = schema()["$defs"]
    batches = defined["Batches"]["properties"]["latency_s"]
    assert batches["description"].startswith("Host clock from before a batch leaves the host")
    assert defined["Gpu"]["properties"]["index"]["description"] == ("NVML's index: by PCI bus. CUDA's may differ.")
    assert "description" not in defined["Gpu"]["properties"]["name"]
    assert "\n" not in defined["Case"]["properties"]["execution"]["description"]


def test_without_sources_the_schema_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation of bytecode only loses the texts and nothing else."""

    def missing(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", missing)
    jsonschema.validate(_document(_full_report()), schema())


@pytest.mark.parametrize(("name", "reason"), [("missing.json", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_says_why(name: str, reason: str) -> None:
    """The operating system's words, once."""
    with pytest.raises(ValueError, match=rf"cannot be read: {reason}"):
        load(Path(name))


def test_a_second_measurement_gets_a_number() -> None:
    """No result hides another one of the same name."""
    report = make_report()
    names = []
    for _ in range(3):
        result = make_result(batch_size=8)
        result.id = next_id(report, result.case)
        report.cases.append(result)
        names.append(result.id)
    assert names == ["mp-bs8", "mp-bs8#2", "mp-bs8#3"]
    assert next_id(report, make_case(batch_size=16)) == "mp-bs16"


@pytest.mark.parametrize("name", ["report.json", "report.json.gz", "new/folder/report.json"])
def test_a_path_that_can_be_written_leaves_no_trace_of_the_check(name: str) -> None:
    """A run that never gets to write leaves neither an empty report nor a folder."""
    check_writable(Path(name))
    assert list(Path().iterdir()) == []


def test_a_report_that_is_there_may_be_replaced() -> None:
    """A second run into the same file passes the check and does not touch the file."""
    dump(_full_report(), Path("report.json"))
    check_writable(Path("report.json"))
    assert load(Path("report.json")) == _full_report()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_inference.py", r"the name must end in \.json or \.json\.gz"),
        ("folder.json", "is a directory"),
        ("file.txt/report.json", "cannot be written: Not a directory"),
        ("pipe.json", "is no regular file"),
        ("x" * 300 + ".json", "cannot be written: File name too long"),
        ("loop.json", "cannot be written"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_run(name: str, reason: str) -> None:
    """Hours of measuring are not lost to a typing mistake, and a test file is not overwritten by one."""
    Path("folder.json").mkdir()
    Path("file.txt").touch()
    os.mkfifo("pipe.json")
    Path("loop.json").symlink_to("loop.json")
    before = sorted(Path().iterdir())
    with pytest.raises(ValueError, match=rf"^report {name[:20]}.*: {reason}"):
        check_writable(Path(name))
    assert sorted(Path().iterdir()) == before


def test_a_folder_that_takes_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only trying shows a read-only mount, a quota, or what root may do."""

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"^report out/report\.json: cannot be written: Read-only file system$"):
        check_writable(Path("out/report.json"))


def test_a_report_that_is_read_only_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever protects a file means it, although a folder's rights would allow to replace it."""
    dump(make_report(), Path("report.json"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="is there already and is read-only"):
        check_writable(Path("report.json"))


def test_a_large_report_loads_as_it_was() -> None:
    """The study's whole table goes through the file."""
    report = make_report(paper_results())
    dump(report, Path("report.json.gz"))
    assert load(Path("report.json.gz")) == report
