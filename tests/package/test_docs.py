"""README and docs: generated pages, flags, commands, snippets and links."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.report_factory import make_accuracy, make_result

from pytest_llmgpu import cli
from pytest_llmgpu.gate import policy
from pytest_llmgpu.render.terminal.report import painter, summary_table
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import HostUse

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_WRITTEN = [page for page in _PAGES if not page.read_text("utf-8").startswith("<!-- Written by")]


def _snippets(language: str) -> list[tuple[str, str]]:
    """Return the name of the page and the text of each snippet of a language."""
    return [
        (page.name, text)
        for page in _WRITTEN
        for text in re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]


def _commands() -> dict[str, argparse.ArgumentParser]:
    [subparsers] = (action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction))
    return subparsers.choices


def _shown() -> list[tuple[str, str]]:
    """Return the page and the line of each shown call of llmgpu, without its comment and what follows `--`."""
    return [
        (page.name, line.partition("#")[0].strip())
        for page in _WRITTEN
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("    llmgpu ")
    ]


def test_the_generated_pages_are_up_to_date() -> None:
    """`python .ci/reference.py` writes them from the options, commands, metrics and records."""
    script = _ROOT / ".ci" / "reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def test_the_readme_is_short() -> None:
    """A new user reads all of it."""
    assert len((_ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_the_output_in_the_readme_is_what_a_run_prints() -> None:
    """A run with these times prints this table."""
    results = [
        make_result(seconds, make_accuracy(1.0, 480), sequences=1920, device="cpu", devices=1, batch_size=size)
        for size, seconds in ((8, 3.17), (64, 3.13))
    ]
    for result in results:
        result.launches[0].host = HostUse(wall_s=3.2, threads=[2], cpu_s=[6.3], waited_s=[0.0])
    text, _ = summary_table(results, painter(color=False))
    assert f"```text\n{text}\n```" in (_ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_pages_name_real_flags_only(page: Path) -> None:
    """A flag of pytest that a page shows exists."""
    shown = set(re.findall(r"--llmgpu-[a-z-]*[a-z]", page.read_text("utf-8")))
    assert shown <= {*Options().in_force()}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_to_files(page: Path) -> None:
    """A relative link has a file or folder at its end."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize(("page", "line"), _shown(), ids=lambda text: text[:40])
def test_shown_commands_are_accepted(page: str, line: str) -> None:
    """Llmgpu parses each call that a page shows."""
    del page
    words = shlex.split(line)[1:]
    command = _commands()[words[0]]
    command.parse_args(words[1:])


@pytest.mark.parametrize(("page", "text"), _snippets("python"), ids=lambda text: text[:20])
def test_python_snippets_compile(page: str, text: str) -> None:
    """A reader copies them."""
    ast.parse(text, page)


@pytest.mark.parametrize(("page", "text"), [one for one in _snippets("toml") if "llmgpu.gate" in one[1]])
def test_policies_are_accepted(page: str, text: str, tmp_path: Path) -> None:
    """The gate reads each policy that a page shows."""
    del page
    tmp_path.joinpath("pyproject.toml").write_text(text, "utf-8")
    assert policy.load_policy(tmp_path / "pyproject.toml")
