"""Findings on a case, each with its next step; a finding that needs no action is left out.

Those on answers are found by their checks, in `answers`.
"""

from __future__ import annotations

import re
import signal
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from pytest_llmgpu.analysis.reference import same_series
from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST, NAMES
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.derived import device_times_s, inference_s, of_window, predictions_of
from pytest_llmgpu.report.result import CaseResult, Failure, Finding, Launch
from pytest_llmgpu.report.text import GIB, gib, percent, plural, sentence, significant
from pytest_llmgpu.report.work import NO_WORK, TRAFFIC_FAILED, WORK_OFF, WORK_STOPPED, WORK_UNSEEN

_SEVERITIES: dict[str, Literal["info", "warning", "failure"]] = {
    # The outcome.
    "failed": "failure",
    "out-of-memory": "info",
    # The answers.
    "wrong-answers": "failure",
    "unchecked-answers": "warning",
    # The times.
    "random-routing": "info",
    "launches-differ": "warning",
    "times-far-apart": "warning",
    "imbalance": "info",
    # What was recorded.
    "passes-failed": "warning",
    "traffic-off-nvlink": "info",
    "incomplete-profile": "info",
    "profile-invalid": "warning",
    "clocks-held-down": "info",
}
"""Code of a finding to its severity."""

_NEXT_STEPS = {
    "random-routing": "The time of small batches depends on the experts that are read: measure a checkpoint to know "
    "it.",
    "launches-differ": "They are not comparable. Look for what each process chooses for itself: kernels that are tuned "
    "or sum in any order, items in another order, CUDA graphs (`execution_choice` in the report), NCCL variables, "
    "another GPU.",
    "times-far-apart": "Look for other programs on the machine (`profile.invalid` and `launches[].host` in the report, "
    "nvidia-smi, top), and measure again. If there is none, run more launches (--llmgpu-launches): they show the "
    "typical time.",
    "imbalance": "If each GPU has layers of its own, give this one fewer of them. If not, see its power limit, its "
    "cooling and what else runs there (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE).",
    "passes-failed": "The times are complete. End other profilers on these GPUs, allow the user to read GPU "
    "performance counters, and read the output of the rank (pytest -rP). --llmgpu-work=off leaves work passes out.",
    "traffic-off-nvlink": "If NVLinks join these GPUs (nvidia-smi topo -m), check NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, "
    "and whether the container allows access from one GPU to another.",
    "incomplete-profile": "Make NVML usable (in a container: the `utility` driver capability), leave a CPU core to the "
    "sampler, and score enough items (--llmgpu-limit) for its period (--llmgpu-sample-period).",
    "profile-invalid": "Measure again with nothing else on the machine before you trust this result.",
    "clocks-held-down": "Compare them only with runs on the same machine, or lock the clocks below the lowest of this "
    "run (nvidia-smi --lock-gpu-clocks).",
}
"""The next step for a code, where it does not depend on the case."""

_OF_THE_MACHINE = ("passes-failed", "incomplete-profile")
"""Their text is the same for many cases, and is stated once."""

_RESUME = "Continue it with the same options and --llmgpu-resume=REPORT."

_LONGEST_LOG_LINE = 200
_NO_TEXT = (" ", "Traceback", "Current thread", "Thread 0x", "Extension modules: ")
_OUTCOMES = {"timeout": "Timed out", "crashed": "Crashed", "error": "Failed", "interrupted": "Interrupted"}

_FAR = 5.0
"""Batch sizes that follow each other differ by less than this factor in throughput, beside the ratio of their sizes."""

_SPREAD = 3.0
"""Launches of one case differ by less than this factor by chance. Where the host limits them their deviation is up to
26 %: one run of ten launches in a hundred spreads by 2.8."""

_MISSED_SAMPLES = 0.05  # a profile that misses more of its samples than this is incomplete

_ABOVE = 1.2
"""A device is reported if its value is above this many times the median of all devices."""

_ABOVE_GIB = 1.0
"""A smaller difference from the median is an output layer, an embedding or a context that only one device has."""

_ABOVE_PCT = 10
"""A smaller difference, in points of utilisation, is not seen: a driver may sample once per second."""

_SAMPLES = 60
"""Devices are not compared by their utilisation in a window with fewer samples, of 10 s by default: readings are of up
to a second, and those of two devices do not begin and end at the same time."""

_SLOWER_RANK = 1.05
"""A rank is reported if its device time is above this many times the median of all ranks. Between GPUs of one kind the
device time of an equal program differs by at most 3.5 % (measured on five H200)."""


def finding(code: str, text: str, next_step: str = "") -> Finding:
    """Return the finding of a code; text and next step get a capital and a full stop."""
    step = sentence(next_step or _NEXT_STEPS[code])
    return Finding(code=code, severity=_SEVERITIES[code], text=sentence(text), next_step=step)


def first_of_each_code(found: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of each code: the others differ only in their figures."""
    by_code: dict[str, Finding] = {}
    for one in found:
        by_code.setdefault(one.code, one)
    return list(by_code.values())


def findings(
    result: CaseResult, earlier: Sequence[CaseResult], launches: Sequence[CaseResult], *, searching: bool
) -> list[Finding]:
    """Return the findings on a result, without those on its answers.

    Args:
        result: The result with all its launches and its derived figures.
        earlier: Results of the same session before it that compute the same answers, with their findings.
        launches: The results of its launches, in the order in which they ran.
        searching: Whether the run searches the largest batch size that fits (--llmgpu-find-max-batch).
    """
    if result.outcome == "skipped_after_oom":
        return []  # the out-of-memory case before it has the finding
    found: list[Finding] = []
    if result.outcome == "oom":
        found += _of_memory(result, same_series(result, earlier), searching=searching)
    elif result.outcome != "completed":
        found.append(_of_failure(result))
    else:
        found += _of_throughput(result, same_series(result, earlier))
        found += _of_passes(result)
        found += _of_routing(result, earlier)
    found += _of_disturbances(result)
    if result.outcome == "completed" and result.case.device == "cuda" and "server" not in result.case.strategy_options:
        path = result.traffic.path if result.traffic is not None else None
        if path is not None and path.link not in (None, "nvlink") and path.nvlink_bytes is not None:
            found.append(finding("traffic-off-nvlink", path.text))  # NVLink is there
        for launch in result.launches:
            found += _of_samples(launch)
            if uneven := list(_uneven(launch)):
                found.append(finding("imbalance", "; ".join(uneven)))
    stated = {one.text for other in earlier for one in other.findings}
    found = [one for one in found if one.code not in _OF_THE_MACHINE or one.text not in stated]
    return first_of_each_code([*found, *(disagreements(launches) if len(launches) > 1 else [])])


def _of_memory(result: CaseResult, series: Sequence[CaseResult], *, searching: bool) -> Iterator[Finding]:
    """Yield why a case ran out of memory; nothing where a larger batch size has the finding."""
    case, failure = result.case, result.failure or Failure(phase="forward", message="")
    if any(other.outcome == "oom" and other.case.batch_size > case.batch_size for other in series):
        return  # this size was run only to find the limit
    fitted = [other.case.batch_size for other in series if other.outcome == "completed"]
    largest = max((fit for fit in fitted if fit < case.batch_size), default=None)
    if failure.phase == "load":
        text = "Out of memory while loading the model"
    else:
        text = f"Out of memory at batch size {case.batch_size}; "
        text += f"the largest that completed is {largest}" if largest else "no smaller batch size completed"
    if failure.tokens_requested is not None and failure.tokens_granted is not None:
        text += f". The workspace holds {failure.tokens_granted:,} of {failure.tokens_requested:,} tokens"
    elif failure.requested_bytes is not None and failure.free_bytes is not None:
        text += f". The allocation of {gib(failure.requested_bytes)} failed with {gib(failure.free_bytes)} free"
    elif failure.evidence:
        text += f" ({failure.evidence})"

    remedies = ["spread the model over more GPUs (--llmgpu-devices)"]
    if case.gpu_memory_bytes is not None:
        remedies.insert(0, f"raise --llmgpu-gpu-memory ({gib(case.gpu_memory_bytes, 1)} in force)")
    if case.dtype == "float32":
        remedies.append("halve the memory with --llmgpu-dtype=float16")
    advice = ", or ".join(remedies)
    if largest is not None and largest + 1 < case.batch_size and failure.phase != "load" and not searching:
        advice = f"run with --llmgpu-find-max-batch to find the limit between these two batch sizes, or {advice}"
    yield finding("out-of-memory", text, advice)


def _of_failure(result: CaseResult) -> Finding:
    failure = result.failure or Failure(phase="forward", message="no reason was recorded")
    where = "while loading the model" if failure.phase == "load" else f"at batch size {result.case.batch_size}"
    rank = "" if failure.rank is None else f" on rank {failure.rank}"
    text = f"{_OUTCOMES[result.outcome]} {where}{rank}: {failure.message.strip().rstrip('.')}"
    # The line of the log that names the cause: a fatal Python error, else the last exception, else the last line. Those
    # of a traceback and the headings of faulthandler, which every dump of stacks has, do not count.
    lines = [line.rstrip() for line in (failure.log_tail or "").splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error: ")]
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    plain = [line for line in lines if not line.startswith(_NO_TEXT)]
    last = (fatal or exceptions or plain or [""])[-1].strip().rstrip(".")
    last = last if len(last) <= _LONGEST_LOG_LINE else f"{last[: _LONGEST_LOG_LINE - 1]}…"
    # In a traceback the name of an exception has its module, in the message it has not.
    if last and last not in failure.message and failure.message not in last:
        text += f". Its log ends: {last}"

    if result.outcome == "timeout":
        option = "--llmgpu-load-timeout" if failure.phase == "load" else "--llmgpu-timeout"
        hung = f" If it hung, `llmgpu show REPORT --log {result.id}` shows where." if failure.log_tail else ""
        advice = f"Raise {option} if the case is slow.{hung}"
    elif result.outcome == "interrupted":
        finished = any(launch.batches.latency_s for launch in result.launches)
        advice = _RESUME + (" The report has the batches that finished." if finished else "")
    elif failure.signal == signal.SIGKILL:
        advice = "Look for what killed it: the host's out-of-memory killer (kernel log, dmesg) or a limit of the job."
    elif failure.signal == signal.SIGTERM:
        advice = "A user or a scheduler ended it, perhaps at the job's time limit. Run it again with more time."
    else:
        log = f"`llmgpu show REPORT --log {result.id}` prints the traceback."
        advice = log if failure.log_tail else "Remove the cause, and run it again."
    return finding("failed", text, advice)


def _of_throughput(result: CaseResult, series: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield a throughput that is far from that of the next smaller batch size of the series.

    A larger batch shares each weight among more sequences: its throughput grows at most by the ratio of the sizes. Only
    cases that ran in the same execution are compared.
    """
    size, now = result.case.batch_size, result.sequences_per_s
    smaller = {
        other.case.batch_size: other.sequences_per_s
        for other in series
        if other.sequences_per_s and other.case.batch_size < size and other.case.execution == result.case.execution
    }
    if not smaller or not now:
        return
    neighbour = max(smaller)
    if not 1 / _FAR <= now / smaller[neighbour] <= _FAR * size / neighbour:
        (less, slow), (more, fast) = sorted([(now, size), (smaller[neighbour], neighbour)])
        text = f"Batch size {fast} has {more / less:.0f} times the throughput of batch size {slow}: "
        text += f"{significant(more, 3)} and {significant(less, 3)} sequences/s"
        yield finding("times-far-apart", text)


def _of_passes(result: CaseResult) -> Iterator[Finding]:
    """Yield why traffic or work has no figures."""
    if (reason := result.why.get("traffic", "")).startswith(TRAFFIC_FAILED):
        yield finding("passes-failed", f"Traffic is not known: {reason}")
    launch = result.launches[-1] if result.launches else Launch()
    if launch.work is None:
        reason = launch.why.get("work", NO_WORK)
        if not reason.startswith((NO_WORK, WORK_OFF, WORK_UNSEEN)):
            advice = f"The times are complete. {_RESUME}" if reason == WORK_STOPPED else ""
            yield finding("passes-failed", f"Kernels and FLOPs of this case are unknown: {reason}", advice)
        return
    rank = next((rank for rank in launch.work.ranks if rank.uuids and "device_time_s" in rank.why), None)
    if rank is not None:
        yield finding("passes-failed", f"Kernels were not recorded: {rank.why['device_time_s']}")


def _of_routing(result: CaseResult, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield the share of the busiest expert of any layer, once for a model with random weights."""
    ranks = result.launches[-1].ranks if result.launches else []
    routing, code = ranks[0].routing if ranks else None, "random-routing"
    stated = any(one.code == code for other in earlier for one in other.findings)
    if routing is not None and result.case.load_format == "dummy" and not stated:
        busiest = f"{percent(max(routing.busiest) / routing.tokens)} of {plural(routing.tokens, 'token')} of a forward"
        text = f"Random weights do not route as trained ones do: the busiest expert has {busiest}, and at least "
        yield finding(code, f"{text}{min(routing.touched)} of {routing.experts} experts of a layer have any")


def _of_disturbances(result: CaseResult) -> Iterator[Finding]:
    """Yield what disturbed a result, which may be the cause of a failure.

    Under full load a GPU works at the limit of its power, which is no fault.
    """
    kinds: dict[str, list[str]] = {}
    for text in [text for profile in result.profiles for text in disturbances.of_profile(profile)]:
        kinds.setdefault(text.partition(":")[0], []).append(text.rstrip("."))
    texts = [one + f" (also in {plural(len(more), 'more launch')})" * bool(more) for one, *more in kinds.values()]
    power = [text for text in texts if disturbances.is_power(text)]
    if others := [text for text in texts if text not in power]:
        yield finding("profile-invalid", f"The measurement was disturbed: {'; '.join(others)}")
    if power:
        yield finding("clocks-held-down", f"Times depend on the limits of power and heat: {'; '.join(power)}")


def _of_samples(launch: Launch) -> Iterator[Finding]:
    """Yield what is wrong with the samples of a profile: none, too short a window, or missing ones."""
    profile = launch.profile
    reason = (launch if profile is None else profile).why.get("profile")
    if profile is None or reason:
        text = f"There is no GPU profile: {reason or 'no reason was recorded'}"
    elif not profile.samples and profile.duration_s < 2 * profile.period_s:
        text = f"The GPU profile has no sample: the case took {profile.duration_s:.2g} s, samples are "
        text += f"{profile.period_s:.2g} s apart"
    elif profile.missed > _MISSED_SAMPLES * (profile.samples + profile.missed):
        text = f"{profile.missed:,} of {profile.samples + profile.missed:,} samples of the GPU profile are missing"
    else:
        return
    yield finding("incomplete-profile", text)


def _uneven(launch: Launch) -> Iterator[str]:
    """Yield the rank or the device of a launch that the others wait for, and the device that is full first.

    Ranks that share every layer wait for each other in kernels, which NVML counts as busy: their device times, which
    have no collectives, are compared. The devices of one rank are compared by their utilisation.
    """
    times_s = device_times_s(launch) or []
    if found := _largest(dict(enumerate(times_s)), above=_SLOWER_RANK):
        index, value, median = found
        of_all = f"the median of the ranks is {median:.4g} s"
        yield f"rank {index} has a device time of {value:.4g} s in a work pass, {of_all}"
    if (profile := launch.profile) is not None and profile.samples >= _SAMPLES and len(times_s) <= 1:
        metrics = {device.index: of_window(profile, device, "utilization_pct") for device in profile.devices}
        busy = {index: None if isinstance(metric, str) else metric.mean for index, metric in metrics.items()}
        if found := _largest(busy, least=_ABOVE_PCT):
            index, value, median = found
            yield f"GPU {index} was busy for {value:.0f} % of the time, the median of the GPUs is {median:.0f} %"
    full, kind = {memory.index: memory.nvml_used_max_bytes for memory in launch.memory}, "in use"
    if None in full.values():
        full, kind = {memory.index: memory.peak_reserved_bytes for memory in launch.memory}, "reserved by torch"
    sizes = {index: None if size is None else size / GIB for index, size in full.items()}
    if found := _largest(sizes, least=_ABOVE_GIB):
        index, value, median = found
        yield f"GPU {index} had {value:.1f} GiB {kind} at its fullest, the median of the GPUs is {median:.1f} GiB"


def _largest(
    values: Mapping[int, float | None], *, least: float = 0.0, above: float = _ABOVE
) -> tuple[int, float, float] | None:
    """Return the largest value with its index and the median of all, if it is above that by `least` and a factor.

    Nothing is compared where a value is unknown, or there are fewer than two.
    """
    known = {index: value for index, value in values.items() if value is not None}
    if len(known) < max(2, len(values)):
        return None
    index = max(known, key=known.__getitem__)
    median = statistics.median(known.values())
    unusual = known[index] - median > least and known[index] > above * median
    return (index, known[index], median) if unusual else None


def disagreements(launches: Sequence[CaseResult]) -> list[Finding]:
    """Return the findings on how the launches of one case differ: a little in time, and in nothing else.

    There is a result for each launch, in their order; one that failed is counted, but not compared.
    """
    completed = [(number, result) for number, result in enumerate(launches, 1) if result.outcome == "completed"]
    found = []
    if differences := list(_differences([result for _, result in completed])):
        found.append(finding("launches-differ", f"Launches of this case differ: {'; '.join(differences)}"))
    if len({(one.plan_sha256, result.case.execution) for _, result in completed for one in result.launches}) > 1:
        return found
    # Device time counts where it is far apart although wall time is not.
    numbered = [(number, launch) for number, result in completed for launch in result.launches]
    wall = [(inference_s(launch), number) for number, launch in numbered if launch.batches.latency_s]
    device = [(max(times), number) for number, launch in numbered if (times := device_times_s(launch))]
    for metric, timed in (("time", wall), ("device time", device)):
        (fastest_s, fastest), (slowest_s, slowest) = min(timed, default=(0.0, 0)), max(timed, default=(0.0, 0))
        if slowest_s >= _SPREAD * fastest_s > 0:
            text = f"Launches differ in {metric} by a factor of {slowest_s / fastest_s:.1f}: launch {slowest} of "
            text += f"{len(launches)} was the slowest with {slowest_s:.3g} s, launch {fastest} the fastest with "
            text += f"{fastest_s:.3g} s"
            return [*found, finding("times-far-apart", text)]
    return found


def _differences(completed: Sequence[CaseResult]) -> Iterator[str]:
    """Yield how completed launches differ: in answers, batches, bytes, links and executions."""
    accuracies = [accuracy for result in completed for accuracy in result.accuracies]
    for metric in ("acc_norm", "acc"):
        columns = [predictions_of(accuracy, metric) for accuracy in accuracies]
        if answers := sum(len(set(items)) > 1 for items in zip(*columns, strict=False)):
            yield f"{len(accuracies)} answer {answers:,} of {accuracies[0].items:,} items differently ({metric})"
            break
    plans = {launch.plan_sha256 for result in completed for launch in result.launches}
    if len(plans) > 1:
        yield f"{len(completed)} ran {len(plans)} lists of batches"
    traffic = [result.traffic for result in completed if result.traffic is not None]
    if any(one.ranks != traffic[0].ranks for one in traffic):
        yield f"{len(traffic)} do not send the same bytes, so that traffic is unknown"
    links = Counter(one.path.link for one in traffic if one.path is not None and one.path.link is not None)
    if len(links) > 1:
        yield f"{', '.join(f'{links[link]} sent over {NAMES[link]}' for link in FASTEST_FIRST if link in links)}"
    executions = dict.fromkeys(result.case.execution for result in completed)
    if len(executions) > 1:
        yield f"they ran as {' and as '.join(executions)}"
