"""`llmgpu promote`: make a report the baseline if it is fit to be one."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmgpu.analysis import findings
from pytest_llmgpu.cli.arguments import REFERENCE, source, storage_of
from pytest_llmgpu.cli.gate_arguments import add_rules, policy_of, rules_of
from pytest_llmgpu.cli.output import complain, show
from pytest_llmgpu.gate import promotion
from pytest_llmgpu.gate.promotion import Trial
from pytest_llmgpu.report.report import Promotion
from pytest_llmgpu.report.text import listed
from pytest_llmgpu.store import references
from pytest_llmgpu.store import store as storage
from pytest_llmgpu.store.references import Source

_REFUSED = 1
_REMEDY = "remove the cause and measure again, or pass --force REASON, which the baseline keeps"
_TIMES_REMEDY = "disturbed times are no objection if the policy gates no time: gate = false in [tool.llmgpu.gate.time]"
_SHOWN = 10
"""Most objections that are printed."""


def add_promote(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = "exit status: 0 promoted, 1 refused, 2 bad usage or an unreadable file"
    parser.add_argument("report", metavar="REF", help=REFERENCE)
    parser.add_argument(
        "--to",
        metavar="PATH",
        type=Path,
        help="file of the baseline, such as benchmarks/baseline.json.gz (default: `baseline` in the store)",
    )
    parser.add_argument(
        "--force",
        metavar="REASON",
        type=_reason,
        help="promote in spite of objections; the baseline keeps them with this reason, and the gate shows it",
    )
    add_rules(parser)


def run_promote(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    policy = policy_of(arguments)
    candidate = source(arguments.report, arguments).report()
    today, noise = rules_of(arguments, candidate)
    store = storage_of(arguments)
    present = _present(arguments.to, store, storage.hardware(candidate))
    verdicts, replaced = None, ""
    objections = [promotion.describe(one) for one in promotion.unfit(candidate, policy)]
    remedies: list[str] = []
    if present is not None:
        base = present.report()
        if promotion.is_same(candidate, base):
            show(f"{arguments.report} is already the baseline")
            return 0
        baseline = present.baseline(present.name, base)
        trial = promotion.trial(base, candidate, policy, today=today, calibration=noise, baseline=baseline)
        remedies = [] if objections else _remedies(trial, present.name)
        objections += promotion.describe_trial(trial)
        verdicts = trial.verdicts
        counted = promotion.counted(verdicts)
        replaced = f"replaces commit {(base.commit.sha or 'unknown')[:8]}, sha256 {present.sha256}: {counted}"
    disturbed = listed(promotion.disturbed_times(candidate), promotion.NAMED)
    if objections and arguments.force is None:
        remedies = remedies or [_REMEDY]
        return _refuse(arguments.report, objections, remedies + [_TIMES_REMEDY] * bool(disturbed))
    forced = Promotion(reason=arguments.force, objections=objections) if objections else None
    try:
        path = promotion.keep(candidate, verdicts, path=arguments.to, store=store, promotion=forced)
    except OSError as error:
        where = arguments.to or store
        raise ValueError(f"baseline {where}: cannot be written: {error.strerror or error}") from None
    unsure = "note: the report does not record whether the working tree had uncommitted changes"
    far_apart = findings.far_apart(candidate.cases)
    overruled = "" if forced is None else f"by force, in spite of: {listed(objections, _SHOWN)}"
    ungated = f"note: times were disturbed, and the policy gates none of them: {disturbed}"
    times = ungated if disturbed and not objections else ""
    lines = [f"promoted: {arguments.report} is the baseline {path}", overruled, replaced, times, far_apart]
    show("\n".join(filter(None, [*lines, unsure if candidate.commit.dirty is None else ""])))
    return 0


def _present(path: Path | None, store: Path, machine: str) -> Source | None:
    """Return the existing baseline; None if there is none. A broken one is an error, so that it is not replaced."""
    if path is None:
        kept = promotion.current_in(store, machine)
        path = kept.path if kept is not None else None
    return references.resolve(str(path), store) if path is not None and path.exists() else None


def _reason(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("a reason is needed, which the baseline keeps")
    return text


def _remedies(trial: Trial, present: str) -> list[str]:
    """Return what the user can do about the objections, one line each."""
    lines = []
    if trial.measure_noise:
        lines.append(
            "the noise of this runner is assumed: measure it with llmgpu calibrate, and fewer launches are needed"
        )
    if trial.begin_again:
        lines.append(f"if the change of cases or machine is intended, remove {present} and promote again")
    return lines


def _refuse(name: str, objections: list[str], remedies: list[str]) -> int:
    for text in objections[:_SHOWN]:
        complain(f"{name} is not promoted: {text}")
    if len(objections) > _SHOWN:
        complain(f"and {len(objections) - _SHOWN:,} more objections: see llmgpu compare")
    for line in remedies:
        complain(line)
    return _REFUSED
