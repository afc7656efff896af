"""The commands of one rank: load a model through its strategy, then score case after case."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pytest_llmgpu.engines.protocol import Engine
from pytest_llmgpu.inference import batching, compiled_layers, generation, models, quantization, scoring, tasks, weights
from pytest_llmgpu.inference.batching import Plan, Requests
from pytest_llmgpu.inference.cuda_graphs import GraphedDecoder
from pytest_llmgpu.inference.generation import Generator, score_texts
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.protocol import Item, Task
from pytest_llmgpu.ranks import ceilings, graph_choice, host, memory, registered, traffic
from pytest_llmgpu.ranks.graph_choice import Decision
from pytest_llmgpu.ranks.local import FinishedBatch
from pytest_llmgpu.ranks.registered import ModelHook
from pytest_llmgpu.recording import work
from pytest_llmgpu.recording.work import WorkReply
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import decode, encode
from pytest_llmgpu.report.result import Collective, DeviceMemory, Generation, Launch, Phase
from pytest_llmgpu.report.work import Ceilings, ModelSize
from pytest_llmgpu.store.imports import Project
from pytest_llmgpu.strategies.protocol import Workspace

if TYPE_CHECKING:
    import torch

    from pytest_llmgpu.strategies.protocol import Loaded, Strategy


class Measured(NamedTuple):
    """The measurement of one case by one rank."""

    launch: Launch
    """The figures of this rank."""
    execution: str
    """The forwards ran as `eager`, `cuda_graphs` or `compile`."""
    started_s: float
    """The first batch began at this time of CLOCK_MONOTONIC."""
    ended_s: float
    """The last batch ended at this time of CLOCK_MONOTONIC."""


class ReferenceTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The texts that the reference strategy generated for the prompts of a case."""

    key: str
    """This is the key of the case that generated them."""
    tokens: str | None
    """These are the tokens, as in `Generation.tokens`."""


class RankState:
    """The data that a rank keeps between commands. What `load` and `warm_up` set is missing before them."""

    case: Case
    source: ModelSource
    strategy: Strategy
    loaded: Loaded
    decision: Decision
    """How the forwards of the latest case run."""
    workspace: Workspace | None
    """What the strategy reserved for the latest case."""

    def __init__(self, on_batch: Callable[[FinishedBatch], None]) -> None:
        self.on_batch = on_batch
        self.phase: Phase = "load"
        self.devices: Sequence[torch.device] = ()
        self.loaded_memory: Sequence[DeviceMemory] = ()
        """The memory of each device since the loading, without peaks; empty before the devices are known."""
        self.datasets: dict[str, tuple[Task, Sequence[Item]]] = {}
        """SHA-256 of a dataset to its task and its items."""
        self.requests: dict[tuple[str, int | None, int | None], Requests] = {}
        """SHA-256 of a dataset, tokens of a prompt and new tokens to its tokenised items."""
        self.model_size: ModelSize | str | None = None
        """The size of the loaded model, or the reason why it has none; None before the first work passes."""
        self.generation: Generation | None = None
        """The texts of the latest case that generated."""
        self.launch: Launch | None = None
        """What the warm-up found about a case that is not measured yet."""
        self.graphs = contextlib.ExitStack()
        """From the warm-up of a case to its first pass that runs eagerly, this holds its CUDA graphs."""
        self.generator: Generator | None = None
        """The generator of the latest case that generates, as long as its CUDA graphs are there."""
        self.engine: Engine | None = None
        """The engine of a rank that has one in place of a strategy."""
        self.engine_plan: Plan | None = None
        """The batches of the latest case of an engine."""
        self.passes: list[WorkReply] = []
        """The work passes of the latest case in its execution; decode steps first, then the prefill."""
        self.counted: traffic.Counted = {}
        """The traffic of small forwards of the loaded model, until a function of the user runs on it."""

    @property
    def plan(self) -> Plan:
        """The batches of the latest case."""
        return self.decision.plan if self.engine_plan is None else self.engine_plan

    def memory(self, workspace: Workspace | None = None) -> list[DeviceMemory]:
        """Return the memory of each device since the case began; empty before the devices are known."""
        workspace_bytes = None if workspace is None else workspace.workspace_bytes
        return memory.since_reset(self.devices, self.loaded_memory, workspace_bytes)


def import_libraries(state: RankState, case: Case, source: ModelSource) -> None:  # noqa: ARG001 - a command
    """Import what `load` will import, without the devices: another model may still be there. `load` reports errors."""
    with contextlib.suppress(Exception):
        if case.device == "cuda" and case.backend is not None:  # on a CPU `load` sets variables for DeepSpeed before
            importlib.import_module(case.backend)
        import accelerate  # noqa: F401
        import torch.distributed.tensor  # noqa: F401
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM._model_mapping[type(weights.config(source))]  # noqa: SLF001 - imports its module
    # A collection of their 400,000 objects would take 0.2 s, between the cases or in the middle of a batch.
    gc.collect()
    gc.freeze()


def load(
    state: RankState, case: Case, source: ModelSource, place: str, hooks: Sequence[ModelHook] = ()
) -> list[DeviceMemory]:
    """Apply the memory cap, load the model of a case, and return the memory of the devices.

    Functions of the test suite then change the model. TypeError if the strategy returned no model, ValueError if the
    model cannot be called, or was loaded for another number of ranks than were started.
    """
    import torch

    from pytest_llmgpu.strategies.protocol import Loaded

    state.phase, state.case, state.source, state.model_size = "load", case, source, None
    state.counted.clear()
    strategy = registered.make(place)
    assert not isinstance(strategy, Engine), "engines have a `load` of their own"
    state.strategy = strategy
    if case.device == "cuda":
        indices = range(case.devices) if strategy.ranks(case.devices) == 1 else [int(os.environ["LOCAL_RANK"])]
        devices = [torch.device("cuda", index) for index in indices]
    else:
        devices = [torch.device("cpu")]
    state.loaded_memory = memory.hold(devices, case.gpu_memory_bytes)
    state.devices = devices
    loaded: object = strategy.load(case, source)
    name = f"strategy {case.strategy}"
    if not isinstance(loaded, Loaded):
        returned = "None" if loaded is None else type(loaded).__name__
        raise TypeError(f"{name}: load returned {returned}, a Loaded is needed")
    model: object = loaded.model
    if not isinstance(model, torch.nn.Module):
        returned = "None" if model is None else type(model).__name__
        raise TypeError(f"{name}: Loaded.model is {returned}, a torch.nn.Module is needed")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if loaded.world_size != started:
        remedy = f"but the number of ranks is {started}: return the number of ranks as Loaded.world_size"
        raise ValueError(f"{name}: Loaded.world_size is {loaded.world_size}, {remedy}")
    quantization.stored(model, started)  # refuses weights that stayed plain
    for hook in hooks:
        hook(loaded, case)
    scoring.check(model)
    state.loaded = loaded
    state.loaded_memory = memory.after_loading(devices, state.loaded_memory)
    return state.memory()


def file_hashes(state: RankState, source: ModelSource) -> dict[str, str] | None:  # noqa: ARG001 - a command
    """Return name to hash of the files of a model on this node; None on every rank of a node but its first."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    weights = source.load_format != "dummy"
    hashes = {} if source.directory is None else models.file_hashes(Path(source.directory), weights=weights)
    with contextlib.suppress(OSError, ValueError):
        # Without a tokenizer the hash is missing, as that of a missing file is.
        hashes["tokenizer"] = models.tokenizer_sha256(Path(source.tokenizer_directory))
    return hashes


def build(state: RankState, case: Case, source: ModelSource, place: str) -> str | None:  # noqa: ARG001 - a command
    """Do what a strategy needs on this node before it loads, as the process of pytest does on its own node.

    Return the error; None if there is none, and on every rank of a node but its first.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" or os.environ.get("RANK", "0") == "0":
        return None
    strategy = registered.make(place)
    assert not isinstance(strategy, Engine), "an engine has one rank"
    try:
        strategy.check(case, source)
        strategy.build(case, print)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def imported_from_elsewhere(state: RankState, project: Project) -> dict[str, str]:  # noqa: ARG001 - a command
    """Return the modules of the project that this rank imported from outside of its working tree, with their files."""
    return project.imported_from_elsewhere()


def reset(state: RankState) -> None:
    """Free what the case before holds, and reset peaks, so that memory is counted for the next case only."""
    state.graphs.close()  # It may have been warmed up and never measured.
    state.passes, state.generator = [], None
    memory.reset(state.devices)


def give(state: RankState, sha256: str, items: Sequence[Item], task: str) -> None:
    """Keep a dataset, whose task is at the place `task`; later commands refer to it by its hash."""
    state.datasets[sha256] = tasks.make(task), items


def score(state: RankState, case: Case) -> Launch:
    """Measure a case: `reset`, `warm_up`, then `measure`."""
    reset(state)
    warm_up(state, case)
    with state.graphs:
        launch = measure(state).launch
        if launch.generation is not None:
            launch.generation = check_texts(state)
        return launch


def warm_up(state: RankState, case: Case, not_recorded: str | None = None) -> None:
    """Prepare `measure` after a `reset`: decide the execution, reserve the workspace, run a batch of every shape.

    The devices are idle when this returns, so that the launcher can read their counters. `not_recorded` is the
    operation because of which the forwards of this model run eagerly, if one is known.
    """
    state.case, loaded = case, state.loaded
    state.phase, state.launch = "forward", None
    if case.generates:
        generation.check(loaded.model, loaded.config)
    requests = encoded(state)
    began_s = time.monotonic()
    state.decision = decision = graph_choice.decide(
        loaded, requests, case.batch_size, requested=case.cuda_graphs, logits=case.scoring, not_recorded=not_recorded
    )
    plan, on_batch = decision.plan, report_to(state)
    # Before a recording: graphs keep the address of the workspace.
    workspace = state.strategy.prepare(loaded, max(batch.rows for batch in plan.batches), plan.tokens)
    state.workspace = workspace
    with contextlib.ExitStack() as graphs:
        if case.generates:
            recorded_tokens = decision.recorded_tokens
            generator = graphs.enter_context(graph_choice.generator(loaded, plan, recorded_tokens=recorded_tokens))
            generator.warm_up(on_batch)
            state.generator = generator
        else:
            recorded = decision.execution == "cuda_graphs"
            decoder = graphs.enter_context(GraphedDecoder(loaded.model, loaded.devices[0])) if recorded else None
            scoring.warm_up(loaded.model, plan, on_batch=on_batch, logits=case.scoring, **loaded.placed)
            if decoder is not None:
                graph_choice.check_answers(loaded, plan, decoder, case.dtype)
        state.graphs = graphs.pop_all()
    compile_s = None
    if loaded.compiled is not None:
        loaded.compiled.check()
        compile_s = loaded.compiled.compile_s
    state.launch = Launch(
        warmup_s=time.monotonic() - began_s - (compile_s or 0.0),
        compile_s=compile_s,
        plan_sha256=plan.sha256,
        tokens_requested=None if workspace is None else workspace.tokens_requested,
        tokens_granted=None if workspace is None else workspace.tokens_granted,
        execution_choice=graph_choice.describe(decision),
        implementations=models.implementations(loaded.config)
        | quantization.describe(quantization.stored(loaded.model, loaded.world_size)),
    )


def measure(state: RankState) -> Measured:
    """Score or generate the case that was warmed up; its CUDA graphs stay for `record_work`."""
    import torch

    from pytest_llmgpu.inference.host_speed import HostReference

    loaded, launch, plan, state.launch = state.loaded, state.launch, state.plan, None
    assert launch is not None, "the case is warmed up"
    on_batch = report_to(state, planned=len(plan.batches))
    beside = None
    # Of several ranks one that is ready would wait for the reference of another one.
    eager = state.decision.execution == "eager" and state.generator is None and loaded.world_size == 1
    if eager and loaded.input_device.type == "cuda":
        beside = HostReference(loaded.input_device).seconds
    started_s, ended = time.monotonic(), host.watch()
    if state.generator is not None:
        launch.batches, texts, why_no_clock = state.generator.generate(on_batch)
    else:
        scores = scoring.score(
            loaded.model, plan, on_batch=on_batch, logits=state.case.scoring, beside=beside, **loaded.placed
        )
        launch.batches, why_no_clock = scores.batches, scores.why_no_clock
    ended(launch)
    ended_s = time.monotonic()
    if why_no_clock is not None:
        launch.why["clock_ghz"] = why_no_clock
    if state.generator is not None:
        assert loaded.config is not None, "`generation.check` refuses a model without one"
        own = None if state.workspace is None else state.workspace.kv_cache_bytes
        dtype: torch.dtype = getattr(torch, state.case.dtype)
        rows = max(batch.rows for batch in plan.batches)
        launch.generation = state.generation = msgspec.structs.replace(
            texts,
            kv_cache_bytes=texts.kv_cache_bytes if own is None else own,
            kv_cache_formula_bytes=generation.formula_bytes(
                loaded.config, rows=rows, slots=plan.tokens, number_bytes=dtype.itemsize
            ),
        )
    else:
        task, items = state.datasets[state.case.dataset_sha256]
        launch.accuracy = task.score(items, scores.loglikelihoods)
    launch.memory = state.memory(state.workspace)
    return Measured(launch, state.decision.execution, started_s, ended_s)


def check_texts(state: RankState, reference: ReferenceTexts | None = None) -> Generation:
    """Score the texts of the latest case, and those of a reference, in forwards without a KV cache."""
    assert state.generation is not None
    case, loaded, prompts = state.case, state.loaded, state.plan.requests
    length = prompts.new_tokens

    def score_again(tokens: str | None) -> str:
        numbers = decode(tokens, "i").tolist()
        texts = [numbers[start : start + length] for start in range(0, len(numbers), length)]
        # Eagerly also where the layers are compiled: a fault of the compiler does not repeat itself here.
        with compiled_layers.suspended():
            values = score_texts(loaded.model, prompts, texts, case.batch_size, **loaded.placed)
        return encode(value for row in values for value in row)

    return msgspec.structs.replace(
        state.generation,
        prefill_loglikelihoods=score_again(state.generation.tokens),
        reference=None if reference is None else reference.key,
        reference_loglikelihoods=None if reference is None else score_again(reference.tokens),
    )


def account(state: RankState) -> tuple[list[Collective], list[Collective] | None] | str:
    """Count the traffic of the latest case, in eager forwards that are not measured.

    Return that of this rank by kind, and that of one decode step of the largest batch, None for a case that scores; or
    the reason why it could not be counted.
    """
    state.graphs.close()
    loaded, plan = state.loaded, state.plan
    if loaded.world_size == 1 and len(loaded.devices) == 1:
        return [], [] if state.case.generates else None
    if max(batch.rows for batch in plan.batches) < traffic.MOST_ROWS:
        # The counted forwards have more rows than the workspace of this case has room for.
        state.strategy.prepare(loaded, traffic.MOST_ROWS, plan.tokens)
    # Tokens are sent to their experts.
    of_tokens = report_to(state) if state.case.strategy_options.get("expert_parallel") == "all_to_all" else None
    try:
        with compiled_layers.suspended():
            if state.case.generates:
                return traffic.of_generation(loaded, plan, of_tokens=of_tokens, counted=state.counted)
            ways: Any = {"logits": state.case.scoring, "of_tokens": of_tokens, "counted": state.counted}
            return traffic.of_plan(loaded, plan, **ways), None
    except ValueError as error:
        return str(error)


def record_work(state: RankState, traces: str | None = None) -> None:
    """Record the kernels of the latest case in its own execution, for `run_eager_passes`.

    This comes right after `measure`: the CUDA graphs of the case are not recorded twice. `traces` is the begin of the
    paths of trace files; None for none.
    """
    loaded, plan = state.loaded, state.plan
    trace = partial(trace_path, state, traces)
    program = work.Program(loaded.devices, loaded.dispatched, loaded.model)
    graphs = state.decision.execution == "cuda_graphs"
    ways: Any = {"on_batch": report_to(state), "alone": loaded.world_size == 1}
    if state.generator is None:
        with work.scoring_forward(loaded.model, loaded.input_device, state.case.scoring) as forward:
            ways["replayed"] = graphs and loaded.world_size == len(loaded.devices) == 1
            state.passes = [work.record(program, plan, forward, trace=trace("passes"), **ways)]
        return
    step, prefill = state.generator.step, state.generator.prefill
    state.passes = [
        work.record(program, plan, step, trace=trace("decode-passes"), **ways),
        work.record(program, plan, prefill, first=False, trace=trace("prefill-passes"), **ways),
    ]


def run_eager_passes(state: RankState, traces: str | None = None) -> list[WorkReply]:
    """Record what the latest case computes, in eager forwards that are not measured; `traces` as in `record_work`.

    Return one reply for a case that scores; for one that generates, that of the decode steps and that of the prefill.
    """
    assert state.passes
    state.graphs.close()
    loaded, plan, on_batch = state.loaded, state.plan, report_to(state)
    trace = partial(trace_path, state, traces)
    program = work.Program(loaded.devices, loaded.dispatched, loaded.model)
    if not state.case.generates:
        with (
            work.scoring_forward(loaded.model, loaded.input_device, state.case.scoring) as forward,
            compiled_layers.suspended(),
        ):
            return [work.measure(program, plan, state.passes[0], forward, on_batch=on_batch, trace=trace("modules"))]
    steps, prefills = state.passes
    names = trace("decode-modules"), trace("prefill-modules")
    with graph_choice.generator(loaded, plan) as generator, compiled_layers.suspended():
        return [
            work.measure(program, plan, steps, generator.step, on_batch=on_batch, last=False, trace=names[0]),
            work.measure(program, plan, prefills, generator.prefill, on_batch=on_batch, trace=names[1]),
        ]


def model_size(state: RankState) -> ModelSize | str | None:
    """Return the size of the whole model, or the reason why it has none; None on every rank but the first."""
    import torch

    if state.engine is not None and state.case.model != state.source.name:
        return "the engine loads a model of its own"
    if state.engine is not None and state.case.quantization is not None:
        return "the bytes of weights that an engine quantises are not known"
    if state.engine is None and state.loaded.rank != 0:
        return None
    if state.engine is None and state.loaded.config is None:
        return "the strategy's model has no config of transformers"
    if state.model_size is None:
        dtype: torch.dtype = getattr(torch, state.case.dtype)
        try:
            # The loaded model holds this rank's part only.
            stored = quantization.stored(state.loaded.model, state.loaded.world_size)
            state.model_size = work.model_size(weights.skeleton(state.source, dtype), dtype.itemsize, stored)
        except Exception as error:  # noqa: BLE001 - a model of a user can fail in any way, and costs its bound alone
            state.model_size = f"{type(error).__name__}: {error}"
    return state.model_size


def measure_ceilings(state: RankState, wanted: Collection[str]) -> Ceilings:
    """Measure the rates that the GPUs of this rank reach."""
    return ceilings.measure(state.devices, state.case.dtype, state.loaded.world_size, wanted)


def call(state: RankState, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function of the user on the loaded model: `fn(loaded, *args)`."""
    state.phase = "forward"
    state.graphs.close()
    state.counted.clear()  # the function may change the model
    with compiled_layers.suspended():  # it may run any number of shapes
        return fn(state.loaded, *args)


def encoded(state: RankState) -> Requests:
    """Return the tokenised items of a case; they are kept for the cases that follow."""
    case = state.case
    task, items = state.datasets[case.dataset_sha256]
    wanted = case.dataset_sha256, case.prompt_tokens, case.new_tokens
    if wanted not in state.requests:
        tokenizer = models.load_tokenizer(state.source, add_bos=case.add_bos)
        if case.prompt_tokens is None or case.new_tokens is None:
            # An engine reads what the config of its model allows.
            config = state.loaded.config if state.engine is None else SimpleNamespace(**state.source.decoder)
            requests = batching.encode(task, items, tokenizer, models.max_length(config), add_bos=case.add_bos)
        else:
            lengths = {"most_tokens": case.prompt_tokens, "new_tokens": case.new_tokens}
            requests = batching.encode_prompts(items, tokenizer, **lengths, add_bos=case.add_bos)
        state.requests[wanted] = requests
    return state.requests[wanted]


def trace_path(state: RankState, begin: str | None, name: str) -> str | None:
    """Return the path of a trace file of this rank; None without a begin of the path."""
    rank = 0 if state.engine is not None else state.loaded.rank
    return None if begin is None else f"{begin}-rank{rank}-{name}.json.gz"


def report_to(state: RankState, *, planned: int = 0) -> scoring.OnBatch:
    """Return what passes each batch to the launcher; `planned` is 0 for batches that are no measurement."""
    return lambda *batch: state.on_batch(FinishedBatch._make((*batch, planned)))
