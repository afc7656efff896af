"""`llmgpu promote`: make a report the baseline if it is clean and complete and passes the gate against the present one.

The report keeps its verdicts against the baseline that it replaces, and the figures of the baselines before it.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import msgspec

from pytest_llmgpu.cli.arguments import REFERENCE, add_rules, policy_of, source, storage_of, today_of
from pytest_llmgpu.cli.output import complain, show
from pytest_llmgpu.gate import creep, headline, promotion
from pytest_llmgpu.gate.judge import exit_status, judge
from pytest_llmgpu.report import disturbances, file
from pytest_llmgpu.report.options import check_name_is_free
from pytest_llmgpu.report.report import Promotion, Report, command
from pytest_llmgpu.report.text import listed
from pytest_llmgpu.store import store as storage


def add_promote(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = "exit status: 0 promoted, 1 refused, 2 bad usage or an unreadable file, 3 could not be judged"
    parser.add_argument("report", metavar="REF", help=REFERENCE)
    text = "file of the baseline, such as benchmarks/baseline.json.gz (default: `baseline` in the store)"
    parser.add_argument("--to", metavar="PATH", type=Path, help=text)
    text = "promote a report that would be refused; the baseline keeps the reason, and the gate shows it"
    parser.add_argument("--force", metavar="REASON", help=text)
    add_rules(parser)


def run_promote(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if arguments.force is not None and not arguments.force.strip():
        raise ValueError("--force: a reason is needed, which the baseline keeps")
    (policy, _), store = policy_of(arguments), storage_of(arguments)
    candidate = source(arguments.report, arguments).report()
    wanted = storage.hardware(candidate), storage.BASELINE
    kept = [one.path for one in storage.stored(store) if (one.machine, one.name) == wanted]
    path: Path | None = arguments.to or (kept[-1] if kept else None)
    refused = list(promotion.unfit(candidate))
    remedy, status, verdicts, promotions = "", 1 if refused else 0, None, candidate.promotions
    if path is not None and path.exists():
        present = storage.resolve(str(path), store)
        base = present.report()
        if _measured(candidate) == _measured(base):
            show(f"{arguments.report} is already the baseline")
            return 0
        # A case that was deselected is missing: later reports would not be compared with it.
        session = msgspec.structs.replace(candidate.session, deselected=[])
        whole = msgspec.structs.replace(candidate, session=session)
        baseline = present.baseline(present.name, base)
        verdicts = judge(base, whole, policy, today=today_of(arguments), baseline=baseline)
        promotions = creep.promotions(base, candidate, verdicts, policy)
        if found := exit_status(verdicts, policy):
            refused.append(headline.describe(headline.decide(verdicts, policy)))
            remedy = headline.next_steps(verdicts, policy)
            status = status or found
    if status and arguments.force is None:
        for text in refused:
            complain(f"{arguments.report} is not promoted: {text}")
        step = remedy or "Next: Remove the cause and measure again."
        complain(f"{step} --force REASON promotes the report as it is, and the baseline keeps the reason.")
        return status
    forced = Promotion(reason=arguments.force, refused=refused) if refused else None
    promotions = [] if refused else promotions  # a growth that was accepted by force is not stated again
    promoted = msgspec.structs.replace(candidate, verdicts=verdicts, promotion=forced, promotions=promotions)
    try:
        written = _write(promoted, arguments.to, store)
    except OSError as error:
        raise ValueError(f"baseline {arguments.to or store}: cannot be written: {file.one_line(error)}") from None
    show(f"promoted: {arguments.report} is the baseline {written}")
    bad = {one.id: [disturbances.untimed(launch) for launch in one.launches] for one in candidate.cases}
    if why := {name: reasons[0] or "" for name, reasons in bad.items() if reasons and all(reasons)}:
        text = f"note: every launch of {listed(why, promotion.NAMED)} was disturbed: its times cannot be compared. "
        show(f"{text}{disturbances.remedy(next(iter(why.values())))}".rstrip())
    if refused:
        show(f"by force, in spite of: {'; '.join(refused)}")
    show(f"next: {command(candidate)} --llmgpu-compare={shlex.quote(str(arguments.to or storage.BASELINE))}")
    return 0


def _write(promoted: Report, path: Path | None, store: Path) -> Path:
    if path is None:
        check_name_is_free(storage.BASELINE)
        return storage.save(promoted, store, storage.BASELINE)
    file.check_writable(path)
    file.dump(promoted, path)
    return path


def _measured(report: Report) -> bytes:
    """Return what two reports with the same measurement have in common."""
    return msgspec.json.encode(msgspec.structs.replace(report, verdicts=None, promotion=None, promotions=[]))
