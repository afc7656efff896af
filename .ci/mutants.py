"""Measure what the tests protect: the share of random mutants of the package that a test kills; prints JSON.

`python .ci/mutants.py` runs the tests once with coverage, changes one operator, constant or condition at a time in a
copy of the package, and runs the tests that reached its line; for a line that runs when its module is imported, such as
a constant, the tests that reached its file. A mutant that no test reached survives. The tests run in children of this
process, so code of other processes (ranks, samplers) counts as not reached. Each of `--processes` changes a copy of its
own.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("gate", "report", "ranks")
_TESTS = ("gate", "report", "ranks", "analysis", "render", "session", "store", "cli")
_SEED = 2026
_LIMIT_S = 120
_MOST_TESTS = 300
"""Tests run for one mutant, those of its own package first."""
_IMPORT = 0
"""Number in place of the line for the tests that reached any line of a file."""
_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class _Contexts:
    """Plugin of pytest: each test is a context of its own in the coverage."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._measured.switch_context(item.nodeid)
        return (yield)


def _mutants(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node that can be changed, with the attribute that is changed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
            yield node, "ops"
        elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _SWAPPED:
            yield node, "op"
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            yield node, "value"
        elif isinstance(node, (ast.If, ast.IfExp)):
            yield node, "test"
        elif isinstance(node, ast.Return) and node.value is not None:
            yield node, "return"


def _changed(source: str, number: int) -> str:
    """Return a source with its mutant of a number."""
    tree = ast.parse(source)
    node: Any
    node, attribute = list(_mutants(tree))[number]
    match attribute:
        case "ops":
            node.ops = [_SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        case "op":
            node.op = _SWAPPED[type(node.op)]()
        case "value":
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        case "test":
            node.test = ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))
        case _:
            node.value = ast.Constant(None)
    return ast.unparse(ast.fix_missing_locations(tree))


def _in_child(root: Path, arguments: list[str], record: Path | None = None) -> int:
    """Run pytest in a copy of the repository in a child; return its exit status, 1 if it exceeds the time limit."""
    child = os.fork()
    if child:
        began = time.monotonic()
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if record is None and time.monotonic() - began > _LIMIT_S:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return 1
            time.sleep(0.01)
    os.setsid()
    os.chdir(root)
    sys.path.insert(0, str(root))
    status = 1
    try:
        with (
            Path(os.devnull).open("w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            plugins: list[object] = []
            if record is not None:
                measured = coverage.Coverage(data_file=str(record), source=["pytest_llmgpu"])
                measured.start()
                plugins = [_Contexts(measured)]
            status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins=plugins)
            if record is not None:
                measured.stop()
                measured.save()
    finally:
        os._exit(int(status))  # an error outside a test must not make this child a worker of the pool


class _Mutant(NamedTuple):
    """One change of a file, and the tests that reached its line."""

    path: str
    number: int
    line: int
    tests: list[str]


def _copied(folder: Path) -> Path:
    """Return a copy of the repository for this process, made at its first call."""
    root = folder / str(os.getpid())
    if not root.exists():
        ignored = shutil.ignore_patterns(".git", ".tox", ".mypy_cache", "__pycache__", ".gpu")
        shutil.copytree(_ROOT, root, ignore=ignored)
    return root


def _reached(folder: Path, tests_of: str) -> tuple[int, dict[tuple[str, int], list[str]]]:
    """Run a folder of tests; return pytest's exit status and the tests that reached each line of the package."""
    root = _copied(folder)
    record = folder / f"{tests_of}.coverage"
    status = _in_child(root, ["-m", "not slow", f"tests/{tests_of}"], record)
    data = coverage.CoverageData(str(record))
    data.read()
    tests: dict[tuple[str, int], list[str]] = {}
    for path in data.measured_files():
        name = str(Path(path).relative_to(root))
        for line, contexts in data.contexts_by_lineno(path).items():
            tests[name, line] = [context for context in contexts if context]
        imported = set().union(*(tests[name, line] for file, line in tests if file == name))
        tests[name, _IMPORT] = sorted(imported)
    return status, tests


def _is_killed(folder: Path, mutant: _Mutant) -> bool:
    """Return whether a test that reached the line of a mutant fails with it."""
    if not mutant.tests:
        return False
    path = _copied(folder) / mutant.path
    source = path.read_text("utf-8")
    path.write_text(_changed(source, mutant.number), "utf-8")
    try:
        return bool(_in_child(_copied(folder), ["-x", *mutant.tests]))
    finally:
        path.write_text(source, "utf-8")


def main() -> None:
    """Print how many mutants the tests killed, by package, and those that survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=_SEED)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    sites = [
        (str(path.relative_to(_ROOT)), number, node.lineno)
        for path in sorted(path for name in _PACKAGES for path in _ROOT.glob(f"pytest_llmgpu/{name}/**/*.py"))
        for number, (node, _) in enumerate(_mutants(ast.parse(path.read_text("utf-8"))))
        if hasattr(node, "lineno")
    ]
    sample = random.Random(chosen.seed).sample(sites, chosen.mutants)  # noqa: S311 - a seed, no secret
    with multiprocessing.get_context("fork").Pool(chosen.processes) as pool:
        statuses, reached = zip(*pool.starmap(_reached, [(folder, name) for name in _TESTS], 1), strict=True)
        mutants = []
        for path, number, line in sample:
            own = f"tests/{path.split('/')[1]}/"
            at_line = [test for one in reached for test in one.get((path, line), [])]
            tests = at_line or [test for one in reached for test in one.get((path, _IMPORT), [])]
            tests.sort(key=lambda test: (not test.startswith(own), test))
            mutants.append(_Mutant(path, number, line, tests[:_MOST_TESTS]))
        killed = pool.starmap(_is_killed, [(folder, mutant) for mutant in mutants], 1)
    shutil.rmtree(folder)
    total = Counter(mutant.path.split("/")[1] for mutant in mutants)
    by_package = Counter(
        mutant.path.split("/")[1] for mutant, is_killed in zip(mutants, killed, strict=True) if is_killed
    )
    survivors = sorted(
        f"{mutant.path}:{mutant.line}{'' if mutant.tests else ' (not reached)'}"
        for mutant, is_killed in zip(mutants, killed, strict=True)
        if not is_killed
    )
    figures = {"seed": chosen.seed, "mutants": len(mutants), "sites": len(sites), "tests_exit_statuses": statuses}
    figures |= {"killed": sum(killed), "share": round(sum(killed) / len(mutants), 3)}
    shares = {name: round(by_package[name] / total[name], 3) for name in sorted(total)}
    print(json.dumps({**figures, "share_by_package": shares, "survivors": survivors}, indent=1))


if __name__ == "__main__":
    main()
