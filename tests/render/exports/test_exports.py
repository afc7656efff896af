from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from support.export_reports import NASTY, nasty, two_strategies
from support.report_factory import make_failed, make_report, make_result

from pytest_llmgpu.render.exports import FORMATS, export
from pytest_llmgpu.render.exports.tools import names
from pytest_llmgpu.report.report import Report

_JSON = ["bencher", "github-action-benchmark-bigger", "github-action-benchmark-smaller"]


def _no_constant(text: str) -> Any:
    raise AssertionError(f"{text} is no JSON")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "report", [make_report(), make_report([make_failed("interrupted")]), two_strategies(), nasty()]
)
def test_every_format_renders_every_report(name: str, report: Report) -> None:
    """Empty, failed, usual and hostile reports give text without a line break at the end."""
    text = export(name, report)
    assert text == text.rstrip("\n")
    assert not {"\x1b", "\u202e", "\r"} & set(text)
    if name in _JSON:
        assert isinstance(json.loads(text, parse_constant=_no_constant), (dict, list))


@pytest.mark.parametrize("name", FORMATS)
def test_a_case_out_of_memory_is_in_every_format(name: str) -> None:
    """It is there as its outcome, or as a number if the format has only numbers."""
    before, after = (export(name, two_strategies(oom=oom)) for oom in ((), (64,)))
    assert before != after
    if name == "github-annotations":
        assert "oom%3A tp-bs64" in after
    elif name == "github-action-benchmark-bigger":
        assert json.loads(after)[0]["value"] == json.loads(before)[0]["value"] - 1
    else:
        assert "tp-bs64" in after


def test_an_unknown_format_is_refused() -> None:
    """The message names the known formats."""
    with pytest.raises(ValueError, match=r"export format 'xml': allowed are bencher, csv, "):
        export("xml", two_strategies())


def test_exporting_needs_no_heavy_library() -> None:
    """All formats work without torch, numpy and pytest."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers', 'scipy', 'numpy', 'pytest')))\n"
        "from pytest_llmgpu.render.exports import FORMATS, export\n"
        "assert 'msgspec' not in sys.modules\n"
        "from pytest_llmgpu.report.report import Environment\n"
        "from pytest_llmgpu.report.report import Report\n"
        "empty = Report(created='', plugin_version=None, environment=Environment(python='', platform=''))\n"
        "[export(name, empty) for name in FORMATS]\n"
        "import pytest_llmgpu.render.exports.tools\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_case_has_the_same_name_in_every_report() -> None:
    """Other cases and their order do not matter, so that tools can follow it over commits."""
    first, second = make_result(model="llama-7b"), make_result(model="llama-13b", limit=64, load_format="dummy")
    second.id = "mp-bs1#2"
    assert names([first, second]) == [
        "mp-bs1 (llama-7b, float16, 4 x cuda, hellaswag)",
        "mp-bs1 (llama-13b with random weights, float16, 4 x cuda, first 64 of hellaswag)",
    ]
    assert sorted(names([second, first])) == sorted(names([first, second]))
    assert names([first, first])[1] == f"{names([first])[0]} #2"
    text = make_result(workload="generate", prompt_tokens=96, new_tokens=32)
    assert names([text])[0].endswith(", 32 tokens after 96)")


def test_names_are_one_printable_line() -> None:
    """This holds for any name of a model or a dataset."""
    for name in names(nasty().cases):
        assert name.isprintable()
        assert len(name) <= 500
    assert NASTY not in names(nasty().cases)[0]
