"""Inject seven faults into a model of four layers, and check that the gate names each of them; prints JSON.

A round is one session of the plugin per strategy: built-in strategies, random weights, LLaMA-7B's width on GPUs and a
small width on a CPU, forwards run eagerly. The test of the session calls `llm.run(inject, FAULT)` before it measures,
so that the loaded model has one fault at a time. Each fault is judged against the healthy measurement of the next
round, which is another launch of the processes. The healthy measurements are judged against each other as well, and
must not be REGRESSED. `right`: the expected metric is REGRESSED, and its cause names the expected family or module (for
a slower rank the rank, for the host the host or the call). The exit status is 0 if all faults but one are right and
nothing healthy is REGRESSED.

On a machine with two GPUs (one GPU: without tp; a session takes about a minute):

    python benchmarks/gate/faults.py --keep=faults > faults.json

Without a GPU, as a trial of the script: FLOPs and traffic are found, over gloo for tp. One launch on a CPU shows the
sleeping host only if nothing else uses the CPU:

    python benchmarks/gate/faults.py --device=cpu --rounds=1 --strategies=mp,tp

Reports in --keep are not measured again, so that an interrupted run continues and reports can be judged elsewhere.
Arguments after -- go to pytest. It needs the package alone; for iok its extra `deepspeed`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.gate import cause as causes
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.inference import bundled
from pytest_llmgpu.report import file
from pytest_llmgpu.report.cause import Cause
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Row

if TYPE_CHECKING:
    import torch

    from pytest_llmgpu.strategies.protocol import Loaded

HEALTHY = "healthy"
"""The measurement without a fault."""

_MLP = "layers.*.mlp"
"""The module that every fault is injected into, so that mp, tp and iok have it under one name."""

_SUITE = """
import pytest

import faults


@pytest.mark.parametrize("fault", [{names}])
def test_fault(fault, llm, hellaswag, batch_size, measure):
    llm.run(faults.inject, fault)
    measure(llm, hellaswag, batch_size)
"""

_SIZES: dict[str, dict[str, object]] = {
    "cuda": {**bundled.PRESETS["llama-7b"], "num_hidden_layers": 4},
    "cpu": {
        **bundled.PRESETS["llama-7b"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
    },
}

ITEMS = {"cuda": 48, "cpu": 6}
"""Items of the dataset that are scored."""

TOKENIZER = Path(bundled.__file__).parent / "model"
ARGUMENTS = ("--llmgpu-load-format=dummy", "--llmgpu-cuda-graphs=off", "--llmgpu-batch-sizes=8")


class Site:
    """The output of a module in a forward, and what a fault needs to act on it."""

    def __init__(self, loaded: Loaded, layer: int, hidden: torch.Tensor) -> None:
        """Describe the output `hidden` of a module in a layer of a rank."""
        self.loaded, self.layer, self.hidden = loaded, layer, hidden

    def multiply(self, times: int, dtype: str | None = None) -> None:
        """Multiply the output by a matrix, and drop the products; with a dtype, after a cast to it."""
        import torch

        rows = self.hidden.flatten(0, -2)
        rows = rows if dtype is None else rows.to(getattr(torch, dtype))
        matrix = _matrix(rows.shape[-1], rows.dtype, rows.device)
        for _ in range(times):
            torch.mm(rows, matrix)

    def all_reduce(self) -> None:
        """Sum zeros over the ranks: the answers do not change."""
        import torch

        torch.distributed.all_reduce(torch.zeros_like(self.hidden))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and what the gate has to name."""

    act: Callable[[Site], None]
    """Called after the MLP of each layer."""
    metric: str
    """Metric that has to be REGRESSED on GPUs."""
    metric_on_cpu: str | None
    """Metric that has to be REGRESSED on a CPU; None: the fault does not exist there."""
    family: str | None = None
    """Family of kernels that has to be named, unless the module is."""
    call: str | None = None
    """Part of the name of an op or a function whose number of calls has to be named, unless the family or module is."""
    call_on_cpu: str | None = None
    """The same on a CPU, where no kernels are recorded; None: no cause is expected there."""
    host: bool = False
    """True if the host has to be named."""
    rank: int | None = None
    """Rank that has to be named."""
    several_ranks: bool = False
    """True if the fault needs several ranks."""


@functools.cache
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    return torch.full((size, size // 2), 1e-3, dtype=dtype, device=device)


def _first_layer(site: Site, times: int, dtype: str | None = None) -> None:
    if site.layer == 0:
        site.multiply(times, dtype)


def _wait(site: Site) -> None:
    site.hidden.flatten()[0].item()


FAULTS = {
    "one layer slower": Fault(
        act=lambda site: _first_layer(site, 6),
        metric="device_time",
        metric_on_cpu="flops",
        family="GEMM",
        call_on_cpu="mm",
    ),
    "all layers slower": Fault(
        act=lambda site: site.multiply(2), metric="device_time", metric_on_cpu="flops", family="GEMM", call_on_cpu="mm"
    ),
    "a cast to float32": Fault(
        act=lambda site: _first_layer(site, 1, "float64" if site.hidden.device.type == "cpu" else "float32"),
        metric="device_time",
        metric_on_cpu="flops",
        family="GEMM",
        call_on_cpu="mm",
    ),
    "one more all-reduce": Fault(
        act=Site.all_reduce,
        metric="traffic",
        metric_on_cpu="traffic",
        call="all_?reduce",
        call_on_cpu="all_?reduce",
        several_ranks=True,
    ),
    "host sleep": Fault(act=lambda _: time.sleep(0.025), metric="time", metric_on_cpu="time", host=True),
    "host synchronization": Fault(act=_wait, metric="host_syncs", metric_on_cpu=None, call="Synchronize"),
    "a slower rank": Fault(
        act=lambda site: site.multiply(2 * site.loaded.rank),
        metric="device_time",
        metric_on_cpu="flops",
        call_on_cpu="mm",
        rank=1,
        several_ranks=True,
    ),
}

_HOOKS: list[Any] = []


def inject(loaded: Loaded, name: str) -> None:
    """Replace the fault of a loaded model; runs in each rank.

    Args:
        loaded: The model.
        name: A key of `FAULTS`, or `HEALTHY`.
    """
    while _HOOKS:
        _HOOKS.pop().remove()
    if name == HEALTHY:
        return
    decoder: Any = loaded.model.get_decoder()  # type: ignore[operator]  # a llama

    def hook(layer: int) -> Callable[[Any, Any, Any], None]:
        def after(_module: Any, _inputs: Any, output: Any) -> None:
            FAULTS[name].act(Site(loaded, layer, output[0] if isinstance(output, tuple) else output))

        return after

    for number, layer in enumerate(decoder.layers):
        _HOOKS.append(layer.mlp.register_forward_hook(hook(number)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, judge and print; return 0 if all faults but one are named and nothing healthy is REGRESSED."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="launches of each strategy (3)")
    parser.add_argument("--strategies", default="mp,tp,iok", help="strategies, separated by commas (mp,tp,iok)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of the forwards (cuda)")
    parser.add_argument("--keep", type=Path, help="folder for the reports (default: a temporary one)")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        found: list[dict[str, Any]] = []
        for strategy in asked.strategies.split(","):
            devices = devices_of(strategy, asked.device)
            if devices is None:
                print(f"{strategy} is left out: it needs two GPUs", file=sys.stderr)
                continue
            names = [HEALTHY, *faults_of(devices, asked.device)]
            rounds = [
                session(folder / f"{strategy}-{number}.json.gz", strategy, devices, asked.device, names, asked.pytest)
                for number in range(asked.rounds)
            ]
            for number, heads in enumerate(rounds):
                base = rounds[(number + 1) % len(rounds)][HEALTHY]
                found += [
                    {"strategy": strategy, "round": number, **judged(base, heads[name], name, asked.device)}
                    for name in (names if len(rounds) > 1 else names[1:])
                ]
    answer = summary(found)
    json.dump(answer, sys.stdout, indent=1)
    print()
    return 0 if answer["ok"] else 1


def model_config(device: str) -> dict[str, object]:
    """Return the `config.json` of the model of four layers."""
    return {"model_type": "llama", **_SIZES[device]}


def devices_of(strategy: str, device: str) -> int | None:
    """Return the number of devices of a strategy on this machine; None if there are too few."""
    if strategy == "mp":
        return 1
    if device == "cpu":
        return 2
    import torch

    gpus = min(2, torch.cuda.device_count())
    return None if strategy == "tp" and gpus < 2 else gpus


def faults_of(devices: int, device: str) -> list[str]:
    """Return the faults that exist on these devices."""
    return [
        name
        for name, fault in FAULTS.items()
        if (devices > 1 or not fault.several_ranks) and (device == "cuda" or fault.metric_on_cpu is not None)
    ]


def session(
    path: Path, strategy: str, devices: int, device: str, names: Sequence[str], arguments: Sequence[str]
) -> dict[str, Report]:
    """Run the plugin once; return a report for each fault, all with the same id of their case."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            suite = Path(temporary, "test_faults.py")
            suite.write_text(_SUITE.format(names=", ".join(map(repr, names))))
            model = Path(temporary, "llama-4-layers")
            model.mkdir()
            (model / "config.json").write_text(json.dumps(model_config(device)))
            here = str(Path(__file__).parent.resolve())
            search = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite), *ARGUMENTS]
            command += [f"--rootdir={temporary}", f"--strategy={strategy}", f"--llmgpu-device={device}"]
            command += [f"--llmgpu-devices={devices}", f"--llmgpu-model={model}", f"--llmgpu-limit={ITEMS[device]}"]
            command += [f"--llmgpu-tokenizer={TOKENIZER}", f"--llmgpu-json={path.resolve()}", *arguments]
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": search}, stdout=subprocess.PIPE, text=True, check=False
            )
        if done.returncode:
            path.unlink(missing_ok=True)
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}")
        print(f"{path.name} is measured", file=sys.stderr)
    return split(file.load(path), names)


def split(report: Report, names: Sequence[str]) -> dict[str, Report]:
    """Return a report for each fault, from the report of a session in which each fault is one test."""
    found = {}
    for name in names:
        (result,) = [
            one for one in report.cases if f"[{name}" in (one.nodeid or "") or f"-{name}" in (one.nodeid or "")
        ]
        found[name] = msgspec.structs.replace(report, cases=[msgspec.structs.replace(result, id=result.case.id)])
    return found


def judged(base: Report, head: Report, name: str, device: str) -> dict[str, Any]:
    """Return the metrics that are REGRESSED, the cause of the expected one, and if both are right."""
    verdicts = judge(base, head, Policy(), today=datetime.datetime.now(datetime.timezone.utc).date())
    regressed = {row.metric: row for row in verdicts.rows if row.verdict == "REGRESSED"}
    if name == HEALTHY:
        gated = sorted(metric for metric, row in regressed.items() if row.gated)
        return {"fault": name, "regressed": gated, "right": not gated}
    fault = FAULTS[name]
    metric = fault.metric if device == "cuda" else fault.metric_on_cpu
    row = regressed.get(metric or "")
    cause = row.cause if row is not None else None
    return {
        "fault": name,
        "regressed": sorted(regressed),
        "expected": {"metric": metric, **expected(fault, device)},
        "change": row.ratio - 1 if row is not None and row.ratio is not None else None,
        "cause": causes.describe(cause) if cause is not None else None,
        "family": next((part.name for part in cause.parts), None) if cause is not None else None,
        "module": next((part.name for part in cause.modules), None) if cause is not None else None,
        "right": is_right(row, fault, device),
    }


def expected(fault: Fault, device: str) -> dict[str, object]:
    """Return what a cause has to name: one of the entries; nothing for times on a CPU."""
    if device == "cpu":
        return {"call": fault.call_on_cpu} if fault.call_on_cpu is not None else {}
    if fault.rank is not None:
        return {"rank": fault.rank}
    if fault.host:
        return {"place": "host"}
    names = {"module": _MLP, "family": fault.family, "call": fault.call}
    return {key: value for key, value in names.items() if value is not None}


def is_right(row: Row | None, fault: Fault, device: str) -> bool:
    """Return whether the expected metric is REGRESSED and its cause names one of the expected entries."""
    wanted = expected(fault, device)
    if row is None or not wanted:
        return row is not None
    return row.cause is not None and any(_names(row.cause, key, value) for key, value in wanted.items())


def _names(cause: Cause, key: str, value: object) -> bool:
    if key == "rank":
        return cause.rank == value
    if key == "place":
        return cause.place == value
    if key == "family":
        return cause.parts[:1] != [] and cause.parts[0].name == value
    if key == "module":
        return cause.modules[:1] != [] and cause.modules[0].name == value
    calls = [*cause.kernels, *cause.runtime_calls, *cause.ops]
    return any(re.search(str(value), change.name, re.IGNORECASE) and change.growth > 0 for change in calls)


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of faults that were named, of healthy measurements that were not REGRESSED, and all of them."""
    faults = [one for one in found if one["fault"] != HEALTHY]
    healthy = [one for one in found if one["fault"] == HEALTHY]
    right, quiet = (sum(one["right"] for one in ones) for ones in (faults, healthy))
    return {
        "faults": len(faults),
        "right": right,
        "healthy": len(healthy),
        "not_regressed": quiet,
        "ok": bool(faults) and right >= len(faults) - 1 and quiet == len(healthy),
        "wrong": [f"{one['strategy']} round {one['round']}: {one['fault']}" for one in found if not one["right"]],
        "trials": list(found),
    }


if __name__ == "__main__":
    sys.exit(main())
