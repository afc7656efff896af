"""Turns options into cases, and refuses what cannot work before a process starts or a model loads."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from pytest_llmgpu.engines import openai
from pytest_llmgpu.engines.function import OPTION, PLACE, Function
from pytest_llmgpu.engines.protocol import Engine
from pytest_llmgpu.inference import bundled, generation, models, quantization, tasks
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.protocol import Dataset, Item, Task
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.profiling.sampler.devices import SMALLEST_PERIOD_S
from pytest_llmgpu.ranks import registered
from pytest_llmgpu.report.case import DEFAULT_TASK, GENERATE, SCORE, Case
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.text import gib, plural
from pytest_llmgpu.session.runner import CaseRequest
from pytest_llmgpu.strategies.protocol import Strategy

_PROMPT_TOKENS, _NEW_TOKENS = 96, 64
"""The defaults of workload generate: about the length of HellaSwag's contexts, and half a paragraph."""

_DTYPES = {"cuda": "float16", "cpu": "float32"}
"""Device to the dtype of `--llmgpu-dtype=auto`."""

_ADD_BOS = {"auto": None, "yes": True, "no": False}
"""Value of `--llmgpu-add-bos` to that of the case."""

_EXTRAS = {"requests": "openai", "accelerate": "transformers"}
_EXTRAS |= {name: name for name in ("deepspeed", "torchao", "transformers", "vllm")}
"""Library of a strategy or a quantisation to the extra of this package that has it."""


class Planner:
    """Turns options into requests; looks up each dataset, model and machine once.

    Every method raises ValueError with one line that has the value, its source and what is allowed.
    """

    def __init__(
        self,
        rootdir: Path,
        find_machine: Callable[[str, int | None], Machine],
        known: Mapping[str, str],
        known_tasks: Mapping[str, str] = tasks.BUILT_IN,
    ) -> None:
        self.known_tasks = known_tasks
        """Maps the name of each task, which is the name of its fixture, to its place."""
        self.notes: list[str] = []
        """A line for each dataset that differs from the published one."""
        self._known = known
        # A name in a report stands for one place, since cases of the same name are compared.
        self._places = dict(known)
        self._rootdir = rootdir
        self._find_machine = functools.cache(find_machine)
        self._datasets: dict[tuple[str, str, int | None], Dataset] = {}
        self._sources: dict[tuple[object, ...], ModelSource] = {}
        self._caps: set[tuple[int, tuple[str, ...]]] = set()

    def machine(self, options: Options) -> Machine:
        """Return the devices that the options choose."""
        return self._find_machine(options.device, options.devices)

    def dataset(self, options: Options, task: str = DEFAULT_TASK) -> Dataset:
        """Return the items of a task that the options choose."""
        wanted = (task, options.dataset, options.limit)
        if wanted not in self._datasets:
            loader = self._task(task)[1]
            try:
                loaded = loader.load(options.dataset, rootdir=self._rootdir, limit=options.limit)
            except ValueError as error:
                raise ValueError(f"--llmgpu-dataset={options.dataset}: {error}") from None
            if loaded.task != task:
                raise ValueError(f"task {task!r} loads items of task {loaded.task!r}: Item.task must be {task!r}")
            self._datasets[wanted] = loaded
            self.notes += [f"note: {loaded.name}: {loaded.note}"] if loaded.note else []
        return self._datasets[wanted]

    def request(
        self,
        options: Options,
        strategy_name: str,
        batch_size: int,
        items: Dataset | Sequence[Item] | None = None,
        *,
        task: str = DEFAULT_TASK,
        new_tokens: int | None = None,
        function: Function | None = None,
    ) -> CaseRequest:
        """Return one case with everything that its measurement needs, under the options in force for its test.

        The strategy is one of `options.strategy`. The items are scored or continued; None is for those of `task` that
        the options choose. `new_tokens` are generated for each item; None is for the number of the options. `function`
        is an engine of the test, in place of a strategy.
        """
        place, strategy = self._strategy(strategy_name) if function is None else self._function(function)
        is_engine = isinstance(strategy, Engine)
        # Only strategies of this package have options: another one named `load` must not get `load_format`.
        prefix = f"{strategy.name}_"
        fields = dataclasses.asdict(options) if strategy.name in registered.BUILT_IN else {}
        own = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
        own = {name: value for name, value in own.items() if value != "off"}  # the key of a case without one stays
        if isinstance(strategy, Engine):
            own = _place_of(strategy, options)
        backend = own.pop("backend", strategy.backend)
        _check_choices(options, strategy)
        flag = f"strategy={strategy_name}" if backend == strategy.backend else f"llmgpu-tp-backend={backend}"
        flags = {backend: flag, "transformers": flag}
        flags |= {} if "none" in options.quantization else {"torchao": f"llmgpu-quantization={options.quantization[0]}"}
        _check_libraries(flags)
        chosen, limit = self._items(options, items, task)
        task_place, its_task = self._task(chosen.task)
        generates = _generates(options, chosen, new_tokens)
        sequences = len(chosen) if generates else sum(len(its_task.requests(item)) for item in chosen.items)
        if batch_size > sequences:
            limited = f" (--llmgpu-limit={limit})" if limit and limit == options.limit else ""
            # A test with items of its own chose the batch size, too: then no flag helps.
            remedy = f": pass --llmgpu-batch-sizes with at most {sequences}" if items is None else ""
            most = f"more than the {plural(sequences, 'sequence')} of {chosen.name}{limited}"
            raise ValueError(f"batch size {batch_size} is {most}{remedy}")
        machine = self.machine(options)
        self._check_device(options, machine)
        self._check_processes(strategy, options, machine)
        if machine.device == "cpu":
            # Devices are processes there, and a strategy of one process uses only one.
            machine = msgspec.structs.replace(machine, devices=_processes(strategy, machine.devices))

        # A function may have any model: only one that was chosen is known to be that of mp.
        model = None if function is None or options.model != Options().model else function.describe()

        def case_of(source: ModelSource) -> Case:
            """Return the case of a model; refuse one that the model or the strategy cannot run."""
            processes = strategy.ranks(machine.devices)
            recorded = options.cuda_graphs == "on" and (processes > 1 or machine.devices == 1)
            case = Case(
                strategy=strategy.name,
                backend=backend,
                strategy_options=own,
                batch_size=batch_size,
                workload=GENERATE if generates else SCORE,
                scoring=options.scoring,
                model=model or source.name,
                revision=source.revision,
                load_format=options.load_format,
                dtype=options.dtype if options.dtype != "auto" else _DTYPES[machine.device],
                device=machine.device,
                devices=machine.devices,
                launcher=options.launcher,
                nodes=len({machine.node_of(rank) for rank in range(processes)}),
                cuda_graphs=options.cuda_graphs,
                execution="engine" if is_engine else "cuda_graphs" if recorded else "eager",
                gpu_memory_bytes=options.gpu_memory,
                dataset=chosen.name,
                dataset_sha256=chosen.sha256,
                tokenizer_sha256=source.tokenizer_sha256,
                add_bos=_ADD_BOS[options.add_bos],
                limit=limit,
                task=chosen.task,
                attention=source.attention,
                experts=None if source.experts == "grouped_mm" else source.experts,  # which runs wherever torch has it
                quantization=source.quantization,
                prompt_tokens=(options.prompt_tokens or _PROMPT_TOKENS) if generates else None,
                new_tokens=(new_tokens or options.new_tokens or _NEW_TOKENS) if generates else None,
            )
            if case.prompt_tokens is not None and case.new_tokens is not None:
                _check_generation(source, case.prompt_tokens, case.new_tokens, is_engine=is_engine)
            strategy.check(case, source)
            models.check_choices(source, machine.device, case.dtype)
            return case

        if options.load_format != "dummy" and options.model not in bundled.PRESETS:
            # First with the config alone: a model that cannot work must not cost a download of weights.
            outline = self._source(dataclasses.replace(options, load_format="dummy"), chosen)
            if quantization.of_checkpoint(outline.config) is not None:
                models.facts(outline)
            case_of(outline)
        source = self._source(options, chosen)
        return CaseRequest(
            case=case_of(source),
            machine=msgspec.structs.replace(machine, gpus=[]) if "server" in own else machine,
            source=source,
            strategy=place,
            task=task_place,
            items=chosen.items,
            timeout_s=options.timeout,
            load_timeout_s=options.load_timeout,
            work=options.work == "on",
            engine=is_engine,
            elsewhere=isinstance(strategy, Engine) and (strategy.own_workers or strategy.elsewhere is not None),
            given=None if function is None or function.given is None else function,
            server_port=openai.local_port(options.server_url) if options.server_url else None,
        )

    def _items(self, options: Options, items: Dataset | Sequence[Item] | None, task: str) -> tuple[Dataset, int | None]:
        """Return the items of a case as a dataset, and its limit: the first items of a dataset are a limit of it."""
        if items is None:
            return self.dataset(options, task), options.limit
        chosen = items if isinstance(items, Dataset) else Dataset.of("custom", items)
        whole = self._datasets.get((chosen.task, options.dataset, options.limit))
        if whole is not None and chosen.items == whole.items:
            return whole, options.limit
        if whole is None or chosen.items != whole.items[: len(chosen)]:
            return chosen, None
        return Dataset.of(whole.name, chosen.items), len(chosen)

    def is_engine(self, written: str) -> bool:
        """Return whether what `--strategy` names is an engine."""
        return isinstance(self._strategy(written)[1], Engine)

    def _function(self, function: Function) -> tuple[str, Function]:
        """Return the place and the object of an engine of a test, whose name must be its own."""
        if not function.place:
            return PLACE, function  # of a test that has not run
        other = self._places.setdefault(function.name, function.place)
        if function.name in self._known or other != function.place:
            remedy = "give it a name of its own (`name = ...` in its class)"
            raise ValueError(f"measure: engine {function.place} is named {function.name!r}, as {other}: {remedy}")
        return PLACE, function

    def _strategy(self, written: str) -> tuple[str, Strategy | Engine]:
        """Return the place and the object of a strategy, from a name or a place as written in `--strategy`."""
        try:
            place = registered.find(written, self._known)
            strategy = registered.make(place)
        except ValueError as error:
            raise ValueError(f"--llmgpu-strategy: {error}") from None
        if written in self._known and strategy.name != written:
            raise ValueError(f"--llmgpu-strategy: {place} is registered as {written!r} and named {strategy.name!r}")
        other = self._places.setdefault(strategy.name, place)
        if other != place:
            raise ValueError(f"--llmgpu-strategy: {place} and {other} are both named {strategy.name!r}; rename one")
        return place, strategy

    def _task(self, name: str) -> tuple[str, Task]:
        """Return the place and the object of a task."""
        place = tasks.find(name, self.known_tasks)
        task = tasks.make(place)
        if task.name != name:
            raise ValueError(f"task {place} is registered as {name!r}, but its name is {task.name!r}")
        return place, task

    def _check_device(self, options: Options, machine: Machine) -> None:
        """Refuse options and a memory cap that the devices do not allow."""
        dummy_preset = options.model in bundled.PRESETS and options.load_format == "dummy"
        if dummy_preset and machine.device == "cpu" and options.device != "cpu":
            remedy = "torch found none; pass --llmgpu-device=cpu to run it on the CPU"
            raise ValueError(f"--llmgpu-model={options.model}: an architecture preset needs a GPU, and {remedy}")
        if options.cuda_graphs == "on" and machine.device == "cpu":
            raise ValueError("--llmgpu-cuda-graphs=on: CUDA graphs need a GPU, the run is on the CPU")
        if options.cuda_graphs == "on" and options.scoring == "harness":
            reason = "--llmgpu-scoring=harness keeps a KV cache"
            raise ValueError(f"--llmgpu-cuda-graphs=on: {reason}; allowed are auto and off")
        cap = options.gpu_memory
        uuids = tuple(gpu.uuid for gpu in machine.gpus_of_nodes[0])
        # Once, before a rank runs: later the memory in use is that of our own ranks.
        if cap is not None and (cap, uuids) not in self._caps:
            flag = f"--llmgpu-gpu-memory={gib(cap)}"
            if machine.device == "cpu":
                raise ValueError(f"{flag}: a cap needs a GPU, the run is on the CPU")
            used = nvml.used_bytes([gpu.uuid for gpu in machine.gpus])
            for gpu in machine.gpus:
                if gpu.memory_bytes is not None and cap > gpu.memory_bytes:
                    raise ValueError(f"{flag}: allowed are at most the {gib(gpu.memory_bytes)} of GPU {gpu.index}")
                if used.get(gpu.uuid, 0) >= cap:
                    remedy = "pass a larger cap or use an idle GPU"
                    raise ValueError(f"{flag}: other programs use {gib(used[gpu.uuid])} of GPU {gpu.index}; {remedy}")
            self._caps.add((cap, uuids))
        if options.sample_period < SMALLEST_PERIOD_S and options.profile_method == "auto":
            allowed = f"{SMALLEST_PERIOD_S:g} s and more, which GPUs need for an average"
            raise ValueError(f"--llmgpu-sample-period={options.sample_period:g}: allowed are {allowed}")

    def _check_processes(self, strategy: Strategy | Engine, options: Options, machine: Machine) -> None:
        """Refuse more processes, or more GPUs in one process, than were started, and processes that nothing uses."""
        needed, started = strategy.ranks(machine.devices), len(machine.nodes)
        if started and needed > started:
            wanted = f"{strategy.name} on {plural(machine.devices, 'device')} needs {needed} processes"
            remedy = f"start {needed}, or pass --llmgpu-devices={started}"
            raise ValueError(f"WORLD_SIZE={started}, but {wanted}: {remedy}")
        usable = 1 if machine.one_gpu_each else len(machine.gpus_of_nodes[0])
        if started and needed == 1 and machine.device == "cuda" and machine.devices > usable:
            reason = f"{strategy.name} runs in one process, which can use {plural(usable, 'GPU')} of node 0"
            raise ValueError(f"--llmgpu-devices={machine.devices}: {reason}: pass at most {usable}")
        if machine.device == "cpu" and machine.devices > 1 and (options.devices is not None or not started):
            # Devices are processes there.
            chosen = [self._strategy(name)[1] for name in options.strategy]
            if all(_processes(one, machine.devices) == 1 for one in chosen):
                reason = f"on a CPU devices are processes, and {', '.join(one.name for one in chosen)} has 1"
                raise ValueError(f"--llmgpu-devices={machine.devices}: {reason}; allowed: 1")

    def _source(self, options: Options, dataset: Dataset) -> ModelSource:
        chosen = (options.model, options.revision, options.tokenizer, options.load_format)
        # Several are left for a test without a strategy of the options: it measures one case, if it can a plain one.
        name = None if "none" in options.quantization else options.quantization[0]
        wanted = (*chosen, options.attention, options.experts, name, dataset.sha256)
        if wanted not in self._sources:
            source = models.resolve(
                options.model,
                revision=options.revision,
                tokenizer=options.tokenizer,
                load_format=options.load_format,
                texts=dataset.texts(),
                rootdir=self._rootdir,
            )
            found = None if options.load_format == "dummy" else quantization.of_checkpoint(source.config)
            if name is not None and found is not None:
                reason = f"model {source.name} has quantised weights ({found})"
                raise ValueError(f"--llmgpu-quantization={name}: {reason}: allowed: none")
            source = msgspec.structs.replace(source, quantization=name or found, experts=options.experts)
            # The attention that transformers chooses anyway stays None: with the option or without, it is the same.
            if options.attention and options.attention != ("sdpa" if models.facts(source).has_sdpa else "eager"):
                source = msgspec.structs.replace(source, attention=options.attention)
            self._sources[wanted] = source
        return self._sources[wanted]


def _check_libraries(flags: Mapping[str, str]) -> None:
    """Refuse the flags whose libraries are missing: the base of this package has none that loads a model."""
    for library, flag in flags.items():
        if not library or importlib.util.find_spec(library.partition(".")[0]) is None:
            package = f"'pytest-llmgpu[{_EXTRAS[library]}]'" if library in _EXTRAS else library
            raise ValueError(f"--{flag} needs {library}: pip install {package}")


def _check_choices(options: Options, strategy: Strategy | Engine) -> None:
    """Refuse options that a strategy or an engine decides itself."""
    if options.attention is not None and getattr(strategy, "own_attention", False):
        reason = f"the kernels of strategy {strategy.name} compute attention themselves"
        raise ValueError(f"--llmgpu-attention={options.attention}: {reason}: measure it without this option")
    if "none" not in options.quantization and not getattr(strategy, "quantizes", False):
        reason = f"{strategy.name} does not quantise weights"
        raise ValueError(f"--llmgpu-quantization={options.quantization[0]}: {reason}: allowed: none")
    if options.tp_expert_parallel != "off" and "tp" not in (strategy.name, *options.strategy):
        remedy = f"add tp to --llmgpu-strategy={','.join(options.strategy)}, or remove the option"
        flag = f"--llmgpu-tp-expert-parallel={options.tp_expert_parallel}"
        raise ValueError(f"{flag}: it is an option of strategy tp: {remedy}")
    if isinstance(strategy, Function) and strategy.given is not None and options.gpu_memory is not None:
        reason = f"engine {strategy.name} runs in pytest's process, which takes no cap"
        remedy = "pass its place, 'package.module:name', to measure"
        raise ValueError(f"--llmgpu-gpu-memory={gib(options.gpu_memory)}: {reason}: {remedy}")
    if isinstance(strategy, Engine) and (options.scoring != "lean" or options.cuda_graphs == "on"):
        flag = f"cuda-graphs={options.cuda_graphs}" if options.scoring == "lean" else f"scoring={options.scoring}"
        raise ValueError(f"--llmgpu-{flag}: engine {strategy.name} chooses it itself: remove the option")


def _place_of(engine: Engine, options: Options) -> dict[str, Any]:
    """Return the options of a case that have the place of its engine."""
    if isinstance(engine, Function):
        return {OPTION: engine.place} | ({} if engine.given is None else {"process": "pytest"})
    own = {name: value for name in engine.options if (value := getattr(options, name))}
    return own | ({"server": "remote"} if openai.URL in own and openai.local_port(own[openai.URL]) is None else {})


def _processes(strategy: Strategy | Engine, devices: int) -> int:
    """Return how many processes compute on a CPU: those of a strategy, or those that an engine starts itself."""
    return devices if getattr(strategy, "own_workers", False) else strategy.ranks(devices)


def _generates(options: Options, dataset: Dataset, new_tokens: int | None) -> bool:
    """Return whether a dataset is continued, not scored; refuse options of the other workload."""
    is_prompts = dataset.task == tasks.PROMPTS
    if (options.workload or ("generate" if is_prompts else "score")) == "generate":
        if options.scoring != "lean":
            reason = "this is an option of workload score, and the test generates"
            raise ValueError(f"--llmgpu-scoring={options.scoring}: {reason}")
        return True
    if dataset.task in tasks.BUILT_IN and not all(item.endings for item in dataset.items):
        raise ValueError(f"dataset {dataset.name}: prompts have no endings to score: pass --llmgpu-workload=generate")
    if new_tokens is not None:
        reason = "this is an argument of workload generate, and the test scores"
        remedy = f"use the fixture {tasks.PROMPTS}, or pass --llmgpu-workload=generate"
        raise ValueError(f"new_tokens={new_tokens}: {reason}: {remedy}")
    return False


def _check_generation(source: ModelSource, prompt_tokens: int, new_tokens: int, *, is_engine: bool) -> None:
    """Refuse a model whose context is too short for the texts, or that cannot generate with a KV cache."""
    fields, tokens = source.decoder, prompt_tokens + new_tokens
    context = models.max_length(SimpleNamespace(**fields))
    if tokens > context:
        needed = f"{prompt_tokens} of a prompt and {new_tokens} new ones are {tokens}"
        remedy = f"choose --llmgpu-prompt-tokens and --llmgpu-new-tokens with a sum of at most {context}"
        raise ValueError(f"--llmgpu-model={source.name}: its context has {context} tokens, but {needed}: {remedy}")
    if is_engine:
        return  # it has a cache of its own
    if source.attention not in (None, "sdpa", "eager"):
        needed = "workload generate needs a mask of truth values or numbers for each row"
        raise ValueError(f"--llmgpu-attention={source.attention}: {needed}: allowed: sdpa, eager")
    reason = generation.reason_against(fields)
    if reason is None and (without := models.facts(source).without) is not None:
        reason = f"takes no {without}, which decode steps with a KV cache need"
    if reason is not None:
        raise ValueError(f"--llmgpu-model={source.name} {reason}: workload generate is not possible")
