"""Inject faults into a model of eight layers, and check that the gate names each of them; prints JSON.

A session of the plugin measures the healthy program, then one fault at a time, then the healthy program again: random
weights, LLaMA-7B's width on GPUs and a small one on a CPU. The test of the session calls `llm.run(inject, FAULT)` and
measures: CUDA graphs are recorded after that, and layers are compiled again. The baseline is the first measurement.

`right`: the row of the fault has the expected verdict and names its kernel, op, CUDA call or Python file, and its
module. The second healthy measurement is right if no row is REGRESSED and the program is equal. `injected` does not
depend on the gate: ops, calls and answers differ as expected, or, of the healthy program, not at all. The exit status
is 0 if all faults but one are right and nothing healthy is wrong.

On one GPU, with the extra `deepspeed` for iok, whose kernels are compiled once; without a GPU as a trial of the script:

    python benchmarks/gate/faults.py --keep=faults > faults.json
    python benchmarks/gate/faults.py --device=cpu --strategies=mp,compile

Reports in --keep are not measured again, so that an interrupted run continues and reports can be judged elsewhere.
Arguments after -- go to pytest.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.inference import bundled
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, typical_difference
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import SEVERITY, Row

if TYPE_CHECKING:
    from pytest_llmgpu.strategies.protocol import Loaded

HEALTHY, AGAIN = "healthy", "healthy again"
"""The measurements without a fault: the baseline, and the check for false alarms."""

WORKLOADS = {"score": "hellaswag", "generate": "prompts"}
"""Each workload and the fixture with its items."""

_SUITE = """
import pytest

import faults


@pytest.mark.parametrize("fault", {names})
def test_fault(fault, llm, {items}, batch_size, measure):
    llm.run(faults.inject, fault)
    measure(llm, {items}, batch_size)
"""

_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES: dict[str, dict[str, object]] = {
    "cuda": {"model_type": "llama", **bundled.PRESETS["llama-7b"], "num_hidden_layers": 8},
    "cpu": {"model_type": "llama", **_SMALL, "num_hidden_layers": 4, "vocab_size": 1024},
}

ITEMS = {"cuda": {"score": 12, "generate": 16}, "cpu": {"score": 2, "generate": 8}}
"""Items of the dataset: six batches on GPUs to score, two to generate; one on a CPU."""

TOKENIZER = Path(bundled.__file__).parent / "model"
ARGUMENTS = ("--llmgpu-load-format=dummy", "--llmgpu-batch-sizes=8")

_LOCK = threading.Condition()
"""Its methods are Python code, so that its calls are counted by their file."""

_UNDO: list[Callable[[], object]] = []


class Target:
    """The parts of a loaded model that faults act on. The layers of iok are modules of DeepSpeed."""

    def __init__(self, loaded: Loaded) -> None:
        """Find the parts of a llama."""
        self.model: Any = loaded.model
        self.decoder: Any = self.model.get_decoder()
        self.layers = list(self.decoder.layers)
        self.attentions = [getattr(layer, "self_attn", None) or layer.attention for layer in self.layers]
        self.mlps = [layer.mlp for layer in self.layers]
        self.one_layer, self.one_attention, self.one_mlp = self.layers[1:2], self.attentions[1:2], self.mlps[1:2]
        self.heads = [self.model.get_output_embeddings()]
        self.own_kernels = not hasattr(self.layers[0], "self_attn")
        """True for iok."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault, and what the gate has to name."""

    inject: Callable[[Target], None]
    """Changes the model; `_hook` and `_replace` keep what undoes it."""
    name: str | None = None
    """Regular expression of the kernel, op, CUDA call or Python file; None for an answer that is wrong."""
    module: str = ""
    """Regular expression of the folded module; empty for calls of the host, which have none."""
    _: dataclasses.KW_ONLY
    verdict: str = "REGRESSED"
    """Expected verdict. Added kernels below 0.2 % of device time, and calls of the host, are CHANGED."""
    compiled: str | None = None
    """Expected verdicts under compile, if they differ: the compiler removes some faults."""
    flops: bool = False
    """True if the fault adds FLOPs: on a CPU other faults are CHANGED."""
    left_out: str = "$^"
    """Regular expression of the strategies, workloads and devices that do not have the fault."""

    def verdicts(self, strategy: str, device: str) -> list[str]:
        """Return the verdicts that are right."""
        if device == "cpu" and self.name is not None:
            return ["REGRESSED" if self.flops else "CHANGED"]
        return ((strategy == "compile" and self.compiled) or self.verdict).split("|")


def _hook(
    parts: str, act: Callable[[Any], Any], *, kept: bool = False, eager: bool = False
) -> Callable[[Target], None]:
    """Return what lets a function act on the output of modules in each forward.

    Args:
        parts: The name of a list of modules of `Target`. Hooks on `layers` are not compiled.
        act: The function. It gets a tensor.
        kept: Its result replaces the output.
        eager: Not while a CUDA graph is recorded, in which the host cannot wait: eager passes have the fault.
    """

    def after(_module: Any, _inputs: Any, output: Any) -> Any:
        if eager and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        found = act(output[0] if isinstance(output, tuple) else output)
        return found if kept else None

    return lambda target: _UNDO.extend(one.register_forward_hook(after).remove for one in getattr(target, parts))


def _replace(owner: Any, name: str, value: object) -> None:
    """Set an attribute of a module, a config or a class."""
    if name in vars(owner) or not hasattr(type(owner), name):
        _UNDO.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    else:
        _UNDO.append(functools.partial(delattr, owner, name))
    setattr(owner, name, value)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a wider dtype."""
    return tensor.double() if tensor.element_size() == 4 else tensor.float()


def _build_mask(hidden: torch.Tensor) -> None:
    rows, tokens, _ = hidden.shape
    mask = hidden.new_ones(tokens, tokens).tril().expand(rows, 1, -1, -1)
    mask.masked_fill(mask == 0, -1.0)


def _lock(_: torch.Tensor) -> None:
    with _LOCK:
        pass


def _add_adapters(target: Target) -> None:
    """Add an adapter of rank 16 to each MLP, whose second matrix is 0 as before a training."""
    weight = target.heads[0].weight
    down = torch.full((weight.shape[1], 16), 1e-3, dtype=weight.dtype, device=weight.device)
    up = torch.zeros_like(down.t())
    _hook("mlps", lambda hidden: hidden + hidden @ down @ up, kept=True)(target)


def _split_products(target: Target) -> None:
    """Compute the last product of each MLP in four parts, and add them."""

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        parts = zip(hidden.flatten(0, -2).chunk(4, dim=-1), self.weight.chunk(4, dim=-1), strict=True)
        first, *others = [part @ weight.t() for part, weight in parts]
        for other in others:
            first = first + other
        return first.view(*hidden.shape[:-1], -1)

    for mlp in target.mlps:
        _replace(mlp.down_proj, "forward", MethodType(forward, mlp.down_proj))


def _compute_norm_twice(target: Target) -> None:
    once = target.decoder.norm.forward
    _replace(target.decoder.norm, "forward", lambda hidden: (once(hidden), once(hidden))[1])


def _widen_attention(target: Target) -> None:
    """Compute the attention of one layer in float32; for iok, whose kernels are fixed, in addition to its own."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    (attention,), heads = target.one_attention, target.model.config.num_attention_heads

    def in_addition(hidden: torch.Tensor) -> None:
        states = _wide(hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
        torch.nn.functional.scaled_dot_product_attention(states, states, states, is_causal=True)

    def instead(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        found, _ = sdpa_attention_forward(module, _wide(query), _wide(key), _wide(value), mask, **named)
        return found.to(query.dtype), None

    if target.own_kernels:
        return _hook("one_attention", in_addition)(target)
    ALL_ATTENTION_FUNCTIONS["wide"] = instead
    config = copy.copy(attention.config)
    config._attn_implementation = "wide"  # noqa: SLF001 - transformers has no other name for it
    return _replace(attention, "config", config)


def _write_cache_twice(_: Target) -> None:
    from pytest_llmgpu.inference.generation import LayerCache

    once = LayerCache.update
    _replace(LayerCache, "update", lambda *given, **named: (once(*given, **named), once(*given, **named))[1])


def _change_rope_base(target: Target) -> None:
    """Use the base of LLaMA-3 in place of 10,000."""
    for layer in target.layers if target.own_kernels else []:
        _replace(layer.config, "rope_theta", 500_000.0)
    rotary = target.decoder.rotary_emb  # its frequencies are powers of the base
    _replace(rotary, "inv_freq", rotary.inv_freq ** math.log(500_000, 10_000))


def _change_epsilon(target: Target) -> None:
    for layer in target.layers if target.own_kernels else []:
        _replace(layer.config, "epsilon", 1e-3)
    for norm in [module for module in target.model.modules() if hasattr(module, "variance_epsilon")]:
        _replace(norm, "variance_epsilon", 1e-3)


def _scale_one_layer(target: Target) -> None:
    (mlp,) = target.one_mlp
    weight = (mlp.output_w if target.own_kernels else mlp.down_proj.weight).data
    weight.mul_(2)  # a power of 2, which can be undone exactly
    _UNDO.append(lambda: weight.mul_(0.5))


_LAYER = r"(?<![\w.])layers\.\*(?![\w.])"
_ATTENTION = r"layers\.\*\.(self_attn|attention)(?![\w.])"
_MLP = r"layers\.\*\.mlp(?!\w)"
_HEAD, _NORM = r"(?<![\w.])lm_head(?!\w)", r"(?<![\w.])norm(?!\w)"
_GEMM = "gemm|nvjet|cutlass|gemv|splitK"

FAULTS = {
    "clone of each attention": Fault(
        _hook("attentions", lambda hidden: hidden.clone()), "clone|DtoD", _ATTENTION, compiled="CHANGED"
    ),
    "clone of one number": Fault(
        _hook("one_layer", lambda hidden: hidden[:1, :1, :1].clone()), "clone|DtoD", _LAYER, verdict="CHANGED"
    ),
    "cast in each layer": Fault(
        _hook("layers", lambda hidden: _wide(hidden).to(hidden.dtype), kept=True), "copy", _LAYER
    ),
    "transposed copy in each layer": Fault(
        _hook("layers", lambda hidden: hidden.transpose(0, -1).contiguous()), "clone|copy", _LAYER
    ),
    "mask built in each layer": Fault(_hook("layers", _build_mask), "tril|masked_fill", _LAYER),
    "final norm twice": Fault(_compute_norm_twice, "rsqrt|pow|mean|Mean", _NORM),
    "adapters": Fault(_add_adapters, f"{_GEMM}|::mm$", _MLP, flops=True),
    "split products": Fault(_split_products, f"{_GEMM}|::mm$|::add$", rf"{_MLP}\.down_proj", left_out="iok"),
    "attention of one layer in float32": Fault(_widen_attention, "attention|fmha|sdpa|copy", _ATTENTION),
    "cache written twice": Fault(
        _write_cache_twice, "index|copy", _ATTENTION, compiled="REGRESSED|CHANGED", left_out="iok|score"
    ),
    "sampler on the device": Fault(
        _hook("heads", lambda logits: logits.float().softmax(-1).cumsum(-1)), "softmax|cumsum|scan", _HEAD
    ),
    "sampler on the host": Fault(
        _hook("heads", lambda logits: _wide(logits).to("cpu", copy=True).argmax(-1), eager=True),
        "Synchronize|DtoH|_to_copy|argmax",
    ),
    "hook on each MLP": Fault(_hook("mlps", lambda _: None), r"faults\.py", verdict="CHANGED"),
    "lock in each layer": Fault(_hook("layers", _lock), r"threading\.py", verdict="CHANGED"),
    "synchronization": Fault(
        _hook("one_layer", lambda _: torch.cuda.synchronize(), eager=True), "Synchronize", left_out="cpu"
    ),
    "rope base": Fault(_change_rope_base),
    "norm epsilon": Fault(_change_epsilon),
    "scale in one layer": Fault(_scale_one_layer),
}


def inject(loaded: Loaded, name: str) -> None:
    """Replace the fault of a loaded model; runs in each rank.

    Args:
        loaded: The model.
        name: A key of `FAULTS`; another name is healthy.
    """
    while _UNDO:
        _UNDO.pop()()
    if name in FAULTS:
        FAULTS[name].inject(Target(loaded))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, judge and print; return 0 if all faults but one are right and nothing healthy is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="mp,iok,compile", help="separated by commas (mp,iok,compile)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="separated by commas (score,generate)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of the forwards (cuda)")
    parser.add_argument("--model", help="--llmgpu-model (default: a llama of eight layers, on a CPU of four)")
    parser.add_argument("--keep", type=Path, help="folder for the reports (default: a temporary one)")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    asked = parser.parse_args(arguments)
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for strategy in asked.strategies.split(","):
            for workload in asked.workloads.split(","):
                path = (asked.keep or Path(temporary)) / f"{strategy.replace(':', '-')}-{workload}.json.gz"
                found = session(path, strategy, workload, asked.device, asked.model, asked.pytest)
                for name in list(found)[1:]:
                    trial = judged(found[HEALTHY], found[name], name, strategy, workload, asked.device)
                    trials.append({"strategy": strategy, "workload": workload, **trial})
    answer = summary(trials)
    json.dump(answer, sys.stdout, indent=1)
    print()
    return 0 if answer["ok"] else 1


def session(
    path: Path, strategy: str, workload: str, device: str, model: str | None, arguments: Sequence[str]
) -> dict[str, Report]:
    """Run the plugin once; return a report for each measurement, all with the same id of their case."""
    place = f"{strategy} {workload} {device}"
    names = [HEALTHY, *(name for name, fault in FAULTS.items() if not re.search(fault.left_out, place)), AGAIN]
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            suite = Path(temporary, "test_faults.py")
            suite.write_text(_SUITE.format(names=names, items=WORKLOADS[workload]))
            Path(temporary, "config.json").write_text(json.dumps(SIZES[device]))
            search = [str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")]
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite), *ARGUMENTS]
            command += [f"--rootdir={temporary}", f"--strategy={strategy}", f"--llmgpu-device={device}"]
            command += ["--llmgpu-devices=1", f"--llmgpu-model={model or temporary}", f"--llmgpu-tokenizer={TOKENIZER}"]
            command += [f"--llmgpu-limit={ITEMS[device][workload]}", f"--llmgpu-json={path.resolve()}", *arguments]
            command += ["--llmgpu-new-tokens=16"] if workload == "generate" else []
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode not in (0, 1) or not path.exists():  # 1: wrong answers fail their tests
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}")
        print(f"{path.name}: {done.stdout.splitlines()[-1]}", file=sys.stderr)
    report = file.load(path)
    found = {}
    for name in names:
        (result,) = [one for one in report.cases if re.search(rf"[\[-]{name}[\]-]", one.nodeid or "")]
        found[name] = msgspec.structs.replace(report, cases=[msgspec.structs.replace(result, id=result.case.id)])
    return found


def judged(base: Report, head: Report, name: str, strategy: str, workload: str, device: str) -> dict[str, Any]:
    """Return the expected row, those that differ with the first line of their reason, and if they are right."""
    verdicts = judge(base, head, Policy(), today=datetime.datetime.now(datetime.timezone.utc).date())
    rows = [row for row in verdicts.rows if row.verdict in {"REGRESSED", "CHANGED"}]
    before, after = counts_of(base.cases[0]), counts_of(head.cases[0])
    added = {key: after[key] - before[key] for key in after | before if after[key] != before[key]}
    wrong_answers = answers_differ(base.cases[0], head.cases[0])
    shown = {
        "fault": name,
        "rows": [f"{row.verdict} {row.metric}: {row.reason.partition(chr(10))[0]}" for row in rows],
        "added": dict(sorted(added.items())),
        "answers_differ": wrong_answers,
    }
    if name not in FAULTS:
        quiet = not any((row.gated and row.verdict == "REGRESSED") or row.metric == "program" for row in rows)
        return {**shown, "right": quiet, "injected": bool(added) or wrong_answers}
    fault, answers = FAULTS[name], {"score": "accuracy", "generate": "texts"}[workload]
    metric, expected = answers if fault.name is None else "program", fault.verdicts(strategy, device)
    worst = min(
        (row for row in rows if row.metric == metric), key=lambda row: SEVERITY.index(row.verdict), default=None
    )
    injected = not added and wrong_answers if fault.name is None else any(names(fault, key) for key in added)
    wanted = {"row": metric, "verdict": expected, "name": fault.name, "module": fault.module}
    right = worst is not None and worst.verdict in expected and is_named(worst, fault)
    return {**shown, "expected": wanted, "right": right, "injected": injected}


def counts_of(result: CaseResult) -> Counter[str]:
    """Return the exact numbers of the work passes: of ops by module, calls by file, waiting calls and FLOPs."""
    launch, found = result.launches[0], Counter[str]()
    for kind, work in (("", launch.work), ("prefill ", launch.prefill_work)):
        for rank in [] if work is None else work.ranks:
            for module, ops in (rank.ops_by_module or {}).items():
                found.update({f"{kind}{module} {op}": calls for op, calls in ops.items()})
            calls = rank.host_calls.by_file if rank.host_calls is not None else {}
            waiting = {call: number for call, number in (rank.runtime_calls or {}).items() if "Synchronize" in call}
            found.update({f"{kind}{name}": number for name, number in {**calls, **waiting}.items()})
            found[f"{kind}FLOPs"] += rank.flops or 0
    return found


def answers_differ(base: CaseResult, head: CaseResult) -> bool:
    """Return whether log-likelihoods differ by more than rounding: of endings, or of the first token of each text."""
    values = []
    for launch in (base.launches[0], head.launches[0]):
        texts, scores = launch.generation, launch.accuracy
        first_tokens = [] if texts is None else decode(texts.loglikelihoods)[:: texts.new_tokens[0]]
        values.append(first_tokens if scores is None else decode(scores.loglikelihoods))
    return typical_difference(values[1], values[0]) > LOGLIKELIHOOD_TOLERANCES[base.case.dtype]


def names(fault: Fault, text: str) -> bool:
    """Return whether one line has the name and the module of a fault."""
    return all(re.search(pattern, text) for pattern in (fault.name or "", fault.module))


def is_named(row: Row, fault: Fault) -> bool:
    """Return whether a line of the reason, or a change of the cause, names the fault with its module."""
    lists = ("kernels", "ops", "runtime_calls", "host_calls")
    changes = [change for kind in lists for change in getattr(row.cause, kind, None) or []]
    found = [f"{change.module} {change.name}" for change in changes if change.growth > 0]
    return any(names(fault, line) for line in [*row.reason.splitlines(), *found])


def summary(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of trials that are right, those that are wrong, and all of them."""
    wrong = [one for one in trials if not one["right"]]
    return {
        "faults": sum(one["fault"] in FAULTS for one in trials),
        "right": sum(one["fault"] in FAULTS and one["right"] for one in trials),
        "ok": bool(trials) and len(wrong) <= 1 and all(one["fault"] in FAULTS for one in wrong),
        "wrong": [f"{one['strategy']} {one['workload']}: {one['fault']}" for one in wrong],
        "trials": list(trials),
    }


if __name__ == "__main__":
    sys.exit(main())
