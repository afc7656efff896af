"""A repository whose commits contain the figures that they measure, for the tests of commands that launch commits."""

from __future__ import annotations

import json
from pathlib import Path

from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from support.repository import git

_MEASURE = '''
"""Replace pytest: write a report with the times in the worktree's behaviour.json."""
import json, os, signal, sys
from msgspec.structs import replace
from pathlib import Path
from support.report_factory import make_failed, make_report, make_result, make_traffic, make_work
from pytest_llmgpu.store.git import commit
from pytest_llmgpu.store.imports import Project
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.report import Session

path = Path(next(part.partition("=")[2] for part in sys.argv if part.startswith("--llmgpu-json=")))
left_out = [part.partition("=")[2] for part in sys.argv if part.startswith("--deselect=")]
given = json.loads(Path("behaviour.json").read_text())
print("measuring", *sys.argv[1:], flush=True)
if given.get("interrupt"):
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
if "status" in given:
    print("last line", flush=True)
    sys.exit(given["status"])
if given.get("installed"):
    import engine
    given["calls"] = engine.CALLS
number = int(path.name.split(".")[0].rpartition("-")[2])
cases = []
for size, seconds in given["seconds"].items():
    level = seconds[(number - 1) % len(seconds)]
    case = make_failed(batch_size=int(size)) if level is None else make_result(level, batch_size=int(size))
    for launch in case.launches:
        launch.load_s = 10.0 + os.getpid() / 1e9  # no launch takes exactly as long as another one
    if "calls" in given and level is not None:
        case.traffic = make_traffic(given["calls"])
    if "device_s" in given and level is not None:
        work = make_work(1)
        slower = given["device_s"] / work.ranks[0].device_time_s[0]
        rank = replace(
            work.ranks[0],
            device_time_s=[slower * one for one in work.ranks[0].device_time_s],
            rows=[replace(row, time_s=slower * row.time_s) for row in work.ranks[0].rows],
        )
        case.launches[0].work = replace(work, ranks=[rank])
    case.nodeid = f"b.py::t[{case.id}]"
    if case.nodeid not in left_out:
        cases.append(case)
found = make_report(cases)
elsewhere = given.get("imported_from") or Project.at(Path()).imported_from_elsewhere()
found.commit = replace(commit(Path()), imported_from=elsewhere)
found.session = Session(complete=True)
dump(found, path)
sys.exit(given.get("ends", 0))
'''

STEADY = {"1": [10.0], "2": [20.0]}


class Project:
    """A repository whose commits contain the times that they measure."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        (root / ".gitignore").write_text(".llmgpu\n.venv\n")
        (root / "measure.py").write_text(_MEASURE)

    def git(self, *arguments: str) -> str:
        """Return the output of git in the repository."""
        return git(self.root, *arguments)

    def commit(self, name: str, policy: str | None = None, **behaviour: object) -> None:
        """Commit what the command measures there, with a tag of the same name."""
        (self.root / "behaviour.json").write_text(json.dumps(behaviour))
        if policy is not None:
            (self.root / "pyproject.toml").write_text(policy)
        self.git("add", ".")
        self.git("commit", "--quiet", "--allow-empty", "-m", name)
        self.git("tag", name)

    @property
    def kept(self) -> Path:
        """The folder of the only run."""
        (folder,) = (self.root / ".llmgpu").glob("*/*")
        return folder

    def reports(self) -> tuple[Report, Report]:
        """Return the merged reports that `llmgpu ab` kept."""
        return file.load(self.kept / "base.json.gz"), file.load(self.kept / "head.json.gz")

    def launches(self) -> list[str]:
        """Return the names of all launches in the order in which they ran."""
        logs = sorted((self.kept / "launches").glob("*.log"), key=lambda path: path.stat().st_mtime_ns)
        return [path.stem for path in logs]

    def untouched(self) -> None:
        """Assert that the user's tree is clean, and that no worktree and no temporary file remains."""
        assert self.git("status", "--porcelain") == ""
        assert len(self.git("worktree", "list").splitlines()) == 1
        assert list((self.root.parent / "tmp").iterdir()) == []
