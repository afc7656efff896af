from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import tiny_model
from support.report_factory import make_case, make_failed, make_report, make_result

from pytest_llmgpu.inference import logits, models
from pytest_llmgpu.inference.tasks import hellaswag
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.rerun import find
from pytest_llmgpu.report import file
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import decode
from pytest_llmgpu.report.result import Failure
from pytest_llmgpu.strategies.mp import LayerParallel

ByHand = Callable[..., dict[str, Any]]
"""`by_hand("report.json", "mp-bs2", "--model", "m")`: what the command prints."""


class Slow(LayerParallel):
    """A strategy of somebody's own."""

    name = "slow"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Case]:
    """A folder with a model and a dataset, and a case that names both as a report of another rootdir does."""
    folder = tmp_path_factory.mktemp("elsewhere")
    tiny_model.write_model(folder / "tiny")
    tiny_model.write_dataset(folder / "items.jsonl")
    dataset = hellaswag.load(str(folder / "items.jsonl"), rootdir=folder)
    source = models.resolve(str(folder / "tiny"), texts=dataset.texts(), rootdir=folder)
    case = make_case(
        batch_size=2,
        backend="accelerate",
        model="tiny",
        revision=source.revision,
        dtype="float32",
        device="cpu",
        devices=1,
        dataset="items.jsonl",
        dataset_sha256=dataset.sha256,
        tokenizer_sha256=source.tokenizer_sha256,
    )
    return folder, case


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> ByHand:
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> dict[str, Any]:
        worker.main([str(argument) for argument in arguments])
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    return run


def _write(case: Case, name: str = "report.json", *, completed: bool = False) -> None:
    result = make_result() if completed else make_failed("error", Failure(phase="forward", message="x"))
    result.id, result.case = case.id, case
    file.dump(make_report([result]), Path(name))


def _refused(by_hand: ByHand, *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as caught:
        by_hand(*arguments)
    message = caught.value.code
    assert isinstance(message, str), "a text ends Python with status 1"
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["report.json", "report.json.gz"])
def test_a_case_from_elsewhere_runs_where_its_files_are_named(
    measured: tuple[Path, Case], by_hand: ByHand, name: str
) -> None:
    """A report holds only the last component of a path outside the rootdir; the rest is said by hand."""
    folder, case = measured
    _write(case, name)
    answer = by_hand(name, "mp-bs2", "--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    assert answer["accuracy"]["items"] == tiny_model.ITEMS
    assert sum(answer["batches"]["sequences"]) == tiny_model.SEQUENCES


def test_batches_by_hand_read_in_a_line_each(
    measured: tuple[Path, Case], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """For people on stderr, with units, and a last line of all; stdout is the JSON alone."""
    folder, case = measured
    monkeypatch.chdir(tmp_path)
    _write(case)
    worker.main(["report.json", "mp-bs2", "--dataset", str(folder / "items.jsonl"), "--model", str(folder / "tiny")])
    printed = capsys.readouterr()
    batches = json.loads(printed.out)["batches"]
    lines = [line for line in printed.err.splitlines() if re.match("warm-up: |batch ", line)]
    count = len(batches["latency_s"])
    assert all(re.fullmatch(r"warm-up: [\d.,]+ ms, 2 sequences, .*", line) for line in lines[:-count])
    assert len(lines) > count
    assert lines[-count] == (
        f"batch 1 of {count}: {1000 * batches['latency_s'][0]:,.1f} ms, 2 sequences, {batches['tokens'][0]} tokens"
        f"{_padding(batches, 0)}"
    )
    assert f"{count} batches in {sum(batches['latency_s']):.3f} s" in printed.err.splitlines()
    assert "FinishedBatch" not in printed.err


def _padding(batches: dict[str, Any], number: int) -> str:
    more = batches["padded_tokens"][number] - batches["tokens"][number]
    return f", {more} of padding" if more else ""


def test_a_case_is_scored_as_it_says(
    measured: tuple[Path, Case], by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every logit in the warm-up and in what is measured where the case has them, and to the same choices."""
    folder, case = measured
    chosen: list[str] = []
    way = logits.way

    def spy(model: Any, workload: str) -> Any:
        chosen.append(workload)
        return way(model, workload)

    monkeypatch.setattr(logits, "way", spy)
    answers = []
    for number, workload in enumerate(logits.WORKLOADS.values()):
        _write(msgspec.structs.replace(case, workload=workload), f"{number}.json")
        files = ("--dataset", folder / "items.jsonl", "--model", folder / "tiny")
        answers.append(by_hand(f"{number}.json", "mp-bs2", *files))
    lean, full = answers
    assert chosen == [logits.LEAN] * 2 + [logits.FULL_LOGITS] * 2
    assert decode(full["accuracy"]["loglikelihoods"]) == pytest.approx(
        decode(lean["accuracy"]["loglikelihoods"]), rel=1e-5
    )
    assert full["accuracy"]["predictions"] == lean["accuracy"]["predictions"]
    assert full["execution_choice"].startswith("no CUDA graphs: ")


def test_files_that_are_not_there_are_asked_for(measured: tuple[Path, Case], by_hand: ByHand) -> None:
    """One line says what is missing and which option says where it is."""
    folder, case = measured
    _write(case)
    message = _refused(by_hand, "report.json", "mp-bs2")
    assert message.startswith("dataset 'items.jsonl' is unknown")
    assert message.endswith("(--dataset PATH says where it is)")
    message = _refused(by_hand, "report.json", "mp-bs2", "--dataset", folder / "items.jsonl")
    assert message.startswith("model 'tiny' is unknown")
    assert message.endswith("(--model DIR says where it is)")


@pytest.mark.parametrize(
    ("field", "what"), [("dataset_sha256", "dataset"), ("tokenizer_sha256", "tokenizer"), ("revision", "model")]
)
def test_files_that_were_not_measured_are_refused(
    measured: tuple[Path, Case], by_hand: ByHand, field: str, what: str
) -> None:
    """A figure by hand is of the very case, or there is none."""
    folder, case = measured
    _write(msgspec.structs.replace(case, **{field: "0" * 64}))
    files = ("--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    message = _refused(by_hand, "report.json", "mp-bs2", *files)
    assert message.startswith(f"mp-bs2: the {what} is not the one of report.json: ")
    assert message.endswith(f" instead of {'0' * 64}")


def test_an_unknown_case_gets_the_ids_there_are(measured: tuple[Path, Case], by_hand: ByHand) -> None:
    """A misspelt id needs no look into the report."""
    _write(measured[1])
    assert _refused(by_hand, "report.json", "mp-bs9") == "'mp-bs9' is no case of report.json: it has mp-bs2"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is broken: Input data was truncated"),
        (b'{"cases": [', "is broken: Input data was truncated"),
        (b"\xff", "is broken: "),
        (b"[]", "is broken: Expected `object`"),
        (b"{}", "is broken: Object missing required field `cases`"),
        (b'{"cases": [{"id": "x"}]}', "is broken: Object missing required field `case`"),
        (gzip.compress(b"{}", mtime=0)[:-4], "is broken: "),
        (b"\x1f\x8bgarbage", "is broken: Compressed file ended"),
    ],
)
def test_a_report_that_cannot_be_used_is_refused(by_hand: ByHand, data: bytes | None, reason: str) -> None:
    """One line names the file and what is wrong with it, not a traceback."""
    if data is not None:
        Path("report.json").write_bytes(data)
    assert _refused(by_hand, "report.json", "mp-bs2").startswith(f"report report.json {reason}")


def test_a_report_without_a_case_is_bad_usage(by_hand: ByHand, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what it needs."""
    with pytest.raises(SystemExit) as caught:
        by_hand("report.json")
    assert caught.value.code == 2
    assert "the id of one of its cases" in capsys.readouterr().err


def test_a_strategy_of_ones_own_runs_where_it_is_named(measured: tuple[Path, Case], by_hand: ByHand) -> None:
    """A report has its name alone; without the flag one line asks for it, and another strategy is not taken for it."""
    folder, case = measured
    _write(msgspec.structs.replace(case, strategy="slow"))
    files = ("report.json", "slow-bs2", "--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    message = _refused(by_hand, *files)
    assert message.startswith("slow-bs2: 'slow' is no strategy: allowed are iok, mp, tp")
    assert message.endswith("(--strategy MODULE:ATTRIBUTE says where it is)")
    message = _refused(by_hand, *files, "--strategy", "mp")
    assert message == "slow-bs2: --strategy=mp is strategy 'mp', and 'slow' was measured"
    answer = by_hand(*files, "--strategy", f"{__name__}:Slow")
    assert sum(answer["batches"]["sequences"]) == tiny_model.SEQUENCES


@pytest.mark.parametrize(
    ("strategy", "started", "message"),
    [
        ("tp", "1", "tp-bs2 needs 2 processes, and 1 was started: torchrun --nproc-per-node=2 -m "),
        ("tp", "3", "tp-bs2 needs 2 processes, and 3 were started: torchrun --nproc-per-node=2 -m "),
        ("mp", "2", "mp-bs2 needs 1 process, and 2 were started: python -m "),
    ],
)
def test_another_number_of_processes_is_refused(
    measured: tuple[Path, Case],
    by_hand: ByHand,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    started: str,
    message: str,
) -> None:
    """Instead of waiting for those that never come; the first process says it, and the others are silent."""
    _write(msgspec.structs.replace(measured[1], strategy=strategy, devices=2))
    monkeypatch.setenv("WORLD_SIZE", started)
    refused = _refused(by_hand, "report.json", f"{strategy}-bs2")
    assert refused == f"{message}pytest_llmgpu.ranks report.json {strategy}-bs2"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as caught:
        by_hand("report.json", f"{strategy}-bs2")
    assert caught.value.code == 0


def test_too_few_gpus_are_refused(
    measured: tuple[Path, Case], by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of a larger machine ends in one line."""
    import torch

    folder, case = measured
    _write(msgspec.structs.replace(case, device="cuda", devices=4))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    files = ("--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    assert _refused(by_hand, "report.json", "mp-bs2", *files) == "mp-bs2 needs 4 GPUs, and torch can use 3 here"


@pytest.mark.parametrize(
    ("asked", "ran", "completed", "expected"),
    [
        ("auto", "cuda_graphs", True, "on"),
        ("auto", "eager", True, "off"),
        ("auto", "eager", False, "auto"),
        ("on", "cuda_graphs", True, "on"),
        ("off", "eager", True, "off"),
    ],
)
def test_a_case_runs_as_it_ran(
    measured: tuple[Path, Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    ran: str,
    completed: bool,
    expected: str,
) -> None:
    """What `auto` chose is not left to another trial; where it chose nothing, it is."""
    folder, case = measured
    monkeypatch.chdir(tmp_path)
    _write(msgspec.structs.replace(case, cuda_graphs=asked, execution=ran), completed=completed)
    ordered = find("report.json", "mp-bs2", dataset=str(folder / "items.jsonl"), model=str(folder / "tiny"))
    assert ordered.case.cuda_graphs == expected


def test_a_case_of_two_processes_runs_under_torchrun(
    measured: tuple[Path, Case], by_hand: ByHand, tmp_path: Path
) -> None:
    """Each holds half of every layer, both answer as the whole model does, and the first prints."""
    folder, case = measured
    files = ("--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    _write(case)
    right = by_hand("report.json", "mp-bs2", *files)
    _write(msgspec.structs.replace(case, strategy="tp", backend="transformers", devices=2))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "pytest_llmgpu.ranks", "report.json", "tp-bs2", *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plan_sha256"] == right["plan_sha256"]
    assert decode(found["accuracy"]["loglikelihoods"]) == pytest.approx(
        decode(right["accuracy"]["loglikelihoods"]), rel=1e-5
    )
