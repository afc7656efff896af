"""The script benchmarks/gate/real_bisection.py: its repository, and that it can fail."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from support.repository import git

OUTPUT = """good  aaaa1
5 launches: 2 of GOOD and BAD, 3 of the commits between them
FOUND: bbbb2 is the first bad commit: Commit 1
"""


def test_one_commit_makes_the_model_slower(tmp_path: Path) -> None:
    """The work changes in this commit alone."""
    shas = import_module("real_bisection").repository(tmp_path, 4, 3, "cpu")
    works = [git(tmp_path, "show", f"{sha}:work.py") for sha in shas]
    assert [work == works[0] for work in works] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("status", "output", "bad", "right"),
    [(0, OUTPUT, 1, True), (0, OUTPUT, 2, False), (3, OUTPUT, 1, False), (4, "BAD is not worse", 1, False)],
)
def test_a_bisection_is_right_if_it_names_the_commit(status: int, output: str, bad: int, right: bool) -> None:
    """Any other commit or exit status is wrong."""
    found = import_module("real_bisection").summary(status, output, ["aaaa1", "bbbb2", "cccc3"], bad)
    assert found["right"] is right
    assert found["launches"] == (5 if output == OUTPUT else None)
