"""Print the lines of each package beside its budget, `[tool.lines]` of pyproject.toml, and fail above it.

`rest` is what is in no package that has a budget of its own: the store and the top level.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import tomllib

_ROOT = Path(__file__).parents[1]


def main() -> int:
    """Print the table and return 1 where a package is above its budget."""
    budgets: dict[str, int] = tomllib.loads(_ROOT.joinpath("pyproject.toml").read_text("utf-8"))["tool"]["lines"]
    lines: Counter[str] = Counter()
    for path in _ROOT.glob("pytest_llmgpu/**/*.py"):
        package = path.relative_to(_ROOT / "pytest_llmgpu").parts[0]
        lines[package if package in budgets else "rest"] += len(path.read_text("utf-8").splitlines())
    for package, budget in {**budgets, "all": sum(budgets.values())}.items():
        used = lines[package] if package in budgets else lines.total()
        print(f"{package:12} {used:6,} of {budget:6,}{'  <- delete first' if used > budget else ''}")
    return int(any(lines[package] > budget for package, budget in budgets.items()))


if __name__ == "__main__":
    sys.exit(main())
