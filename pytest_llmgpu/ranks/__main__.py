"""Start one rank, or run one case of a report again: `python -m pytest_llmgpu.ranks REPORT CASE_ID`."""

from __future__ import annotations

import sys

from pytest_llmgpu.ranks import rerun, serving

if __name__ == "__main__":
    if sys.argv[1:2] == [serving.FLAG]:
        serving.main(sys.argv[2:])
    else:
        rerun.main()
