from __future__ import annotations

from pytest_llmgpu.plugin.selection import ascending


def test_batch_sizes_ascend_within_a_group_and_groups_keep_their_turn() -> None:
    """Each model is loaded once and large batches run last, in any order of the tests."""
    tests = [("tp", 8), ("mp", 64), ("tp", 1), ("mp", 1), ("mp", 8)]
    ordered = ascending(tests, lambda test: test[0], lambda test: test[1])
    assert ordered == [("tp", 1), ("tp", 8), ("mp", 1), ("mp", 8), ("mp", 64)]


def test_equal_batch_sizes_keep_their_order() -> None:
    """Tests of one batch size run in the order of the file."""
    tests = [("b", 1), ("a", 1), ("c", 1)]
    assert ascending(tests, lambda _: "mp", lambda test: test[1]) == tests


def test_what_others_are_compared_with_runs_first() -> None:
    """The reference strategy runs first, in any order of strategies on the command line."""
    tests = [("tp", 8), ("iok", 1), ("mp", 64), ("tp", 1), ("mp", 1)]
    ordered = ascending(tests, lambda test: test[0], lambda test: test[1], lambda test: test[0] == "mp")
    assert ordered == [("mp", 1), ("mp", 64), ("tp", 1), ("tp", 8), ("iok", 1)]
