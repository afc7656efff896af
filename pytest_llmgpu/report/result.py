"""The records of one measurement, in the names, units and nesting of the JSON report.

Units are seconds, bytes and fractions; percent is used only where NVML reports percent. A value that could not be
measured is None, and the `why` map of the same record has the reason; it is never 0 and never absent. Time series and
figures per batch are columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pytest_llmgpu.report.bounds import Amount, Count, Elapsed, Fraction, Moment, Number, Reasons, Seconds
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.work import Bound, RankWork, Work

Outcome = Literal["completed", "oom", "skipped_after_oom", "timeout", "crashed", "error", "interrupted"]
"""How a case ended. A case that did not complete stays in the report."""

OUT_OF_MEMORY: frozenset[Outcome] = frozenset(("oom", "skipped_after_oom"))
"""Outcomes of a batch size that does not fit."""

Phase = Literal["load", "forward"]
"""The work of a rank at the moment when a case failed."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a case did not complete."""

    phase: Phase
    """Phase of the failure: `load` is before the model is loaded, `forward` after that."""
    rank: Count | None = None
    """Rank that failed first; null if no single rank failed, as with a time limit."""
    message: str
    """Message of the exception, or a description of how the rank ended, in one line."""
    evidence: str | None = None
    """Fact that decided the outcome: the rule for `oom`, an exit status, or a time limit."""
    log_tail: str | None = None
    """Last lines that the rank wrote, including its traceback."""
    exit_code: int | None = None
    """Exit status of a rank that exited."""
    signal: Count | None = None
    """Number of the signal that killed a rank."""
    requested_bytes: Count | None = None
    """Size of the allocation that failed."""
    free_bytes: Count | None = None
    """Free memory of the device when the allocation failed."""
    allocated_bytes: Count | None = None
    """Memory that the rank had allocated on the device when the allocation failed."""
    tokens_requested: Count | None = None
    """Length of the longest sequence in tokens, for a strategy with a workspace that is sized in tokens."""
    tokens_granted: Count | None = None
    """Number of tokens that the workspace of the strategy can hold."""


class Batches(msgspec.Struct, kw_only=True):
    """Finished batches in the order in which they ran, as columns of equal length."""

    latency_s: list[Elapsed] = []
    """Time of each batch on the host clock, from its transfer to the device to its results on the host. The devices are
    idle at both ends."""
    sequences: list[Count] = []
    """Number of sequences of each batch."""
    tokens: list[Count] = []
    """Number of input tokens of each batch, without padding. Generated tokens do not count."""
    padded_tokens: list[Count] = []
    """Number of input tokens of each batch with padding: sequences times the longest sequence, or less where prompts
    share lines."""
    launch_s: list[Elapsed] = []
    """Time from the start of each batch until the host has launched its work, where one rank scores eagerly on GPUs;
    else empty, as for engines and in older reports."""
    reference_s: list[Elapsed] = []
    """Mean time that the host needed to launch a fixed small program of torch before and after each batch. Empty where
    `launch_s` is."""
    clock_ghz: list[list[Amount]] | None = None
    """Mean clock of the SMs while each batch was scored, in GHz [GPUs][batches]: the median over the SMs of their
    cycles divided by the time. Null for a case that generates, and in older reports; `why` of the launch has other
    reasons."""


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of the model, item by item, with their log-likelihoods."""

    acc: Fraction
    """Fraction of items whose right ending has the largest log-likelihood."""
    acc_norm: Fraction
    """Fraction of items whose right ending has the largest log-likelihood per character."""
    items: Count
    """Number of items."""
    predictions: list[Count]
    """Index of the ending with the largest log-likelihood, for each item."""
    predictions_norm: list[Count]
    """Index of the ending with the largest log-likelihood per character, for each item."""
    loglikelihoods: str
    """Log-likelihoods of all endings of all items in order, as Base64 of little-endian float32."""
    stderr: float | None
    """Standard error of `acc_norm` over items; null with one item."""
    labels: list[int] | None = None
    """Index of the right ending, for each item; null in reports of versions that did not record it."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of one launch, in the order of the dataset, with their log-likelihoods and times."""

    prompt_tokens: list[Count]
    """Number of tokens of each prompt."""
    new_tokens: list[Count]
    """Number of tokens generated for each prompt. End-of-sequence tokens end no text, so that all are equal."""
    first_token_s: list[Elapsed]
    """For each batch, the time from its start until the first token of each of its texts is chosen. It has the transfer
    of the prompts to the device and the prefill. The slowest rank counts. Empty for an engine that does not report
    it."""
    step_s: list[Elapsed]
    """The time of each decode step, batch after batch: a step chooses one token for every text of its batch. A batch
    has one step less than new tokens. The slowest rank counts."""
    prefill_clock_ghz: list[list[Amount]] | None = None
    """Mean clock of the SMs in the prefill of each batch in GHz [GPUs][batches]."""
    step_clock_ghz: list[list[Amount]] | None = None
    """Mean clock of the SMs in all decode steps of each batch in GHz [GPUs][batches]."""
    kv_cache_bytes: Count | None = None
    """Size of the KV caches of all devices together; null for an engine."""
    kv_cache_formula_bytes: Count | None = None
    """Size of the KV cache by the formula: 2 x layers x KV heads x size of a head x sequences of the largest batch x
    tokens of a sequence x bytes of a number. Null if the config of the model lacks one of these."""
    tokens: str | None
    """Generated tokens of all prompts, prompt by prompt, as Base64 of little-endian int32. Null for a server that sends
    text alone."""
    loglikelihoods: str | None
    """Log-likelihood of each generated token when it was chosen, as Base64 of little-endian float32. Null for an engine
    that does not return it."""
    prefill_loglikelihoods: str | None = None
    """Log-likelihood of each generated token, computed again in a forward over prompt and text without a KV cache, as
    Base64 of little-endian float32. Null if these forwards, which follow the measurement, failed."""
    reference: str | None = None
    """Key of the case of mp whose texts were scored too; null if there was none in the run."""
    reference_loglikelihoods: str | None = None
    """Log-likelihood of each token of the texts of `reference`, computed by this case in forwards without a KV cache,
    as Base64 of little-endian float32."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device in one case. `held_bytes` is subtracted from all other figures."""

    index: Count
    """NVML index of the device, or its torch index if NVML is not available; 0 for the CPU."""
    weights_bytes: Count | None = None
    """Memory allocated after the model was loaded and before the first forward."""
    loading_peak_bytes: Count | None = None
    """Largest sum of live tensors while the model was loaded."""
    peak_allocated_bytes: Count | None = None
    """Largest sum of live tensors during the case, including the warm-up."""
    peak_reserved_bytes: Count | None = None
    """Largest amount of device memory that torch's allocator reserved."""
    workspace_bytes: Count | None = None
    """Workspace that a strategy allocated outside torch's allocator."""
    peak_resident_bytes: Count | None = None
    """Largest memory of a rank's process on a CPU since the case began, with the code of libraries; null on a GPU."""
    held_bytes: Count = 0
    """Memory that is blocked to enforce the memory cap."""
    nvml_used_max_bytes: Count | None = None
    """Largest NVML sample of memory used by all processes."""
    nvml_used_mean_bytes: Count | None = None
    """Mean of the NVML samples of memory used by all processes."""
    why: Reasons = {}

    @property
    def peak_bytes(self) -> int | None:
        """Peak of live tensors plus the workspace; None if it is not known."""
        return self.peak_allocated_bytes + (self.workspace_bytes or 0) if self.peak_allocated_bytes else None


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one device over a window of time."""

    mean: Amount | None
    """Mean over the window."""
    max: Amount | None
    """Maximum over the window."""
    method: str
    """NVML call that returned the values, such as `nvmlDeviceGetUtilizationRates`."""
    coverage: Fraction | None
    """Fraction of the window that the readings cover; null for instantaneous values and for unknown driver periods."""


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """NVML's figures of one device over a window of time."""

    index: Count
    """NVML index of the device."""
    uuid: str
    """NVML's unique identifier of the device."""
    metrics: dict[str, Metric] = {}
    """Metric name mapped to its figures. The names are utilization_pct, memory_used_bytes, pcie_tx_bytes_per_s,
    pcie_rx_bytes_per_s, power_w, sm_clock_mhz, nvlink_tx_bytes_per_s, nvlink_rx_bytes_per_s, sm_active_pct,
    tensor_active_pct and dram_active_pct."""
    energy_j: Amount | None = None
    """Energy that the device used in the window."""
    throttled_s: Seconds | None = None
    """Time throttled by power plus time throttled by heat. Both can overlap, so that the sum can exceed the window."""
    counters: dict[str, Amount] = {}
    """Counts over the window: nvlink_tx_bytes, nvlink_rx_bytes, ecc_uncorrected and xids. For compute_processes it is
    the larger number of the start and the end of the window."""
    why: dict[str, str] = {}
    """Metric name mapped to the reason why it could not be measured."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Samples over time, thinned to at most 2,000 points."""

    t_s: list[Moment]
    """Time of each sample since the start of the window."""
    devices: list[dict[str, list[float | None]]]
    """For each device in the order of `Profile.devices`: metric name mapped to one value per time in `t_s`."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """NVML's figures between two times of CLOCK_MONOTONIC."""

    period_s: Seconds
    """Requested sampling period."""
    duration_s: Seconds
    """Length of the window."""
    samples: Count
    """Number of samples in the window."""
    missed: Count
    """Number of sampling deadlines in the window that have no sample."""
    lateness_p99_s: Seconds | None
    """The 99th percentile of the delay between a sampling deadline and its sample."""
    devices: list[DeviceProfile] = []
    """Figures of each device."""
    series: Series | None = None
    """Samples over time; null if they were not kept."""
    invalid: list[str] = []
    """Disturbances: signs that the figures are not those of the case alone. Throttling counts as one if it exceeds
    0.5 % of the window, because power capping of some milliseconds is normal at the start of work."""
    why: dict[str, str] = {}
    """Reason why there is no profile, under the key `profile`; other keys name what is missing from it."""


class HostUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the CPU cores while the batches were measured; the lists have one value per rank."""

    wall_s: Seconds
    """Length of the window."""
    threads: list[Count]
    """Number of threads with which torch computes one operation on the CPU."""
    cpu_s: list[Seconds]
    """CPU time of all threads of the rank."""
    waited_s: list[Seconds | None]
    """Longest time in which one thread of the rank waited for a core; null if the kernel does not count it."""
    pressure_s: Seconds | None = None
    """Time in which any process of the machine waited for a core, from /proc/pressure/cpu; null without that file."""


class Launch(msgspec.Struct, kw_only=True):
    """One launch of the processes and its measurements."""

    load_s: Seconds | None = None
    """Time until the model is loaded, without the start of the processes and the import of the libraries."""
    warmup_s: Seconds | None = None
    """Time of the warm-up, without `compile_s`."""
    compile_s: Seconds | None = None
    """Time of torch.compile in the warm-up, which is shorter with torch's cache folder; null if nothing is compiled."""
    wall_s: Seconds | None = None
    """Time from the request to the answer, including warm-up and tokenization."""
    plan_sha256: str | None = None
    """SHA-256 over item ids, order and shapes of the batches. Batches are compared in pairs only if it is equal."""
    batches: Batches = msgspec.field(default_factory=Batches)
    """Finished batches with their times."""
    accuracy: Accuracy | None = None
    """Answers of the model; null if the launch did not complete, and for a case that generates."""
    generation: Generation | None = None
    """Generated texts and the time of their tokens; null if the launch did not complete, and for a case that scores."""
    memory: list[DeviceMemory] = []
    """Memory of each device."""
    profile: Profile | None = None
    """NVML's figures while the case ran; null if there was no profiler."""
    host: HostUse | None = None
    """Use of the CPU cores by the ranks; null in reports of versions that did not record it."""
    tokens_requested: Count | None = None
    """Length of the longest sequence in tokens, for a strategy with a workspace that is sized in tokens."""
    tokens_granted: Count | None = None
    """Number of tokens that the workspace holds. With fewer than requested its rows overlap and answers are wrong."""
    execution_choice: str | None = None
    """Reason for the value of `case.execution`, in one sentence with its figures."""
    implementations: dict[str, str] = {}
    """The implementations in transformers that ran, also where the options name none: of `attention`, and of `experts`
    where the model has some. Empty in older reports and for a model without a config of transformers."""
    resumption: Count = 0
    """Number of times that the session had been resumed before this launch: the start of pytest that measured it."""
    work: Work | None = None
    """Kernels, ops and FLOPs, recorded in work passes after the measured forwards; null with the reason in `why`. For a
    case that generates, they are those of one decode step of each batch of `work.batches`."""
    prefill_work: Work | None = None
    """Work of the prefills of these batches; null for a case that scores, and with `work`."""
    figures: dict[str, Number] = {}
    """Figures that the test recorded with `CaseResult.record`, by name."""
    traces: list[str] = []
    """Trace files of the work passes of this launch; a later launch of the case replaces them. Empty without
    --llmgpu-trace."""
    why: Reasons = {}

    @property
    def ranks(self) -> list[RankWork]:
        """Work of each rank; empty without work passes."""
        return [] if self.work is None else self.work.ranks


CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "peer_copy", "all_to_all"
]
"""The kind of a communication. A `peer_copy` copies from one CUDA device to another within a process."""


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of one kind by one rank, for one pass over the batches of the case."""

    collective: CollectiveKind
    """Kind of the communication."""
    calls: Count
    """Number of operations; several tensors that are sent together are one operation."""
    payload_bytes: Count
    """Size of the tensors given to the operations, each counted once; for `recv` the size of the tensors received."""
    wire_bytes: Count
    """Bytes that this rank sends with ring algorithms; for `recv` the bytes that it receives."""
    between_nodes_bytes: Count | None = None
    """Bytes of them that this rank sends to ranks of other nodes; null on one node."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends. It is 0 for `recv`, which the sending rank counts."""
        return 0 if self.collective == "recv" else self.wire_bytes


Link = Literal["nvlink", "mixed", "pcie", "host"]
"""The link that carries traffic: `mixed` is NVLink and PCIe, `host` is PCIe through host memory."""


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """The links that carried the traffic of a case, according to the counters of the devices."""

    link: Link | None
    """Link that carried the traffic; null if the counters do not show it, or if nothing was sent."""
    nvlink_bytes: Amount | None = None
    """Bytes that all devices together sent over NVLink; null if they were not counted."""
    pcie_bytes: Amount | None = None
    """Bytes that all devices together sent over PCIe, to the host and to each other; null if they were not counted."""
    expected_bytes: Count
    """Bytes that all ranks together sent inside their nodes, computed from the operations of the program."""
    text: str
    """Path in one sentence, with the size of and the reason for a difference to `expected_bytes`."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The exact bytes that the program sent: an equal program with equal batches sends equal bytes."""

    ranks: list[list[Collective]]
    """Communication of each rank by kind; the list of a rank that sends nothing is empty."""
    wire_bytes_per_sequence: Amount
    """Bytes that all ranks together send for each sequence."""
    step: list[list[Collective]] | None = None
    """Communication of each rank by kind in one decode step of the largest batch, which generates one token for each of
    its sequences; null for a case that scores."""
    path: Path | None = None
    """Links that carried the traffic; null if it was not measured."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that all ranks together send in all batches."""
        return sum(one.sent_bytes for rank in self.ranks for one in rank)

    @property
    def between_nodes_bytes(self) -> int | None:
        """Bytes that all ranks together send to other nodes in all batches; None on one node."""
        known = [one.between_nodes_bytes for rank in self.ranks for one in rank]
        return None if None in known or not known else sum(one or 0 for one in known)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of this case compared with those of a reference case with another strategy."""

    reference: str
    """Id of the reference case, such as `mp-bs8`."""
    items: Count
    """Number of items compared."""
    flipped: list[Count]
    """Numbers of the items whose prediction differs, by the metric of `accuracy_check`, or whose text does."""
    first_difference: Count | None = None
    """Number of generated tokens that are equal in all texts before the first difference; null without one, and for a
    case that scores."""
    lost: Count | None
    """Number of items that are right in the reference and wrong in this case; null without labels in both cases."""
    won: Count | None
    """Number of items that are wrong in the reference and right in this case; null without labels in both cases."""
    mcnemar_p: Fraction | None
    """Two-sided p-value of the exact McNemar test on `lost` and `won`; null without labels."""
    largest_difference: float | None
    """Largest relative difference of a log-likelihood to that of the reference; null if one is not finite."""
    typical_difference: float | None
    """Sum of all absolute differences divided by the sum of the absolute log-likelihoods of the reference."""


class AccuracyCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The check of the answers of a case."""

    metric: str
    """Metric of the check: `acc`, `acc_norm`, or `loglikelihood_relative_difference` for dummy weights."""
    value: float | None
    """Value of the metric in this case."""
    baseline: float | None
    """Value that the metric is compared with; null if there is none."""
    source: str | None
    """Source of the baseline; null if there is none."""
    tolerance: float
    """Largest allowed difference to the baseline."""
    ok: bool | None
    """True if the check passed; null if there was nothing to compare with."""
    text: str
    """Result of the check in one sentence."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One observation about a case, which the terminal and the HTML page show."""

    code: str
    """Stable name for scripts, such as `wrong-answers`."""
    severity: Literal["info", "warning", "failure"]
    """Severity of the observation."""
    text: str
    """Observation in one sentence."""
    next_step: str
    """Advice on what to do next."""


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the user's own as the hook `pytest_llmgpu_metrics` declares it."""

    unit: Annotated[str, Meta(max_length=16, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    """Unit of the figure; empty without one."""
    better: Literal["larger", "smaller"]
    """The direction of an improvement."""
    rule: Literal["exact", "time"] = "exact"
    """Rule of the gate. exact: one launch shows a change. time: the figure varies, and launches are the replicates."""
    threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Change for the worse that is allowed, as a fraction of the baseline."""


def declared_in(results: Iterable[CaseResult]) -> dict[str, Declared]:
    """Return the declarations of results by name; of several the last one counts."""
    return {name: one for result in results for name, one in result.declared.items()}


class CaseResult(msgspec.Struct, kw_only=True, dict=True):
    """The result of one case."""

    id: str
    """Id that is unique in the report: `mp-bs8`, or `mp-bs8#2` for a second measurement of the case."""
    nodeid: str | None = None
    """Node id of the test that measured the case; null if no test did."""
    line: Count | None = None
    """Number of the line where the test begins in its file, from 1; null if it is not known."""
    key: str
    """SHA-256 over the fields of `case` that differ from their defaults, except `execution` and `launcher`: results
    with an equal key are measurements of the same case. It is computed again when a report is read."""
    case: Case
    """Settings of the measurement."""
    outcome: Outcome
    """How the case ended."""
    failure: Failure | None = None
    """Reason why the case did not complete; null if it completed."""
    launches: list[Launch] = []
    """Measurements of each launch."""
    attempts: int = 1
    """Number of times that the test ran in the launch that repeated it most, such as by pytest-rerunfailures; the last
    attempt of each launch counts."""
    inference_s: Seconds | None = None
    """Sum of the batch latencies; the median over launches."""
    sequences_per_s: Amount | None = None
    """Sequences per second: those of a launch divided by `inference_s`."""
    tokens_per_s: Amount | None = None
    """Generated tokens, or for a case that scores, input tokens without padding, divided by `inference_s`."""
    first_token_s: Seconds | None = None
    """Time to first token: the median over batches, and over launches. Null for a case that scores."""
    token_p50_s: Seconds | None = None
    """Time per output token: the median over decode steps, and over launches; null without decode steps."""
    token_p95_s: Seconds | None = None
    """The 95th percentile of the time of a decode step; the median over launches."""
    token_p99_s: Seconds | None = None
    """The 99th percentile of the time of a decode step; the median over launches. Null with fewer than 100 steps."""
    acc: Fraction | None = None
    """Fraction of items answered right by log-likelihood; the median over launches."""
    acc_norm: Fraction | None = None
    """Fraction of items answered right by log-likelihood per character; the median over launches."""
    accuracy_check: AccuracyCheck | None = None
    """Check of the accuracy; null if there was none."""
    comparison: Comparison | None = None
    """Comparison with mp in the same session; null for mp itself and if mp was not measured. The reason is in `why`."""
    traffic: Traffic | None = None
    """Exact bytes sent, counted in separate forwards; null with the reason in `why`."""
    bound: Bound | None = None
    """Shortest time in which the measured ceilings of the machine allow the batches; null with the reason in `why`."""
    energy_j_per_sequence: Amount | None = None
    """Energy of all devices in joules per sequence; the median over launches. Null if a window is shorter than 1 s."""
    energy_j_per_token: Amount | None = None
    """Energy of all devices in joules per token, as `tokens_per_s` counts them; the median over launches."""
    findings: list[Finding] = []
    """Observations about the case."""
    declared: dict[str, Declared] = {}
    """Declarations of figures of the user's own in this run, by name, whether this case has them or not."""
    why: Reasons = {}

    def record(self, name: str, value: float) -> None:
        """Add a figure of your own to the launch that `measure` has just measured, and to the report.

        ValueError: the name or the value is not allowed, or the launch has a figure of this name.
        """
        __tracebackhide__ = True
        if "recorder" not in vars(self):
            raise ValueError(f"figure {name!r}: only a result that measure returned records figures")
        vars(self)["recorder"](self, {name: value})

    @property
    def accuracies(self) -> list[Accuracy]:
        """Answers of each launch that has them."""
        return [launch.accuracy for launch in self.launches if launch.accuracy is not None]

    @property
    def profiles(self) -> list[Profile]:
        """Profile of each launch that has one."""
        return [launch.profile for launch in self.launches if launch.profile is not None]

    @property
    def has_wrong_answers(self) -> bool:
        """True if the accuracy check failed."""
        return self.accuracy_check is not None and self.accuracy_check.ok is False
