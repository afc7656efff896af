"""The commands of the rank of an engine: those of `worker`, for something that runs the model by itself.

A batch is one call of the engine. Everything around it is that of a strategy: tokens, batches, times, answers, work
passes. Kernels, ops and calls of the host are recorded in this process, unless the engine computes in others.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from pytest_llmgpu.engines.protocol import Engine, Texts
from pytest_llmgpu.inference import batching, scoring
from pytest_llmgpu.inference.batching import Batch
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.sm_clock import SmClock
from pytest_llmgpu.ranks import host, memory, registered, traffic, worker
from pytest_llmgpu.ranks.registered import ModelHook
from pytest_llmgpu.ranks.worker import Measured, RankState, ReferenceTexts
from pytest_llmgpu.recording import turns, work
from pytest_llmgpu.recording.work import WorkReply
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import decode, encode
from pytest_llmgpu.report.result import Batches, Collective, DeviceMemory, Generation, Launch
from pytest_llmgpu.report.text import plural

_T = TypeVar("_T")

_MOST_TOKEN = 2**31 - 1
_MOST_LOGLIKELIHOOD = 0.01
"""The log of a probability is at most 0, up to rounding."""
model_size = worker.model_size
_IN_WORKERS = "the engine computes in processes of its own, whose memory is not seen"
_REPLAYED = "CUDA graphs of the engine replay its collectives past torch's dispatcher: pass --llmgpu-cuda-graphs=off"


def load(
    state: RankState, case: Case, source: ModelSource, place: str, hooks: Sequence[ModelHook] = ()
) -> list[DeviceMemory]:
    """Start the engine of a case, and return the memory of the devices; ValueError for a hook that changes a model."""
    import torch

    if hooks:
        raise ValueError("pytest_llmgpu_model: an engine loads its model itself: change it there")
    state.phase, state.case, state.source = "load", case, source
    engine = state.engine or registered.make(place)
    assert isinstance(engine, Engine), "strategies have a `load` of their own"
    elsewhere = engine.elsewhere or (_IN_WORKERS if engine.own_workers and case.devices > 1 else None)
    on_gpu = case.device == "cuda" and elsewhere is None
    devices = [torch.device("cuda", index) for index in range(case.devices)] if on_gpu else [torch.device("cpu")]
    held = memory.hold(devices, case.gpu_memory_bytes if on_gpu else None)
    if elsewhere is not None:
        held = [msgspec.structs.replace(one, why=dict.fromkeys(one.why, elsewhere)) for one in held]
    state.devices, state.engine, state.loaded_memory = devices, engine, held
    engine.start(case, source)
    state.loaded_memory = memory.after_loading(devices, held)
    return state.memory()


def warm_up(state: RankState, case: Case, not_recorded: str | None = None) -> None:  # noqa: ARG001 - as `worker.warm_up`
    """Prepare `measure`: run a batch of each number of rows and of each of few widths."""
    state.case, state.phase, state.generation = case, "forward", None
    requests = worker.encoded(state)
    # Sequences are not padded: the few widths are for the warm-up alone.
    state.engine_plan = plan = batching.plan(requests, case.batch_size, few_shapes=True, share=False)
    _engine(state).prepare(max(batch.rows for batch in plan.batches), plan.tokens, requests.new_tokens)
    memory.reset(state.devices, recorded=True)  # what the case before needed is free now
    began_s = time.monotonic()  # vLLM has loaded the model again
    on_batch = worker.report_to(state)
    for batch in {(batch.rows, batch.width): batch for batch in plan.batches}.values():
        _engine(state).idle()
        started_s = time.perf_counter()
        _run(state, batch)
        on_batch(time.perf_counter() - started_s, batch.rows, batch.tokens, batch.padded_tokens)
    scoring.synchronize(state.devices)
    state.launch = Launch(warmup_s=time.monotonic() - began_s, plan_sha256=plan.sha256)


def measure(state: RankState) -> Measured:
    """Score or generate the case that was warmed up, one call of the engine for each batch.

    ValueError if the engine returned another number of sequences or tokens, or a number that is none.
    """
    launch, plan, state.launch = state.launch, state.plan, None
    assert launch is not None, "the case is warmed up"
    on_batch, columns = worker.report_to(state, planned=len(plan.batches)), Batches()
    answers: dict[int, list[float]] = {}
    texts: list[tuple[Batch, Texts]] = []
    clock = SmClock(state.devices, 2 * len(plan.batches))
    counted = _engine(state).counters()
    started_s, ended = time.monotonic(), host.watch()
    for number, batch in enumerate(plan.batches):
        _engine(state).idle()
        clock.stamp(2 * number)
        scoring.synchronize(state.devices)
        began_s = time.perf_counter()
        found = _run(state, batch)
        scoring.synchronize(state.devices)
        latency_s = time.perf_counter() - began_s
        clock.stamp(2 * number + 1)
        if isinstance(found, Texts):
            texts.append((batch, found))
            values: Sequence[Sequence[float]] = found.loglikelihoods or ()
        else:
            values = found
            if values:
                answers.update(zip(batch.requests, values, strict=True))
        scoring.add_batch(columns, batch, latency_s, itertools.chain.from_iterable(values), of=len(plan.batches))
        on_batch(latency_s, batch.rows, batch.tokens, batch.padded_tokens)
    ended(launch)
    ended_s = time.monotonic()
    grown = _engine(state).counters()
    launch.figures = {name: grown[name] - before for name, before in counted.items() if name in grown}
    launch.batches = columns
    if texts:
        _add_texts(state, launch, texts)
    else:
        columns.clock_ghz = clock.ghz([(2 * number, 2 * number + 1) for number in range(len(plan.batches))])
        if clock.why is not None:
            launch.why["clock_ghz"] = clock.why
        if answers:
            task, items = state.datasets[state.case.dataset_sha256]
            sums = iter([math.fsum(answers[number]) for number in range(len(plan.requests.requests))])
            launch.accuracy = task.score(items, [[next(sums) for _ in range(count)] for count in plan.requests.endings])
        else:
            launch.why["accuracy"] = f"engine {_engine(state).name} returns no log-likelihoods"
    launch.memory = state.memory()
    return Measured(launch, "engine", started_s, ended_s)


def check_texts(state: RankState, reference: ReferenceTexts | None = None) -> Generation:
    """Score the texts of the latest case, and those of a reference, by the engine's `score`, if it has one."""
    assert state.generation is not None
    requests, size = state.plan.requests, max(1, state.case.batch_size // 2)

    def score_again(tokens: str | None) -> str | None:
        if tokens is None:
            return None
        numbers = iter(decode(tokens, "i").tolist())
        prompts = [list(request.tokens[:-1]) for request in requests.requests]
        both = [[*prompt, *itertools.islice(numbers, requests.new_tokens)] for prompt in prompts]
        values: list[list[float]] = []
        on_batch = worker.report_to(state)
        for start in range(0, len(both), size):
            some, begins = both[start : start + size], [len(prompt) for prompt in prompts[start : start + size]]
            try:
                found = _engine(state).score(some, begins)
            except NotImplementedError:
                return None
            if found is None:
                return None
            values += _checked_scores(found, [requests.new_tokens] * len(some), "score")
            on_batch(0.0, len(some), sum(map(len, some)), sum(map(len, some)))  # progress, for the time limit
        return encode(itertools.chain.from_iterable(values))

    found = score_again(state.generation.tokens)
    return msgspec.structs.replace(
        state.generation,
        prefill_loglikelihoods=found,
        # Without tokens there is nothing to compare.
        reference=None if reference is None or state.generation.tokens is None else reference.key,
        reference_loglikelihoods=None if reference is None or found is None else score_again(reference.tokens),
    )


def account(state: RankState) -> list[tuple[list[Collective], None]] | tuple[list[Collective], None] | str:
    """Return the traffic of the latest case: none on one device; on several that of each worker, in calls of its own.

    A string is the reason why it is not known.
    """
    engine = _engine(state)
    if engine.elsewhere is not None or state.case.devices == 1:
        return engine.elsewhere or ([], None)
    if state.case.device == "cuda" and state.case.cuda_graphs != "off":
        return _REPLAYED
    if engine.workers(traffic.begin, state.case.devices) is None:
        return f"engine {engine.name} starts its processes itself, whose traffic is not counted"
    on_batch = worker.report_to(state)
    for batch in state.plan.batches:
        _idle_run(state, batch)
        on_batch(0.0, batch.rows, batch.tokens, batch.padded_tokens)  # progress, for the time limit
    return [(found, None) for found in engine.workers(traffic.end) or ()]


def record_work(state: RankState, traces: str | None = None) -> str | None:
    """Record the kernels of the latest case (see `worker.record_work`); return why nothing can be recorded, or None."""
    engine = _engine(state)
    if engine.elsewhere is not None:
        return engine.elsewhere
    trace = worker.trace_path(state, traces, "passes")
    if (replies := _in_workers(state, trace, eager=False)) is None:
        forward, on_batch = partial(_idle_run, state), worker.report_to(state)
        whole = {"whole_texts": state.case.generates}
        program = work.Program(tuple(state.devices), engine.dispatched)
        replies = [work.record(program, state.plan, forward, on_batch=on_batch, trace=trace, **whole)]
    state.passes = replies
    return None


def run_eager_passes(state: RankState, traces: str | None = None) -> list[WorkReply]:
    """Record what the latest case computes, in calls that are not measured, and return the reply of each process."""
    trace = worker.trace_path(state, traces, "modules")
    if (replies := _in_workers(state, trace, eager=True)) is not None:
        return replies
    forward, on_batch = partial(_idle_run, state), worker.report_to(state)
    program = work.Program(tuple(state.devices), _engine(state).dispatched)
    return [work.measure(program, state.plan, state.passes[0], forward, on_batch=on_batch, trace=trace)]


def _in_workers(state: RankState, trace: str | None, *, eager: bool) -> list[WorkReply] | None:
    """Run passes in the workers of the engine, and each batch that they wait for; None if it has no workers."""
    engine = _engine(state)
    start = partial(turns.start, dispatched=engine.dispatched, eager=eager, whole_texts=state.case.generates)
    replies = engine.workers(start, state.plan, trace)
    while replies is not None and isinstance(replies[0], int):
        if len(set(replies)) > 1:
            raise RuntimeError(f"the workers of {engine.name} wait for different batches: {replies}")
        _idle_run(state, state.plan.batches[replies[0]])
        replies = engine.workers(turns.go_on)
    return replies


def stop(state: RankState) -> None:
    """End the engine."""
    if state.engine is not None:
        state.engine.stop()


def _engine(state: RankState) -> Engine:
    assert state.engine is not None, "it is started"
    return state.engine


def _run(state: RankState, batch: Batch) -> Texts | list[list[float]]:
    """Run one batch, and check what the engine returns."""
    engine, requests = _engine(state), state.plan.requests
    sequences = [requests.requests[number] for number in batch.requests]
    if state.case.generates:
        found = engine.generate([list(one.tokens[:-1]) for one in sequences], requests.new_tokens)
        texts = found if isinstance(found, Texts) else Texts(tokens=found)
        vocabulary = state.source.decoder.get("vocab_size") if state.case.model == state.source.name else None
        return _checked_texts(texts, len(sequences), requests.new_tokens, vocabulary)
    # The first tokens of a sequence that is too long are left out, and one token more than a model reads is scored.
    kept = [list(one.tokens[-(requests.max_length + 1) :]) for one in sequences]
    begins = [len(tokens) - one.ending for tokens, one in zip(kept, sequences, strict=True)]
    values = engine.score(kept, begins)
    return [] if values is None else _checked_scores(values, [one.ending for one in sequences], "score")


def _idle_run(state: RankState, batch: Batch) -> object:
    """Run one batch as soon as nothing of the one before it runs."""
    _engine(state).idle()
    return _run(state, batch)


def _checked_texts(texts: Texts, prompts: int, new_tokens: int, vocabulary: int | None) -> Texts:
    """Return texts in lists of Python's numbers; refuse any that no engine can mean."""
    tokens = None
    if texts.tokens is not None:
        tokens = _rows(texts.tokens, operator.index, "generate", "token ids")
        if len(tokens) != prompts:
            raise ValueError(f"generate returned {plural(len(tokens), 'text')} for {plural(prompts, 'prompt')}")
        if (wrong := next((row for row in tokens if len(row) != new_tokens), None)) is not None:
            found = f"{plural(len(wrong), 'token')} for prompt {tokens.index(wrong)} of its batch"
            needed = f"{new_tokens} are needed: an end-of-sequence token ends no text"
            raise ValueError(f"generate returned {found}, {needed}")
        most = (vocabulary or _MOST_TOKEN) - 1
        outside = next((token for row in tokens for token in row if not 0 <= token <= most), None)
        if outside is not None:
            raise ValueError(f"generate returned token {outside}: allowed are 0 to {most}")
    values = texts.loglikelihoods
    if values is not None:
        values = _checked_scores(values, [new_tokens] * prompts, "generate")
    if texts.step_s and len(texts.step_s) != new_tokens - 1:
        raise ValueError(f"generate returned {len(texts.step_s)} times of further tokens, {new_tokens - 1} are needed")
    (times_s,) = _rows([[texts.first_token_s or 0.0, *texts.step_s]], _number, "generate", "seconds")
    if (wrong_s := next((second for second in times_s if not 0 <= second < math.inf), None)) is not None:
        raise ValueError(f"generate returned a time of {wrong_s} s: at least 0 is needed")
    return msgspec.structs.replace(texts, tokens=tokens, loglikelihoods=values)


def _checked_scores(found: Sequence[Sequence[float]], lengths: Sequence[int], method: str) -> list[list[float]]:
    values = _rows(found, _number, method, "log-likelihoods")
    if (counts := [len(row) for row in values]) != [*lengths]:
        needed = "one for each token" if method == "generate" else "one for each token from the given position on"
        raise ValueError(f"{method} returned log-likelihoods of {counts} tokens, {[*lengths]} are needed: {needed}")
    wrong = next((value for row in values for value in row if not -math.inf < value <= _MOST_LOGLIKELIHOOD), None)
    if wrong is not None:
        raise ValueError(f"{method} returned the log-likelihood {wrong}: a finite number of at most 0 is needed")
    return values


def _number(value: Any) -> float:
    return float(value + 0.0)  # no text, which float alone would read


def _rows(found: Any, convert: Callable[[Any], _T], method: str, what: str) -> list[list[_T]]:
    """Return a list of lists from one of Python, numpy or torch; ValueError for anything else."""
    try:
        rows: Iterable[Any] = found.tolist() if hasattr(found, "tolist") else found
        return [[convert(value) for value in row] for row in rows]
    except (TypeError, ValueError) as error:
        needed = f"a list with a list of {what} for each sequence is needed ({error})"
        raise ValueError(f"{method} returned {type(found).__name__}: {needed}") from None


def _add_texts(state: RankState, launch: Launch, texts: Sequence[tuple[Batch, Texts]]) -> None:
    """Add the record of the texts of all batches, and the reasons for figures that the engine does not have."""
    places = [number for batch, _ in texts for number in batch.requests]
    in_order = [place for _, place in sorted(zip(places, range(len(places)), strict=True))]
    tokens = [row for _, one in texts for row in one.tokens or ()]
    values = [row for _, one in texts for row in one.loglikelihoods or ()]
    firsts = [one.first_token_s for _, one in texts if one.first_token_s is not None]
    requests = state.plan.requests
    timed = all(len(one.step_s) == requests.new_tokens - 1 for _, one in texts)
    flat = itertools.chain.from_iterable
    launch.generation = state.generation = Generation(
        prompt_tokens=[len(request.tokens) - 1 for request in requests.requests],
        new_tokens=[requests.new_tokens] * len(places),
        first_token_s=firsts if len(firsts) == len(texts) else [],
        step_s=[second for _, one in texts for second in one.step_s] if timed else [],
        tokens=encode(flat(tokens[place] for place in in_order), "i") if len(tokens) == len(places) else None,
        loglikelihoods=encode(flat(values[place] for place in in_order)) if len(values) == len(places) else None,
    )
    reasons = {
        "first_token_s": "reports no time of the first token",
        "step_s": "does not report the time of each further token",
        "tokens": "returns no token ids",
        "loglikelihoods": "returns no log-likelihoods of its tokens",
    }
    lacking = [field for field in reasons if not getattr(launch.generation, field)]
    launch.why |= {field: f"engine {_engine(state).name} {reasons[field]}" for field in lacking}
