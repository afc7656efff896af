from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.noisy_reports import noisy, on_h200
from support.stored_reports import H200

from pytest_llmgpu.gate.timing.calibration import Measured, Noise, as_it_counts, measure
from pytest_llmgpu.gate.timing.calibration_file import (
    ONE_SESSION,
    default_path,
    dump,
    in_force,
    in_words,
    left_out,
    load,
)


def test_the_gate_reads_the_calibration_of_the_machine(tmp_path: Path) -> None:
    """By itself, where there is one, with the digest of its file; or the one that was named."""
    loud, quiet = noisy(0.03, strategy="tp"), noisy(0.006)
    head = on_h200(loud, quiet)
    assert in_force(tmp_path, head) is None
    dump(measure(head), default_path(tmp_path, H200))
    digest = load(default_path(tmp_path, H200))[1]
    assert digest == hashlib.sha256(default_path(tmp_path, H200).read_bytes()).hexdigest()
    assert in_force(tmp_path, head) == as_it_counts(measure(head), digest)
    dump(measure(on_h200(loud)), tmp_path / "loud.json")
    named = in_force(tmp_path, head, tmp_path / "loud.json")
    assert named is not None
    assert named.sd.keys() == {loud.key}
    assert in_force(tmp_path, on_h200(loud, seen="NVIDIA A100")) is None


def test_the_noise_in_force_is_said_in_a_line(tmp_path: Path) -> None:
    """The file without its folder, and how many launches it rests on; else that the noise is assumed."""
    head = on_h200(noisy(0.03, strategy="tp"), noisy(0.01, launches=4))
    assumed = "noise: at most 20 % assumed, less with at least five launches in each report"
    assert in_words(tmp_path, head) == f"{assumed} (llmgpu calibrate)"
    path = default_path(tmp_path, H200)
    dump(measure(head), path)
    assert in_words(tmp_path, head, in_turn=True) == "noise: calibration.json, 4 to 10 launches"
    assert in_words(tmp_path, head) == f"noise: calibration.json, 4 to 10 launches\n{ONE_SESSION}"
    dump(measure(on_h200(head.cases[1])), tmp_path / "mine.json")
    assert in_words(tmp_path, head, tmp_path / "mine.json").splitlines()[0] == "noise: mine.json, 4 launches"
    mine = in_force(tmp_path, head, tmp_path / "mine.json")
    assert left_out(mine, head) == "not calibrated: 1 case, at most 20 % assumed"
    assert left_out(mine, on_h200(head.cases[1])) == left_out(None, head) == ""
    dump(measure(on_h200(noisy(0.01)), on_h200(noisy(0.01, seed=2))), path)
    assert in_words(tmp_path, head) == "noise: calibration.json, 20 launches in 2 sessions"
    assert in_words(tmp_path, head, in_turn=True) == "noise: calibration.json, 20 launches"
    dump(Measured(machine=H200, time={}), path)
    assert in_words(tmp_path, head) == f"{assumed} (calibration.json has no case)"


def test_a_case_that_was_not_calibrated_on_a_loud_machine_counts_as_the_loudest(tmp_path: Path) -> None:
    """Its launches cannot tell that it is less: what is said is what counts."""
    head = on_h200(noisy(0.4, strategy="tp"), noisy(0.01))
    dump(measure(on_h200(head.cases[0])), tmp_path / "loud.json")
    loud = in_force(tmp_path, head, tmp_path / "loud.json")
    assert loud is not None
    assert loud.typical is not None
    assert left_out(loud, head) == f"not calibrated: 1 case, {100 * loud.typical:.2g} % assumed"


def test_a_calibration_of_another_machine_is_refused(tmp_path: Path) -> None:
    """The one that was named, and one that was copied into the machine's folder."""
    head = on_h200(noisy(0.01))
    path = default_path(tmp_path, H200)
    dump(Measured(machine="CPU-x", time={}), path)
    for given in (None, path):
        with pytest.raises(ValueError, match="was measured on CPU-x, the report on 4x-NVIDIA-H200-140GiB"):
            in_force(tmp_path, head, given)


def test_a_calibration_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    """No silent fall back to assumed noise."""
    with pytest.raises(ValueError, match=r"calibration .*nothing.json: cannot be read: No such file or directory"):
        in_force(tmp_path, on_h200(noisy(0.01)), tmp_path / "nothing.json")


def test_it_is_read_back_as_written(tmp_path: Path) -> None:
    """As JSON for people, over an older one, with nothing left beside it."""
    measured = measure(on_h200(noisy(0.01)))
    path = tmp_path / "new" / "calibration.json"
    dump(Measured(machine="old", time={}), path)
    dump(measured, path)
    assert load(path)[0] == measured
    assert path.read_text().startswith('{\n  "calibration_version": 1,\n')
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def _written(**noise: Any) -> str:
    return json.dumps({"machine": H200, "time": {"k": {"id": "mp-bs1", "sd": 0.01, "launches": 10, **noise}}})


def test_a_calibration_of_before_sessions_were_recorded_is_read(tmp_path: Path) -> None:
    """It knows no noise between them."""
    (tmp_path / "old.json").write_text(_written())
    old = in_force(tmp_path, on_h200(noisy(0.01)), tmp_path / "old.json")
    assert old is not None
    assert old.of("k") == pytest.approx(0.0115, rel=0.01)
    assert old.between_sessions("k") == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Input data was truncated"),
        ("[" * 1000, "Expected `object`, got `array`"),
        ("{}", "missing required field `machine`"),
        (_written(sd=-0.01), "expected a number from 0 to 2, got -0.01 - at `$.time['k'].sd`"),
        (_written(sd=1e308), "expected a number from 0 to 2, got 1e+308 - at `$.time['k'].sd`"),
        (_written(sd=2.001), "expected a number from 0 to 2, got 2.001 - at `$.time['k'].sd`"),
        (_written(sd=math.nan), "JSON is malformed"),
        (_written().replace("0.01", "1e999"), "Number out of range"),
        (_written(sd="x"), "Expected `float`, got `str`"),
        (_written(sessions=2, session_sd=-0.1), "from 0 to 2, got -0.1 - at `$.time['k'].session_sd`"),
        (_written(sessions=2, session_sd=1e308), "from 0 to 2, got 1e+308 - at `$.time['k'].session_sd`"),
        (_written(session_sd=0.1), "the number of sessions does not fit launches and session_sd - at `$.time['k']`"),
        (_written(sessions=11, session_sd=0.1), "does not fit"),
        (_written(sessions=0), "does not fit"),
        (_written(launches=1), "expected 2 launches or more, got 1 - at `$.time['k'].launches`"),
        (_written().replace("{", '{"calibration_version": 2, ', 1), "calibration_version 2 is not supported"),
    ],
)
def test_a_broken_calibration_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    """It names the file, and the place where there is one."""
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="calibration") as caught:
        load(path)
    assert str(caught.value).startswith(f"calibration {path}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    """A machine that differs by a factor of 7 from launch to launch is said to do so, and the old file stays."""
    path = tmp_path / "calibration.json"
    old = Measured(machine=H200, time={"k": Noise(id="mp-bs1", sd=2.0, launches=10)})
    dump(old, path)
    with pytest.raises(
        ValueError, match=r"calibration .*: expected a number from 0 to 2, got 2.5 - at `\$.time\['k'\].sd`"
    ):
        dump(Measured(machine=H200, time={"k": Noise(id="mp-bs1", sd=2.5, launches=10)}), path)
    assert load(path)[0] == old
