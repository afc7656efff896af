"""Tasks: the questions that a model is asked, and the score of its answers; see `protocol`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_llmgpu.inference.registry import Registry

if TYPE_CHECKING:
    from pytest_llmgpu.inference.tasks.protocol import Task

PROMPTS = "prompts"
"""Name of the task whose items have no endings: they are continued, and cannot be scored."""

BUILT_IN = {
    "hellaswag": "pytest_llmgpu.inference.tasks.hellaswag:HellaSwag",
    PROMPTS: "pytest_llmgpu.inference.tasks.hellaswag:Prompts",
}
"""Name to `module:attribute`. pytest reads it at every start, so a task is imported only when a test uses it."""

_REGISTRY: Registry[Task] = Registry(
    kind="task",
    built_in=BUILT_IN,
    hook="pytest_llmgpu_tasks",
    protocol="pytest_llmgpu.inference.tasks.protocol",
    members=("name", "load", "requests", "score"),
    is_name=str.isidentifier,
    allowed_names="the name of a fixture, such as my_task, is needed",
)

merge, find, make = _REGISTRY.merge, _REGISTRY.find, _REGISTRY.make
