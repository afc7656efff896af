"""`llmgpu init`: write a test, its options, a policy that can pass on this machine, and a workflow.

Nothing is replaced.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.cli import launches
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.report import file

_TEST = '''\
def test_hellaswag(llm, hellaswag, batch_size, measure):
    """The model answers as before, and is as fast, at each batch size under each strategy."""
    measure(llm, hellaswag, batch_size)
'''
_OPTIONS = """\
llmgpu_model = "bundled"  # your model: a hub id or a folder
llmgpu_strategy = ["mp"]
llmgpu_batch_sizes = ["8", "64"]
llmgpu_launches = "{launches}"
"""
_POLICIES = {
    "cuda": "[tool.llmgpu.gate]  # the built-in thresholds: llmgpu gate --dump-policy\n",
    "cpu": "# Wall time of a CPU is shown, not gated: it differs by 15 to 20 % between runs.\n"
    + "".join(f"[tool.llmgpu.gate.{name}]\ngate = false\n" for name in ("time", "first_token", "token_time")),
}
_TABLE = re.compile(r"^\[tool\.pytest(\.ini_options)?\][^\S\n]*(#.*)?\n", re.MULTILINE)
_OTHERS = {"pytest.toml": "", ".pytest.toml": "", "pytest.ini": "", ".pytest.ini": "", "tox.ini": "[pytest]"}
"""Files that pytest reads instead of pyproject.toml, with the line that makes it do so."""
_STEPS = """\
This measures llmgpu_model, the bundled model at first; for your own layers, modules or functions see docs/own-code.md.
next:
    cd {root}
    git add {names} && git commit -m "Benchmark"
    {pytest} --llmgpu-save=base
    llmgpu promote base --to benchmarks/baseline.json.gz
    git add benchmarks/baseline.json.gz && git commit -m "Baseline"
    {pytest} --llmgpu-compare=benchmarks/baseline.json.gz
The workflow needs a baseline of its own runner: the head of the file has the commands."""
_INSTALL = """
Add to its step Install what addopts ({}) and your tests need: plugins and packages."""
_ADDOPTS = re.compile(r"""\baddopts'?\s*[=:]\s*(\[[^\]]*\]|(['"]).*?\2|.*(?:\n[ \t]+.+)*)""")
_XDIST = re.compile(r"(?<![\w-])(-n|--numprocesses|--dist)\b")
"""Options with which pytest would measure nothing: the workers of xdist cannot share the GPUs."""


def add_init(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = "Files and tables that exist are kept. Each file is shown before it is written, except with --yes."
    text = "what is measured and judged: on a CPU exact figures are gated, and times are shown (default: a GPU if any)"
    parser.add_argument("--device", choices=tuple(_POLICIES), help=text)
    parser.add_argument("--yes", action="store_true", help="write the files without a question")


def run_init(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status; ValueError if the answer was no."""
    root = launches.place()[1]
    device = arguments.device or ("cuda" if nvml.inventory().gpus else "cpu")
    before, after, advice, addopts, has_workers = _project(root, device)
    pytest = "pytest benchmarks" + " -n 0" * has_workers
    workflow = (Path(__file__).parents[1] / "workflow.yml").read_text(encoding="utf-8")
    workflow = workflow.replace("pytest benchmarks", pytest)
    if device == "cpu":
        workflow = workflow.replace("[self-hosted, gpu] # the labels of your runner", "ubuntu-latest")
        workflow = workflow.replace(" --llmgpu-launches=5", "")
    if re.search(r"^\[(project|build-system)\]", before, re.MULTILINE) or (root / "setup.py").exists():
        workflow = workflow.replace('"$PACKAGE[transformers]" #', '"$PACKAGE[transformers]" -e . #')
    # The options come last: they are what the user looks at, and the workflow is long.
    files = {".github/workflows/llm-inference.yml": workflow, "benchmarks/test_inference.py": _TEST}
    for name in [name for name in files if (root / name).exists()]:
        del files[name]
        show(f"{name} exists and is kept")
    shown = [f"new file {name}\n\n{text}" for name, text in files.items()]
    if after != before:
        files["pyproject.toml"] = after
        added = [line for line in after.splitlines() if line not in before.splitlines()]
        shown.append("\n".join(["added to pyproject.toml\n", *added, ""]))
    show("\n".join([*shown * (not arguments.yes), f"options and policy are for --device {device}", *advice]))
    if not files:
        return 0
    show(f"write {', '.join(files)}" + "? [y/N]" * (not arguments.yes))
    if not arguments.yes and sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ValueError("nothing is written: the answer y, or --yes, writes the files")
    for name, text in files.items():
        file.save(root / name, text.encode(), "file")
    steps = _STEPS.format(root=shlex.quote(str(root)), names=" ".join(files), pytest=pytest)
    show(steps + (_INSTALL.format(addopts) if addopts else ""))
    return 0


def _project(root: Path, device: str) -> tuple[str, str, list[str], str, bool]:
    """Return the text of pyproject.toml, that with options and policy, what is to be added, addopts, use of xdist."""
    path = root / "pyproject.toml"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        tool: Mapping[str, Any] = msgspec.toml.decode(before).get("tool", {})
    except (ValueError, ImportError) as error:  # ImportError: Python 3.10 without tomli
        raise ValueError(f"pyproject.toml: cannot be read: {file.one_line(error)}") from None
    options, advice = _OPTIONS.format(launches=2 if device == "cuda" else 1), []
    pytests = tool.get("pytest", {})
    paths = [root / name for name in _OTHERS if (root / name).exists()]
    found = [path for path in paths if _OTHERS[path.name] in path.read_text(encoding="utf-8")]
    chosen = found[0].read_text(encoding="utf-8") if found else str(pytests)
    after = before if not before or before.endswith("\n") else f"{before}\n"
    if "llmgpu_" in f"{chosen}{pytests}":
        advice = ["options that exist are kept"]
    elif found or (pytests and not _TABLE.search(before)):
        where = found[0].name if found else "the table [tool.pytest] of pyproject.toml"
        plain = re.sub(r'[\["\]]| *#.*', "", options)  # a list of an ini file has commas
        advice = [f"add these options to {where}:\n{plain if found else options}"]
    elif pytests:
        after = _TABLE.sub(lambda table: table[0] + options, after, count=1)
    else:
        after += f"\n[tool.pytest.ini_options]\n{options}"
    if "gate" not in tool.get("llmgpu", {}):
        after += f"\n{_POLICIES[device]}"
    addopts = " ".join(re.sub(r"""["',\[\]]""", " ", given[1]).split()) if (given := _ADDOPTS.search(chosen)) else ""
    return before, after if before else after.lstrip("\n"), advice, addopts, _XDIST.search(chosen) is not None
