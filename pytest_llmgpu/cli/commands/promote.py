"""`llmgpu promote`: makes a report the baseline, if it deserves to be."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmgpu.cli.arguments import REFERENCE, source, storage_of
from pytest_llmgpu.cli.gate_arguments import add_rules, policy_of, rules_of
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.cli.protocol import Command
from pytest_llmgpu.report.file import paused

if TYPE_CHECKING:
    from pytest_llmgpu.gate.promotion import Trial
    from pytest_llmgpu.store.references import Source

__all__ = ["COMMAND"]

_REFUSED = 1
_SHOWN = 10


class _Promote:
    name = "promote"
    help = "make a report the baseline; refuses one that is dirty, failed, invalid, inconclusive or worse"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "exit status: 0 promoted, 1 refused, 2 bad usage or unreadable"
        parser.add_argument("report", metavar="REF", help=REFERENCE)
        parser.add_argument(
            "--to",
            metavar="PATH",
            type=Path,
            help="file of the baseline, to commit: benchmarks/baseline.json.gz (default: `baseline` of the store)",
        )
        add_rules(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from pytest_llmgpu.analysis import launch_findings
        from pytest_llmgpu.gate import promotion
        from pytest_llmgpu.store import store as storage

        with paused():
            policy = policy_of(arguments)
            candidate = source(arguments.report, arguments).report()
            today, noise = rules_of(arguments, candidate)
            store = storage_of(arguments)
            present = _present(arguments.to, store, storage.hardware(candidate))
            objections, verdicts, replaced = promotion.unfit(candidate), None, ""
            remedies: list[str] = []
            if present is not None:
                base = present.report()
                if promotion.is_same(candidate, base):
                    show(f"{arguments.report} is the baseline already")
                    return 0
                baseline = present.baseline(present.name, base)
                trial = promotion.trial(base, candidate, policy, today=today, calibration=noise, baseline=baseline)
                remedies = [] if objections else _remedies(trial, present.name)
                objections += trial.objections
                verdicts = trial.verdicts
                counted = promotion.counted(verdicts)
                replaced = f"replaces commit {(base.commit.sha or 'unknown')[:8]}, sha256 {present.sha256}: {counted}"
            if objections:
                return _refuse(arguments.report, objections, remedies)
            try:
                path = promotion.keep(candidate, verdicts, path=arguments.to, store=store)
            except OSError as error:
                where = arguments.to or store
                raise ValueError(f"baseline {where}: cannot be written: {error.strerror or error}") from None
            unsure = "note: whether files were changed since its commit is not known"
            far_apart = launch_findings.far_apart(candidate.cases)
            lines = [f"promoted: {arguments.report} is the baseline {path}", replaced, far_apart]
            show("\n".join(filter(None, [*lines, unsure if candidate.commit.dirty is None else ""])))
            return 0


def _present(path: Path | None, store: Path, machine: str) -> Source | None:
    """Return the baseline that there is; None for none. A broken one is no reason to write over it."""
    from pytest_llmgpu.gate import promotion
    from pytest_llmgpu.store import references

    if path is None:
        kept = promotion.current_in(store, machine)
        path = kept.path if kept is not None else None
    return references.resolve(str(path), store) if path is not None and path.exists() else None


def _remedies(trial: Trial, present: str) -> list[str]:
    """Return what a person can do about it, a line each."""
    lines = []
    if trial.measure_noise:
        lines.append("the runner's noise is assumed: llmgpu calibrate measures it, and fewer launches tell more")
    if trial.begin_anew:
        lines.append(f"where other cases or another machine are meant, remove {present} and promote again")
    return lines


def _refuse(name: str, objections: list[str], remedies: list[str]) -> int:
    lines = [f"llmgpu: {name} is not promoted: {' '.join(text.split())}" for text in objections[:_SHOWN]]
    if left := len(objections) - _SHOWN:
        lines += [f"llmgpu: and for {left:,} reasons more: see llmgpu compare"] * (left > 0)
    lines += [f"llmgpu: {line}" for line in remedies]
    print("\n".join(lines), file=sys.stderr)
    return _REFUSED


COMMAND: Command = _Promote()
