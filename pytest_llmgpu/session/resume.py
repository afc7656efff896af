"""Continues a session that was broken off: which report can be continued, and which of its results stay."""

from __future__ import annotations

import dataclasses

import msgspec

from pytest_llmgpu.analysis.environments import hardware_differences, shortened, software_differences
from pytest_llmgpu.analysis.merging import by_launch, merge_results
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.options import GATE_OPTIONS, OUTPUT_OPTIONS, Options, flag_of
from pytest_llmgpu.report.report import Report, Resumption, Session
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import listed
from pytest_llmgpu.report.work import TRAFFIC_STOPPED, WORK_STOPPED

_NAMED = 3
"""An error names at most this many differences."""

SAVE = "--llmgpu-save"
"""The option whose value a session keeps when it is continued without it."""


def continued(broken: Report, now: Report, *, name: str, sha256: str) -> Report:
    """Return the report of a broken session with the results that stay, for the results that are missing.

    It is saved under the name of the broken one, unless the options have another name.

    Args:
        broken: The report of the broken session.
        now: A report without cases, of this commit, machine and options.
        name: The name of the broken report.
        sha256: The hash of its file.

    Raises:
        ValueError: The session was of another commit or machine, of uncommitted changes, or had other options.
    """
    if refusal := _refusal(broken, now):
        raise ValueError(refusal)
    save = now.options.get(SAVE) if now.options.get(SAVE) is not None else broken.options.get(SAVE)
    cases = [whole for result in broken.cases if (whole := _whole(result)) is not None]
    resumption = Resumption(created=now.created, source=name, sha256=sha256, kept=len(cases))
    return msgspec.structs.replace(
        broken,
        schema_version=now.schema_version,
        options={**broken.options, SAVE: save},
        session=Session(),
        resumed=[*broken.resumed, resumption],
        cases=cases,
        verdicts=None,
    )


def changed_files(result: CaseResult, case: Case) -> str | None:
    """Return how the files of a test differ from those that it measured, in words; None if they do not.

    Args:
        result: A result of the test.
        case: The same case as it would be measured now.
    """
    before = result.case
    chosen = ("id", "task", "dataset", "limit", "model", "new_tokens")
    if before.key == case.key or any(getattr(before, name) != getattr(case, name) for name in chosen):
        return None  # a test can also have items, or new tokens, of its own, which are another case
    pairs = ((name, getattr(before, name), getattr(case, name)) for name in case.__struct_fields__)
    found = [f"{name} {shortened(then)} -> {shortened(now)}" for name, then, now in pairs if then != now]
    return listed(found, _NAMED)


def _refusal(broken: Report, now: Report) -> str | None:
    shas = broken.commit.sha, now.commit.sha
    if None in shas:
        commit = now.commit if broken.commit.sha is not None else broken.commit
        return f"the commit is not known: {commit.why.get('sha', 'no reason was recorded')}"
    if shas[0] != shas[1]:
        return f"it measured commit {shas[0]}, and this is commit {shas[1]}: check out {shas[0]} to continue it"
    if broken.commit.dirty or now.commit.dirty:
        whose = "files of the working tree differ" if now.commit.dirty else "it measured files that differed"
        return f"{whose} from commit {shas[0]}: only a committed state can be continued"
    if broken.plugin_version != now.plugin_version:
        return f"pytest-llmgpu {broken.plugin_version} wrote it, and this is {now.plugin_version}"
    then, here = broken.environment, now.environment
    found = [*hardware_differences(then, here, "cpu"), *hardware_differences(then, here, "cuda")]
    if found := [*dict.fromkeys(found), *software_differences(then, here)]:
        return f"it ran on another machine or with other libraries: {listed(found, _NAMED)}"
    free = {flag_of(field) for field in dataclasses.fields(Options) if field.name in OUTPUT_OPTIONS + GATE_OPTIONS}
    flags = sorted({*broken.options, *now.options} - free)
    found = [
        f"{flag} {shortened(broken.options.get(flag))} -> {shortened(now.options.get(flag))}"
        for flag in flags
        if broken.options.get(flag) != now.options.get(flag)
    ]
    return f"it had other options: {listed(found, _NAMED)}" if found else None


def _whole(result: CaseResult) -> CaseResult | None:
    """Return a result without the launch that was interrupted; None if it has no other."""
    last = result.launches[-1] if result.launches else None
    stopped = last is not None and (
        last.why.get("work") == WORK_STOPPED or result.why.get("traffic") == TRAFFIC_STOPPED
    )
    if result.outcome != "interrupted" and not stopped:
        return result
    before = msgspec.structs.replace(result, outcome="completed", failure=None, launches=result.launches[:-1])
    return merge_results(by_launch(before)) if before.launches else None
