"""The commands that judge reports: gate and ab, whose exit status is the result, and promote."""

from __future__ import annotations

import argparse
import hashlib
import shlex
from pathlib import Path

import msgspec

from pytest_llmgpu.cli import launches
from pytest_llmgpu.cli.arguments import REFERENCE, add_rules, add_switches, judged, policy_of, source, storage_of, today
from pytest_llmgpu.cli.output import color, complain, show, write_json
from pytest_llmgpu.gate import ab, exact, headline, promotion
from pytest_llmgpu.gate.ab import Both
from pytest_llmgpu.gate.judge import exit_status, judge
from pytest_llmgpu.gate.policy import dump_policy, parse_policy
from pytest_llmgpu.render.terminal import verdicts as verdict_tables
from pytest_llmgpu.report import disturbances, file
from pytest_llmgpu.report.options import check_name_is_free
from pytest_llmgpu.report.report import Promotion, Report, command
from pytest_llmgpu.report.text import listed, named
from pytest_llmgpu.report.verdicts import Baseline, Verdicts
from pytest_llmgpu.store import git
from pytest_llmgpu.store import store as storage

_OF_JUDGING = ("BASE", "HEAD", "--policy", "--in-turn", "--strict", "--allow-no-baseline", "--dump-policy")
"""The arguments that have no effect on verdicts that exist."""
_EPILOG = """\
Each commit is checked out into a git worktree under TMPDIR; your working tree is not changed. Launches alternate: base,
head, base, head. Both commits are compared after 1, 3, 5 and 8 launches of each, until every gated row is decided or a
regression is found; later launches measure only the cases that are not decided. The policy is that of the base commit,
or the file of --policy; its error rate is divided by the number of comparisons. The merged reports are kept in
.llmgpu/ab. Exit status, as for llmgpu gate: 0 passed, 1 regressed, 2 bad usage or a launch without a report, 3 could
not be judged. llmgpu bisect finds the commit between them."""


def add_gate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    unjudged = "3 could not be judged: undecided, not comparable, or nothing compared"
    parser.epilog = f"exit status: 0 passed, 1 regressed, 2 bad usage or an unreadable file, {unjudged}"
    # --dump-policy needs no report.
    parser.add_argument("base", metavar="BASE", nargs="?", help=f"the baseline: {REFERENCE}")
    parser.add_argument("head", metavar="HEAD", nargs="?", help="the candidate, named in the same ways")
    add_rules(parser)
    add_switches(parser)
    text = "show the verdicts of this report, which pytest compared, and return their result"
    parser.add_argument("--verdicts", metavar="REPORT", help=text)
    parser.add_argument("--json", metavar="PATH", help="write the verdicts as JSON; - prints them instead of the table")
    parser.add_argument("--all", action="store_true", help="show all cases")
    parser.add_argument("--dump-policy", action="store_true", help="print the policy in force as TOML and exit")


def run_gate(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    line, is_misspelt = "", False
    if arguments.verdicts is not None:
        for word in _OF_JUDGING:
            if getattr(arguments, word.strip("-").replace("-", "_").lower()):
                raise ValueError(f"--verdicts: cannot be combined with {word}: nothing is judged again")
        report = source(arguments.verdicts, arguments).report()
        if (verdicts := report.verdicts) is None:
            remedy = f"pass --llmgpu-compare=REF to pytest, or run llmgpu gate BASE {arguments.verdicts}"
            raise ValueError(f"{arguments.verdicts}: has no verdicts, because its run was not compared: {remedy}")
        policy = parse_policy(verdicts)
        line = f"measured: {report.created}"
    else:
        policy, in_words = policy_of(arguments)
        if arguments.dump_policy:
            show(dump_policy(policy).rstrip("\n"))
            return 0
        if arguments.base is None or arguments.head is None:
            raise ValueError("gate: BASE and HEAD are needed; see llmgpu gate --help")
        candidate = source(arguments.head, arguments).report()
        try:
            base, verdicts = judged(arguments, arguments.base, candidate, policy)
            line = in_words if base is not None else ""
        except git.AbsentError as error:
            policy = msgspec.structs.replace(policy, allow_no_baseline=False)  # its name may be misspelt
            verdicts, line = judge(None, candidate, policy, today=today()), str(error)
            is_misspelt = isinstance(error, git.MisspeltError)
    # Before the table is printed, because its reader may close the pipe early.
    if not write_json(verdicts, arguments.json):
        table = verdict_tables.table(verdicts, policy, color(), None if arguments.all else verdict_tables.MOST_CASES)
        # The next step would make the report the baseline under a misspelt name.
        table = "" if is_misspelt else named(table, arguments.head or arguments.verdicts, arguments.base)
        show("\n".join(filter(None, (f"{verdict_tables.conclusion(verdicts, policy, color())}\n", table, line))))
    return exit_status(verdicts, policy)


def side_by_side(arguments: argparse.Namespace) -> str:
    """Return what changed from the first report to each other one, worst first."""
    (policy, in_words), most = policy_of(arguments), None if arguments.verbose else verdict_tables.MOST_CASES
    heads = [source(name, arguments).report() for name in arguments.others]
    found = [(*judged(arguments, arguments.report, head, policy), head) for head in heads]
    conclusions = [verdict_tables.conclusion(verdicts, policy, color()) for _, verdicts, _ in found]
    if len(found) == 1:
        table = verdict_tables.table(found[0][1], policy, color(), most)
    else:
        table = verdict_tables.side_by_side(found, color(), most)
        named = enumerate(zip(arguments.others, conclusions, strict=True), 1)
        conclusions = [f"{number}  {name}: {text}" for number, (name, text) in named]
    lines = "\n".join(conclusions)
    return "\n".join(filter(None, (f"{lines}\n", table, in_words)))


def add_ab(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = _EPILOG
    parser.add_argument("base_ref", metavar="BASE_REF", help="commit to compare with: a branch, a tag, a hash")
    parser.add_argument("head_ref", metavar="HEAD_REF", help="commit to judge; uncommitted changes are not measured")
    launches.add_command(parser)
    text = "largest number of launches of each commit (default: 8)"
    parser.add_argument("--launches", metavar="N", type=launches.count, default=8, help=text)
    add_rules(parser)
    add_switches(parser, baseline=False)
    parser.set_defaults(in_turn=True)


def run_ab(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    references = dict(zip(ab.SIDES, (arguments.base_ref, arguments.head_ref), strict=True))
    with launches.interruptible(), launches.checked_out(references) as trees:
        looks = ab.looks(arguments.launches)
        kept, policy, in_words, measure = launches.begin(arguments, trees, looks, storage_of(arguments) / "ab")

        def judge_both(both: Both) -> Verdicts:
            file.dump(both.base, kept / "base.json.gz")
            sha256 = hashlib.sha256(file.encode(both.base, compressed=True)).hexdigest()
            baseline = Baseline(name=trees[0].reference, sha256=sha256, commit=trees[0].sha)
            verdicts = judge(both.base, both.head, policy, today=today(), baseline=baseline, in_turn=True)
            both.head.verdicts = verdicts
            file.dump(both.head, kept / "head.json.gz")
            return verdicts

        _, verdicts = ab.compare(measure, judge_both, lambda found: ab.undecided(found, policy), looks)
        conclusion = verdict_tables.conclusion(verdicts, policy, color())
        show(f"\n{conclusion}\n\n{verdict_tables.table(verdicts, policy, color())}\n{in_words}")
        show(f"reports, policy and logs: {kept}")
    return exit_status(verdicts, policy)


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
        verdicts = judge(base, whole, policy, today=today(), baseline=present.baseline(present.name, base))
        promotions = promotion.promotions(base, candidate, verdicts, policy)
    for one in promotion.judged(candidate, verdicts, policy, today()):
        if found := exit_status(one, policy):
            refused = list(dict.fromkeys([*refused, headline.headline(one, policy).text]))
            remedy = remedy or headline.next_steps(one, policy)
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
    written = _write(promoted, arguments.to, store)
    show(f"promoted: {arguments.report} is the baseline {written}{'; commit it' if arguments.to is not None else ''}")
    bad = [(one, list(filter(None, map(disturbances.untimed, one.launches)))) for one in candidate.cases]
    if why := {f"{one.id} ({len(found)} of {len(one.launches)})": found[0] for one, found in bad if found}:
        text = f"note: disturbed launches, whose wall times are not compared: {listed(why, exact.NAMED)}. "
        show(f"{text}{disturbances.remedy(next(iter(why.values())))}".rstrip())
    if refused:
        show(f"by force, in spite of: {'; '.join(refused)}")
    show(f"next: {command(candidate)} --llmgpu-compare={shlex.quote(str(arguments.to or storage.BASELINE))}")
    return 0


def _write(promoted: Report, path: Path | None, store: Path) -> Path:
    try:
        if path is None:
            check_name_is_free(storage.BASELINE)
            return storage.save(promoted, store, storage.BASELINE)
        file.check_writable(path)
        file.dump(promoted, path)
    except OSError as error:
        raise ValueError(f"baseline {path or store}: cannot be written: {file.one_line(error)}") from None
    return path


def _measured(report: Report) -> bytes:
    """Return what two reports with the same measurement have in common."""
    return msgspec.json.encode(msgspec.structs.replace(report, verdicts=None, promotion=None, promotions=[]))
