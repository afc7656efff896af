"""Whatever a file from outside holds, reading it returns a value or one line: `tox -e fuzz`.

The files of the tests are the corpus. Each example changes a valid file: its bytes, or values of its JSON.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.report_factory import make_failed, make_full_report, make_generation, make_report, make_result, make_work
from support.tiny_model import write_dataset

pytest.importorskip("hypothesis", reason="tox -e fuzz installs it")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_llmgpu.cli import main
from pytest_llmgpu.gate.policy import Policy, dump_policy, load_policy
from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag, Prompts
from pytest_llmgpu.report import file
from pytest_llmgpu.report.privacy import anonymous, short_paths
from pytest_llmgpu.report.report import Commit, Report, Resumption
from pytest_llmgpu.report.result import Failure
from pytest_llmgpu.report.text import printable_lines
from pytest_llmgpu.session.recorder import continued
from pytest_llmgpu.store import store

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of libraries, about files that nobody would write
    pytest.mark.usefixtures("empty_folder"),
]

_EXAMPLES = os.environ.get("LLMGPU_FUZZ_EXAMPLES")
fuzz = settings(
    max_examples=int(_EXAMPLES or 200),
    derandomize=_EXAMPLES is None,  # a search has other examples each time
    deadline=60_000,  # milliseconds: no example may take long, on a loaded machine either
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)

_HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.0, -0.5, 1e-320, 1e308, 0.5),
    *("", "x", "x" * 5000, "\x1b]0;x\x07", "\n::error::x", "é€\u202e", "../../etc/passwd", "/", "mp-bs1", "-", "2026"),
    *([], {}, [[]], [None], [0], {"": None}, [1e308] * 3, "AAAA", "completed", "cuda"),
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return each container of a JSON value with each of its keys."""
    found: list[tuple[Any, Any]] = []
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found.append((value, key))
        found += _places(value[key])
    return found


@st.composite
def changed_json(draw: st.DrawFn, document: Any) -> Any:
    """Return a JSON value in which a few values are replaced, removed, doubled or exchanged."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 4))):
        places = _places(document)
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "replace", "remove", "copy", "double"])):
            case "remove":
                del container[key]
            case "copy":
                other, other_key = draw(st.sampled_from(places))
                with contextlib.suppress(LookupError):  # it was removed with its container
                    container[key] = copy.deepcopy(other[other_key])
            case "double" if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case _:
                alike = [value for value in _HOSTILE if type(value) is type(container[key])]
                values = draw(st.sampled_from([alike, alike, alike, _HOSTILE])) or _HOSTILE
                hostile = draw(st.sampled_from(values))
                container[key] = copy.deepcopy(hostile)  # the next change may be inside it
    return document


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Return bytes in which a few parts are replaced, removed, doubled or cut off."""
    hostile = [b"[" * 5000, b'"', b"\xff", b"\0", b"{", b"1e999", b"NaN", b"\n", b"]"]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 40)))
        new = draw(st.binary(max_size=8) | st.sampled_from([*hostile, data[start:end] * 3]))
        data = data[:start] + new + (b"" if draw(st.booleans()) and draw(st.booleans()) else data[end:])
    return data


def _encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


def _one_line(read: Callable[[], Any]) -> Any:
    """Return what a reader returns, None if it refuses; fail where it raises anything but one line."""
    refusal = "?"
    try:
        return read()
    except ValueError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) == 1
    return None


def _report() -> Report:
    failed = make_failed("error", Failure(phase="load", message="m", log_tail="log"), batch_size=64)
    worked = make_result(batch_size=16)
    worked.launches[0].work = make_work()
    generated = make_result(workload="generate", task="prompts", sequences=2, batch_size=2)
    texts, values = [[1, 2], [3, 4]], [[-1.0, -0.5], [-2.0, -0.1]]
    generated.launches[0].generation = make_generation(texts, values, values, reference="a" * 64)
    stopped = make_failed("interrupted", Failure(phase="forward", message="m"), batch_size=32)
    stopped.launches = [*make_result(batch_size=32).launches, *stopped.launches]
    report = make_report([*make_full_report().cases, worked, generated, failed, stopped])
    report.resumed = [Resumption(created=report.created, source="a.json", sha256="f" * 64, kept=2)]
    report.commit = Commit(sha="a" * 40, dirty=False)
    return report


_REPORT = json.loads(file.encode(_report(), compressed=False))


def _consume(data: bytes) -> None:
    """Read a report, and let every command use it that needs no other file."""
    report = _one_line(lambda: file.parse(data, "r.json"))
    if report is None:
        return
    Path("r.json").write_bytes(data)
    Path("base.json").write_bytes(_encoded(_REPORT))
    for command in (
        ["show", "r.json"],
        ["gate", "r.json", "base.json"],
        ["export", "github-summary", "r.json"],
        ["export", "csv", "r.json"],
    ):
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            status = main(command)
        assert status in (0, 1, 2, 3), command
        assert "Traceback" not in errors.getvalue()
        if command[0] != "export":
            assert printable_lines(printed.getvalue()) == printed.getvalue()
    assert file.load(Path("r.json")) == report
    now = msgspec.structs.replace(report, cases=[])
    resumed = _one_line(lambda: continued(report, now, name="r.json", sha256="f" * 64))
    if resumed is not None:
        file.parse(file.encode(resumed, compressed=False), "continued.json")


def test_the_report_that_is_changed_can_be_read() -> None:
    """Else every example would be refused for the same reason."""
    _consume(_encoded(_REPORT))
    assert Path("r.json").exists()


@pytest.mark.parametrize("changed", [changed_json(_REPORT).map(_encoded), changed_bytes(_encoded(_REPORT))])
@given(data=st.data())
@fuzz
def test_reports(data: st.DataObject, changed: st.SearchStrategy[bytes]) -> None:
    """A report that is read can be shown, judged and exported; it has other values, or is damaged."""
    _consume(data.draw(changed))


@given(changed_bytes(dump_policy(Policy()).encode()))
@fuzz
def test_policies(data: bytes) -> None:
    """A policy is read, or refused in one line."""
    Path("policy.toml").write_bytes(data)
    _one_line(lambda: load_policy(Path("policy.toml")))


@given(st.data())
@fuzz
def test_datasets(data: st.DataObject) -> None:
    """A dataset is read, or refused in one line."""
    write_dataset(Path("items.jsonl"))
    lines = Path("items.jsonl").read_bytes().splitlines()
    lines[0] = data.draw(st.sampled_from([lines[0], b'{"id": "a", "prompt": "Someone counts."}']))
    first = data.draw(changed_json(json.loads(lines[0])).map(_encoded) | changed_bytes(lines[0]))
    Path("items.jsonl").write_bytes(b"\n".join([first, *lines[1:]]))
    task = data.draw(st.sampled_from([HellaSwag(), Prompts()]))
    _one_line(lambda: task.load("items.jsonl", rootdir=Path.cwd()))


@given(st.data())
@fuzz
def test_model_folders(model: Path, data: st.DataObject) -> None:
    """A model is found, or refused in one line, before anything loads it."""
    shutil.rmtree("tiny", ignore_errors=True)
    shutil.copytree(model, "tiny")
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors"}}
    Path("tiny/model.safetensors.index.json").write_bytes(_encoded(index))
    path = data.draw(st.sampled_from(sorted(Path("tiny").iterdir())))
    content = path.read_bytes()
    json_of = changed_json(json.loads(content)).map(_encoded) if path.suffix == ".json" else st.nothing()
    path.write_bytes(data.draw(json_of | changed_bytes(content)))
    if _one_line(lambda: models.resolve("tiny", texts=[], rootdir=Path.cwd())) is not None:
        models.weight_files(Path("tiny"))


@given(st.text(max_size=40) | st.sampled_from(["git:HEAD:x", "latest", "0001", "a/b", "../x.json", "git:-x:y", "\0"]))
@fuzz
def test_references(name: str) -> None:
    """A name of a report is found, or refused in one line."""
    _one_line(lambda: store.resolve(name, Path(".llmgpu")))


@given(st.text(max_size=400) | st.from_regex(r"(/[a-z\"' ]{0,9}){0,40}", fullmatch=True))
@fuzz
def test_texts(text: str) -> None:
    """Any text is made public and printable."""
    printable_lines(anonymous(short_paths(text, Path("/repo"))))
