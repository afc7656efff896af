"""What a test suite brings into a rank: strategies and engines, and functions that change a loaded model.

Strategies and engines have one registry, since both are measured in the same way. `ModelHook` is an implementation of
the hook `pytest_llmgpu_model`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_llmgpu.engines.protocol import Engine
from pytest_llmgpu.inference.registry import Registry
from pytest_llmgpu.strategies import BUILT_IN as STRATEGIES
from pytest_llmgpu.strategies.protocol import Strategy

if TYPE_CHECKING:
    from pytest_llmgpu.report.case import Case
    from pytest_llmgpu.strategies.protocol import Loaded

NAME = "pytest_llmgpu_model"
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
    """Return a new strategy or engine of a place that `find` returned; ValueError as for `Registry.make`."""
    made = _REGISTRY.make(place)
    needed = () if isinstance(made, Engine) else ("build", "load", "prepare")
    if lacking := [name for name in needed if not hasattr(made, name)]:
        raise ValueError(f"strategy {place} lacks {', '.join(lacking)} (see {_REGISTRY.protocol})")
    return made


class ModelHook(NamedTuple):
    """A function that changes a loaded model, as plain data.

    A rank imports the module of the function: by its name, or from its file where the name leads elsewhere, as that of
    a conftest.py often does.
    """

    module: str
    """Name of its module."""
    path: str
    """File of its module."""
    function: str
    """Name of the function."""
    arguments: tuple[str, ...]
    """The arguments that it takes: `loaded`, `case` or both."""

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Sequence[str]) -> ModelHook:
        """Return an implementation as plain data; ValueError if a rank could not find it by its name."""
        name = getattr(function, "__qualname__", repr(function))
        if not inspect.isfunction(function) or not name.isidentifier():
            raise ValueError(f"{NAME}: {name} is not allowed: a function at the top level of a module is needed")
        # Not that of the code: a decorator has the function of another module.
        path = getattr(sys.modules[function.__module__], "__file__", None)
        return cls(function.__module__, path or inspect.getfile(function), name, tuple(arguments))

    def __call__(self, loaded: Loaded, case: Case) -> None:
        """Import the function and call it; ValueError if it raised an error, or returned something."""
        import torch

        given = {"loaded": loaded, "case": case}
        try:
            returned = getattr(self._import(), self.function)(**{name: given[name] for name in self.arguments})
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(f"{self.path}: {self.function} raised {type(error).__name__}: {error}") from error
        if returned is not None:
            remedy = "change loaded.model in place and return None; a strategy of your own can return another model"
            raise ValueError(f"{self.path}: {self.function} returned {type(returned).__name__}: {remedy}")

    def _import(self) -> ModuleType:
        with contextlib.suppress(ImportError):  # as pytest names a module below rootdir with --import-mode=importlib
            spec = importlib.util.find_spec(self.module)
            if spec is not None and spec.origin == self.path:
                return importlib.import_module(self.module)
        name = f"{NAME}:{self.path}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.path)
            assert spec is not None
            assert spec.loader is not None, "a file of Python code has a loader"
            sys.modules[name] = importlib.util.module_from_spec(spec)  # as dataclasses look their module up
            try:
                spec.loader.exec_module(sys.modules[name])
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]
