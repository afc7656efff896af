"""What happened: the records of one measurement, in the names, units and nesting of the JSON report.

Seconds, bytes and fractions; percent only where NVML gives percent. What could not be had is None, with its reason
in the `why` map of the same record, never 0 and never absent. Series and per-batch figures are columns.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_llmgpu.report.case import Case

__all__ = [
    "Accuracy",
    "AccuracyCheck",
    "Batches",
    "CaseResult",
    "Collective",
    "CollectiveKind",
    "Comparison",
    "DeviceMemory",
    "DeviceProfile",
    "Failure",
    "Finding",
    "Launch",
    "Link",
    "Metric",
    "Outcome",
    "Path",
    "Phase",
    "Profile",
    "Series",
    "Traffic",
]

Outcome = Literal["completed", "oom", "skipped_after_oom", "timeout", "crashed", "error", "interrupted"]
"""How a case ended. An outcome is a measurement, never a vanished row."""

Phase = Literal["load", "forward"]
"""What a rank was doing when a case ended early."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a case did not complete, with the evidence for it."""

    phase: Phase
    """`load` before the first batch could start, `forward` from the warm-up on."""
    rank: int | None = None
    """Rank that failed first, None where no single rank did (a time limit)."""
    message: str
    """One line for people: the exception's text, or what was seen of a rank that died."""
    evidence: str | None = None
    """What decided the outcome: the rule of `oom`, an exit status, a time limit."""
    log_tail: str | None = None
    """Last lines the rank wrote, its traceback included."""
    exit_code: int | None = None
    """Exit status of a rank that ended by itself."""
    signal: int | None = None
    """Number of the signal that ended a rank."""
    requested_bytes: int | None = None
    """Bytes the failed allocation asked for."""
    free_bytes: int | None = None
    """Bytes free on that device at that moment."""
    allocated_bytes: int | None = None
    """Bytes the rank had allocated there."""
    tokens_requested: int | None = None
    """Tokens of the longest sequence, where a workspace is counted in tokens."""
    tokens_granted: int | None = None
    """Tokens that workspace could hold."""


class Batches(msgspec.Struct, kw_only=True):
    """Finished batches in the order they ran, as columns of equal length."""

    latency_s: list[float] = []
    """Host clock from before a batch leaves the host to after its results are back, devices idle at both ends."""
    sequences: list[int] = []
    """Rows of the forward."""
    tokens: list[int] = []
    """Input tokens without padding."""
    padded_tokens: list[int] = []
    """Rows times the longest row: what the devices computed."""


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """What the model chose, item by item, with the numbers it chose by."""

    acc: float
    """Fraction of items whose right ending has the largest log-likelihood."""
    acc_norm: float
    """The same with log-likelihoods divided by the ending's length in characters."""
    items: int
    predictions: list[int]
    """[items] index of the ending chosen by log-likelihood."""
    predictions_norm: list[int]
    """[items] index of the ending chosen by log-likelihood per character."""
    loglikelihoods: str
    """Base64 of float32 little-endian, items in order, their endings in order."""
    stderr: float | None
    """Standard error of `acc_norm` over items; None with one item."""
    labels: list[int] | None = None
    """[items] index of the right ending; None in reports from before it was kept."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device in one case. Held bytes are taken out of every other figure."""

    index: int
    """NVML index of the device; the torch index where NVML is absent; 0 for the CPU."""
    weights_bytes: int | None = None
    """Allocated after loading, before the first forward."""
    loading_peak_bytes: int | None = None
    """Largest sum of live tensors while the model was loaded: how much more than its weights that took."""
    peak_allocated_bytes: int | None = None
    """Largest sum of live tensors during the case, warm-up included."""
    peak_reserved_bytes: int | None = None
    """Largest amount the allocator had taken from the device."""
    workspace_bytes: int | None = None
    """Workspace a strategy allocated outside torch's allocator."""
    held_bytes: int = 0
    """Taken out of use to enforce the cap."""
    nvml_used_max_bytes: int | None = None
    """Largest sample of the device's memory in use, by any process."""
    nvml_used_mean_bytes: int | None = None
    """Mean of those samples."""
    why: dict[str, str] = {}


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of one device over a window."""

    mean: float | None
    max: float | None
    method: str
    """The call that gave it: `nvmlDeviceGetUtilizationRates`."""
    coverage: float | None
    """Fraction of the window that the readings speak for; None for instants and for unknown periods of the driver."""


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML saw of one device during a window."""

    index: int
    uuid: str
    metrics: dict[str, Metric] = {}
    """Keys: utilization_pct, memory_used_bytes, pcie_tx_bytes_per_s, pcie_rx_bytes_per_s, power_w, sm_clock_mhz,
    nvlink_tx_bytes_per_s, nvlink_rx_bytes_per_s, sm_active_pct, tensor_active_pct, dram_active_pct."""
    energy_j: float | None = None
    throttled_s: float | None = None
    counters: dict[str, float] = {}
    """What was counted in the window: nvlink_tx_bytes, nvlink_rx_bytes, ecc_uncorrected, xids; and compute_processes,
    of which it is the most at its ends."""
    why: dict[str, str] = {}
    """Metric name to the reason it could not be had."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Samples over time, thinned to at most 2,000 points."""

    t_s: list[float]
    """Seconds since the window's start."""
    devices: list[dict[str, list[float | None]]]
    """Per device in the order of `Profile.devices`: metric name to values, one per `t_s`."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML saw between two CLOCK_MONOTONIC times."""

    period_s: float
    """Sampling period asked for."""
    duration_s: float
    """Length of the window."""
    samples: int
    """Ticks inside the window."""
    missed: int
    """Deadlines inside the window for which there is no tick."""
    lateness_p99_s: float | None
    """99th percentile of how late the ticks began."""
    devices: list[DeviceProfile] = []
    sampler_cpu_s: float | None = None
    """CPU seconds that the sampler itself used in the window; None with fewer than two samples."""
    series: Series | None = None
    invalid: list[str] = []
    """Evidence that the window does not speak for the case alone. Throttling counts above half a percent of the window:
    many a step from idle to busy begins with milliseconds of power capping; `throttled_s` of the device has them."""
    why: dict[str, str] = {}
    """`profile` to the reason there is no profile at all (no NVML, no GPU)."""


class Launch(msgspec.Struct, kw_only=True):
    """One launch of the processes and what was measured in it."""

    load_s: float | None = None
    """From the start of the processes to a model that is ready to score."""
    warmup_s: float | None = None
    wall_s: float | None = None
    """From the request to the answer, warm-up and tokenising included."""
    plan_sha256: str | None = None
    """Item ids, order and shapes of the batches: batches pair only where this is equal."""
    batches: Batches = msgspec.field(default_factory=Batches)
    accuracy: Accuracy | None = None
    memory: list[DeviceMemory] = []
    profile: Profile | None = None
    tokens_requested: int | None = None
    """Tokens of the longest sequence, where the strategy keeps a workspace that is counted in tokens."""
    tokens_granted: int | None = None
    """Tokens that workspace holds. Fewer than requested means that rows of it overlap: the answers are garbage."""
    execution_choice: str | None = None
    """Why the forwards ran as `case.execution` says, in a sentence with its figures."""
    why: dict[str, str] = {}


CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "peer_copy", "all_to_all"
]
"""A peer copy is one from a CUDA device to another by the same process."""


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did by one kind of communication, once through the case's batches."""

    collective: CollectiveKind
    calls: int
    """Ops, one for several tensors that are sent together."""
    payload_bytes: int
    """Of the tensors that the ops were given (for recv: of those that were filled), each once."""
    wire_bytes: int
    """What this rank sends by the ring algorithms; for recv what it receives."""

    @property
    def sent_bytes(self) -> int:
        """Wire bytes that this rank sends: what it receives was sent by another of them."""
        return 0 if self.collective == "recv" else self.wire_bytes


Link = Literal["nvlink", "mixed", "pcie", "host"]
"""What traffic goes over; `mixed` is partly NVLink and partly PCIe, `host` PCIe by way of the host's memory."""


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """Which links carried a case's traffic, by the devices' counters."""

    link: Link | None
    """What carried it; None where counters cannot tell, or nothing was sent."""
    nvlink_bytes: float | None = None
    """Sent over NVLink by all devices together; None where it was not counted."""
    pcie_bytes: float | None = None
    """Sent over PCIe by all devices together, to the host as well as to each other."""
    expected_bytes: int
    """What all ranks together put on the wire, by the program's own account."""
    nvlink_shares: list[float] = []
    """What each rank's device sent over NVLink as a fraction of what the rank put on the wire, ranks that send nothing
    left out; one fraction of all devices where a process has several. Empty where it was not counted."""
    text: str
    """The path in one sentence; where the counters differ from the account, by how much and why."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What the program itself sent, exactly: an equal program on an equal plan sends equal bytes."""

    ranks: list[list[Collective]]
    """[ranks] by kind; an empty list where a rank sends nothing."""
    wire_bytes_per_sequence: float
    """Of all ranks together."""
    path: Path | None = None

    @property
    def sent_bytes(self) -> int:
        """Wire bytes that all ranks together send in all batches."""
        return sum(one.sent_bytes for rank in self.ranks for one in rank)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The same items under another strategy, which computes the same numbers in another order."""

    reference: str
    """Id of the case compared with: `mp-bs8`."""
    items: int
    flipped: list[int]
    """Numbers of the items whose prediction (by the checked metric) differs."""
    lost: int | None
    """Items that are right there and wrong here; None where a side has no labels."""
    won: int | None
    """Items that are wrong there and right here."""
    mcnemar_p: float | None
    """Two-sided exact probability of such a difference between `lost` and `won` by chance; None without labels."""
    largest_difference: float | None
    """Largest difference of a log-likelihood, as a fraction of the reference's; None where one is not finite."""
    typical_difference: float | None
    """Sum of all differences as a fraction of the sum of the reference's: one near 0 does not make it large."""


class AccuracyCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a case's answers are still right, and by which yardstick."""

    metric: str
    """`acc`, `acc_norm`, or `loglikelihood_relative_difference` for dummy weights."""
    value: float | None
    baseline: float | None
    source: str | None
    """Where the baseline comes from; None where there is none."""
    tolerance: float
    ok: bool | None
    """None: there was nothing to compare with."""
    text: str
    """The comparison in one sentence."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What the terminal and the page say of a case."""

    code: str
    """Stable name for scripts: `accuracy-collapsed`."""
    severity: Literal["info", "warning", "failure"]
    text: str
    next_step: str


class CaseResult(msgspec.Struct, kw_only=True):
    """One row of the report."""

    id: str
    """`mp-bs8`; `mp-bs8#2` for a second measurement."""
    nodeid: str | None = None
    markers: list[str] = []
    """Names of the test's markers, by which a policy may have other margins for it; none where nobody recorded them."""
    key: str
    case: Case
    outcome: Outcome
    failure: Failure | None = None
    launches: list[Launch] = []
    inference_s: float | None = None
    """Sum of the batch latencies, median over launches."""
    sequences_per_s: float | None = None
    tokens_per_s: float | None = None
    """Input tokens without padding."""
    acc: float | None = None
    acc_norm: float | None = None
    accuracy_check: AccuracyCheck | None = None
    comparison: Comparison | None = None
    """Against mp in the same session; None for mp itself and where mp was not measured, with the reason in `why`."""
    traffic: Traffic | None = None
    """Exact bytes by collective, counted in forwards of their own; None with its reason in `why`."""
    findings: list[Finding] = []
    why: dict[str, str] = {}
