"""The texts of findings: what was found with its figures, and what to do next. The rules decide on code and figures.

Findings whose text depends on what else is known have their texts beside the rule: those on answers in
`accuracy_findings`, those on a case that did not complete in `findings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pytest_llmgpu.report.result import CaseResult, Finding
from pytest_llmgpu.report.text import sentence


class _Words(NamedTuple):
    severity: Literal["info", "warning"]
    text: str
    """Names the figures in braces. A capital at its beginning and a full stop at its end are added."""
    next_step: str


_WORDS = {
    # The launches of a case.
    "launches-answer-otherwise": _Words(
        "warning",
        "{launches} launches of this case answer {answers:,} of {items:,} items differently ({metric})",
        "The forward is not deterministic: look for atomic sums, autotuned kernels, or memory that is read before it "
        "is written.",
    ),
    "launches-run-other-batches": _Words(
        "warning",
        "{launches} launches of this case ran {plans} different lists of batches",
        "Their times are not comparable: let the test choose the same items in the same order each time.",
    ),
    "launches-send-otherwise": _Words(
        "warning",
        "{launches} launches of this case do not send the same bytes, so its traffic is unknown",
        "Look for a choice that the program makes in each process.",
    ),
    "launches-take-other-paths": _Words(
        "warning",
        "{launches} launches of this case do not send over the same links: {links}",
        "The slowest path counts: look for NCCL variables, GPUs or containers that change from launch to launch "
        "(NCCL_DEBUG=INFO shows what NCCL chose).",
    ),
    "launches-run-otherwise": _Words(
        "warning",
        "Launches of this case ran as {executions}: their times are not comparable",
        "Read `execution_choice` of each launch, or pass --llmgpu-cuda-graphs=off, so that all launches run in the "
        "same way.",
    ),
    "launch-times-differ": _Words(
        "warning",
        "Launches differ in {metric} by a factor of {factor:.1f}: launch {slowest} of {launches} was the slowest with "
        "{slowest_s:.3g} s, launch {fastest} the fastest with {fastest_s:.3g} s",
        "Look for another user of the machine (`profile.invalid`, nvidia-smi, top). If there is none, run more "
        "launches (--llmgpu-launches) to see which time is typical.",
    ),
    # The batch sizes of a series.
    "batch-sizes-far-apart": _Words(
        "warning",
        "Batch size {fast} has {factor:.0f} times the throughput of batch size {slow}: {more} and {less} sequences/s",
        "Look for other programs on the machine (`launches[].host` in the report, top), and measure again.",
    ),
    "batching-stopped-paying": _Words(
        "info",
        "Throughput fell by {loss} compared with batch size {best}: {less} sequences/s, {more} there",
        "Serve with the smaller batch size: larger ones cost memory and time.",
    ),
    # What was recorded besides the times.
    "traffic-failed": _Words(
        "warning",
        "Traffic is not known: {reason}",
        "The times are complete. Run it again; if it fails again, the strategy does not run forward after forward.",
    ),
    "traffic-off-nvlink": _Words(
        "info",
        "{path}",
        "If NVLinks join these GPUs (nvidia-smi topo -m), check NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, and whether the "
        "container allows access from one GPU to another.",
    ),
    "work-passes-failed": _Words(
        "warning",
        "Kernels and FLOPs of this case are unknown: {reason}",
        "Read the log of the rank, or leave the work passes out with --llmgpu-work=off.",
    ),
    "kernels-not-recorded": _Words(
        "warning",
        "Kernels were not recorded: {reason}",
        "End other profilers on these GPUs, or allow the user to read GPU performance counters.",
    ),
    # The profile.
    "no-profile": _Words(
        "info",
        "There is no GPU profile: {reason}",
        "Make NVML usable (in a container: the `utility` driver capability) to get utilisation, communication and "
        "memory of the devices.",
    ),
    "profile-too-short": _Words(
        "info",
        "The GPU profile has no sample: the case took {duration_s:.2g} s, samples are {period_s:.2g} s apart",
        "Score more items (--llmgpu-limit) or shorten --llmgpu-sample-period.",
    ),
    "profile-gaps": _Words(
        "info",
        "{missed:,} of {all:,} samples of the GPU profile are missing",
        "Leave a CPU core to the sampler, or lengthen --llmgpu-sample-period.",
    ),
    "profile-invalid": _Words(
        "warning",
        "The measurement was disturbed: {disturbances}",
        "Measure again with nothing else on the machine before you trust this result.",
    ),
    "clocks-held-down": _Words(
        "info",
        "Times depend on the limits of power and heat: {disturbances}",
        "Compare them only with runs on the same machine, or lock the clocks below the lowest of this run (nvidia-smi "
        "--lock-gpu-clocks). Other cases can have the same limit: see `profile.invalid` in the report.",
    ),
    # Devices and ranks that differ from the others.
    "slower-rank": _Words(
        "info",
        "Rank {index} has a device time of {value:.4g} s in a work pass, the median of the ranks is {median:.4g} s",
        "The others wait for it: see the power limit and the cooling of its GPU, and what else runs there (nvidia-smi "
        "-q -d PERFORMANCE,POWER,TEMPERATURE). If each rank has layers of its own, give this rank fewer of them.",
    ),
    "imbalanced-work": _Words(
        "info",
        "GPU {index} was busy for {value:.0f} % of the time, the median of the GPUs is {median:.0f} %",
        "See in `profile.devices` whether it is slower: its SM clock, its throttled time, its PCIe figures. If each "
        "GPU has layers of its own, give this GPU fewer of them.",
    ),
    "imbalanced-memory": _Words(
        "info",
        "GPU {index} had {value:.1f} GiB {kind} at its fullest, the median of the GPUs is {median:.1f} GiB",
        "Move memory from this GPU to the others, so that a larger batch fits: it runs out of memory first.",
    ),
}
"""Code of a finding to its severity and its words."""


def finding(code: str, **figures: object) -> Finding:
    """Return the finding of a code; the figures are those that its text names."""
    words = _WORDS[code]
    text = sentence(words.text.format(**figures))
    return Finding(code=code, severity=words.severity, text=text, next_step=words.next_step)


def has_finding(code: str, results: Sequence[CaseResult]) -> bool:
    """Return whether one of these results has a finding of this code."""
    return any(found.code == code for other in results for found in other.findings)
