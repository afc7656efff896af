"""Continues a session that was broken off: which report can be continued, and which of its results stay."""

from __future__ import annotations

import dataclasses

import msgspec

from pytest_llmgpu.analysis.environments import hardware_differences, shortened, software_differences
from pytest_llmgpu.analysis.merging import by_launch, merge_results
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

    Raises:
        ValueError: The session was of another commit or machine, of uncommitted changes, or had other options.
    """
    for one in (broken, now):
        if one.commit.sha is None:
            raise ValueError(f"the commit is not known: {one.commit.why.get('sha', 'no reason was recorded')}")
        if one.commit.dirty:
            raise ValueError(f"files differ from commit {one.commit.sha}: only a committed state can be continued")
    then, here = broken.environment, now.environment
    found = [*hardware_differences(then, here, "cpu"), *hardware_differences(then, here, "cuda")]
    found = [*dict.fromkeys(found), *software_differences(then, here)]
    free = {flag_of(field) for field in dataclasses.fields(Options) if field.name in OUTPUT_OPTIONS + GATE_OPTIONS}
    flags = sorted({*broken.options, *now.options} - free)
    pairs = [
        ("commit", broken.commit.sha, now.commit.sha),
        ("pytest-llmgpu", broken.plugin_version, now.plugin_version),
        *((flag, broken.options.get(flag), now.options.get(flag)) for flag in flags),
    ]
    found += [f"{what} {shortened(before)} -> {shortened(after)}" for what, before, after in pairs if before != after]
    if found:
        raise ValueError(f"it was measured in another way: {listed(found, _NAMED)}")
    save = now.options.get(SAVE) if now.options.get(SAVE) is not None else broken.options.get(SAVE)
    cases = [whole for result in broken.cases if (whole := _whole(result)) is not None]
    return msgspec.structs.replace(
        broken,
        schema_version=now.schema_version,
        options={**broken.options, SAVE: save},
        session=Session(duration_s=broken.session.duration_s),
        resumed=[*broken.resumed, Resumption(created=now.created, source=name, sha256=sha256, kept=len(cases))],
        cases=cases,
        verdicts=None,
    )


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
