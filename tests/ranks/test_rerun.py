from __future__ import annotations

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
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.ranks import rerun
from pytest_llmgpu.report import file
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import decode
from pytest_llmgpu.report.result import Failure
from pytest_llmgpu.strategies.mp import LayerParallel

Run = Callable[..., dict[str, Any]]
"""`run("report.json", "mp-bs2", "--model", "m")`: the JSON that the command prints."""


class Slow(LayerParallel):
    """A strategy of a user."""

    name = "slow"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Case]:
    """A folder with a model and a dataset, and a case that names both as a report from another rootdir does."""
    folder = tmp_path_factory.mktemp("elsewhere")
    tiny_model.write_model(folder / "tiny")
    tiny_model.write_dataset(folder / "items.jsonl")
    dataset = HellaSwag().load(str(folder / "items.jsonl"), rootdir=folder)
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
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_main(*arguments: str | Path) -> dict[str, Any]:
        rerun.main([str(argument) for argument in arguments])
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    return run_main


def _write(case: Case, name: str = "report.json", *, completed: bool = False) -> None:
    result = make_result() if completed else make_failed("error", Failure(phase="forward", message="x"))
    result.id, result.case = case.id, case
    file.dump(make_report([result]), Path(name))


def _refusal(run: Run, *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    message = caught.value.code
    assert isinstance(message, str), "a text ends Python with status 1"
    assert "\n" not in message
    return message


def test_a_case_from_elsewhere_runs_with_the_places_of_its_files(measured: tuple[Path, Case], run: Run) -> None:
    """A report keeps only the last component of a path outside the rootdir; the flags give the rest."""
    folder, case = measured
    _write(case)
    answer = run("report.json", "mp-bs2", "--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    assert answer["accuracy"]["items"] == tiny_model.ITEMS
    assert sum(answer["batches"]["sequences"]) == tiny_model.SEQUENCES


def test_each_batch_is_one_line_on_stderr(
    measured: tuple[Path, Case], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The lines have units, the last one is the total, and stdout is the JSON alone."""
    folder, case = measured
    monkeypatch.chdir(tmp_path)
    _write(case)
    rerun.main(["report.json", "mp-bs2", "--dataset", str(folder / "items.jsonl"), "--model", str(folder / "tiny")])
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


def _padding(batches: dict[str, Any], number: int) -> str:
    more = batches["padded_tokens"][number] - batches["tokens"][number]
    return f", {more} of padding" if more else ""


def test_a_case_is_scored_by_its_workload(
    measured: tuple[Path, Case], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full-logits workload computes every logit in warm-up and measurement, and gives the same predictions."""
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
        answers.append(run(f"{number}.json", "mp-bs2", *files))
    lean, full = answers
    assert chosen == [logits.LEAN] * 2 + [logits.FULL_LOGITS] * 2
    assert decode(full["accuracy"]["loglikelihoods"]) == pytest.approx(
        decode(lean["accuracy"]["loglikelihoods"]), rel=1e-5
    )
    assert full["accuracy"]["predictions"] == lean["accuracy"]["predictions"]
    assert "--llmgpu-scoring=harness" in full["execution_choice"]


def test_missing_files_are_refused(measured: tuple[Path, Case], run: Run) -> None:
    """The message names the missing file and the option that gives its place."""
    folder, case = measured
    _write(case)
    message = _refusal(run, "report.json", "mp-bs2")
    assert "'items.jsonl'" in message
    assert "--dataset PATH" in message
    message = _refusal(run, "report.json", "mp-bs2", "--dataset", folder / "items.jsonl")
    assert "'tiny'" in message
    assert "--model DIR" in message


@pytest.mark.parametrize(
    ("field", "what"), [("dataset_sha256", "dataset"), ("tokenizer_sha256", "tokenizer"), ("revision", "model")]
)
def test_files_other_than_the_measured_ones_are_refused(
    measured: tuple[Path, Case], run: Run, field: str, what: str
) -> None:
    """A rerun measures the same case or none."""
    folder, case = measured
    _write(msgspec.structs.replace(case, **{field: "0" * 64}))
    files = ("--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    message = _refusal(run, "report.json", "mp-bs2", *files)
    assert message.startswith(f"mp-bs2: the {what} ")
    assert f" instead of {'0' * 64}" in message


def test_an_unknown_case_is_refused_with_the_ids_of_the_report(measured: tuple[Path, Case], run: Run) -> None:
    """The message lists the cases, so that a misspelt id can be corrected."""
    _write(measured[1])
    assert _refusal(run, "report.json", "mp-bs9") == "'mp-bs9' is no case of report.json: it has mp-bs2"


@pytest.mark.parametrize("data", [None, b"", b"{}", b"\x1f\x8bgarbage"])
def test_an_unreadable_report_is_refused(run: Run, data: bytes | None) -> None:
    """The message is one line that names the file."""
    if data is not None:
        Path("report.json").write_bytes(data)
    assert _refusal(run, "report.json", "mp-bs2").startswith("report report.json: ")


def test_a_missing_case_id_is_bad_usage(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits with status 2 and names the missing argument."""
    with pytest.raises(SystemExit) as caught:
        run("report.json")
    assert caught.value.code == 2
    assert "case_id" in capsys.readouterr().err


def test_a_users_strategy_runs_by_its_place(measured: tuple[Path, Case], run: Run) -> None:
    """A report has only the name of a strategy: its place must be given, and must have the same name."""
    folder, case = measured
    _write(msgspec.structs.replace(case, strategy="slow"))
    files = ("report.json", "slow-bs2", "--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    message = _refusal(run, *files)
    assert message.startswith("slow-bs2: 'slow' is no built-in strategy: ")
    assert "--strategy MODULE:ATTRIBUTE" in message
    message = _refusal(run, *files, "--strategy", "mp")
    assert message.startswith("slow-bs2: --strategy=mp is strategy 'mp', but 'slow' was measured")
    answer = run(*files, "--strategy", f"{__name__}:Slow")
    assert sum(answer["batches"]["sequences"]) == tiny_model.SEQUENCES


@pytest.mark.parametrize("field", ["strategy", "task"])
def test_a_report_chooses_nothing_that_is_imported(measured: tuple[Path, Case], tmp_path: Path, field: str) -> None:
    """A report may come from anybody: a place in it is refused before it is imported, in one line."""
    (tmp_path / "trap.py").write_text("open('sprung', 'w').close()\n\ndef spring(): pass\n")
    case = msgspec.structs.replace(measured[1], **{field: "trap:spring"})
    result = make_failed("error", Failure(phase="forward", message="x"))
    result.id, result.case = "a", case
    file.dump(make_report([result]), tmp_path / "report.json")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest_llmgpu.ranks", "report.json", "a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith(
        f"a: 'trap:spring' is no built-in {field}: --{field} MODULE:ATTRIBUTE"
    )
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("strategy", "started", "message"),
    [
        ("tp", "1", "tp-bs2 needs 2 processes, but 1 was started: run torchrun --nproc-per-node=2 -m "),
        ("tp", "3", "tp-bs2 needs 2 processes, but 3 were started: run torchrun --nproc-per-node=2 -m "),
        ("mp", "2", "mp-bs2 needs 1 process, but 2 were started: run python -m "),
    ],
)
def test_a_wrong_number_of_processes_is_refused(
    measured: tuple[Path, Case],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    started: str,
    message: str,
) -> None:
    """The first process prints the command to use; the others end silently instead of waiting for ever."""
    _write(msgspec.structs.replace(measured[1], strategy=strategy, devices=2))
    monkeypatch.setenv("WORLD_SIZE", started)
    assert _refusal(run, "report.json", f"{strategy}-bs2") == f"{message}pytest_llmgpu.ranks report.json {strategy}-bs2"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as caught:
        run("report.json", f"{strategy}-bs2")
    assert caught.value.code == 0


def test_too_few_gpus_are_refused(measured: tuple[Path, Case], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of a larger machine is refused in one line."""
    import torch

    folder, case = measured
    _write(msgspec.structs.replace(case, device="cuda", devices=4))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    files = ("--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    assert "mp-bs2 needs 4 GPUs, but torch can use 3 here" in _refusal(run, "report.json", "mp-bs2", *files)


@pytest.mark.parametrize(
    ("requested", "ran", "completed", "expected"),
    [
        ("auto", "cuda_graphs", True, "on"),
        ("auto", "eager", True, "off"),
        ("auto", "eager", False, "auto"),
        ("on", "cuda_graphs", True, "on"),
        ("off", "eager", True, "off"),
    ],
)
def test_a_rerun_keeps_the_execution_that_was_chosen(
    measured: tuple[Path, Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requested: str,
    ran: str,
    completed: bool,
    expected: str,
) -> None:
    """A completed case runs as `auto` chose; a case that did not complete is tried again."""
    folder, case = measured
    monkeypatch.chdir(tmp_path)
    _write(msgspec.structs.replace(case, cuda_graphs=requested, execution=ran), completed=completed)
    found = rerun.find("report.json", "mp-bs2", dataset=str(folder / "items.jsonl"), model=str(folder / "tiny"))
    assert found.case.cuda_graphs == expected


@pytest.mark.slow
def test_a_case_of_two_processes_runs_under_torchrun(measured: tuple[Path, Case], run: Run, tmp_path: Path) -> None:
    """Each process holds half of every layer, both answer as the whole model does, and the first one prints."""
    folder, case = measured
    files = ("--dataset", folder / "items.jsonl", "--model", folder / "tiny")
    _write(case)
    right = run("report.json", "mp-bs2", *files)
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
