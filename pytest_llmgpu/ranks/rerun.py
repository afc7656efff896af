"""Run one case of a report again: `python -m pytest_llmgpu.ranks REPORT CASE_ID`.

A case that cannot be run, or whose files differ from those that were measured, ends the process with one line.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

import msgspec

from pytest_llmgpu import strategies
from pytest_llmgpu.inference import models, tasks
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.protocol import FinishedBatch
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report import file
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.text import listed, plural, printable

_DESCRIPTION = """\
Run one case of a report again, for example under a debugger. Batches are printed on stderr, the result as JSON on
stdout. Start a case of several processes with torchrun --nproc-per-node=N -m pytest_llmgpu.ranks; the first process
prints. A report keeps the name of your own strategy or task, and the last component of a dataset or model path outside
the rootdir: give their places with --strategy, --task, --dataset and --model.
"""


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """A case of a report with everything that a rank needs to run it."""

    case: Case
    """The case runs as in the report: where `auto` chose eager or CUDA graphs, the choice is fixed."""
    source: ModelSource
    """The files of the model."""
    dataset: Dataset
    """The dataset of the case."""
    strategy: str
    """The place of the strategy as `module:attribute`."""
    task: str
    """The place of the task as `module:attribute`."""


class BatchPrinter:
    """Prints one line per finished batch, and a last line with the total time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._latencies_s: list[float] = []

    def __call__(self, batch: FinishedBatch) -> None:
        """Print the line of a batch or of a batch of the warm-up."""
        name = "warm-up"
        if batch.planned:
            self._latencies_s.append(batch.latency_s)
            name = f"batch {len(self._latencies_s):,} of {batch.planned:,}"
        padding = batch.padded_tokens - batch.tokens
        size = f"{plural(batch.sequences, 'sequence')}, {plural(batch.tokens, 'token')}"
        size += f", {padding:,} of padding" if padding else ""
        print(f"{name}: {1000 * batch.latency_s:,.1f} ms, {size}", file=self._stream)
        if batch.planned and len(self._latencies_s) == batch.planned:
            print(f"{plural(batch.planned, 'batch')} in {math.fsum(self._latencies_s):,.3f} s", file=self._stream)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: this process is one rank of the case."""
    parser = argparse.ArgumentParser(prog="python -m pytest_llmgpu.ranks", description=_DESCRIPTION)
    parser.add_argument("report", help="the report that has the case")
    parser.add_argument("case_id", help="the id of the case, such as mp-bs8")
    parser.add_argument("--strategy", metavar="MODULE:ATTRIBUTE", help="the place of a strategy that is not built in")
    parser.add_argument("--task", metavar="MODULE:ATTRIBUTE", help="the place of a task that is not built in")
    parser.add_argument("--dataset", metavar="PATH", help="the dataset file (default: the path in the report)")
    parser.add_argument("--model", metavar="DIR", help="the model directory (default: the path in the report)")
    arguments = parser.parse_args(argv)
    rerun = find(
        arguments.report,
        arguments.case_id,
        strategy=arguments.strategy,
        task=arguments.task,
        dataset=arguments.dataset,
        model=arguments.model,
    )
    is_first = os.environ.get("RANK", "0") == "0"
    state = RankState(on_batch=BatchPrinter(sys.stderr) if is_first else lambda _: None)
    worker.load(state, rerun.case, rerun.source, rerun.strategy)
    worker.give(state, rerun.dataset.sha256, rerun.dataset.items, rerun.task)
    reply = worker.score(state, rerun.case)
    if is_first:
        print(msgspec.json.encode(reply).decode())


def find(
    report_path: str,
    case_id: str,
    *,
    strategy: str | None = None,
    task: str | None = None,
    dataset: str | None = None,
    model: str | None = None,
) -> Rerun:
    """Return a case of a report with everything that it needs.

    Args:
        report_path: The report, compressed or not.
        case_id: The id of a case of the report.
        strategy: The place of the strategy (`module:attribute`); None for a built-in strategy.
        task: The place of the task (`module:attribute`); None for a built-in task.
        dataset: The path of the dataset; None for the one in the report, relative to the working directory.
        model: The directory of the model; None for the one in the report, relative to the working directory.

    Raises:
        SystemExit: The report has no such case; a strategy, task, model or dataset is missing or not the measured
            one; or the case needs another number of processes or more GPUs.
    """
    case = _read_case(report_path, case_id)
    place, built = _find("strategy", case.strategy, strategy, case_id, strategies)
    _check_process_count(built.ranks(case.devices), report_path, case_id)
    task_place, task_object = _find("task", case.task, task, case_id, tasks)
    try:
        items = task_object.load(dataset or case.dataset, rootdir=Path.cwd(), limit=case.limit)
    except ValueError as error:
        _refuse(f"{error} (--dataset PATH gives its place)")
    name = model or case.model
    # The revision of a directory is its fingerprint, which is compared below. Only the hub accepts a revision.
    revision = None if model or name == "bundled" or Path(name).is_dir() else case.revision
    try:
        source = models.resolve(
            name, revision=revision, load_format=case.load_format, texts=items.texts(), rootdir=Path.cwd()
        )
    except ValueError as error:
        _refuse(f"{error} (--model DIR gives its place)")
    source = msgspec.structs.replace(source, attention=case.attention)
    for what, found, measured in (
        ("dataset", items.sha256, case.dataset_sha256),
        ("tokenizer", source.tokenizer_sha256, case.tokenizer_sha256),
        ("model", source.revision, case.revision),
    ):
        if found != measured:
            _refuse(
                f"{case_id}: the {what} is not the one of {report_path}: {found} instead of {measured}: "
                "use the files that were measured"
            )
    try:
        built.check(case, source)
    except ValueError as error:
        _refuse(f"{case_id}: {error}")
    _check_gpus(case, case_id)
    return Rerun(case=case, source=source, dataset=items, strategy=place, task=task_place)


def _refuse(message: str) -> NoReturn:
    sys.exit(printable(message))


def _read_case(report_path: str, case_id: str) -> Case:
    try:
        results = {result.id: result for result in file.load(Path(report_path)).cases}
    except ValueError as error:
        _refuse(str(error))
    if case_id not in results:
        _refuse(f"{case_id!r} is no case of {report_path}: it has {listed(results)}")
    result = results[case_id]
    if result.outcome != "completed" or result.case.cuda_graphs != "auto":
        return result.case
    # The batches decide alike again, except where a recording had failed.
    return msgspec.structs.replace(result.case, cuda_graphs="on" if result.case.execution == "cuda_graphs" else "off")


def _find(kind: str, measured: str, requested: str | None, case_id: str, registry: ModuleType) -> tuple[str, Any]:
    """Return the place and the object of a case's strategy or task.

    The report decides nothing that is imported: only a built-in name is looked up, and a place comes from the user.
    """
    if requested is None and measured not in registry.BUILT_IN:
        _refuse(
            f"{case_id}: {measured!r} is no built-in {kind}: --{kind} MODULE:ATTRIBUTE gives its place; built in are "
            f"{', '.join(sorted(registry.BUILT_IN))}"
        )
    try:
        place = registry.find(requested or measured)
        made = registry.make(place)
    except ValueError as error:
        _refuse(f"{case_id}: {error} (--{kind} MODULE:ATTRIBUTE gives its place)")
    if made.name != measured:
        _refuse(
            f"{case_id}: --{kind}={requested} is {kind} {made.name!r}, but {measured!r} was measured: "
            f"give the place of {measured!r}"
        )
    return place, made


def _check_process_count(needed: int, report_path: str, case_id: str) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == needed:
        return
    start = "python" if needed == 1 else f"torchrun --nproc-per-node={needed}"
    message = (
        f"{case_id} needs {plural(needed, 'process')}, but {started} {'was' if started == 1 else 'were'} started: run "
        f"{start} -m pytest_llmgpu.ranks {report_path} {case_id}"
    )
    # Every process finds this, and the first one prints it. The others succeed: torchrun ends all after a failure.
    sys.exit(printable(message) if os.environ.get("RANK", "0") == "0" else 0)


def _check_gpus(case: Case, case_id: str) -> None:
    if case.device != "cuda":
        return
    import torch

    if (usable := torch.cuda.device_count()) < case.devices:
        _refuse(
            f"{case_id} needs {plural(case.devices, 'GPU')}, but torch can use {usable} here: run it on a machine with "
            "as many GPUs"
        )
