from __future__ import annotations

import math
from typing import Any

import pytest

from pytest_llmgpu.report.result import Declared
from pytest_llmgpu.session.figures import checked, merge


def test_declarations_of_several_places_are_merged() -> None:
    """Equal ones are one; the rule `time` has the threshold of wall time."""
    rate = {"better": "larger", "threshold": 0.01}
    found = merge([{"hit_rate": rate}, {"hit_rate": rate, "waiting": {"better": "smaller", "rule": "time"}}])
    assert found["hit_rate"] == Declared(better="larger", threshold=0.01)
    assert found["waiting"].threshold == 0.04


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([{"own": {"better": "larger"}}, {"own": {"better": "smaller"}}], "'own' is declared twice: .*larger.*smaller"),
        ([["own"]], ".*: a dictionary of names to dictionaries is needed"),
        ([{"own": "larger"}], ".*: a dictionary of names to dictionaries is needed"),
        ([{"own": {}}], "'own': .* missing required field `better`; allowed are better = larger or smaller, .*"),
        ([{"own": {"better": "larger", "treshold": 1}}], "'own': unknown key 'treshold'; allowed are"),
        ([{"own": {"better": "higher"}}], "'own': Invalid enum value 'higher'"),
        ([{"own": {"better": "larger", "unit": "x" * 17}}], "'own': Expected `str` of length <= 16"),
        ([{"own": {"better": "larger", "threshold": 1}}], "'own': Expected `float` < 1.0"),
        ([{"time": {"better": "smaller"}}], "'time' is not allowed: a name of up to 40 of a-z"),
        ([{"inference_s": {"better": "smaller"}}], "'inference_s' is not allowed"),
        ([{"strict": {"better": "smaller"}}], "'strict' is not allowed"),
        ([{7: {"better": "smaller"}}], "7 is not allowed"),
    ],
)
def test_a_wrong_declaration_is_refused_in_one_line(found: list[Any], message: str) -> None:
    """The line names the figure, the fault and what is allowed."""
    with pytest.raises(ValueError, match=f"^pytest_llmgpu_metrics: {message}") as caught:
        merge(found)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("own", value, "a finite number is needed") for value in (math.nan, math.inf, "0.9", None, True, 10**400)),
        ("waiting", 0, r": 0 is not allowed: a number above 0 \(rule time\) is needed"),
        ("Own-rate", 1, "is not allowed: a name"),
        ("memory", 1, "is not allowed: a name"),
        ("a" * 41, 1, "is not allowed: a name"),
    ],
)
def test_a_wrong_figure_is_refused_in_one_line(name: str, value: Any, message: str) -> None:
    """The line names the figure, its value and what is allowed."""
    with pytest.raises(ValueError, match=f"^figure '{name}'.*{message}"):
        checked({name: value}, {"waiting": Declared(better="smaller", rule="time")})
    with pytest.raises(ValueError, match=r"^figures: .* a dictionary of names to numbers is needed$"):
        checked([(name, value)], {})
