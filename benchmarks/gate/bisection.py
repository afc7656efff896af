"""Measure how often `llmgpu bisect` finds the right commit, and in how many launches; prints JSON.

A trial is a bisection of a line of commits by git, of which one adds device time to one case. Launches are drawn: from
reports with many launches of each case, none twice before all were drawn, or without reports from the priors of the
noise model. A trial draws from one report, because its launches are of one GPU.

    python benchmarks/gate/bisection.py --trials=200 benchmarks/reports/work-*.json.gz
    python benchmarks/gate/bisection.py --trials=200 --regime=device_compute
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pytest_llmgpu.cli import bisection
from pytest_llmgpu.gate import bisect
from pytest_llmgpu.gate.ab import SIDES, Side
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.noise_model import prior_of
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import file
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import derive, device_times_s
from pytest_llmgpu.report.report import Environment, Gpu, Report
from pytest_llmgpu.report.result import Batches, CaseResult, Launch
from pytest_llmgpu.report.verdicts import Verdicts
from pytest_llmgpu.report.work import Bound, RankWork, Work
from pytest_llmgpu.store import git

TODAY = datetime.date(2026, 1, 1)
"""The policy has no known regressions, so that the date does not matter."""

RIGHT = 0.95
"""The smallest fraction of trials that must find the right commit within `LAUNCHES`."""

LAUNCHES = 10
"""The number of launches, those of both ends included, within which a trial must find the commit."""

METRIC = "device_time"

Draw = Callable[[random.Random], Iterator[Report]]
"""Begins a trial: returns an endless series of reports with one launch of every case, all of one program."""


def main() -> int:
    """Run and print the trials; return 1 if too few find the right commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "reports", type=Path, nargs="*", metavar="report", help="report with many launches of each case"
    )
    parser.add_argument("--cases", nargs="+", metavar="ID", help="cases that may become slower (all)")
    parser.add_argument("--regime", choices=("device_memory", "device_compute"), help="prior to draw from (both)")
    parser.add_argument("--commits", type=int, default=63, help="commits of which one is the first bad one (63)")
    parser.add_argument("--slowdown", type=float, default=0.03, help="device time that it adds, as a fraction (0.03)")
    parser.add_argument("--max-launches", type=int, default=16, help="launches that a bisection may take (16)")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.reports:
        draws = [recorded(file.load(path)) for path in asked.reports]
    else:
        draws = [drawn(regime) for regime in ([asked.regime] if asked.regime else ["device_memory", "device_compute"])]
    found = study(
        draws,
        commits=asked.commits,
        slowdown=asked.slowdown,
        max_launches=asked.max_launches,
        trials=asked.trials,
        seed=asked.seed,
        cases=asked.cases,
    )
    names = {"reports": [path.name for path in asked.reports], "regime": asked.regime}
    json.dump({**names, "seed": asked.seed, **found}, sys.stdout, indent=2)
    print()
    return 0 if found["ok"] else 1


def recorded(report: Report) -> Draw:
    """Return draws from the launches of a report, of its cases with device time."""
    cases = [result for result in report.cases if all(device_times_s(launch) for launch in result.launches)]
    if not cases:
        raise SystemExit("a report has no case with device time")
    count = min(len(result.launches) for result in cases)

    def begin(chance: random.Random) -> Iterator[Report]:
        while True:
            for number in chance.sample(range(count), count):
                drawn_cases = [msgspec.structs.replace(one, launches=[one.launches[number]]) for one in cases]
                for one in drawn_cases:
                    derive(one)
                yield msgspec.structs.replace(report, cases=drawn_cases)

    return begin


def drawn(regime: str) -> Draw:
    """Return draws from a prior: each trial draws its deviation, then each launch its time."""
    prior = prior_of(regime)  # type: ignore[arg-type]

    def begin(chance: random.Random) -> Iterator[Report]:
        sd = prior.s0 * math.sqrt(prior.df0 / chance.gammavariate(prior.df0 / 2, 2))
        while True:
            yield synthetic(regime, math.exp(chance.gauss(0, sd)))

    return begin


def synthetic(regime: str, seconds: float) -> Report:
    """Return a report of one launch of one case with this device time."""
    case = Case(
        strategy="mp",
        batch_size=8,
        model="llama-7b",
        dtype="float16",
        device="cuda",
        devices=1,
        dataset="hellaswag",
        dataset_sha256="d" * 64,
        tokenizer_sha256="e" * 64,
    )
    launch = Launch(
        plan_sha256="f" * 64,
        batches=Batches(latency_s=[seconds], sequences=[8], tokens=[800], padded_tokens=[800]),
        # 24 forwards, for which the priors hold.
        work=Work(batches=[0], passes=24, ranks=[RankWork(uuids=["GPU-0"], device_time_s=[seconds], busy=1.0)]),
    )
    limited_by: Any = "memory" if regime == "device_memory" else "compute"
    result = CaseResult(
        id=f"{regime}",
        key=case.key,
        case=case,
        nodeid=f"bench.py::test[{regime}]",
        outcome="completed",
        launches=[launch],
        bound=Bound(compute_s=0.5, memory_s=0.5, wire_s=0.0, bound_s=0.5, limited_by=limited_by, share=0.5),
    )
    derive(result)
    machine = Environment(python="3", platform="Linux", gpus=[Gpu(index=0, uuid="GPU-0", name="drawn")])
    return Report(created="2026-01-01T00:00:00Z", plugin_version=None, environment=machine, cases=[result])


class Trial(NamedTuple):
    """The result of one bisection."""

    case: str
    """The id of the case that became slower."""
    result: str
    """`right`, `wrong`, `undecided`, or `no difference` of the ends."""
    launches: int
    """The number of launches, those of both ends included."""


def study(
    draws: Sequence[Draw],
    *,
    commits: int,
    slowdown: float,
    max_launches: int,
    trials: int,
    seed: int,
    cases: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the results of trials that draw from each source in turn."""
    chance = random.Random(seed)  # noqa: S311 - noise, no secret
    with tempfile.TemporaryDirectory() as folder:
        shas = history(Path(folder), commits)
        done = [
            trial(draws[number % len(draws)], chance, Path(folder), shas, slowdown, max_launches, cases)
            for number in range(trials)
        ]
    share = sum(one.result == "right" and one.launches <= LAUNCHES for one in done) / len(done)
    return {
        "commits": commits,
        "slowdown": slowdown,
        "max_launches": max_launches,
        **summary(done),
        f"right_within_{LAUNCHES}_launches": round(share, 4),
        "by_case": {
            name: summary([one for one in done if one.case == name]) for name in sorted({one.case for one in done})
        },
        "ok": share >= RIGHT,
    }


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the counts of results, and the launches that they took."""
    launches = [one.launches for one in trials]
    return {
        "trials": len(trials),
        "results": dict(Counter(one.result for one in trials)),
        "launches": {"mean": round(statistics.fmean(launches), 2), "most": max(launches)},
    }


def history(folder: Path, commits: int) -> list[str]:
    """Create a repository with a line of commits without files, one more than asked for; return their hashes."""
    people = {f"GIT_{role}_{what}": "bisection" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | people
    git.output(folder, "init", "--quiet", environ=environ)
    tree = git.output(folder, "hash-object", "-w", "-t", "tree", os.devnull, environ=environ).strip()
    shas: list[str] = []
    for number in range(commits + 1):
        parent = ["-p", shas[-1]] if shas else []
        shas.append(git.output(folder, "commit-tree", tree, *parent, "-m", str(number), environ=environ).strip())
    return shas


def trial(
    draw: Draw,
    chance: random.Random,
    folder: Path,
    shas: Sequence[str],
    slowdown: float,
    max_launches: int,
    cases: Sequence[str] | None,
) -> Trial:
    """Run one bisection; a random commit makes a random case slower."""
    launches = draw(chance)
    first = next(launches)
    slow = chance.choice([result for result in first.cases if cases is None or result.id in cases])
    culprit = chance.randrange(1, len(shas))

    def launch(number: int, deselected: Sequence[str]) -> Report:
        report = next(launches)
        kept = [result for result in report.cases if result.nodeid not in deselected]
        if number >= culprit:
            kept = [slowed(result, slowdown) if result.key == slow.key else result for result in kept]
        return msgspec.structs.replace(report, cases=kept)

    def measure_end(side: Side, _: int, deselected: Sequence[str]) -> Report:
        return launch((0, len(shas) - 1)[SIDES.index(side)], deselected)

    policy = Policy()
    ends = bisect.measure_ends(measure_end, judged, policy, launches=max_launches, metric=METRIC)
    end = bisect.worst(ends.verdicts, METRIC)
    if end is None:
        return Trial(slow.id, "no difference", ends.launches)
    with bisection.begun(shas[0], shas[-1], folder) as commits:
        found = bisect.find(
            commits,
            lambda sha, _, deselected: launch(shas.index(sha), deselected),
            judged,
            policy,
            ends.both,
            end,
            launches=max_launches - ends.launches,
        )
    result = "undecided" if found.first_bad is None else "right" if found.first_bad == shas[culprit] else "wrong"
    return Trial(slow.id, result, ends.launches + found.launches)


def judged(base: Report, head: Report, policy: Policy) -> Verdicts:
    """Return the verdicts, as `llmgpu bisect` computes them."""
    return judge(base, head, policy, today=TODAY, in_turn=True)


def slowed(result: CaseResult, slowdown: float) -> CaseResult:
    """Return a result whose kernels take longer on every rank."""
    launches = []
    for launch in result.launches:
        assert launch.work is not None, "only cases with device time are drawn"
        ranks = [
            msgspec.structs.replace(rank, device_time_s=[(1 + slowdown) * one for one in rank.device_time_s or []])
            for rank in launch.work.ranks
        ]
        launches.append(msgspec.structs.replace(launch, work=msgspec.structs.replace(launch.work, ranks=ranks)))
    return msgspec.structs.replace(result, launches=launches)


if __name__ == "__main__":
    sys.exit(main())
