from __future__ import annotations

import math
import random
import statistics

import pytest
from support.noisy_reports import noisy, on_h200, sessions
from support.stored_reports import H200
from support.verdict_factory import make_invalid

from pytest_llmgpu.gate.stats.holm import holm
from pytest_llmgpu.gate.stats.intervals import change
from pytest_llmgpu.gate.timing.calibration import Calibration, Measured, Noise, as_it_counts, measure
from pytest_llmgpu.report.result import CaseResult


def test_noise_is_the_spread_of_log_times_between_launches() -> None:
    """Of each case by itself, with the machine and the commit that it was measured on."""
    loud, quiet = noisy(0.03, 200, strategy="tp"), noisy(0.005, 200)
    found = measure(on_h200(loud, quiet))
    assert (found.machine, found.commit) == (H200, "a" * 40)
    assert (found.time[loud.key].id, found.time[loud.key].launches) == ("tp-bs1", 200)
    assert found.time[loud.key].sd == pytest.approx(0.03, rel=0.15)
    assert found.time[quiet.key].sd == pytest.approx(0.005, rel=0.15)


def test_only_launches_that_can_be_compared_count() -> None:
    """Not a disturbed one, one without times, one that ran other batches; nor a case that has one left."""
    spoilt = noisy(0.001, 6)
    make_invalid(spoilt.launches[1], "a stranger's process")
    spoilt.launches[2].plan_sha256 = "0" * 64
    spoilt.launches[3].batches.latency_s = spoilt.launches[3].batches.latency_s[:-1]
    once = noisy(0.001, 2, batch_size=2)
    once.launches[1].batches.latency_s = []
    found = measure(on_h200(spoilt, once))
    assert {key: noise.launches for key, noise in found.time.items()} == {spoilt.key: 3}


@pytest.mark.parametrize("cases", [(), (noisy(0.01, 1),)])
def test_one_launch_is_no_calibration(cases: tuple[CaseResult, ...]) -> None:
    """It is refused, with what to do."""
    with pytest.raises(ValueError, match=r"no case has 2 undisturbed launches .* 10 are recommended"):
        measure(on_h200(*cases))


def test_one_launch_twice_is_no_calibration() -> None:
    """A report that is given twice would say that there is no noise."""
    result = noisy(0.01, 3)
    result.launches.append(result.launches[0])
    with pytest.raises(ValueError, match="mp-bs1: two launches have identical times"):
        measure(on_h200(result))


def test_noise_between_sessions_is_kept_apart() -> None:
    """What days differ by is no part of the noise between launches; one session alone says nothing of it."""
    [noise] = measure(*sessions(100, 0.015, 0.003, 5)).time.values()
    assert (noise.launches, noise.sessions) == (500, 100)
    assert noise.sd == pytest.approx(0.003, rel=0.1)
    assert noise.session_sd == pytest.approx(0.015, rel=0.2)
    assert noise.cautious_session == pytest.approx(noise.session_sd, rel=0.02)
    [noise] = measure(*sessions(1, 0.015, 0.003, 5)).time.values()
    assert (noise.sessions, noise.session_sd, noise.cautious_session) == (1, None, None)


def test_sessions_of_one_launch_each_tell_no_noise_from_the_other() -> None:
    """Either may be all that they differ by."""
    [noise] = measure(*sessions(50, 0.01, 0.01, 1)).time.values()
    assert noise.session_sd == noise.sd == pytest.approx(0.014, rel=0.2)
    assert noise.cautious == pytest.approx(noise.cautious_session)


def test_a_case_of_fewer_sessions_is_measured_in_those() -> None:
    """One that only a later session has, too."""
    first, second = on_h200(noisy(0.01)), on_h200(noisy(0.01, seed=2), noisy(0.01, batch_size=2))
    found = measure(first, second).time
    assert sorted((noise.id, noise.sessions, noise.launches) for noise in found.values()) == [
        ("mp-bs1", 2, 20),
        ("mp-bs2", 1, 10),
    ]


def test_the_gate_uses_the_noise_between_sessions() -> None:
    """The noise of a case is raised to the median; a calibration of one session has no noise between sessions."""
    loud, quiet = (measure(*sessions(5, sd, 0.001, 3, strategy=name)).time for name, sd in (("tp", 0.02), ("mp", 0.01)))
    found = as_it_counts(Measured(machine=H200, time={**loud, **quiet}))
    [loud_key], [quiet_key] = loud, quiet
    wide = [noise.cautious_session for noise in (*loud.values(), *quiet.values())]
    assert None not in wide
    assert found.between_sessions(loud_key) == found.between_sessions("another") == wide[0]
    assert found.between_sessions(quiet_key) == pytest.approx(statistics.median(w for w in wide if w is not None))
    one = as_it_counts(measure(on_h200(noisy(0.01))))
    assert one.between_sessions(noisy(0.01).key) == 0.0


def test_a_case_with_significantly_less_noise_keeps_it() -> None:
    """A case that keeps its GPU busy keeps its own noise, raised to its upper limit."""
    loud, usual, quiet = noisy(0.3, strategy="tp"), noisy(0.2, strategy="iok"), noisy(0.005)
    measured = measure(on_h200(loud, usual, quiet))
    # scipy.stats.chi2.ppf(0.01 / 3, 9) is 1.56.
    at_most = measured.time[quiet.key].sd * (9 / 1.56) ** 0.5
    assert as_it_counts(measured).of(quiet.key) == pytest.approx(at_most, rel=0.03)
    few = noisy(0.3, 2, strategy="tp"), noisy(0.2, 2, strategy="iok"), noisy(0.005, 2)
    found = as_it_counts(measure(on_h200(*few)))
    assert found.of(few[2].key) == statistics.median(found.sd.values()), "two launches are no proof"


def test_few_launches_count_as_noisier_than_they_look() -> None:
    """By how unsure they leave the noise: false alarms stay as rare with few launches as with many."""
    assert Noise(id="x", sd=0.01, launches=2).cautious == pytest.approx(0.0648, rel=0.01)
    assert Noise(id="x", sd=0.01, launches=10).cautious == pytest.approx(0.0115, rel=0.01)
    assert Noise(id="x", sd=0.01, launches=1000).cautious == pytest.approx(0.01, rel=0.01)


def test_noise_that_is_small_by_chance_is_raised_to_the_median() -> None:
    """What is new counts as assumed, or as the noisiest where that is more."""
    loud, usual, quiet = noisy(0.03, strategy="tp"), noisy(0.01, strategy="iok"), noisy(0.006)
    measured = measure(on_h200(loud, usual, quiet))
    found = as_it_counts(measured)
    assert found.of(quiet.key) == found.of(usual.key) == pytest.approx(measured.time[usual.key].cautious)
    assert found.of("another") is None, "what was not calibrated counts as such"
    assert found.of(loud.key) == pytest.approx(measured.time[loud.key].cautious)
    worse = as_it_counts(measure(on_h200(noisy(0.5, strategy="tp"))))
    assert worse.of("another") == worse.of(loud.key) == worse.typical, "and as no quieter than what was"
    assert worse.sd[loud.key] > 0.2


def test_an_empty_calibration_is_none() -> None:
    """Every case counts as uncalibrated."""
    assert as_it_counts(Measured(machine=H200, time={})).of("any") is None


def test_false_alarms_stay_rare_on_a_calibrated_runner() -> None:
    """In simulation: of runs of 21 cases in which nothing changed, at most 1 % are REGRESSED.

    With one launch in each report and a noise of 6 % that five launches estimated.
    """
    chance, alarms, runs = random.Random(1), 0, 300
    for _ in range(runs):
        seen = [statistics.stdev([chance.gauss(0, 0.06) for _ in range(5)]) for _ in range(21)]
        time = {f"{number}": Noise(id="x", sd=sd, launches=5) for number, sd in enumerate(seen)}
        known = as_it_counts(Measured(machine=H200, time=time))
        changes = [change([0.0], [chance.gauss(0, 0.06 * math.sqrt(2))], sd) for sd in known.sd.values()]
        alarms += min(holm([one.p_above(math.log1p(0.02)) for one in changes])) <= 0.05
    assert alarms <= 0.01 * runs


def test_a_case_without_noise_of_its_own_gets_the_typical_one() -> None:
    """None where nothing was calibrated at all."""
    assert Calibration(sd={"a": 0.01}, typical=0.02).of("a") == 0.01
    assert Calibration(sd={"a": 0.01}, typical=0.02).of("b") == 0.02
    assert Calibration().of("a") is None


def test_noise_between_sessions_is_nothing_to_sides_of_one() -> None:
    """Of a case that has none of its own the largest; launched in turn, both sides have the same session."""
    known = Calibration(sd={"a": 0.01}, typical=0.02, session_sd={"a": 0.015}, typical_session=0.03, sha256="x")
    assert (known.between_sessions("a"), known.between_sessions("b")) == (0.015, 0.03)
    assert known.of_one_session() == Calibration(sd={"a": 0.01}, typical=0.02, sha256="x")
