from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import tiny_model

from pytest_llmgpu import processes
from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.models import ModelFacts
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.ranks import registered
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Gpu
from pytest_llmgpu.session.planner import Planner
from pytest_llmgpu.session.runner import CaseRequest
from pytest_llmgpu.strategies.iok import KernelInjection
from pytest_llmgpu.strategies.mp import LayerParallel

_FACTS = models.facts
_GIB = 2**30
_GPUS = [Gpu(index=number, uuid=f"GPU-{number}", name="H", memory_bytes=32 * _GIB) for number in (0, 1)]


def _strategy(name: str, **members: Any) -> Any:
    """Return the class of a strategy of this name."""
    return type(name, (LayerParallel,), {"name": name, **members})


Mine, AlsoMine = _strategy("load"), _strategy("load")  # the name is the first word of an option
Tensor = _strategy("tp", backend="nowhere")  # with the options of tp
Injection = _strategy("iok", backend="accelerate")  # with the options of iok
Ranks = _strategy("tensor", ranks=lambda _, devices: devices)  # one for each device

_ALSO_MINE = f"{__name__}:AlsoMine"
_KNOWN = {
    **registered.BUILT_IN,
    "load": f"{__name__}:Mine",
    "wrong": _ALSO_MINE,
    "tp": f"{__name__}:Tensor",
    "iok": f"{__name__}:Injection",
    "tensor": f"{__name__}:Ranks",
}


def _machine(device: str = "cuda", devices: int = 2, **fields: Any) -> Machine:
    gpus = _GPUS[:devices] if device == "cuda" else []
    return Machine(device=device, devices=devices, gpus=gpus, facts=TorchFacts(version="2"), **fields)


_TWO_NODES = _machine(nodes=[0, 1])


class _Bench:
    """A planner of the tiny model on a machine."""

    def __init__(self, model: Path, rootdir: Path) -> None:
        """Start on two GPUs."""
        self.model, self.rootdir = model, rootdir
        self.facts = ModelFacts(has_plan=True)
        """What transformers answers about the model."""
        self.probes: list[tuple[str, int | None]] = []
        """Each look-up of the machine."""
        self.on(_machine())

    def on(self, machine: Machine, known: dict[str, str] = _KNOWN) -> _Bench:
        """Plan on another machine."""

        def find(device: str, devices: int | None) -> Machine:
            self.probes.append((device, devices))
            return machine

        self.planner = Planner(self.rootdir, find, known)
        return self

    def options(self, **fields: Any) -> Options:
        return Options(**{"model": str(self.model), "dataset": "items.jsonl", **fields})

    def __call__(self, name: str = "mp", size: int = 4, items: Any = None, **fields: Any) -> CaseRequest:
        """Return the request of a case; `task` and `new_tokens_of_test` are arguments of the test."""
        given = {"task": fields.pop("task", "hellaswag"), "new_tokens": fields.pop("new_tokens_of_test", None)}
        return self.planner.request(self.options(**fields), name, size, items, **given)


@pytest.fixture
def plan(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Bench:
    """Plan cases of the tiny model and its dataset."""
    tiny_model.write_dataset(tmp_path / "items.jsonl")
    bench = _Bench(model, tmp_path)
    monkeypatch.setattr(models, "facts", lambda _: bench.facts)
    monkeypatch.chdir(tmp_path)
    return bench


def test_a_case_holds_what_the_options_mean_on_this_machine(plan: _Bench) -> None:
    """Values of `auto` and of defaults are resolved, so that equal cases are the same measurement."""
    request = plan()
    case = request.case
    assert (case.strategy, case.backend, case.batch_size) == ("mp", "accelerate", 4)
    assert (case.device, case.devices, case.dtype) == ("cuda", 2, "float16")
    assert (case.model, case.dataset, case.limit) == ("tiny", "items.jsonl", None)
    assert case.revision is not None
    assert len(request.items) == tiny_model.ITEMS
    assert plan(size=2).items is request.items, "all batch sizes share one read of the file"
    assert plan.probes == [("auto", None)], "and one probe of torch"
    off = plan(work="off")
    assert (request.work, off.work, off.case) == (True, False, case), "work passes are no part of a case"
    case = plan.on(_TWO_NODES)("tensor", launcher="env").case
    assert (case.launcher, case.nodes, case.devices) == ("env", 2, 2)
    on_cpu = plan.on(_machine("cpu"))
    cases = [on_cpu(name, strategy=("mp", "tensor")).case for name in ("mp", "tensor")]
    assert [(case.devices, case.dtype) for case in cases] == [(1, "float32"), (2, "float32")]


@pytest.mark.parametrize(
    ("machine", "strategy", "fields", "message"),
    [
        # Processes.
        (_machine(nodes=[0]), "tensor", {}, "WORLD_SIZE=1, but tensor on 2 devices needs 2 processes"),
        (_TWO_NODES, "mp", {}, "--llmgpu-devices=2: mp runs in one process, which can use 1 GPU of node 0"),
        (_machine(nodes=[0, 0], one_gpu_each=True), "mp", {}, "--llmgpu-devices=2: mp .* of node 0: pass at most 1"),
        (_machine("cpu"), "mp", {"strategy": ("mp",)}, "--llmgpu-devices=2: on a CPU .*, and mp has 1; allowed: 1"),
        # Strategies: measurements of two under one name would be compared.
        (None, "wrong", {}, f"--llmgpu-strategy: {_ALSO_MINE} is registered as 'wrong' and named 'load'$"),
        (None, _ALSO_MINE, {}, f"--llmgpu-strategy: {_ALSO_MINE} and {__name__}:Mine are both named 'load'"),
        (None, f"{__name__}:Missing", {}, f"--llmgpu-strategy: strategy {__name__}:Missing cannot be imported: A"),
        (None, "pp", {}, "--llmgpu-strategy: 'pp' is no strategy: allowed are "),
        # Values that name nothing: the message begins with the flag.
        (None, "mp", {"model": "lama-7b"}, "--llmgpu-model=lama-7b: model 'lama-7b' is unknown"),
        (None, "mp", {"dataset": "no.jsonl"}, r"--llmgpu-dataset=no\.jsonl: dataset 'no\.jsonl' is unknown"),
        (None, "mp", {"tokenizer": "nowhere"}, "--llmgpu-tokenizer=nowhere: model 'nowhere' is unknown"),
        (None, "mp", {"tokenizer": "."}, r"--llmgpu-tokenizer=\.: .* has no tokenizer"),
        (None, "mp", {"model": "lama-7b", "tokenizer": "."}, "--llmgpu-model=lama-7b: "),
        # Options that exclude each other.
        (_machine("cpu", 1), "mp", {"cuda_graphs": "on"}, "--llmgpu-cuda-graphs=on: CUDA graphs need a GPU"),
        (None, "mp", {"scoring": "harness", "cuda_graphs": "on"}, "--llmgpu-cuda-graphs=on: .*=harness keeps a KV"),
        (
            None,
            "mp",
            {"tp_expert_parallel": "all_reduce"},
            "--llmgpu-tp-expert-parallel=all_reduce: .*: add tp to --llmgpu-st",
        ),
        (None, "mp", {"gpu_memory": 40 * _GIB}, "--llmgpu-gpu-memory=40.00 GiB: .* 32.00 GiB of GPU 0"),
        (None, "mp", {"gpu_memory": 8 * _GIB}, "--llmgpu-gpu-memory=8.00 GiB: .* 9.00 GiB of GPU 1"),
        # Workloads.
        (None, "mp", {"task": "prompts", "workload": "score"}, "dataset .*: prompts have no endings to score"),
        (None, "mp", {"task": "prompts", "scoring": "harness"}, "--llmgpu-scoring=harness: .* of workload score"),
        (None, "mp", {"new_tokens_of_test": 5}, "new_tokens=5: this is an argument of workload generate"),
        (None, "mp", {"task": "prompts", "prompt_tokens": 250}, ".*its context has 256 tokens, but 250 of a prompt"),
        (None, "mp", {"task": "prompts", "size": 7}, f"batch size 7 is more than the {tiny_model.ITEMS} sequences"),
        (None, "mp", {"limit": 2, "size": 9}, r"batch size 9 is more .*--llmgpu-limit=2\): pass --llmgpu-batch-sizes"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_process_starts(
    plan: _Bench, monkeypatch: pytest.MonkeyPatch, machine: Machine | None, strategy: str, fields: Any, message: str
) -> None:
    """The message has the value, its source and what is allowed."""
    monkeypatch.setattr(nvml, "used_bytes", lambda _: {"GPU-0": 0, "GPU-1": 9 * _GIB})
    if machine is not None:
        plan.on(machine)
    with pytest.raises(ValueError, match=f"^{message}"):
        plan(strategy, **fields)


def test_a_strategy_without_its_library_is_refused(plan: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the extra that installs the library of the chosen backend in the right version."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    messages = {
        "mp": "--strategy=mp needs accelerate: pip install 'pytest-llmgpu[transformers]'",
        "tp": "--llmgpu-tp-backend=deepspeed needs deepspeed: pip install 'pytest-llmgpu[deepspeed]'",
    }
    for strategy, message in messages.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            plan(strategy, tp_backend="deepspeed")


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("add_bos", ("auto", "yes", "no"), [None, True, False]),
        ("scoring", ("lean", "harness"), ["lean", "harness"]),
        ("cuda_graphs", ("auto", "on", "off"), ["auto", "on", "off"]),
    ],
)
def test_an_option_is_part_of_the_case(plan: _Bench, name: str, values: tuple[str, ...], found: list[object]) -> None:
    """The first value is the default. Of the execution only `on` is known before the run."""
    plan.on(_machine(devices=1))
    cases = [plan("mp", 4, None, **{name: value}).case for value in values]
    assert [getattr(case, name) for case in cases] == found
    assert [case.execution for case in cases] == ["cuda_graphs" if value == "on" else "eager" for value in values]
    assert len({case.key for case in cases}) == len(values)
    assert cases[0].key == plan().case.key


@pytest.mark.parametrize(
    ("strategy", "fields", "backend", "own"),
    [
        ("mp", {}, "accelerate", {}),
        ("tp", {"iok_stock": True}, "transformers", {}),
        ("tp", {"tp_backend": "torch"}, "torch", {}),
        ("tp", {"tp_expert_parallel": "all_reduce"}, "transformers", {"expert_parallel": "all_reduce"}),
        ("mp", {"strategy": ("mp", "tp"), "tp_expert_parallel": "all_reduce"}, "accelerate", {}),
        ("iok", {}, "accelerate", {"stock": False, "min_tokens": None}),
        ("iok", {"iok_stock": True, "iok_min_tokens": 1}, "accelerate", {"stock": True, "min_tokens": 1}),
        ("load", {}, "accelerate", {}),
    ],
)
def test_a_case_holds_the_options_of_its_strategy_alone(
    plan: _Bench, strategy: str, fields: dict[str, Any], backend: str, own: dict[str, object]
) -> None:
    """A chosen library is the backend; a strategy that is chosen by its place is the same measurement."""
    request = plan(strategy, **fields)
    case = request.case
    assert (case.strategy, case.backend, case.strategy_options) == (strategy, backend, own)
    by_place = plan(_KNOWN[strategy], **fields)
    assert (by_place.case, by_place.strategy) == (case, request.strategy)


@pytest.mark.parametrize(
    ("url", "port", "marked"),
    [
        ("http://localhost:8000", 8000, {}),
        ("https://127.0.0.2", 443, {}),
        ("http://192.0.2.1", None, {"server": "remote"}),
    ],
)
def test_a_server_of_another_machine_is_marked(
    plan: _Bench, url: str, port: int | None, marked: dict[str, str]
) -> None:
    """The row and the report have the mark; the port of one of this machine is known to all cases of the run."""
    request, mp = (plan(name, server_url=url) for name in ("openai", "mp"))
    assert request.case.strategy_options == {"server_url": url, **marked}
    assert (bool(request.machine.gpus), request.server_port, mp.server_port) == (not marked, port, port)


def test_a_cap_is_compared_with_memory_of_other_programs_only(plan: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of our own ranks does not refuse the next case."""
    used = {"GPU-0": 0, "GPU-1": 0}
    monkeypatch.setattr(nvml, "used_bytes", lambda _: used)
    plan(gpu_memory=8 * _GIB)
    used["GPU-1"] = 32 * _GIB
    assert plan(size=8, gpu_memory=8 * _GIB).case.gpu_memory_bytes == 8 * _GIB


@pytest.mark.parametrize("limit", [None, 4])
def test_the_first_items_of_the_dataset_are_a_limit_of_it(plan: _Bench, limit: int | None) -> None:
    """`hellaswag[:2]` is the measurement of --llmgpu-limit=2, so that it has the same baseline."""
    dataset = plan.planner.dataset(plan.options(limit=limit))
    of_limit = plan(limit=2).case
    for first in (dataset[:2], list(dataset)[:2]):
        assert plan(items=first, limit=limit).case == of_limit
    whole = plan(limit=limit).case
    assert plan(items=dataset[:], limit=limit).case == whole
    assert (whole.limit, of_limit.limit, of_limit.dataset) == (limit, 2, "items.jsonl")


def test_items_of_a_tests_own_are_another_measurement(plan: _Bench) -> None:
    """They have their own hash and no limit, and the test itself chose the batch size."""
    chosen = plan(limit=4)
    dataset = plan.planner.dataset(plan.options(limit=4))
    own = plan(items=dataset[1:3], limit=4)
    assert (chosen.case.dataset, chosen.case.limit) == ("items.jsonl", 4)
    assert (own.case.dataset, own.case.limit, len(own.items)) == ("custom", None, 2)
    assert own.case.dataset_sha256 != chosen.case.dataset_sha256
    assert own.case.loading == chosen.case.loading, "the same loaded model serves both"
    assert own.case.series != chosen.case.series
    with pytest.raises(ValueError, match=r"^batch size 99 is more than the 16 sequences of \S+ \(--llmgpu-limit=4\)$"):
        plan(size=99, items=dataset, limit=4)


def test_a_dataset_with_other_prompts_is_noted(plan: _Bench) -> None:
    """Items with a context in one text have other prompts than lm-evaluation-harness makes of two."""
    plan.planner.dataset(plan.options())
    plan.planner.dataset(plan.options(dataset="bundled"))
    (note,) = plan.planner.notes
    assert note.startswith("note: items.jsonl: ")
    assert "lm-evaluation-harness" in note


def test_prompts_are_continued_and_other_items_where_the_option_asks(plan: _Bench) -> None:
    """The fixture or the option decides; each item is one sequence, and the same loaded model serves both workloads."""
    scored, prompts = plan().case, plan(task="prompts").case
    assert (scored.workload, scored.prompt_tokens, scored.new_tokens) == ("score", None, None)
    assert (prompts.id, prompts.prompt_tokens, prompts.new_tokens) == ("mp-generate-bs4", 96, 64)
    contexts = plan(workload="generate", prompt_tokens=8).case
    assert (contexts.id, contexts.task, contexts.prompt_tokens) == ("mp-generate-bs4", "hellaswag", 8)
    own = plan(items=plan.planner.dataset(plan.options(), "prompts"), new_tokens=5, new_tokens_of_test=7).case
    assert own.new_tokens == 7, "the argument of measure comes first"
    assert len({case.series for case in (scored, prompts, contexts, own)}) == 4
    assert len({case.loading for case in (scored, prompts, contexts, own)}) == 1
    # A file of prompts serves the test that scores where the option asks to generate.
    (plan.rootdir / "prompts.jsonl").write_text('{"prompt": "One, two,"}\n')
    case = plan(size=1, dataset="prompts.jsonl", workload="generate").case
    assert (case.id, case.task) == ("mp-generate-bs1", "hellaswag")
    message = r"^dataset prompts\.jsonl: prompts have no endings .* --llmgpu-workload=generate$"
    with pytest.raises(ValueError, match=message):
        plan(size=1, dataset="prompts.jsonl")


def test_quantised_weights_without_their_library_are_refused(plan: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config alone suffices: no weights are looked for, and random weights need no library."""
    config = json.loads((plan.model / "config.json").read_text())
    quantised = plan.rootdir / "quantised"
    shutil.copytree(plan.model, quantised, ignore=shutil.ignore_patterns("*.safetensors"))
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    monkeypatch.setattr(models, "facts", _FACTS)
    monkeypatch.setattr(processes, "ask", lambda *_, **__: '{"has_plan": true, "refusal": "it needs gptqmodel"}')
    plan.on(_machine("cpu", 1))
    with pytest.raises(ValueError, match=r"^--llmgpu-model=quantised: transformers cannot load it: it needs gptqmodel"):
        plan(model=str(quantised))
    dummy = plan(model=str(quantised), load_format="dummy").case
    assert (dummy.load_format, dummy.quantization) == ("dummy", None)
    monkeypatch.setattr(processes, "ask", lambda *_, **__: '{"has_plan": true}')
    models._asked.cache_clear()
    shutil.copy(plan.model / "model.safetensors", quantised)
    assert plan(model=str(quantised)).case.id == "mp-awq-checkpoint-bs4"
    monkeypatch.setattr(processes, "ask", lambda *_, **__: '""')
    with pytest.raises(ValueError, match=r"=int8: model quantised has quantised weights \(awq-checkpoint\): .* none$"):
        plan(model=str(quantised), quantization=("int8",))


def test_a_quantisation_is_another_case_and_is_loaded(plan: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on the device is found out before a rank starts; one case of several is that of plain weights."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "found")
    monkeypatch.setattr(processes, "ask", lambda *given, **_: f'"{"no int4 here" * ("int4" in given)}"')
    plain, int8 = plan(quantization=("none", "int8")), plan(quantization=("int8",))
    assert (plain.case.id, int8.case.id) == ("mp-bs4", "mp-int8-bs4")
    assert plain.case == plan().case
    assert plain.case.loading != int8.case.loading
    assert (plain.source.quantization, int8.source.quantization) == (None, "int8")
    with pytest.raises(ValueError, match=r"^no int4 here$"):
        plan(quantization=("int4",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else "found")
    with pytest.raises(ValueError, match=r"^--llmgpu-quantization=int8 needs torchao: .* 'pytest-llmgpu\[torchao\]'$"):
        plan(quantization=("int8",))


def test_the_attention_is_part_of_the_case_where_transformers_would_not_choose_it(plan: _Bench) -> None:
    """Old baselines still match; the model that is loaded has the attention of the case."""
    plain, sdpa, eager = (plan(attention=value) for value in (None, "sdpa", "eager"))
    assert [one.case.attention for one in (plain, sdpa, eager)] == [None, None, "eager"]
    assert plain.case.key == sdpa.case.key != eager.case.key
    assert plain.case.loading != eager.case.loading
    assert eager.source.attention == "eager"


def test_what_the_model_lacks_is_refused(plan: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps need a KV cache. Kernels with an attention of their own refuse the option: it has no effect."""
    plan.facts = ModelFacts(has_plan=True, without="past_key_values")
    with pytest.raises(ValueError, match=r"^--llmgpu-model=tiny takes no past_key_values, .* is not possible$"):
        plan(workload="generate")
    plan.facts = ModelFacts(has_plan=True, has_sdpa=False)
    assert plan(attention="eager").case.attention is None
    asked: list[tuple[str, ...]] = []

    def ask(*given: str, library: str) -> str:  # noqa: ARG001 - as that of the package
        asked.append(given[2:])
        return '""'

    monkeypatch.setattr(processes, "ask", ask)
    kernel = plan(attention="flash_attention_2", experts="eager").case
    assert (kernel.attention, kernel.experts) == ("flash_attention_2", "eager")
    assert asked == [("flash_attention_2", "eager", "", "cuda", "float16")]
    chosen = plan(experts="grouped_mm")
    assert (chosen.case.experts, chosen.case.key) == (None, plan(attention="eager").case.key), "as without the option"
    assert asked[1][1] == chosen.source.experts == "grouped_mm", "a dense model refuses it all the same"
    with pytest.raises(ValueError, match=r"^--llmgpu-attention=flash_attention_2: .* each row: allowed: sdpa, eager$"):
        plan(attention="flash_attention_2", workload="generate")
    monkeypatch.setattr(processes, "ask", lambda *_, **__: '"--llmgpu-attention=sdpa: no: allowed here: eager"')
    with pytest.raises(ValueError, match=r"^--llmgpu-attention=sdpa: no: allowed here: eager$"):
        plan(attention="sdpa")
    monkeypatch.setattr(KernelInjection, "backend", "accelerate")  # an installed library
    plan.on(_machine(), registered.BUILT_IN)
    for attention in ("sdpa", "eager"):
        with pytest.raises(ValueError, match=f"^--llmgpu-attention={attention}: the kernels of strategy iok"):
            plan("iok", attention=attention)
    with pytest.raises(ValueError, match=r"^--llmgpu-quantization=int8: iok does not quantise weights: allowed: none$"):
        plan("iok", quantization=("int8",))
