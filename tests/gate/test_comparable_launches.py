from __future__ import annotations

import msgspec
import pytest
from support.verdict_factory import BATCHES, make_invalid, with_latencies, with_launches

from pytest_llmgpu.gate.comparable_launches import Refusal, Sides, comparable, is_copy
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import CaseResult, HostUse, Launch

_HELD = "throttled by power or heat: GPU 0 for 60.0 % of the time"


def _compared(base: CaseResult, head: CaseResult) -> Sides:
    found = comparable(base, head)
    assert not isinstance(found, Refusal), found
    return found


def _counts(base: CaseResult, head: CaseResult) -> tuple[int, int]:
    then, now = _compared(base, head)
    return len(then), len(now)


def _refused(base: CaseResult, head: CaseResult) -> Refusal:
    found = comparable(base, head)
    assert isinstance(found, Refusal), found
    return found


def test_batches_of_another_plan_are_not_compared() -> None:
    """Other items or shapes, a plan that nobody wrote down, or batches that are missing."""
    for change, words in (
        ({"plan_sha256": "0" * 64}, "they differ"),
        ({"plan_sha256": None}, "does not record them"),
    ):
        head = with_launches([1.0, 1.0])
        head.launches[1].plan_sha256 = change["plan_sha256"]
        row = _refused(with_launches([1.0]), head)
        assert row.verdict == "NOT_COMPARABLE"
        assert words in row.reason
    head.case = msgspec.structs.replace(head.case, execution="cuda_graphs")
    row = _refused(with_launches([1.0]), head)
    assert "The forwards ran as CUDA graphs, the baseline's eagerly" in row.reason
    short = with_latencies([[1.0] * (BATCHES - 1)])
    row = _refused(with_launches([1.0]), short)
    assert "one launch has 19, another 20" in row.reason


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_times_of_other_threads_are_not_compared(device: str, refused: bool) -> None:
    """On a CPU the number of threads decides the time; a GPU's rank starts kernels with one."""
    base, head = (with_launches([1.0], device=device) for _ in range(2))
    for result, threads in ((base, 2), (head, 1)):
        result.launches[0].host = HostUse(wall_s=1.0, threads=[threads], cpu_s=[1.0], waited_s=[0.0])
    found = comparable(base, head)
    assert isinstance(found, Refusal) is refused
    if isinstance(found, Refusal):
        assert found.verdict == "NOT_COMPARABLE"
        assert "2 in the baseline, 1 in the candidate" in found.reason
    head.launches[0].host = None
    assert not isinstance(comparable(base, head), Refusal)


def test_a_launch_with_evidence_against_it_does_not_count() -> None:
    """The others do; where none is left the time is INVALID, with the evidence, on either side."""
    head = with_launches([1.0, 5.0])
    make_invalid(head.launches[1], "GPU 0 was throttled for 3 s.")
    assert _counts(with_launches([1.0]), head) == (1, 1)
    make_invalid(head.launches[0], "GPU 0 was throttled for 2 s.")
    for sides in ((with_launches([1.0]), head), (head, with_launches([1.0]))):
        found = _refused(*sides)
        assert found.verdict == "UNDECIDED"
        assert found.reason.endswith("were disturbed: GPU 0 was throttled for 2 s.")
    found = _refused(with_launches([1.0]), with_launches([0.0]))
    assert found.verdict == "UNDECIDED"


def test_a_time_that_is_gone_is_missing() -> None:
    """A case that completed without a timed batch. Where the baseline has none, nothing can be compared: no pass."""
    found = _refused(with_launches([1.0]), with_launches([]))
    assert found.verdict == "MISSING"
    found = _refused(with_launches([]), with_launches([1.0]))
    assert (found.verdict, found.next_step) == ("UNDECIDED", "Measure the baseline again.")


@pytest.mark.parametrize("kind", disturbances.TITLES)
def test_the_next_step_follows_the_disturbance(kind: disturbances.Kind) -> None:
    """Another program is to be ended, a throttled GPU to be cooled: the step also names the report."""
    head = with_launches([1.0])
    make_invalid(head.launches[0], f"{disturbances.TITLES[kind]}: GPU 0")
    if kind in ("throttled", "clock"):
        found = _refused(with_launches([1.0]), head)
        assert found.next_step.startswith(disturbances.COOLER)
    else:
        found = _refused(with_launches([1.0]), head)
        assert found.next_step.startswith(
            "End the other" if kind in ("processes", "memory", "cpu") else "Read the driver's"
        )
        assert found.next_step.endswith("Then measure the candidate again.")


def _held(*launches: tuple[float, bool]) -> CaseResult:
    """Return a result with launches of these levels, of which some were held down."""
    found = with_launches([level for level, _ in launches])
    for launch, (_, held) in zip(found.launches, launches, strict=True):
        make_invalid(launch, *[_HELD] * held)
    return found


def test_launches_that_were_free_are_compared_where_the_sides_were_held_down_unalike() -> None:
    """Four of five of the candidate by 8 %, and none of the baseline: that is the room's heat, no slowdown."""
    head = _held((1.0, False), *[(1.08, True)] * 4)
    for base in (_held(*[(1.0, False)] * 5), _held((1.0, False), (1.0, False), (1.08, True))):
        then, now = _compared(base, head)
        assert now == head.launches[:1]
        assert then == [launch for launch in base.launches if launch.profile is None or not launch.profile.invalid]


def test_sides_that_were_held_down_alike_are_compared_whole() -> None:
    """All launches of both, or as large a share of each: that is how this machine runs."""
    for base, head in (
        (_held((1.0, True), (1.0, True)), _held((1.0, True))),
        (_held((1.0, False), (1.08, True)), _held((1.0, False), (1.08, True), (1.0, False), (1.08, True))),
    ):
        assert _counts(base, head) == (len(base.launches), len(head.launches))


def test_a_clock_that_hardly_fell_is_no_reason_to_leave_a_launch_out() -> None:
    """Only one of two met its limit: by 1 % it still compares, by more it does not, whatever the margin."""
    free, held, slow = with_launches([1.0]), with_launches([1.01]), with_launches([1.08])
    make_invalid(free.launches[0], mhz=1980)
    make_invalid(held.launches[0], _HELD, mhz=1961)
    make_invalid(slow.launches[0], _HELD, mhz=1955)
    assert _counts(free, held) == _counts(held, free) == (1, 1)
    unknown = with_launches([1.0])
    for sides in ((free, slow), (slow, free), (held, unknown)):
        found = _refused(*sides)
        assert found.verdict == "UNDECIDED"
    assert _counts(slow, held) == (1, 1), "both met their limit, whatever their clocks"


def test_a_launch_that_does_not_say_whether_it_was_held_down_goes_with_the_others_of_its_side() -> None:
    """A mark that came late leaves the throttled time unread: that is neither free nor held down."""

    def late(launch: Launch) -> None:
        assert launch.profile is not None
        launch.profile.devices[0].why["throttled_s"] = "the counter was not read at the window's start"

    def dead(launch: Launch) -> None:
        assert launch.profile is not None
        launch.profile.devices.clear()

    def without(launch: Launch) -> None:
        launch.profile = None

    held, free = _held((1.0, True), (1.0, True), (1.0, True)), _held((1.0, False), (1.0, False))
    for forget in (late, dead, without):
        one = _held((1.0, True), (1.0, True), (1.0, False))
        forget(one.launches[2])
        assert _counts(held, one) == _counts(one, held) == (3, 3)
        some = _held((1.0, False), (1.08, True), (1.2, False))
        forget(some.launches[2])
        assert _counts(free, some) == (2, 1), "it is not known to be free"
        none = _held((1.0, False))
        forget(none.launches[0])
        assert _counts(free, none) == (2, 1), "nothing else is known there"
        for sides, names in (((held, none), ("baseline", "candidate")), ((none, held), ("candidate", "baseline"))):
            found = _refused(*sides)
            assert found.verdict == "UNDECIDED"
            assert found.reason.startswith("Power or heat throttled the {}; for the {} it is not known".format(*names))


def test_a_side_of_which_no_launch_was_free_is_invalid() -> None:
    """Unless the other is the same; the reason names both."""
    whole = _held((1.08, True), (1.08, True))
    for other, words in (
        (
            _held((1.0, False)),
            "Power or heat throttled only the {} (`profile.invalid`).",
        ),
        (
            _held((1.0, False), (1.08, True)),
            "Power or heat throttled all launches of the {} and 1 of 2 of the {} (`profile.invalid`).",
        ),
    ):
        for sides, names in (((other, whole), ("candidate", "baseline")), ((whole, other), ("baseline", "candidate"))):
            found = _refused(*sides)
            assert (found.verdict, found.reason) == ("UNDECIDED", words.format(*names))
            assert found.next_step.startswith(disturbances.COOLER)


def test_copies_of_a_launch_are_one_launch() -> None:
    """A report that was merged with itself has no more launches than before; a launch of another run is no copy."""
    head = with_launches([1.0, 1.0])
    head.launches *= 3
    assert _counts(with_launches([1.0]), head) == (1, 2)
    assert not is_copy(with_launches([1.0]), head)
    base = with_launches([1.0])
    base.launches = [*base.launches, *head.launches[:2]]
    assert is_copy(base, head)
    assert not is_copy(head, base)
