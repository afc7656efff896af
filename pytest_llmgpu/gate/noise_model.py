"""The noise of times between launches: a prior deviation for each noise regime, and its use in a moderated t-test.

A few launches estimate their own deviation badly, and one launch not at all. The deviation of a row is therefore a mean
of two variances, weighted by their degrees of freedom: that of its launches, and the prior of its regime
(empirical Bayes, as in limma: Smyth 2004). The degrees of the prior are small where machines differ in their deviation.

`prior_of(regime)` returns a prior, `Prior.calibrated` adds the launches of `llmgpu calibrate`, `Prior.updated` those of
the row. `smallest_seen` and `launches_needed` plan with a prior before anything is measured.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.noise_regime import NoiseRegime
from pytest_llmgpu.gate.stats.distributions import largest_sd, t_quantile
from pytest_llmgpu.report.result import CaseResult

POWER = 0.95
"""Probability with which the smallest slowdown is seen."""

GPU_SD = 0.006
"""Standard deviation of the log device time of one program between GPUs of one kind, measured on five H200."""

_FORWARDS = 24
"""Number of forwards for which the deviations of `device_compute` and `replayed` hold. That of fewer or more is larger
or smaller by the square root: on two H200, forwards of LLaMA-7B at batch sizes 8, 32 and 64 differed by 1.1, 1.5 and
1.4 %, in one launch as much as between launches."""

_MOST_FORWARDS = 200
"""More forwards do not lower the deviation further: launches differ in more than their forwards."""

DAY_SD = 0.005
"""Addition to the threshold of device time for two sessions on different days. It is assumed, not measured."""

_CHANCE = 0.01
"""Probability with which the deviation of a calibration is limited to less than the true one."""

PRACTICAL_LAUNCHES = 20
"""Largest number of launches that is recommended."""

_MOST_LAUNCHES = 1000
"""Largest number of launches that is computed."""

_POWER_QUANTILE = statistics.NormalDist().inv_cdf(POWER)


class Deviation(msgspec.Struct, frozen=True, kw_only=True):
    """A measured standard deviation."""

    sd: float
    """Standard deviation of the logarithm of the time between launches."""
    degrees: int
    """Degrees of freedom of `sd`: the number of launches minus the number of reports or sessions."""


class Prior(msgspec.Struct, frozen=True, kw_only=True):
    """The noise between launches that is expected before a comparison."""

    s0: float
    """Standard deviation of the logarithm of the time between launches."""
    df0: float
    """Degrees of freedom of `s0`: the number of launches of one's own that have the same weight."""
    source: str
    """The measurements that `s0` and `df0` are from."""

    def updated(self, measured: Deviation | None) -> Prior:
        """Return the prior with measured launches added to it."""
        if measured is None or not measured.degrees:
            return self
        degrees = self.df0 + measured.degrees
        s0 = math.sqrt((self.df0 * self.s0**2 + measured.degrees * measured.sd**2) / degrees)
        return Prior(s0=s0, df0=degrees, source=self.source)

    def calibrated(self, measured: Deviation | None) -> Prior:
        """Return the prior with the launches of a calibration added to it.

        Machines of one regime can differ in their deviation by more than a factor of ten. A prior that the launches
        contradict is therefore replaced by the largest deviation that they are compatible with.
        """
        if measured is None:
            return self
        both = self.updated(measured)
        return msgspec.structs.replace(both, s0=min(both.s0, largest_sd(measured.sd, measured.degrees, _CHANCE)))


PRIORS: Mapping[NoiseRegime, Prior] = MappingProxyType(
    {
        "device_memory": Prior(s0=0.001, df0=10.0, source="LLaMA-7B at batch sizes 1 and 2, 52 launches on eight H200"),
        "device_compute": Prior(
            s0=0.003, df0=40.0, source="24 forwards of LLaMA-7B at batch sizes 8 to 64, 72 launches on two H200"
        ),
        "replayed": Prior(
            s0=0.003, df0=20.0, source="24 forwards of LLaMA-7B at batch sizes 32 and 64, 48 launches on two H200"
        ),
        "eager_device": Prior(s0=0.01, df0=6.0, source="LLaMA-7B at batch sizes 32 and 64, 55 launches on five H200"),
        "eager_host": Prior(s0=0.1, df0=2.0, source="LLaMA-7B at batch sizes 2 and 8, 55 launches on six H200"),
        "cpu": Prior(s0=0.15, df0=4.0, source="bundled model, 40 launches on two cores of a virtual machine"),
        "load": Prior(s0=0.15, df0=4.0, source="load times and warm-ups of 13 reports of 10 to 100 launches"),
    }
)
"""The built-in priors. The policy can replace them: `[tool.llmgpu.gate.noise.device_memory]`."""


class NoiseRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prior deviation of one noise regime."""

    s0: Annotated[float, Meta(ge=1e-6, lt=2)] | None = None
    """The standard deviation of the logarithm of the time between launches; None: the built-in one."""
    df0: Annotated[float, Meta(ge=0.5, lt=1e6)] | None = None
    """The degrees of freedom of `s0`: the number of launches that have the same weight; None: the built-in ones."""


def _built_in(regime: NoiseRegime) -> NoiseRule:
    return NoiseRule(s0=PRIORS[regime].s0, df0=PRIORS[regime].df0)


class NoiseRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prior deviations of all noise regimes."""

    device_memory: NoiseRule = _built_in("device_memory")
    """Device time of cases that memory limits."""
    device_compute: NoiseRule = _built_in("device_compute")
    """Device time of the other cases."""
    replayed: NoiseRule = _built_in("replayed")
    """Wall time of replayed CUDA graphs."""
    eager_device: NoiseRule = _built_in("eager_device")
    """Wall time of eager forwards that the GPU limits: it is busy for at least 80 % of the time."""
    eager_host: NoiseRule = _built_in("eager_host")
    """Wall time of eager forwards that the host limits."""
    cpu: NoiseRule = _built_in("cpu")
    """Wall time on a CPU."""
    load: NoiseRule = _built_in("load")
    """Load time, warm-up, transfer time and energy of a series."""


def prior_of(
    regime: NoiseRegime, rules: NoiseRules | None = None, *, idle: float = 0.0, forwards: int | None = None
) -> Prior:
    """Return the prior of a regime; `rules` of the policy replace the built-in values.

    The deviations of `device_compute` and `replayed` are those of 24 forwards, and scaled to the number that a launch
    measures.

    Between replayed graphs the GPU waits for the host, whose time has the deviation of `eager_host`: with LLaMA-7B on
    an H200 the GPU waited 15 % of batch size 1, whose deviation was 0.8 to 1.8 %, and 2 % of batch size 64 (0.5 %).

    Args:
        regime: The noise regime.
        rules: The noise rules of the policy; None: the built-in ones.
        idle: The fraction of the time in which the GPU waits for the host. It widens the prior of replayed graphs only.
        forwards: The number of forwards that a launch measures (`noise_regime.forwards`); None: as many as `s0` is of.
    """
    prior = _ruled(regime, rules)
    if forwards is not None:
        scale = math.sqrt(_FORWARDS / min(forwards, _MOST_FORWARDS))
        prior = msgspec.structs.replace(prior, s0=scale * prior.s0)
    if regime != "replayed" or not idle:
        return prior
    return msgspec.structs.replace(prior, s0=math.hypot(prior.s0, idle * _ruled("eager_host", rules).s0))


def prior_of_case(regime: NoiseRegime, rules: NoiseRules | None, *results: CaseResult) -> Prior:
    """Return the prior of a time of one case, before a calibration.

    Args:
        regime: The regime of the time.
        rules: The noise rules of the policy; None: the built-in ones.
        results: The results of the case in one report or in several.
    """
    return prior_of(
        regime,
        rules,
        idle=noise_regime.idle_share(*results) if regime == "replayed" else 0.0,
        forwards=noise_regime.forwards(regime, *results),
    )


def _ruled(regime: NoiseRegime, rules: NoiseRules | None) -> Prior:
    built_in = PRIORS[regime]
    rule: NoiseRule = NoiseRule() if rules is None else getattr(rules, regime)
    s0 = built_in.s0 if rule.s0 is None else rule.s0
    df0 = built_in.df0 if rule.df0 is None else rule.df0
    return built_in if (s0, df0) == (built_in.s0, built_in.df0) else Prior(s0=s0, df0=df0, source="policy")


def deviation(groups: Iterable[Sequence[float]]) -> Deviation:
    """Return the deviation of launches around the mean of their group; without degrees of freedom 0.

    Args:
        groups: [groups, launches] logarithms of times.
    """
    squares, degrees = 0.0, 0
    for group in groups:
        if len(group) > 1:
            mean = statistics.fmean(group)
            squares += math.fsum((value - mean) ** 2 for value in group)
            degrees += len(group) - 1
    return Deviation(sd=math.sqrt(squares / degrees) if degrees else 0.0, degrees=degrees)


def critical_t(degrees: float, family: float, confidence: float) -> float:
    """Return the first critical value of Holm's method: the t that the smallest p of a family has to exceed.

    Args:
        degrees: Degrees of freedom of t.
        family: The number of tests in the family, times the number of ranks of this row.
        confidence: The confidence of the whole family.
    """
    return t_quantile(degrees, 1 - (1 - confidence) / max(1.0, family))


def smallest_slowdown(threshold: float, shown: float, error: float) -> float:
    """Return the smallest true slowdown that is seen with probability `POWER`, as a fraction.

    Args:
        threshold: The threshold as a fraction.
        shown: The smallest measured change, as a logarithm, that is statistically significant.
        error: The standard error of the measured change.
    """
    return math.expm1(min(700.0, max(math.log1p(threshold), shown) + _POWER_QUANTILE * error))


def smallest_seen(
    prior: Prior, *, n_base: int, n_head: int, threshold: float, family: float = 1, confidence: float = 0.99
) -> float:
    """Return the smallest true slowdown that launches with the noise of a prior show, as a fraction.

    Args:
        prior: The expected noise.
        n_base: The number of launches of the baseline.
        n_head: The number of launches of the candidate.
        threshold: The threshold as a fraction.
        family: The number of gated rows of times, times the number of ranks of this row.
        confidence: The confidence of the policy.
    """
    error = prior.s0 * math.sqrt(1 / n_base + 1 / n_head)
    shown = critical_t(prior.df0 + n_base + n_head - 2, family, confidence) * error
    return smallest_slowdown(threshold, shown, error)


def launches_needed(
    prior: Prior, *, slowdown: float, threshold: float, family: float = 1, confidence: float = 0.99
) -> int | None:
    """Return how many launches in each report show a true slowdown with probability `POWER`; None above 1,000.

    Args:
        prior: The expected noise.
        slowdown: The true slowdown as a fraction. One up to the threshold is never seen.
        threshold: The threshold as a fraction.
        family: The number of gated rows of times, times the number of ranks of this row.
        confidence: The confidence of the policy.
    """
    # Rounded, so that cases of similar noise share one cached computation.
    return _launches_needed(_rounded_up(prior.s0), round(prior.df0, 1), slowdown, threshold, family, confidence)


@functools.lru_cache(maxsize=4096)
def _launches_needed(
    s0: float, df0: float, slowdown: float, threshold: float, family: float, confidence: float
) -> int | None:
    prior = Prior(s0=s0, df0=df0, source="")

    def seen(n: int) -> bool:
        least = smallest_seen(prior, n_base=n, n_head=n, threshold=threshold, family=family, confidence=confidence)
        return least <= slowdown

    if slowdown <= threshold or not seen(_MOST_LAUNCHES):
        return None
    few, enough = 0, _MOST_LAUNCHES
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if seen(middle) else (middle, enough)
    return enough


def _rounded_up(value: float) -> float:
    """Return a positive value rounded up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-9) * unit
