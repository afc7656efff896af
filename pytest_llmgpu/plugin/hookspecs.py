"""Where other plugins and conftest files extend this one: pytest hooks, each with an example to copy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

__all__ = ["pytest_llmgpu_strategies"]


@pytest.hookspec
def pytest_llmgpu_strategies(config: pytest.Config) -> Mapping[str, str]:  # type: ignore[empty-body]  # implemented elsewhere
    """Return strategies for `--strategy` to choose from: name to `package.module:attribute`.

    The attribute is a class that is made without arguments, as `pytest_llmgpu.strategies.protocol.Strategy` describes
    it; its `name` is the one it is registered by. It is imported where it is chosen, in pytest's process and in every
    rank, so its module must import there without the test suite. Two places for one name are refused.

    Two files make a strategy that waits before every forward::

        # slow_strategy.py, beside conftest.py
        import time

        from pytest_llmgpu.strategies.mp import LayerParallel


        class Slow(LayerParallel):
            name = "slow"

            def load(self, case, source):
                loaded = super().load(case, source)
                loaded.model.register_forward_pre_hook(wait)
                return loaded


        def wait(module, args):
            time.sleep(0.01)


        # conftest.py
        def pytest_llmgpu_strategies():
            return {"slow": "slow_strategy:Slow"}

    `pytest --strategy=mp,slow` measures it beside mp. In an installed package the hook stands in the module that its
    entry point of group `pytest11` names; with `@pytest.hookimpl(optionalhook=True)` on it, that module also works
    where this plugin is not installed.

    Args:
        config: pytest's; an implementation may leave it out.
    """
