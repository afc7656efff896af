"""Measure how long the page of many cases takes until it can be used; prints JSON. It needs Chromium and selenium.

The cases are those of a recorded report under several names of a model. A page is usable when its script has ended and
the charts near the screen are drawn. Each page is opened `--runs` times, and the median counts.

    python benchmarks/overhead/page.py benchmarks/reports/llama-30b-4xH200.json.gz
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from selenium import webdriver

from pytest_llmgpu.render.html import report as html_report
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report

_LIMIT_S = 3.0
_MOST_S = 120.0
_STATE = "return [document.documentElement.dataset.ready === 'yes', document.getElementsByTagName('*').length]"


def main() -> int:
    """Make the pages, open them and print; return 1 if 200 cases take more than 3 s."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--cases", type=int, nargs="+", default=[21, 200, 1000])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    source = file.load(arguments.report)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for cases in arguments.cases:
            path = Path(folder) / f"{cases}.html"
            began = time.perf_counter()
            path.write_text(html_report.render(_report(source, cases), name="page"), "utf-8")
            made_s = time.perf_counter() - began
            runs = [_opened(path) for _ in range(arguments.runs)]
            usable_s, nodes = (statistics.median(one[place] for one in runs) for place in (0, 1))
            result[str(cases)] = {
                "usable_s": round(usable_s, 2),
                "nodes": int(nodes),
                "written_s": round(made_s, 2),
                "megabytes": round(path.stat().st_size / 1e6, 1),
            }
    print(json.dumps(result, indent=2))
    return int(result.get("200", {}).get("usable_s", 0.0) > _LIMIT_S)


def _report(source: Report, number: int) -> Report:
    """Return a report of this number of cases, which repeats those of another under other models."""
    cases = []
    for place in range(number):
        result = source.cases[place % len(source.cases)]
        model = f"{result.case.model}-{place // len(source.cases)}"
        case = msgspec.structs.replace(result.case, model=model)
        copy = msgspec.json.decode(msgspec.json.encode(result), type=type(result))
        copy.id, copy.case, copy.key = f"{model}-{result.id}", case, case.key
        cases.append(copy)
    return msgspec.structs.replace(source, cases=cases, verdicts=None)


def _opened(path: Path) -> tuple[float, int]:
    """Return the seconds until the page can be used, and its number of elements then."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        began = time.perf_counter()
        browser.get(path.as_uri())
        while time.perf_counter() - began < _MOST_S:
            ready, nodes = browser.execute_script(_STATE)
            if ready:
                return time.perf_counter() - began, int(nodes)
            time.sleep(0.02)
        return _MOST_S, 0
    finally:
        browser.quit()


if __name__ == "__main__":
    raise SystemExit(main())
