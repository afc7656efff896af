"""The workflow to copy: its steps run word for word in a new repository, except for those that need a network."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.repository import git
from support.verdict_factory import on_h200, timed

from pytest_llmgpu.cli import parser
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.options import Options

_WORKFLOW = Path(__file__).parents[2] / "examples" / "github-actions.yml"
_STEPS = ("Measure", "Gate", "Summary and annotations", "Comment on the pull request")
_QUIET = [1 + 0.001 * number for number in range(10)]

_PYTEST = """\
\"\"\"Stands for the run of pytest: compares what was measured before, and exits as pytest does.\"\"\"
import sys
from pathlib import Path
import msgspec
from pytest_llmgpu.cli import main
from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.report.verdicts import Verdicts
given = dict(one.removeprefix("--llmgpu-").split("=") for one in sys.argv if "=" in one)
assert "--llmgpu-allow-no-baseline" in sys.argv
policy = ["--policy", given["policy"], "--allow-no-baseline", "--json", "verdicts.json"]
status = main(["gate", given["compare"], "measured.json.gz", *policy])
report = load(Path("measured.json.gz"))
report.verdicts = msgspec.json.decode(Path("verdicts.json").read_bytes(), type=Verdicts)
dump(report, Path(given["json"]))
sys.exit(min(status, 1))
"""
_GH = """\
\"\"\"Stands for GitHub: the comments of a pull request, in comments.json.\"\"\"
import json, sys
from pathlib import Path
kept = Path("comments.json")
comments = json.loads(kept.read_text()) if kept.exists() else ["a comment of a person"]
arguments = sys.argv[2:]
if "--jq" in arguments:
    mark = arguments[arguments.index("--jq") + 1].partition('startswith("')[2].partition('"')[0]
    print(*(f"comments/{number}" for number, body in enumerate(comments) if body.startswith(mark)), sep="\\n")
else:
    body = Path(next(part for part in arguments if part.startswith("body=@")).partition("@")[2]).read_text()
    if "PATCH" in arguments:
        comments[int(arguments[2].rpartition("/")[2])] = body
    else:
        comments.append(body)
    kept.write_text(json.dumps(comments))
"""


@pytest.fixture(scope="module")
def workflow() -> Any:
    """The workflow."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
    return yaml.safe_load(_WORKFLOW.read_text(encoding="utf-8"))


class _Repository:
    """A new repository of GitHub in the working directory."""

    def __init__(self, workflow: Any, programs: Path) -> None:
        self._workflow = workflow
        programs.mkdir()
        self._add(programs / "llmgpu", f'#!/bin/sh\nexec {sys.executable} -m pytest_llmgpu.cli "$@"\n')
        self._add(programs / "gh", f"#!{sys.executable}\n{_GH}")
        Path(".venv/bin").mkdir(parents=True)
        self._add(Path(".venv/bin/pytest"), f"#!{sys.executable}\n{_PYTEST}")
        self._environ = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(programs / "summary.md"),
            "COMMENTS": "repos/a/b/issues/1/comments",
            **{name: value for name, value in workflow["env"].items() if name != "BASE"},
        }
        git(Path(), "init", "-q", "-b", "main")
        git(Path(), "commit", "-q", "--allow-empty", "-m", "a repository")

    def _add(self, program: Path, text: str) -> None:
        program.write_text(text)
        program.chmod(0o755)

    def judge(self, name: str = "main", *growth: float) -> tuple[list[int], str]:
        """Return the exit statuses of the steps of both jobs, and their output."""
        head = on_h200([timed(*map(operator.mul, _QUIET[1:8:2], growth or [1.0] * 4))], sha="b" * 40)
        dump(head, Path("measured.json.gz"))
        jobs = self._workflow["jobs"].values()
        steps = {step.get("name"): step.get("run") for job in jobs for step in job["steps"]}
        done = [self.shell(steps[step], BASE=name) for step in _STEPS]
        return [one.returncode for one in done], "".join(one.stdout for one in done)

    def shell(self, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a step as GitHub does."""
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env={**self._environ, **environ}, timeout=300
        )


@pytest.fixture
def repository(workflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Repository:
    """A repository with one empty commit."""
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    return _Repository(workflow, tmp_path / "programs")


@pytest.mark.slow
def test_a_new_repository_comes_to_a_gate_that_detects_a_slowdown(repository: _Repository) -> None:
    """Nothing is needed to begin; comments of the workflow have the way of the first baseline."""
    statuses, output = repository.judge()
    assert statuses == [0, 0, 0, 0], output
    assert "there is no baseline" in output
    person, comment = json.loads(Path("comments.json").read_text())
    assert (person, "there is no baseline" in comment) == ("a comment of a person", True)

    text = _WORKFLOW.read_text(encoding="utf-8")
    [promote] = re.findall(r"^#   (llmgpu promote .*)$", text, re.MULTILINE)
    assert repository.shell(promote).returncode == 0
    git(Path(), "add", "benchmarks")
    git(Path(), "commit", "-q", "-m", "Baseline")

    for growth, of_pytest, of_gate in (([], 0, 0), ([1, 9, 1, 9], 1, 3), ([1.3] * 4, 1, 1)):
        statuses, output = repository.judge("main", *growth)
        assert statuses == [of_pytest, of_gate, 0, 0], output
    person, comment = json.loads(Path("comments.json").read_text())
    assert "REGRESSED" in comment
    assert "::error" in output


@pytest.mark.slow
def test_a_push_without_a_commit_before_it_is_judged(repository: _Repository) -> None:
    """GitHub names the commit 0000000 for the first push of a branch."""
    statuses, output = repository.judge("0" * 40)
    assert statuses == [0, 0, 0, 0], output


def test_the_workflow_s_commands_are_those_of_the_command_line(workflow: Any) -> None:
    """This includes those in comments: their options and formats exist."""
    text = re.sub(r"^\s*# *(- )?", "", _WORKFLOW.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = re.findall(r"(?:^|[`;:]|&&)\s*llmgpu ([^`>\n]+)", text, re.MULTILINE)
    commands = [shlex.split(arguments, comments=True) for arguments in found]
    names = ["init", "gate", "promote", "gate", *["export"] * 3, "html", *["export"] * 2]
    assert [arguments[0] for arguments in commands] == names
    for arguments in commands:
        assert callable(parser().parse_args(arguments).run)
    assert workflow["jobs"]["judge"]["needs"] == "measure"
    (measure,) = [step["run"] for step in workflow["jobs"]["measure"]["steps"] if step.get("name") == "Measure"]
    flags = re.findall(r"--llmgpu-([a-z-]+)", measure)
    assert {flag.replace("-", "_") for flag in flags} <= {field.name for field in dataclasses.fields(Options)}
    uploads = [step for step in workflow["jobs"]["measure"]["steps"] if "upload-artifact" in step.get("uses", "")]
    assert [step["if"] for step in uploads] == ["always()"]


def test_the_workflow_s_baseline_is_not_the_change_s_own(workflow: Any) -> None:
    """A pull request is compared with its target, and a push with the commit before it."""
    base = workflow["env"]["BASE"]
    assert "github.event_name == 'push' && github.event.before" in base
    assert "github.base_ref" in base
