"""Tasks: the questions that a model is asked, and the score of its answers; one file per task, see `protocol`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pytest_llmgpu.inference.registry import Registry

if TYPE_CHECKING:
    from pytest_llmgpu.inference.tasks.protocol import Task

BUILT_IN = {"hellaswag": "pytest_llmgpu.inference.tasks.hellaswag:HellaSwag"}
"""Name to `module:attribute`. pytest reads it at every start, so a task is imported only when a test uses it."""

_REGISTRY = Registry(
    kind="task",
    hook="pytest_llmgpu_tasks",
    protocol="pytest_llmgpu.inference.tasks.protocol",
    members=("name", "load", "requests", "score"),
    is_name=str.isidentifier,
    allowed_names="the name of a fixture, such as my_task, is needed",
)


def merge(registrations: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return one mapping of name to place from all registrations (see `Registry.merge`)."""
    return _REGISTRY.merge(registrations)


def find(name: str, known: Mapping[str, str] = BUILT_IN) -> str:
    """Return the place of a task, `module:attribute`, by its registered name or its place (see `Registry.find`)."""
    return _REGISTRY.find(name, known)


def make(place: str) -> Task:
    """Return a new object of the task at a place that `find` returned (see `Registry.make`)."""
    task: Task = _REGISTRY.make(place)
    return task
