from __future__ import annotations

from typing import Any

import pytest
from support import tiny_model
from support.prose import Prose
from support.report_factory import make_case

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.strategies import divisibility
from pytest_llmgpu.strategies.divisibility import Indivisible

_LLAMA_2_70B = {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28_672}


def _source(config: dict[str, Any]) -> ModelSource:
    return tiny_model.source(config, name="llama")


@pytest.mark.parametrize(
    ("fields", "devices", "expected"),
    [
        ({"num_attention_heads": 52}, 8, ("num_attention_heads", 52, (2, 4))),
        ({"num_key_value_heads": 2}, 4, ("num_key_value_heads", 2, (2,))),
        ({"num_key_value_heads": 1}, 2, ("num_key_value_heads", 1, ())),
        ({"num_attention_heads": 3}, 2, ("num_attention_heads", 3, ())),
        ({"intermediate_size": 28_674}, 8, ("intermediate_size", 28_674, (2,))),
    ],
)
def test_the_first_indivisible_count_is_found(
    fields: dict[str, int], devices: int, expected: tuple[str, int, tuple[int, ...]]
) -> None:
    """The result has the count and the numbers of devices that divide all counts, at most 64."""
    name, count, allowed = expected
    found = divisibility.find_indivisible(_LLAMA_2_70B | fields, devices)
    assert found == Indivisible(name=name, count=count, allowed=allowed)


@pytest.mark.parametrize(("heads", "allowed"), [(3, (1,)), (12, (1, 2, 4))])
def test_a_strategy_may_allow_one_device(heads: int, allowed: tuple[int, ...]) -> None:
    """With one device, as iok allows, nothing is split."""
    found = divisibility.find_indivisible(_LLAMA_2_70B | {"num_attention_heads": heads}, 8, least=1)
    assert found is not None
    assert found.allowed == allowed


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
@pytest.mark.parametrize("heads", [52, 3])
def test_an_indivisible_count_is_refused(prose: Prose, heads: int, nested: bool) -> None:
    """The message has the flag, the strategy, the count and the allowed numbers of devices."""
    config = _LLAMA_2_70B | {"num_attention_heads": heads}
    # The outer fields describe another part of the model, such as a vision encoder.
    source = _source({"text_config": config, "num_attention_heads": 7} if nested else config)
    with pytest.raises(ValueError, match="--llmgpu-devices=8") as caught:
        divisibility.check_divisible(make_case(strategy="tp", devices=8), source)
    assert prose == caught.value


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_divisible_counts_are_accepted(devices: int) -> None:
    """Each number of devices divides all counts of the model."""
    divisibility.check_divisible(make_case(strategy="tp", devices=devices), _source(_LLAMA_2_70B))


@pytest.mark.parametrize("config", [{}, {"text_config": {}}, {"text_config": None}, {"num_key_value_heads": None}])
def test_counts_that_the_config_lacks_are_not_checked(config: dict[str, Any]) -> None:
    """The defaults of the model class apply, which the process of pytest does not load."""
    divisibility.check_divisible(make_case(strategy="tp", devices=7), _source(config))
