from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.report_factory import make_generation, make_result

from pytest_llmgpu.analysis.bound import bound, forward_flops, weights_read
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.result import Batches, CaseResult, Collective, Traffic
from pytest_llmgpu.report.work import Bound, Ceilings, DeviceCeilings, ModelSize, RankWork, Work

_NATS = [[-1.0] * 3] * 5
_MODEL = ModelSize(parameters=1000, weights_bytes=2000, layers=2, attention_width=10)
_CEILINGS = Ceilings(
    devices=[
        DeviceCeilings(uuid="a", gemm_flops_per_s={"float16": 1e6}, copy_bytes_per_s=1e5),
        DeviceCeilings(uuid="b", gemm_flops_per_s={"float16": 2e6}, copy_bytes_per_s=1e5),
        DeviceCeilings(uuid="slow", gemm_flops_per_s={"float16": 1.0}, copy_bytes_per_s=1.0),
    ],
    all_reduce_bytes_per_s=1e4,
)


def _work(*uuids: list[str], **fields: Any) -> Work:
    ranks = [RankWork(uuids=one) for one in uuids]
    return Work(**{"batches": [0], "eager_batches": [0], "passes": 3, "ranks": ranks, "model": _MODEL, **fields})


def _result(
    tokens: list[int], sequences: list[int], sent: tuple[int, ...] = (), kind: str = "all_reduce"
) -> CaseResult:
    result = make_result()
    result.launches[-1].batches = Batches(
        latency_s=[1.0] * len(tokens), sequences=sequences, tokens=tokens, padded_tokens=tokens
    )
    ranks = [[Collective(collective=kind, calls=1, payload_bytes=size, wire_bytes=size)] for size in sent]  # type: ignore[arg-type]
    result.traffic = Traffic(ranks=ranks, wire_bytes_per_sequence=0.0)
    derive(result)
    return result


def _bound(result: CaseResult, *uuids: list[str]) -> Bound:
    found = bound(result, _work(*uuids), _CEILINGS)
    assert isinstance(found, Bound)
    return found


def test_a_forward_has_two_flops_per_parameter_and_token_plus_attention() -> None:
    """Causal attention: two products of a query with half of the keys and values, for every layer."""
    assert forward_flops(_MODEL, 10, 1) == 2 * 1000 * 10 + 2 * 2 * 10 * 100
    assert forward_flops(_MODEL, 10, 2) == 2 * 1000 * 10 + 2 * (2 * 2 * 10 * 25)
    assert forward_flops(_MODEL, 0, 0) == 0


def test_a_forward_reads_the_experts_that_its_tokens_are_routed_to() -> None:
    """One token touches its active experts, many tokens all of them."""
    model = msgspec.structs.replace(_MODEL, experts_bytes=1600, active_experts=0.25)
    assert [weights_read(model, tokens) for tokens in (1, 2, 1000)] == pytest.approx([800, 1100, 2000])
    # Trained weights may touch fewer than uniform routing would: 60 % in place of 1 - 0.75 ** 10.
    assert weights_read(model, 10, touched=0.6) == pytest.approx(400 + 0.6 * 1600)
    assert weights_read(_MODEL, 1) == 2000
    result = _result([100, 1], [10, 1])
    found = bound(result, _work(["a"], model=model), _CEILINGS)
    assert isinstance(found, Bound)
    assert found.memory_s == pytest.approx((2000 + 800) / 1e5)


def test_the_slower_of_compute_and_memory_bounds_each_batch() -> None:
    """The first batch is limited by its FLOPs, the second by the weights that it reads."""
    found = _bound(_result([100, 1], [10, 1]), ["a"])
    large, small = (forward_flops(_MODEL, *shape) / 1e6 for shape in ((100, 10), (1, 1)))
    times_s = (found.compute_s, found.memory_s, found.wire_s, found.bound_s)
    assert times_s == pytest.approx((large + small, 2 * 0.02, 0, large + 0.02))
    assert found.limited_by == "compute"
    assert found.share == pytest.approx(found.bound_s / 2)


def test_ranks_compute_at_the_same_time_and_devices_of_a_rank_in_turn() -> None:
    """The slowest GPU of the case counts, and none of another case."""
    result = _result([1], [1])
    one, two = _bound(result, ["a", "b"]), _bound(result, ["a"], ["b"])
    assert one.limited_by == "memory"
    assert (two.compute_s, two.memory_s) == pytest.approx((one.compute_s / 2, one.memory_s / 2))


def test_the_wire_is_added_for_the_rank_that_sends_most() -> None:
    """Collectives overlap with nothing; what is received was sent by another rank."""
    found = _bound(_result([1], [1], sent=(5000, 20_000)), ["a"], ["b"])
    assert (found.wire_s, found.bound_s) == pytest.approx((2.0, found.memory_s + 2.0))
    assert found.limited_by == "wire"
    assert _bound(_result([1], [1], sent=(5000,), kind="peer_copy"), ["a", "b"]).wire_s == 0


@pytest.mark.parametrize(
    ("work", "ceilings", "reason"),
    [
        (None, _CEILINGS, "work passes"),
        (_work(["a"], model=None, why={"model": "it has experts"}), _CEILINGS, "it has experts"),
        (_work([]), _CEILINGS, "CPU"),
        (_work(["a"]), None, "float16"),
        (_work(["a"], ["c"]), _CEILINGS, "float16"),
        (_work(["a"]), Ceilings(devices=[DeviceCeilings(uuid="a", gemm_flops_per_s={"float16": 1.0})]), "float16"),
        (_work(["a"]), msgspec.structs.replace(_CEILINGS, all_reduce_bytes_per_s=None), "all-reduce"),
    ],
)
def test_a_bound_that_is_not_known_has_a_reason(work: Work | None, ceilings: Ceilings | None, reason: str) -> None:
    """It is never 0. Without the bytes of the collectives the time on the wire is not known."""
    result = _result([1], [1], sent=(5000,))
    assert reason in str(bound(result, work, ceilings))
    result.traffic, result.why["traffic"] = None, "an op is not known"
    assert "an op is not known" in str(bound(result, _work(["a"]), _CEILINGS))
    result.launches.clear()
    assert "no finished batches" in str(bound(result, _work(["a"]), _CEILINGS))


def test_a_decode_step_reads_the_weights_and_the_keys_and_values_before_it() -> None:
    """Prefill and steps have bounds of their own; both are in the bound of the case."""
    scored = _result([40, 10], [4, 1])
    texts = make_generation([[1, 2, 3]] * 5, _NATS, _NATS, kv_cache_formula_bytes=4 * (10 + 3) * 50)
    launch = msgspec.structs.replace(scored.launches[-1], generation=texts)
    case = msgspec.structs.replace(scored.case, workload="generate", prompt_tokens=10, new_tokens=3)
    result = msgspec.structs.replace(scored, case=case, launches=[launch])
    plain, found = (_bound(one, ["a"]) for one in (scored, result))
    assert (plain.prefill_s, plain.step_s) == (None, None)
    assert found.prefill_s == pytest.approx(plain.bound_s / 2)
    # 50 bytes for each token: 40 + 4 x 1.5 of the first batch, 10 + 1.5 of the second, and 2,000 bytes of weights.
    steps = [(2000 + 50 * 46) / 1e5, (2000 + 50 * 11.5) / 1e5]
    assert found.step_s == pytest.approx(sum(steps) / 2)
    assert found.bound_s == pytest.approx(plain.bound_s + 2 * sum(steps))
    assert found.limited_by == "memory"
