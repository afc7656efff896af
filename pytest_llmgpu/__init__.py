"""Performance regression testing of LLM inference on GPUs, as a pytest plugin.

The map of the package. Imports point down; packages on one line do not import each other.

    plugin | cli                     what pytest sees | what can be done with reports without pytest
    session                          how one run goes from options to a report
    render                           how people and other tools read a report: terminal, HTML, charts, exports
    gate                             did the run get worse than the baseline?
    analysis | ranks                 what one run says by itself | processes, and what one of them does
    strategies | engines             how a model is spread over devices | other people's code that runs it
    recording                        kernels, ops and calls of a process
    inference | profiling | store    model, batches, tasks | the machine and NVML | which report, and where it is kept
    report                           the records and their file
    processes                        how a child process starts and ends

`report.metrics` has the table of metrics with their default thresholds, `gate.judge` the classes of verdicts and the
exit statuses, `analysis.assess` the findings on one run by itself, `ranks.memory` the decision on out of memory. The
reason of a verdict is worded in `gate`, beside the rule, and the first sentence in `gate.headline`; `render` lays out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llmgpu.report.case import Case as Case
    from pytest_llmgpu.report.report import Report as Report
    from pytest_llmgpu.report.result import CaseResult as CaseResult

__all__ = ["Case", "CaseResult", "Report"]

_MODULES = {"Case": "report.case", "CaseResult": "report.result", "Report": "report.report"}


def __getattr__(name: str) -> object:
    # At first use and not here: every test run with the plugin installed imports this package.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
