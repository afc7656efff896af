"""Performance regression testing of LLM inference on GPUs, as a pytest plugin.

The map of the package, from what people touch down to what is measured; imports point down only.

    plugin, cli                     pytest's hooks; the command `llmgpu`
    fixtures, session               what tests are written with; what lives as long as a run
    planner, recorder, live         options to cases, everything refused that can be; results kept; the live line
    terminal, case_tables, order    tables and findings for people; small batches before large ones
    runner, options                 run(case) -> result; the one table of options
    hookspecs                       what other plugins may add: strategies
    group                           the processes of a strategy as one thing
    findings, accuracy_findings     what a person should do; what is wrong with the answers, and why
    accuracy, comparison            whether answers are still right; the same items under mp
    report, environment, commit     the JSON; machine and libraries; the source that was measured
    privacy, child                  no name of a host or a user, no secret; how a process of ours is started
    launchers, rank                 how processes are started; what one of them does
    by_hand                         the case of a report that somebody runs by hand, and its files
    execution, graphs               eager or CUDA graphs, decided once per case; recording and replaying
    strategies                      how a model is spread: mp, tp, iok, or another's own
    scoring, batching, tasks        log-likelihoods, batches, items
    models, weights, model_files    a model and its parts; values one at a time; which checkpoint a directory holds
    memory, profiling, oom          caps and peaks; NVML; what counts as out of memory
    bundled                         the model, dataset and presets that come with the package
    metrics > result > case         derived numbers, what happened, what was measured

Where it departs from the design it began with: `planner` is a room of its own, since refusing bad input before anything
starts is a question of its own; so are `group` (several processes, one outcome), `session`, `recorder`, `accuracy`,
`findings` and `memory`. Fixtures are made per run from the options instead of parametrised by a hook, so that a suite's
own `llm` or `batch_size` fixture is left alone. The first line that names the devices comes after the collection, where
it is known that a test needs them; a run without such tests pays nothing. A case's `execution` is no part of its key:
where graphs are chosen by the run, it is an answer. traffic.py, the gate and the page follow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llmgpu.case import Case as Case
    from pytest_llmgpu.report import Report as Report
    from pytest_llmgpu.result import CaseResult as CaseResult

__all__ = ["Case", "CaseResult", "Report"]

_ROOMS = {"Case": "case", "CaseResult": "result", "Report": "report"}


def __getattr__(name: str) -> object:
    # At first use and not here: every test run with the plugin installed imports this package.
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
