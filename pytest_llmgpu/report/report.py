"""The record of one session, the whole object of the JSON file, with the machine, the source and the largest batch."""

from __future__ import annotations

import dataclasses
import shlex

import msgspec

from pytest_llmgpu.report.bounds import Amount, Count, Positive, Reasons, Seconds
from pytest_llmgpu.report.options import GATE_OPTIONS, OUTPUT_OPTIONS, Options, flag_of, key_of
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.verdicts import Verdicts
from pytest_llmgpu.report.work import Ceilings

SCHEMA_VERSION = 2
"""Version of the report's format. It grows by optional fields; a reader ignores fields that it does not know."""

OptionValue = str | int | float | bool | None | list[str | int | float]
"""The value of an option in JSON."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as NVML describes it, independent of CUDA_VISIBLE_DEVICES."""

    index: Count
    """NVML index, in the order of the PCI bus. The index in CUDA may differ. On several nodes the indices of a node
    continue those of the node before."""
    uuid: str
    """NVML's unique identifier of the GPU."""
    name: str
    """Product name of the GPU."""
    memory_bytes: Count | None = None
    """Total memory of the GPU, including the share of the driver."""
    reserved_bytes: Count | None = None
    """Memory that the driver reserves for itself; null if the driver does not report it."""
    pcie_gen: Count | None = None
    """Highest PCIe generation that both GPU and slot support. The current generation is lower while the GPU is idle."""
    pcie_width: Count | None = None
    """PCIe lanes in use; fewer than the board has can mean a badly seated board."""
    power_limit_w: Amount | None = None
    """Lowest power limit in force. A lower limit makes the GPU slower."""
    nvlinks: Count | None = None
    """Number of active NVLinks; null if the GPU has none."""
    why: Reasons = {}


class Node(msgspec.Struct, kw_only=True):
    """A machine and its libraries, without names of hosts or users."""

    cpu: str | None = None
    """Model name of the CPU."""
    cores: Count | None = None
    """Number of CPU cores that the process may use."""
    python: str
    """Version of Python."""
    platform: str
    """Kernel and C library, such as `Linux-6.1.0-x86_64-with-glibc2.36`."""
    gpus: list[Gpu] = []
    """Every GPU of the node, visible to CUDA or not. In `environment`, the GPUs of all nodes in their order."""
    topology: list[list[str]] | None = None
    """Matrix [gpus][gpus] of the links between GPUs, in the terms of `nvidia-smi topo -m`; `NET` between nodes."""
    driver: str | None = None
    """Version of the NVIDIA driver."""
    cuda: str | None = None
    """CUDA version that torch was built for."""
    nccl: str | None = None
    """Version of NCCL."""
    versions: dict[str, str | None] = {}
    """Distribution name mapped to its version; null if it is not installed."""
    variables: dict[str, str] = {}
    """Environment variables that influence the measurement."""
    why: Reasons = {}


class Environment(Node, kw_only=True):
    """The machine and its libraries, without names of hosts or users; of several nodes the first one."""

    nodes: list[Node] = []
    """Every node of a measurement on several, in the order of their ranks; empty for one node."""
    ceilings: Ceilings | None = None
    """Rates that the GPUs reached in short benchmarks of this session; null with the reason in `why`."""
    kernel_names: list[str] = []
    """Names of the kernels that rows of `work` refer to by number, cut to 120 characters."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The source that was measured."""

    sha: str | None = None
    """Hash of the commit."""
    branch: str | None = None
    """Name of the branch; null if HEAD is detached and no variable of a CI system names the branch."""
    dirty: bool | None = None
    """True if a tracked file differs from the commit; null if git could not be run."""
    source: str | None = None
    """Source of the commit: `git`, or the environment variable that named it."""
    imported_from: dict[str, str] = {}
    """Modules of the project that were imported from outside of the working tree, to their files: the commit was not
    measured. Empty if there are none."""
    why: Reasons = {}

    def not_measured(self) -> str | None:
        """Return a sentence on the modules that are not of this commit; None if there are none."""
        if not self.imported_from:
            return None
        name, path = next(iter(self.imported_from.items()))
        more = f" and {len(self.imported_from) - 1} more" if len(self.imported_from) > 1 else ""
        return f"commit {(self.sha or '?')[:8]}, but module {name}{more} was imported from {path}"


class Session(msgspec.Struct, kw_only=True):
    """The tests that pytest selected and how far it got. It distinguishes a missing case from a deselected one."""

    complete: bool = False
    """True if every collected case has a result."""
    interrupted: bool = False
    """True if the session was ended by Ctrl-C, `-x` or a signal."""
    exit_status: int | None = None
    """Exit status of pytest; null if the report was written before the session ended."""
    failed_tests: Count | None = None
    """Number of tests of a model that failed, without the items of the gate; null in reports of versions that did not
    record it."""
    collected: Count = 0
    """Number of tests left after deselection."""
    duration_s: Seconds | None = None
    """Time from the start of the session to its end, of a resumed one without the pause; null if it did not end."""
    deselected: list[str] = []
    """Node ids that `-k` or `-m` deselected, and other selections of this run: `--lf`, or tests named as arguments."""


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """A later start of pytest that continued the session of a report with the cases that were missing."""

    created: str
    """Time at which the session was resumed, in UTC as RFC 3339."""
    source: str
    """Name of the report that was continued, as the user gave it but without private folders."""
    sha256: str
    """SHA-256 of the file of that report."""
    kept: Count
    """Number of its cases that were kept. Cases that were interrupted are measured again."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch size of one series, as measured."""

    series: str
    """Series of the cases: a hash over every property of a case except its batch size."""
    strategy: str
    """Strategy of the series."""
    largest_fit: Positive | None
    """Largest batch size that completed; null if none did."""
    smallest_oom: Positive | None
    """Smallest batch size that ran out of memory. Null means that none did, so that sizes above `largest_fit` may
    fit."""
    text: str
    """Measured size in one sentence."""


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """The promotion by force of a report that `llmgpu promote` had refused."""

    reason: str
    """Reason that the user gave."""
    refused: list[str]
    """Reasons why it had been refused."""


class PromotedCase(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a case in an earlier baseline, and their conditions: only under equal ones they are compared."""

    figures: dict[str, Amount]
    """Metric to its figure: `device_time` (s), `memory` (bytes), `traffic` (wire bytes of a sequence)."""
    execution: str
    """Execution of the forwards, as in `case`."""
    batches_sha256: str
    """SHA-256 over plans and batches of work passes, a condition of every metric but memory."""
    uuids: list[str]
    """UUIDs of the GPUs, a condition of device time. Empty without work passes."""
    clock_ghz: Amount | None
    """Mean SM clock of the work passes, another one; null if it was not measured."""


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline that was replaced by a promotion."""

    commit: str | None
    """Commit that was measured."""
    created: str
    """Time at which its report was created, in UTC as RFC 3339."""
    cases: dict[str, PromotedCase]
    """Key of a completed case to its figures, without those from before an accepted growth or an improvement."""


class Report(msgspec.Struct, kw_only=True):
    """One session: the whole object of the JSON file."""

    schema_version: int = SCHEMA_VERSION
    """Version of the report's format."""
    created: str
    """Time at which the report was created, in UTC as RFC 3339."""
    plugin_version: str | None
    """Version of pytest-llmgpu; null if it is not known."""
    options: dict[str, OptionValue] = {}
    """Option flag mapped to its value."""
    session: Session = msgspec.field(default_factory=Session)
    """The selected tests and how far the session got."""
    resumed: list[Resumption] = []
    """Later starts of pytest that continued the session; empty if one start measured all cases."""
    environment: Environment
    """The machine and its libraries."""
    commit: Commit = Commit()
    """The source that was measured."""
    cases: list[CaseResult] = []
    """Results of the cases in the order in which they ran."""
    capacity: list[Capacity] = []
    """Largest batch size of each series of cases, as measured."""
    verdicts: Verdicts | None = None
    """Verdicts of the gate; null if nothing was compared."""
    promotion: Promotion | None = None
    """Promotion by force; null for other baselines, and for reports that are none."""
    promotions: list[Promoted] = []
    """The baselines before this one, since the last promotion by force, the oldest first; at most the last 50."""


def command(report: Report) -> str:
    """Return the command that measures the cases of a report again, in one launch and without its output options."""
    paths = dict.fromkeys(result.nodeid.partition("::")[0] for result in report.cases if result.nodeid)
    flags = []
    for field in dataclasses.fields(Options):
        value = report.options.get(key_of(field), field.default)
        value = tuple(value) if isinstance(value, list) else value
        if value != field.default and field.name not in {*GATE_OPTIONS, *OUTPUT_OPTIONS, "launcher", "launches"}:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags.append(flag_of(field) if value is True else f"{flag_of(field)}={text}")
    return shlex.join(["pytest", *(["-n", "0"] if "-n" in report.options else []), *paths, *flags])


def started(report: Report, launch: Launch) -> str:
    """Return the time at which the start of pytest that measured a launch began, as the report has it."""
    number = launch.resumption
    return report.resumed[number - 1].created if 0 < number <= len(report.resumed) else report.created
