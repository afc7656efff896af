from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.report_factory import known, make_answers, make_failed, make_profile, make_result, make_traffic, make_work
from support.verdict_factory import gpus, keep, measured, summed

from pytest_llmgpu.analysis.noise_regime import Prior
from pytest_llmgpu.gate.trends import DEVICE_TIME, Line, chosen, steps, trends
from pytest_llmgpu.report.file import load
from pytest_llmgpu.report.result import Declared
from pytest_llmgpu.store import store

pytestmark = pytest.mark.usefixtures("empty_folder")

_FLAT = [1.0, 1.002, 0.999, 1.001, 0.998, 1.0, 1.001, 0.999, 1.0, 1.002]
_STEPPED = [1.0, 1.001, 0.999, 1.0, 1.001, 0.999, 1.0, 1.03, 1.031, 1.029]


def _lines(metric: str = "time", last: int | None = None) -> list[Line]:
    kept = [(one, load(one.path)) for one in chosen(store.DEFAULT)]
    return next(trend for trend in trends(kept, last) if trend.metric == metric).lines


def _changes(line: Line) -> list[str | None]:
    return [one.change if one is not None else "absent" for one in line.figures]


_FASTER, _SLOWER = ([factor * value for value in _FLAT] for factor in (1 / 1.05, 1.05))
_QUIET = [1.0001, 1.0, 1.0001, 1.0, 1.0001]
_BY_HALF_A_PERCENT = [1.005 * value for value in _QUIET]


def test_a_figure_of_ones_own_is_followed() -> None:
    """An exact one is marked from its threshold on, in its direction; a time has the steps of times."""
    for day in range(1, 13):
        result = summed(1.0, execution="cuda_graphs")
        result.declared = {
            "rate": Declared(better="larger", threshold=0.01),
            "speed": Declared(better="larger", rule="time"),
        }
        for launch in result.launches:
            launch.figures = {
                "rate": 0.9 if day < 12 else 0.8,
                "speed": 100.0 if day < 7 else 50.0,
                "seen": -float(day),
            }
        keep(day, result)
    assert [_changes(*_lines(name))[-1] for name in ("rate", "seen")] == ["worse", None]
    assert _changes(*_lines("speed")).count("worse") == 1


@pytest.mark.parametrize(
    ("history", "prior", "expected"),
    [
        ([*_FLAT, *_SLOWER], DEVICE_TIME, [(10, 11)]),
        ([*_FLAT, *_FASTER], DEVICE_TIME, [(10, 11)]),
        ([*_FLAT, *_SLOWER, *_FLAT], DEVICE_TIME, [(10, 11), (20, 21)]),
        ([*_FLAT, *_SLOWER[:1]], DEVICE_TIME, []),
        ([*_QUIET, *_BY_HALF_A_PERCENT], Prior(s0=0.003, df0=40.0), []),
        ([*_QUIET, *_BY_HALF_A_PERCENT], Prior(s0=0.0003, df0=40.0), [(5, 6)]),
        ([*(_QUIET * 6), *_BY_HALF_A_PERCENT], Prior(s0=0.003, df0=40.0), [(30, 33)]),
        ([*_FLAT, 1.5], DEVICE_TIME, []),
        ([*(_FLAT * 8), 1.5, *_FLAT], DEVICE_TIME, []),
        ([1.0, 1.0 + 1e-9] * 10 + [1.001] * 10, DEVICE_TIME, []),
        ([1.0, 1.0 + 1e-9] * 10 + [1.01] * 10, DEVICE_TIME, [(20, 21)]),
    ],
)
def test_a_step_lasts_and_exceeds_the_noise(
    history: list[float], prior: Prior, expected: list[tuple[int, int]]
) -> None:
    """Few reports are compared with the expected noise, many show their own; the second report shows a step."""
    found = steps(history, prior)
    assert [(one.first, one.found) for one in found] == expected
    for one in found:
        assert one.change == pytest.approx(history[one.first] / history[one.first - 1] - 1, abs=0.004)


def test_a_step_has_to_be_clearer_among_many_cases() -> None:
    """Each of the histories may show one by chance."""
    history = [*_FLAT, *(1.01 * value for value in _FLAT)]
    alone, among = (steps(history, DEVICE_TIME, cases=cases)[0] for cases in (1, 1000))
    assert among.found > alone.found


@pytest.mark.parametrize(
    ("last", "expected"), [(None, [None] * 7 + ["worse", None, None]), (2, ["worse", None]), (1, [None])]
)
def test_a_step_is_marked_where_it_began_or_was_found(last: int | None, expected: list[str | None]) -> None:
    """Reports without a column belong to the history."""
    for number, level in enumerate(_STEPPED, 1):
        keep(number, summed(level, execution="cuda_graphs"))
    [line] = _lines(last=last)
    assert _changes(line) == expected
    if last is None:
        assert re.fullmatch(r"Step of \+3\.\d % since report 0008, found with 0009\.", known(line.figures[7]).reason)


@pytest.mark.parametrize(("gpu", "execution"), [("b", "cuda_graphs"), ("", "eager")])
def test_other_gpus_and_noisy_times_show_no_small_step(gpu: str, execution: str) -> None:
    """1 % is within the noise of eager forwards, and another GPU has another speed."""
    for number, level in enumerate((*_STEPPED[:7], 1.01, 1.011, 1.009), 1):
        keep(number, summed(level, execution=execution), gpu=gpu if number > 7 else "")
    [line] = _lines()
    assert not any(_changes(line))


@pytest.mark.parametrize(
    ("metric", "before", "after", "change"),
    [
        ("time", summed(1.0), make_failed("oom"), "worse"),
        ("time", make_failed("oom"), summed(1.0), "better"),
        ("traffic", {"traffic": make_traffic(60)}, {"traffic": make_traffic()}, "worse"),
        ("traffic", {"traffic": make_traffic()}, {"traffic": make_traffic()}, None),
        ("accuracy", {"accuracy": make_answers([True, False])}, {"accuracy": make_answers([True, True])}, "better"),
    ],
)
def test_exact_figures_and_outcomes_are_compared_with_the_report_before(
    metric: str, before: Any, after: Any, change: str | None
) -> None:
    """A report without the case in between does not matter."""
    first, last = (make_result(**one) if isinstance(one, dict) else one for one in (before, after))
    keep(1, first)
    keep(2, summed(1.0, strategy="tp"))
    keep(3, last)
    [line] = [line for line in _lines(metric) if line.strategy == "mp"]
    assert _changes(line) == [None, "absent", change]


@pytest.mark.parametrize("undisturbed", [0, 2])
def test_disturbed_times_are_marked_and_are_no_step(undisturbed: int) -> None:
    """The median of a case is undisturbed if most of its launches are."""
    profile = msgspec.structs.replace(make_profile(), invalid=["processes of other programs: GPU 0 has 2"])
    for number in range(1, 9):
        result = summed(1.0 if number < 7 else 1.5)
        for launch in result.launches[undisturbed:] if number >= 7 else ():
            launch.profile = profile
        keep(number, result)
    [line] = _lines()
    assert _changes(line) == [None] * 6 + (["worse", None] if undisturbed else ["disturbed"] * 2)


def test_cases_of_one_id_are_named_by_what_differs() -> None:
    """A limit of the GPU memory makes another case; a rate has no change of its own."""
    keep(1, summed(1.0), summed(1.0, strategy="tp"))
    keep(2, summed(1.0, gpu_memory_bytes=16 << 30))
    names = [line.name for line in _lines()]
    assert names == ["mp-bs1", "mp-bs1 gpu_memory_bytes 17179869184", "tp-bs1"]
    assert not any(any(one.change for one in line.figures if one) for line in _lines("sequences"))


def test_another_dataset_is_named_by_its_limit_and_by_its_hash_only_where_nothing_else_differs() -> None:
    """A hash of 64 letters hides the case; two files without a limit differ in nothing else."""
    keep(1, summed(1.0))
    keep(2, summed(1.0, dataset_sha256="b" * 64, limit=24))
    assert [line.name for line in _lines()] == ["mp-bs1", "mp-bs1 limit 24"]
    keep(3, summed(1.0, dataset_sha256="c" * 64))
    (second,) = [line.name for line in _lines() if "sha256 ccc" in line.name]
    assert len(second) < len("mp-bs1 dataset_sha256 ") + 20


def test_a_change_of_flops_is_a_change() -> None:
    """On a CPU it is all that shows a slower program."""
    for day, flops in enumerate((10**12, 10**12, 2 * 10**12), start=1):
        result, work = summed(1.0), make_work(1, batches=[0])
        ranks = [msgspec.structs.replace(work.ranks[0], flops=flops)]
        result.launches[0].work = msgspec.structs.replace(work, ranks=ranks)
        keep(day, result)
    (line,) = _lines("flops")
    assert _changes(line) == [None, None, "worse"]


def test_a_trend_is_of_one_machine_in_the_order_of_measurement() -> None:
    """With several machines a name or the folder of one is needed; a promoted copy appears once."""
    for day in (2, 1, 2):
        keep(day, make_result())
    store.save(measured(seen=gpus("NVIDIA A100")), store.DEFAULT)
    four = store.stored(store.DEFAULT)[-1].machine
    with pytest.raises(ValueError, match=f"give --machine, one of 1x-NVIDIA-A100-140GiB, {four}"):
        chosen(store.DEFAULT)
    assert [one.number for one in chosen(store.DEFAULT, four)] == [2, 1]
    assert [one.number for one in chosen(store.DEFAULT / four)] == [2, 1]
    with pytest.raises(ValueError, match=r"machine 'other': storage \.llmgpu has only 1x-NVIDIA"):
        chosen(store.DEFAULT, "other")
    with pytest.raises(ValueError, match="storage nothing: it has no numbered report"):
        chosen(Path("nothing"))
