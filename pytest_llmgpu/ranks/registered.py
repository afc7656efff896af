"""The strategies and engines that `--strategy` chooses from: one registry, since both are measured in the same way."""

from __future__ import annotations

import re

from pytest_llmgpu.engines.protocol import Engine
from pytest_llmgpu.inference.registry import Registry
from pytest_llmgpu.strategies import BUILT_IN as STRATEGIES
from pytest_llmgpu.strategies.protocol import Strategy

ENGINES = {
    "transformers-cb": "pytest_llmgpu.engines.transformers_cb:ContinuousBatching",
    "openai": "pytest_llmgpu.engines.openai:Server",
    "vllm": "pytest_llmgpu.engines.vllm:Vllm",
}
"""Name to `module:attribute`: an engine is imported only when it is chosen."""
BUILT_IN = STRATEGIES | ENGINES

_REGISTRY: Registry[Strategy | Engine] = Registry(
    kind="strategy",
    built_in=BUILT_IN,
    hook="pytest_llmgpu_strategies",
    protocol="pytest_llmgpu.strategies.protocol, or pytest_llmgpu.engines.protocol",
    members=("name", "backend", "check", "ranks"),
    is_name=lambda text: re.fullmatch(r"[\w.-]+", text) is not None,
    allowed_names="letters, digits, _, . and - are needed",
)

merge, find = _REGISTRY.merge, _REGISTRY.find


def make(place: str) -> Strategy | Engine:
    """Return a new strategy or engine of the implementation at a place that `find` returned.

    Raises:
        ValueError: It cannot be imported or made, lacks a member, or has a name that is not allowed.
    """
    made = _REGISTRY.make(place)
    needed = () if isinstance(made, Engine) else ("build", "load", "prepare")
    if lacking := [name for name in needed if not hasattr(made, name)]:
        raise ValueError(f"strategy {place} lacks {', '.join(lacking)} (see {_REGISTRY.protocol})")
    return made


def strategy(place: str) -> Strategy:
    """Return a new strategy of the implementation at a place."""
    made = make(place)
    assert not isinstance(made, Engine), "the place is that of a strategy"
    return made


def engine(place: str) -> Engine:
    """Return a new engine of the implementation at a place."""
    made = make(place)
    assert isinstance(made, Engine), "the place is that of an engine"
    return made
