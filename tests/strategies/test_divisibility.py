from __future__ import annotations

from typing import Any

import pytest
from support.report_factory import make_case

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.strategies import divisibility

_LLAMA_2_70B = {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28_672}


def _source(config: dict[str, Any]) -> ModelSource:
    return ModelSource(
        name="llama",
        directory=None,
        config=config,
        revision=None,
        load_format="dummy",
        tokenizer_directory="",
        tokenizer_sha256="",
    )


@pytest.mark.parametrize(
    ("fields", "devices", "message"),
    [
        ({"num_attention_heads": 52}, 8, "the 52 attention heads of llama: allowed are 2, 4"),
        ({"num_key_value_heads": 2}, 4, "the 2 key and value heads of llama: allowed are 2"),
        ({"num_key_value_heads": 1}, 2, "the 1 key and value heads of llama: no number from 2 to 64 can"),
        ({"num_attention_heads": 3}, 2, "the 3 attention heads of llama: no number from 2 to 64 can"),
        (
            {"intermediate_size": 28_674},
            8,
            "the 28674 columns of its feed-forward layers of llama: allowed are 2",
        ),
    ],
)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
def test_what_the_devices_do_not_divide_is_refused(
    fields: dict[str, int], devices: int, message: str, nested: bool
) -> None:
    """By flag and strategy, with the numbers of devices that would do; no node has more than 64."""
    config = _LLAMA_2_70B | fields
    # Beside it stand the numbers of another part of the model, as of one that sees.
    source = _source({"text_config": config, "num_attention_heads": 7} if nested else config)
    with pytest.raises(ValueError, match="cannot share out") as caught:
        divisibility.check_divisible(make_case(strategy="tp", devices=devices), source)
    assert str(caught.value) == f"--llmgpu-devices={devices}: strategy tp cannot share out {message}"


@pytest.mark.parametrize(("heads", "allowed"), [(3, "1"), (12, "1, 2, 4")])
def test_a_strategy_that_runs_on_one_device_may_be_left_with_that(heads: int, allowed: str) -> None:
    """As iok may: one device shares nothing out."""
    source = _source(_LLAMA_2_70B | {"num_attention_heads": heads})
    with pytest.raises(ValueError, match=f"the {heads} attention heads of llama: allowed are {allowed}$"):
        divisibility.check_divisible(make_case(strategy="iok", devices=8), source, least=1)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_what_the_devices_divide_is_let_through(devices: int) -> None:
    """Every number is divisible, each by itself."""
    divisibility.check_divisible(make_case(strategy="tp", devices=devices), _source(_LLAMA_2_70B))


@pytest.mark.parametrize("config", [{}, {"text_config": {}}, {"text_config": None}, {"num_key_value_heads": None}])
def test_what_a_config_does_not_say_is_not_judged(config: dict[str, Any]) -> None:
    """Its class has defaults that pytest's process does not know."""
    divisibility.check_divisible(make_case(strategy="tp", devices=7), _source(config))
