"""The choice whether a case runs eagerly or as CUDA graphs: by the case and its batches alone, never by a timing.

So every launch of a case runs the same batches in the same execution. With `auto`, forwards are recorded up to
`cuda_graphs.MOST_TOKENS`; above, the GPU is the limit and eager forwards are as fast. Up to there eager forwards on
GPUs are padded to few shapes as well: the first forward of a shape is slow, and a dataset has about a hundred widths
(LLaMA-13B, mp on 2 H200, 64 items, batch size 1: 6.7 s of warm-up before 8.9 s of inference).
"""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from pytest_llmgpu.inference import cuda_graphs, generation, scoring
from pytest_llmgpu.inference.batching import Batch, Plan, Requests, cost, plan
from pytest_llmgpu.inference.cuda_graphs import GraphedDecoder
from pytest_llmgpu.inference.generation import Generator
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, typical_difference
from pytest_llmgpu.report.text import percent, plural
from pytest_llmgpu.strategies.protocol import Loaded

Reason = Literal["requested", "small", "excluded", "large", "not_recorded"]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The execution of a case, with the reason for it and the batches that it runs."""

    reason: Reason
    plan: Plan
    """The batches. On a GPU small forwards are padded to few shapes, eager ones too: each shape costs a warm-up."""
    padding: float = 0.0
    """Padding to few shapes adds this fraction of time (`batching.cost`)."""
    detail: str = ""
    """For `excluded`, this is the cause; for `not_recorded`, the operation with its error."""
    compiled: bool = False
    """The layers are compiled."""

    @property
    def recorded_tokens(self) -> int:
        """Return the tokens up to which a forward of a case that generates is recorded; 0 for none."""
        return {"requested": sys.maxsize, "small": cuda_graphs.MOST_TOKENS}.get(self.reason, 0)

    @property
    def execution(self) -> Literal["eager", "cuda_graphs", "compile"]:
        """Return how the forwards run; compiled ones that are recorded are `cuda_graphs`."""
        if self.reason in ("requested", "small"):
            return "cuda_graphs"
        return "compile" if self.compiled else "eager"


def decide(
    loaded: Loaded,
    requests: Requests,
    batch_size: int,
    *,
    requested: str,
    logits: str = scoring.LEAN,
    not_recorded: str | None = None,
) -> Decision:
    """Return how the forwards of a case run.

    `requested` is `auto`, `on` (CUDA graphs, if they can be recorded) or `off`, and `logits` one of `scoring.SCORINGS`.
    `not_recorded` is the operation that could not be recorded when it was tried; None if nothing failed.
    """
    own = plan(requests, batch_size)
    large = requested != "on" and _largest_forward(own) > cuda_graphs.MOST_TOKENS
    if requests.new_tokens and loaded.own_kv_cache:
        exclusion: str | None = (
            "the kernels of the strategy count the tokens of a text on the host, so that a graph repeats one step"
        )
    elif logits == scoring.HARNESS:
        exclusion = "--llmgpu-scoring=harness keeps a KV cache, which a CUDA graph does not"
    elif not loaded.recordable:
        exclusion = "the strategy forbids CUDA graphs"
    else:
        exclusion = cuda_graphs.reason_against(loaded.model, loaded.devices)
        exclusion = exclusion or ("CUDA graphs are switched off" if requested == "off" else None)
    compiled = loaded.compiled is not None
    own_widths = large or loaded.devices[0].type != "cuda" or logits == scoring.HARNESS
    pack = compiled and bool(requests.new_tokens) and generation.can_share_lines(loaded.config)
    chosen = own if own_widths and not compiled else plan(requests, batch_size, few_shapes=True, pack=pack)
    own_cost, chosen_cost = (cost((batch.rows, batch.width) for batch in one.batches) for one in (own, chosen))
    reason: Reason = "requested" if requested == "on" else "small"
    if exclusion is not None:
        reason = "excluded"
    elif large:
        reason = "large"
    elif not_recorded is not None:
        reason = "not_recorded"
    return Decision(
        reason=reason,
        plan=chosen,
        padding=chosen_cost / own_cost - 1,
        detail=exclusion or not_recorded or "",
        compiled=compiled,
    )


def generator(loaded: Loaded, plan: Plan, *, recorded_tokens: int = 0) -> Generator:
    """Return the generator of texts of a loaded model; the arguments are those of `Generator`."""
    return Generator(
        loaded.model, plan, recorded_tokens=recorded_tokens, own_kv_cache=loaded.own_kv_cache, **loaded.placed
    )


def describe(decision: Decision) -> str:
    """Return the reason of a decision in one sentence, with its figures."""
    batches = decision.plan.batches
    forward = "decode step" if decision.plan.requests.new_tokens else "forward"
    largest = f"the largest {forward} has {plural(_largest_forward(decision.plan), 'token')}"
    shapes = len({(batch.rows, batch.width) for batch in batches})
    padded = f"padding adds {percent(decision.padding)} of time"
    recorded = f"{plural(shapes, 'shape')} recorded for {plural(len(batches), 'batch')}, {padded}"
    eager, graphs = ("compiled", "compiled, CUDA graphs") if decision.compiled else ("eager", "CUDA graphs")
    sentences: dict[Reason, str] = {
        "requested": f"{graphs}: they were requested; {recorded}",
        "small": f"{graphs}: {largest}, at most {cuda_graphs.MOST_TOKENS:,}; {recorded}",
        "excluded": f"{eager}: {decision.detail}",
        "large": f"{eager}: {largest}, more than {cuda_graphs.MOST_TOKENS:,}: the GPU is the limit",
        "not_recorded": f"{eager}: the forwards cannot be recorded as CUDA graphs: {decision.detail}",
    }
    return sentences[decision.reason]


def check_answers(loaded: Loaded, plan: Plan, decoder: GraphedDecoder, dtype: str) -> None:
    """Compare the median batch, replayed, with an eager forward; ValueError if they differ by more than rounding."""
    number = len(plan.batches) // 2
    batch = plan.batches[number]
    found = _answers(loaded, batch)
    with decoder.suspended():
        expected = _answers(loaded, batch)
    # All log-likelihoods together: rounding alone can change a single one near 0 by more.
    difference, allowed = typical_difference(found, expected), LOGLIKELIHOOD_TOLERANCES[dtype]
    if difference > allowed:
        where = f"batch {number + 1} ({plural(batch.rows, 'row')} of {batch.width} tokens)"
        differ = f"typically differ by {percent(difference)} from those of an eager forward"
        remedy = "look for hooks or for state in the model, or pass --llmgpu-cuda-graphs=off"
        remedy = f"{dtype} allows {100 * allowed:g} %: a replay runs no Python code, {remedy}"
        raise ValueError(f"as CUDA graphs, the log-likelihoods of {where} {differ}; {remedy}")


def _largest_forward(plan: Plan) -> int:
    """Return the tokens of the forward that decides: the largest one, or the largest decode step."""
    return max(batch.rows if plan.requests.new_tokens else batch.padded_tokens for batch in plan.batches)


def _answers(loaded: Loaded, batch: Batch) -> list[float]:
    _, answers = scoring.run(loaded.model, [batch], **loaded.placed)
    return [answers[number] for number in sorted(answers)]
