"""Measure whether the gate finds a fault in real runs, and no fault without one; prints JSON.

Each round has two reports, whose launches alternate (A B A B ...): A of a strategy without its fault, B with it.
`llmgpu gate` compares B with A, and the A of the next round with A, which must not be REGRESSED. `ok`: every round has
a verdict, and all verdicts are correct. Some launches of A calibrate the noise first. One round alone has no next
round, and shows no false alarms. Reports in --keep are not measured again, so that an interrupted run can be continued
with the same number of GPUs. With several GPUs (--gpus=0,1,2,3) each launch uses one of them, and a round stays on its
GPU. With --together the launches of a report are of one run of pytest, as for a user: fewer starts, but a drift between
the two runs is part of the difference.

    python benchmarks/gate/end_to_end.py slow --rounds=20 -- --llmgpu-batch-sizes=8 --llmgpu-limit=64
    python benchmarks/gate/end_to_end.py chatty --rounds=1 --launches=1 -- --llmgpu-device=cpu --llmgpu-devices=2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pytest_llmgpu.analysis import launch_merging, noise_regime
from pytest_llmgpu.gate import calibration, noise_model
from pytest_llmgpu.gate.calibration import Calibration
from pytest_llmgpu.gate.time import PROMISED
from pytest_llmgpu.report import file
from pytest_llmgpu.report.metrics import default_threshold
from pytest_llmgpu.report.report import Report

SIDES = {"a": False, "b": True}
"""Reports of a round, in the order in which they are launched, and whether each has the fault."""

_Made = TypeVar("_Made")

METRICS = {"slow": "time", "chatty": "traffic", "stock": "accuracy"}

Trial = tuple[int, Counter[str]]
"""The exit status of the gate, and the count of each verdict on the metric of the fault."""


def main() -> int:
    """Measure, judge and print; return 1 if a round has no verdict or a wrong one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", choices=METRICS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--launches", type=int, help="launches of each report (default: the minimum launches required)")
    parser.add_argument("--calibrating", type=int, default=calibration.ENOUGH, help="launches that calibrate (10)")
    parser.add_argument(
        "--fault", type=float, default=0.1, help="size of the fault; for slow a fraction of the time (0.1)"
    )
    parser.add_argument("--most", type=int, default=20, help="the most launches of a report (20)")
    parser.add_argument("--together", action="store_true", help="make all launches of a report in one run of pytest")
    parser.add_argument("--gpus", type=_several, default=[None], help="launch on these GPUs at once: 0,1")
    parser.add_argument("--keep", type=Path, help="folder for every report (end-to-end/PROBE)")
    parser.add_argument("pytest", nargs="+", help="arguments for pytest, after --")
    asked = parser.parse_args()
    asked.keep = asked.keep or Path("end-to-end", asked.probe)
    asked.keep.mkdir(parents=True, exist_ok=True)
    _refuse_another(asked)
    bench = Bench(asked.probe, asked.fault, asked.keep, asked.pytest, asked.gpus, together=asked.together)
    noise = asked.keep / "calibration.json"
    calibrated = bench.calibrating(asked.calibrating)
    calibration.dump(calibration.measure(calibrated), noise)
    in_force = calibration.load(noise)
    slowdown = asked.fault if asked.probe == "slow" else default_threshold("time") + PROMISED
    named = launches_needed(calibrated, in_force, slowdown)
    launches = asked.launches or min(asked.most, named or asked.most)
    found: dict[str, list[Trial]] = {"without_fault": [], "with_fault": []}
    rounds = bench.dealt(asked.rounds, lambda number, gpu: bench.round(number, launches, gpu))
    for number, one in enumerate(rounds):
        found["with_fault"].append(bench.judged(one["a"], one["b"], noise))
        if (other := following(number, asked.rounds, len(asked.gpus))) is not None:
            found["without_fault"].append(bench.judged(one["a"], rounds[other]["a"], noise))
    answer = {
        "probe": asked.probe,
        "fault": asked.fault,
        "arguments": asked.pytest,
        "rounds": asked.rounds,
        "gpus_at_once": len(asked.gpus),
        "together": asked.together,
        "sd_between_launches": {one.id: round(one.time.sd, 5) for one in in_force.cases.values()},
        "launches_asked_for": named,
        "launches": launches,
        **{name: summary(trials) for name, trials in found.items()},
    }
    answer["ok"] = proven(**found)
    json.dump(answer, sys.stdout, indent=2)
    print()
    return 0 if answer["ok"] else 1


def launches_needed(calibrated: Report, noise: Calibration, slowdown: float) -> int | None:
    """Return the launches in each report that show a slowdown of each case, the maximum over them; None above 1,000."""
    cases = [result for result in calibrated.cases if result.outcome == "completed"]
    needed = [
        noise_model.launches_needed(
            noise_model.prior_of(noise_regime.of_time(result)).calibrated(noise.of(result.key, "time")),
            slowdown=slowdown,
            threshold=default_threshold("time"),
            family=len(cases),
        )
        for result in cases
    ]
    return None if None in needed else max(count for count in needed if count is not None)


def _refuse_another(asked: argparse.Namespace) -> None:
    """Write the settings into the folder of the reports; refuse a folder that has different settings."""
    names = ("probe", "fault", "launches", "calibrating", "most", "together", "pytest")
    # Rounds are assigned to GPUs by number: with the same number of GPUs the rounds of one GPU stay together.
    settings = {**{name: getattr(asked, name) for name in names}, "gpus_at_once": len(asked.gpus)}
    path = asked.keep / "asked.json"
    if path.exists() and (present := json.loads(path.read_text())) != settings:
        raise SystemExit(f"--keep {asked.keep}: has reports of a different experiment: {present}")
    path.write_text(json.dumps(settings))


class Bench:
    """Runs of pytest with one of the probes, and the verdicts of the gate on their reports."""

    def __init__(
        self,
        probe: str,
        fault: float,
        folder: Path,
        arguments: Sequence[str],
        gpus: Sequence[str | None] = (None,),
        *,
        together: bool = False,
    ) -> None:
        """Set what is run, the folder of the reports, and the GPUs that launch at once; None lets the run choose."""
        self._probe, self._fault, self._folder, self._arguments = probe, fault, folder, arguments
        self._gpus, self._together = gpus, together

    def dealt(self, count: int, make: Callable[[int, str | None], _Made]) -> list[_Made]:
        """Return what is made for each number; number n runs on GPU n modulo the GPUs, one at a time on each."""
        failed = threading.Event()

        def on_one(place: int) -> list[_Made]:
            made = []
            for number in range(place, count, len(self._gpus)):
                if failed.is_set():
                    break  # the error of the other thread is raised below
                try:
                    made.append(make(number, self._gpus[place]))
                except BaseException:
                    failed.set()
                    raise
            return made

        with ThreadPoolExecutor(len(self._gpus)) as pool:
            made = list(pool.map(on_one, range(len(self._gpus))))
        return [made[number % len(self._gpus)][number // len(self._gpus)] for number in range(count)]

    def calibrating(self, launches: int) -> Report:
        """Return the report of the launches that calibrate the noise, without the fault."""
        path = self._folder / "calibrating.json.gz"
        if not path.exists():
            launched = self.dealt(launches, lambda number, gpu: self.launch(f"calibrating-{number}", gpu))
            file.dump(launch_merging.merge(launched), path)
        return file.load(path)

    def round(self, number: int, launches: int, gpu: str | None = None) -> dict[str, Path]:
        """Make the launches of both reports, alternating unless together; return the paths of the reports."""
        paths = {side: self._folder / f"{number}-{side}.json.gz" for side in SIDES}
        if all(path.exists() for path in paths.values()):
            return paths
        found: dict[str, list[Report]] = {side: [] for side in SIDES}
        times, at_once = (1, launches) if self._together else (launches, 1)
        for launch in range(times):
            for side, faulty in SIDES.items():
                found[side].append(self.launch(f"{number}-{side}-{launch}", gpu, at_once, faulty=faulty))
        for side, path in paths.items():
            file.dump(launch_merging.merge(found[side]), path)
        print(f"round {number + 1} is measured", file=sys.stderr)
        return paths

    def launch(self, name: str, gpu: str | None = None, launches: int = 1, *, faulty: bool = False) -> Report:
        """Run pytest once, on a GPU, with the fault or without; return its report."""
        path = self._folder / f"{name}.json"
        here = Path(__file__).parent
        environ = {**os.environ, "LLMGPU_FAULT": str(self._fault if faulty else 0.0)}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here.resolve()), os.environ.get("PYTHONPATH")]))
        if gpu is not None:
            environ["CUDA_VISIBLE_DEVICES"] = gpu
        suite = [str(here.parent), f"--strategy=probes:{self._probe.upper()}", f"--llmgpu-json={path}"]
        suite += [f"--llmgpu-launches={launches}"] * (launches > 1)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite, *self._arguments]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}")
        measured = file.load(path)
        path.unlink()  # its launch becomes part of a merged report
        return measured

    def judged(self, base: Path, head: Path, noise: Path) -> Trial:
        """Return the exit status and the verdicts of the gate on two reports."""
        command = [sys.executable, "-m", "pytest_llmgpu.cli", "gate", str(base), str(head), "--calibration", str(noise)]
        done = subprocess.run([*command, "--json", "-"], stdout=subprocess.PIPE, text=True, check=False)
        rows = json.loads(done.stdout)["rows"]
        return done.returncode, Counter(row["verdict"] for row in rows if row["metric"] == METRICS[self._probe])


def _several(text: str) -> list[str]:
    names = text.split(",")
    if not all(names) or len({*names}) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are numbers of GPUs separated by commas, each once: 0,1")
    return names


def following(number: int, rounds: int, gpus: int) -> int | None:
    """Return the next round of the same GPU, cyclic; of another GPU if it has no other; None without one."""
    follower = number + gpus if number + gpus < rounds else number % gpus
    if follower == number:
        follower = (number + 1) % rounds
    return None if follower == number else follower


def proven(with_fault: Sequence[Trial], without_fault: Sequence[Trial]) -> bool:
    """Return whether every round has a verdict and all verdicts are correct.

    NOT_ENOUGH_DATA is correct with and without the fault: the noise may hide it. A row that is INVALID, IMPROVED or of
    another kind is not about the fault.
    """
    return (
        bool(with_fault)
        and all(_true(trial, {"REGRESSED", "NOT_ENOUGH_DATA"}) for trial in with_fault)
        and all(_true(trial, {"OK", "NOT_ENOUGH_DATA"}) for trial in without_fault)
    )


def _true(trial: Trial, allowed: set[str]) -> bool:
    """Return whether there is a row, each verdict is allowed, and the exit status agrees."""
    status, rows = trial
    verdicts = {verdict for verdict, count in rows.items() if count}
    # 3: the noise would have hidden a slowdown of 50 % (`largest_unseen_slowdown`).
    agreeing = {1} if "REGRESSED" in verdicts else {0, 3} if "NOT_ENOUGH_DATA" in verdicts else {0}
    return bool(verdicts) and verdicts <= allowed and status in agreeing


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """Count the exit statuses, the verdicts, and the rounds with a REGRESSED row."""
    rows: Counter[str] = sum((counted for _, counted in trials), Counter())
    return {
        "exit_status": dict(sorted(Counter(str(status) for status, _ in trials).items())),
        "rounds_regressed": sum(counted["REGRESSED"] > 0 for _, counted in trials),
        "rows": dict(sorted(rows.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
