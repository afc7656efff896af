"""Measure what the tests protect: the share of random mutants of the package that a test kills; prints JSON.

`python .ci/mutants.py` runs the tests once with coverage, changes one operator, constant or condition at a time in a
copy of the package, and runs the tests that reached its line. A mutant on a line that no test reached survives. The
tests run in this process's children, so code of other processes (ranks, samplers) counts as not reached.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
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
from typing import Any

import coverage
import pytest

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("gate", "report", "ranks")
_TESTS = ("gate", "report", "ranks", "analysis", "render", "session", "store", "cli")
_SEED = 2026
_LIMIT_S = 120
_MOST_TESTS = 300
"""Tests run for one mutant, those of its own package first."""
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
    os._exit(int(status))


def main() -> None:
    """Print how many mutants the tests killed, by package, and those that survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=_SEED)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    root = folder / "copy"
    shutil.copytree(_ROOT, root, ignore=shutil.ignore_patterns(".git", ".tox", ".mypy_cache", "__pycache__", ".gpu"))
    record = folder / "coverage"
    tests = [f"tests/{name}" for name in _TESTS]
    baseline = _in_child(root, ["-m", "not slow", *tests], record)
    data = coverage.CoverageData(str(record))
    data.read()
    sources = {
        path: path.read_text("utf-8") for name in _PACKAGES for path in root.glob(f"pytest_llmgpu/{name}/**/*.py")
    }
    sites = [
        (path, number, node.lineno)
        for path, source in sorted(sources.items())
        for number, (node, _) in enumerate(_mutants(ast.parse(source)))
        if hasattr(node, "lineno")
    ]
    killed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    survivors = []
    for path, number, line in random.Random(chosen.seed).sample(  # noqa: S311 - a seed, no secret
        sites, chosen.mutants
    ):
        package = path.relative_to(root).parts[1]
        reached = [name for name in data.contexts_by_lineno(str(path)).get(line, []) if name]
        reached = sorted(reached, key=lambda name: (not name.startswith(f"tests/{package}/"), name))[:_MOST_TESTS]
        total[package] += 1
        path.write_text(_changed(sources[path], number), "utf-8")
        if reached and _in_child(root, ["-x", *reached]):
            killed[package] += 1
        else:
            survivors.append(f"{path.relative_to(root)}:{line}{'' if reached else ' (not reached)'}")
        path.write_text(sources[path], "utf-8")
    shutil.rmtree(folder)
    shares = {name: round(killed[name] / total[name], 3) for name in sorted(total)}
    figures = {"seed": chosen.seed, "mutants": chosen.mutants, "sites": len(sites), "tests_exit_status": baseline}
    figures |= {"killed": sum(killed.values()), "share": round(sum(killed.values()) / chosen.mutants, 3)}
    print(json.dumps({**figures, "share_by_package": shares, "survivors": sorted(survivors)}, indent=1))


if __name__ == "__main__":
    main()
