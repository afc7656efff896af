"""Which case of a report is to be run by hand, where its strategy, dataset and model are here, and how it goes.

What cannot be run, or is not what was measured, ends the process with one line.
"""

from __future__ import annotations

import gzip
import math
import os
import sys
import zlib
from pathlib import Path
from typing import TextIO

import msgspec

from pytest_llmgpu import strategies
from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks import hellaswag
from pytest_llmgpu.inference.tasks.hellaswag import Dataset
from pytest_llmgpu.ranks.protocol import FinishedBatch
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies.protocol import Strategy

__all__ = ["Ordered", "Teller", "find"]


class Ordered(msgspec.Struct, frozen=True, kw_only=True):
    """A case with all that a rank needs to run it."""

    case: Case
    """Run as it was: where `auto` has chosen how, it is asked for."""
    source: ModelSource
    dataset: Dataset
    strategy: str
    """Where the case's strategy is: `module:attribute`."""


class Teller:
    """Tells people of each batch as soon as it is done, in a line; the last line is of all of them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._latencies_s: list[float] = []

    def __call__(self, batch: FinishedBatch) -> None:
        """Write the line of a batch, which may be one of the warm-up."""
        which = "warm-up"
        if batch.planned:
            self._latencies_s.append(batch.latency_s)
            which = f"batch {len(self._latencies_s):,} of {batch.planned:,}"
        padding = f", {batch.padded_tokens - batch.tokens:,} of padding" if batch.padded_tokens > batch.tokens else ""
        size = f"{_counted(batch.sequences, 'sequence')}, {_counted(batch.tokens, 'token')}{padding}"
        print(f"{which}: {1000 * batch.latency_s:,.1f} ms, {size}", file=self._stream)
        if batch.planned and len(self._latencies_s) == batch.planned:
            total_s = math.fsum(self._latencies_s)
            print(f"{_counted(batch.planned, 'batch')} in {total_s:,.3f} s", file=self._stream)


class _Row(msgspec.Struct):
    """What of a report's row says what was measured."""

    id: str
    case: Case
    outcome: str


class _Rows(msgspec.Struct):
    """What of a report is needed to measure one of its cases again."""

    cases: list[_Row]


def find(
    report_path: str,
    case_id: str,
    *,
    strategy: str | None = None,
    dataset: str | None = None,
    model: str | None = None,
) -> Ordered:
    """Return a case of a report with what it needs.

    Args:
        report_path: The report, compressed or not.
        case_id: Id of the case in it.
        strategy: Where the case's strategy is (`module:attribute`), None for a built-in one.
        dataset: Where the case's dataset is, None for the name the report has, looked for from the working directory.
        model: The same of the directory of its model.

    Raises:
        SystemExit: There is no such case; its strategy, model or dataset is not to be had, or not the one that was
            measured; or the processes and GPUs that are here are not those it needs.
    """
    case = _case_of(report_path, case_id)
    here = Path.cwd()
    place, found = _strategy_of(case, case_id, strategy)
    _check_ranks(found.ranks(case.devices), report_path, case_id)
    try:
        scored = hellaswag.load(dataset or case.dataset, rootdir=here, limit=case.limit)
    except ValueError as error:
        sys.exit(f"{error} (--dataset PATH says where it is)")
    name = model or case.model
    # The revision of a directory is its fingerprint, which is compared below; only the hub can be asked for one.
    revision = None if model or name == "bundled" or Path(name).is_dir() else case.revision
    try:
        source = models.resolve(
            name, revision=revision, load_format=case.load_format, texts=scored.texts(), rootdir=here
        )
    except ValueError as error:
        sys.exit(f"{error} (--model DIR says where it is)")
    for what, seen, measured in (
        ("dataset", scored.sha256, case.dataset_sha256),
        ("tokenizer", source.tokenizer_sha256, case.tokenizer_sha256),
        ("model", source.revision, case.revision),
    ):
        if seen != measured:
            sys.exit(f"{case_id}: the {what} is not the one of {report_path}: {seen} instead of {measured}")
    try:
        found.check(case, source)
    except ValueError as error:
        sys.exit(f"{case_id}: {error}")
    _check_gpus(case, case_id)
    return Ordered(case=case, source=source, dataset=scored, strategy=place)


def _case_of(report_path: str, case_id: str) -> Case:
    try:
        data = Path(report_path).read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        rows = msgspec.json.decode(data, type=_Rows).cases
    except OSError as error:
        sys.exit(f"report {report_path} cannot be read: {error.strerror or error}")
    except (EOFError, zlib.error, UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
        sys.exit(f"report {report_path} is broken: {error}")
    by_id = {row.id: row for row in rows}
    if case_id not in by_id:
        sys.exit(f"{case_id!r} is no case of {report_path}: it has {', '.join(by_id)}")
    row = by_id[case_id]
    if row.outcome != "completed" or row.case.cuda_graphs != "auto":
        return row.case
    # Another trial could come out otherwise, and its figures would not be this case's.
    return msgspec.structs.replace(row.case, cuda_graphs="on" if row.case.execution == "cuda_graphs" else "off")


def _strategy_of(case: Case, case_id: str, written: str | None) -> tuple[str, Strategy]:
    """Return the place and the object of a case's strategy: a report has its name alone."""
    try:
        place = strategies.find(written or case.strategy)
        found = strategies.make(place)
    except ValueError as error:
        sys.exit(f"{case_id}: {error} (--strategy MODULE:ATTRIBUTE says where it is)")
    if found.name != case.strategy:
        sys.exit(f"{case_id}: --strategy={written} is strategy {found.name!r}, and {case.strategy!r} was measured")
    return place, found


def _check_ranks(needed: int, report_path: str, case_id: str) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == needed:
        return
    start = "python" if needed == 1 else f"torchrun --nproc-per-node={needed}"
    message = (
        f"{case_id} needs {_counted(needed, 'process')}, and {started} {'was' if started == 1 else 'were'} started: "
        f"{start} -m pytest_llmgpu.ranks {report_path} {case_id}"
    )
    # All of them see it, and one says so. The others do not fail, or torchrun might end that one before it has.
    sys.exit(message if os.environ.get("RANK", "0") == "0" else 0)


def _check_gpus(case: Case, case_id: str) -> None:
    if case.device != "cuda":
        return
    import torch

    if (there := torch.cuda.device_count()) < case.devices:
        sys.exit(f"{case_id} needs {_counted(case.devices, 'GPU')}, and torch can use {there} here")


def _counted(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith(("s", "ch")) else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"
