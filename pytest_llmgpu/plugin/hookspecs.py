"""The pytest hooks by which plugins and conftest.py files extend this plugin, each with an example to copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_llmgpu.report.case import Case
    from pytest_llmgpu.strategies.protocol import Loaded


@pytest.hookspec
def pytest_llmgpu_strategies(config: pytest.Config) -> Mapping[str, str]:  # type: ignore[empty-body]  # implemented elsewhere
    """Return strategies for `--strategy` to choose from: name to `package.module:attribute`.

    The attribute is a class without constructor arguments that implements
    `pytest_llmgpu.strategies.protocol.Strategy`; its `name` is the registered name. pytest's process and every rank
    import its module when the strategy is chosen, so the module must import without the test suite. Two places for one
    name are refused.

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

    `pytest --strategy=mp,slow` measures it and mp. An installed package implements the hook in the module of its entry
    point of group `pytest11`; with `@pytest.hookimpl(optionalhook=True)` the module also works without this plugin.
    An implementation may omit `config`.
    """


@pytest.hookspec
def pytest_llmgpu_tasks(config: pytest.Config) -> Mapping[str, str]:  # type: ignore[empty-body]  # implemented elsewhere
    """Return tasks that tests can score: name to `package.module:attribute`.

    A test uses a task by the fixture of its name, which has the items of `--llmgpu-dataset`. The attribute is a class
    without constructor arguments that implements `pytest_llmgpu.inference.tasks.protocol.Task`; its `name` is the
    registered name. pytest's process and every rank import its module when a test uses the task, so the module must
    import without the test suite. Two places for one name are refused.

    Two files make a task of two choices::

        # right_or_wrong.py, beside conftest.py
        from pytest_llmgpu.inference.tasks.multiple_choice import MultipleChoice
        from pytest_llmgpu.inference.tasks.protocol import Item


        class RightOrWrong(MultipleChoice):
            name = "right_or_wrong"

            def item(self, record, place, index):
                right = record["endings"][int(record["label"])]
                wrong = record["endings"][int(record["label"]) - 1]
                prompt = f"Read: {record['ctx']}"
                return Item(str(index), prompt, (wrong, right), label=1, task=self.name)


        # conftest.py
        def pytest_llmgpu_tasks():
            return {"right_or_wrong": "right_or_wrong:RightOrWrong"}

    A test measures it with `measure(llm, right_or_wrong, batch_size)`.
    An implementation may omit `config`.
    """


@pytest.hookspec
def pytest_llmgpu_model(loaded: Loaded, case: Case) -> None:
    """Change a model right after a strategy has loaded it, in each rank; the change is part of what is measured.

    Three lines of conftest.py measure a kernel of your own in place of the MLPs of a llama, under every strategy::

        def pytest_llmgpu_model(loaded):
            for layer in loaded.model.model.layers:
                layer.mlp = FusedMLP(layer.mlp)

    The model is changed in place, before its layers are compiled and recorded as CUDA graphs. `iok` has replaced its
    layers before. Under `tp` a rank has its part of the weights. A replayed CUDA graph runs kernels and no Python code.

    Each rank imports the module of the function, which is at its top level: what it imports must be importable there.
    The function of a conftest.py holds for the tests below its folder. An implementation may omit `case` or `loaded`.

    Args:
        loaded: The model of this rank, with its devices, number of ranks and config.
        case: The first case that is measured with it.
    """


@pytest.hookspec
def pytest_llmgpu_metrics(config: pytest.Config) -> Mapping[str, Mapping[str, Any]]:  # type: ignore[empty-body]  # implemented elsewhere
    """Declare figures of your own, which tests record: name to unit, direction and rule.

    conftest.py declares a figure, so that the gate judges it as a metric of the package::

        def pytest_llmgpu_metrics():
            return {"cache_hit_rate": {"unit": "", "better": "larger", "rule": "exact", "threshold": 0.01}}

    A test records it for the launch that `measure` has just measured::

        result = measure(llm, hellaswag, batch_size)
        result.record("cache_hit_rate", 0.93)

    `better` is needed: `larger` or `smaller`. `unit` is short (16 letters). `rule` is `exact` (default) or `time`, for
    a figure above 0 that varies by chance. `threshold` is the change for the worse that is allowed, as a fraction; the
    default is 0, and 0.04 with the rule `time`. Two that differ for one name are refused. `config` may be omitted.
    """
