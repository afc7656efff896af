"""README and docs: generated pages, flags, commands, snippets and links."""

from __future__ import annotations

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
from pytest_llmgpu.report.result import DeviceMemory, HostUse
from pytest_llmgpu.report.work import RankWork, Work

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_WRITTEN = [page for page in _PAGES if not page.read_text("utf-8").startswith("<!-- Written by")]


def _found(pattern: str) -> list[str]:
    """Return each match of a pattern in the pages that people write."""
    return [text for page in _WRITTEN for text in re.findall(pattern, page.read_text("utf-8"), re.DOTALL)]


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
        flops = 135_000_000 * result.case.batch_size
        result.launches[0].work = Work(
            batches=[0], eager_batches=[0], passes=1, ranks=[RankWork(uuids=[], flops=flops)]
        )
        result.launches[0].host = HostUse(wall_s=3.2, threads=[2], cpu_s=[6.3], waited_s=[0.0])
        size = {8: 458, 64: 510}[result.case.batch_size] << 20
        result.launches[0].memory = [DeviceMemory(index=0, peak_resident_bytes=size)]
    text, _ = summary_table(results, painter(color=False))
    assert f"```text\n{text}\n```" in (_ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_pages_name_real_flags_only(page: Path) -> None:
    """A flag of pytest that a page shows exists."""
    shown = set(re.findall(r"--llmgpu-[a-z-]*[a-z]", page.read_text("utf-8")))
    assert shown <= {*Options().in_force(), "--llmgpu-strategy"}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_to_files(page: Path) -> None:
    """A relative link has a file or folder at its end."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("arguments", _found(r"\n    llmgpu ([^\n]+)"))
def test_shown_commands_are_accepted(arguments: str) -> None:
    """Llmgpu parses each call that a page shows, without its comment."""
    cli.parser().parse_args(shlex.split(arguments, comments=True))


@pytest.mark.parametrize("text", _found(r"```python\n(.*?)```"), ids=lambda text: text[:20])
def test_python_snippets_compile(text: str) -> None:
    """A reader copies them."""
    ast.parse(text)


@pytest.mark.parametrize("text", [text for text in _found(r"```toml\n(.*?)```") if "llmgpu.gate" in text])
def test_policies_are_accepted(text: str, tmp_path: Path) -> None:
    """The gate reads each policy that a page shows."""
    tmp_path.joinpath("pyproject.toml").write_text(text, "utf-8")
    assert policy.load_policy(tmp_path / "pyproject.toml")
