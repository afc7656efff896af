"""Performance regression testing of LLM inference on GPUs, as a pytest plugin.

The map of the package, from what people touch down to what is measured; imports point down only.

    plugin, cli                     pytest's hooks; the command `llmgpu`
    gate_items, launch_loop         the gate as items of pytest; the order of tests that are run in several launches
    collected                       which tests ask for the model, and under what options
    fixtures, session               what tests are written with; what lives as long as a run
    planner, recorder, live         options to cases, everything refused that can be; results kept; the live line
    terminal, case_tables, order    tables and findings for people; small batches before large ones
    html_report, page               a report, or a trend, as a page for a browser; template, style, script and contents
    conclusion, study_table, blocks a report in a sentence; the study's table as data; which cases share a table
    judging                         what a run is judged by, and what that says of each test
    charts                          the charts of a report or a trend, as data and as pictures
    trends, trend_tables            each case over the stored reports of a machine; the same for people
    verdict_tables                  what the gate says, for people
    exports                         reports in the formats of other tools and pages, one file each
    runner, options                 run(case) -> result; the one table of options
    option_values                   what the text of an option means
    hookspecs                       what other plugins may add: strategies
    group                           the processes of a strategy as one thing
    findings                        what a person should do of all that is known of a case
    accuracy_findings               what is wrong with the answers, and why
    profile_findings                what is wrong with a profile; one GPU busier or fuller than the others
    launch_findings                 what launches of one case must agree in
    device_figures                  the columns of the tables per device, and why one is missing
    accuracy, comparison            whether answers are still right; the same items under mp
    promotion                       which report may become the baseline, and how it does
    self_test, planting             whether a gate can fail; losses that it should see
    side_by_side                    two commits measured in turn until the gate can tell them apart
    gate, case_verdicts, matching   what a report is worth against a baseline; which cases are held against which
    time_verdicts, accuracy_verdicts, exact_verdicts, series_verdicts
                                    how each kind of metric is judged: pairs of batches, flipped items, exact counts,
                                    the largest batch that fits
    paired_times                    the time of one case against its baseline's, batch by batch, not yet judged
    comparable_launches             which launches of both it is taken from
    launch_merging                  several reports of the same cases as one with several launches a case
    calibration_files, policy_files how the file of either is found, read, checked and written
    calibration                     how much a runner's times differ from launch to launch
    policy, statistics              what the gate is told; how sure a change is
    families, hodges_lehmann        several tests judged together; the typical one of many values
    distributions, verdicts         Student's t and binomial tails; what the gate says
    report, environment, commit     the JSON; machine and libraries; the source that was measured
    capacity, footprint             the largest batch size that fits; what a device's memory is in use for
    evidence, path                  whether a profile speaks for its case alone; which links carried its traffic
    storage, references, listing    the numbered store; which report is meant; what the store holds
    json_schema                     the report's shape, for other tools
    validation, unpacking           figures that cannot be; bytes within a limit
    privacy, child                  no name of a host or a user, no secret; how a process of ours is started
    worktrees, worktree_runs        commits checked out side by side; commands that run in them, and end with us
    git, collector                  how git is run; Python's cycle collector, paused for large reports
    launchers, rank                 how processes are started; what one of them does
    door                            commands in, plain records out: a rank's side of its pipes
    by_hand                         the case of a report that somebody runs by hand, and its files
    execution, graphs               eager or CUDA graphs, decided once per case; recording and replaying
    traffic                         bytes that the program itself sends, exactly, by collective
    strategies                      how a model is spread: mp, tp, iok, or another's own
    scoring, batching, tasks        log-likelihoods, batches, items
    logits                          which of them exist: those of endings, or all and a KV cache
    models, weights, model_files    a model and its parts; values one at a time; which checkpoint a directory holds
    memory, profiling, oom          caps and peaks; NVML; what counts as out of memory
    bundled                         the model, dataset and presets that come with the package
    metrics > result > case         derived numbers, what happened, what was measured

Where it departs from the design it began with: `planner` is a room of its own, since refusing bad input before anything
starts is a question of its own; so are `group` (several processes, one outcome), `session`, `recorder`, `accuracy`,
`findings` and `memory`. Fixtures are made per run from the options instead of parametrised by a hook, so that a suite's
own `llm` or `batch_size` fixture is left alone. The first line that names the devices comes after the collection, where
it is known that a test needs them; a run without such tests pays nothing. A case's `execution` is no part of its key:
where graphs are chosen by the run, it is an answer. Traffic is counted after a case is measured, in a few small
forwards from which that of any batch follows exactly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llmgpu.report.case import Case as Case
    from pytest_llmgpu.report.file import Report as Report
    from pytest_llmgpu.report.result import CaseResult as CaseResult

__all__ = ["Case", "CaseResult", "Report"]

_ROOMS = {"Case": "report.case", "CaseResult": "report.result", "Report": "report.file"}


def __getattr__(name: str) -> object:
    # At first use and not here: every test run with the plugin installed imports this package.
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
