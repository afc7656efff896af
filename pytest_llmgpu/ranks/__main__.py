"""Start one rank, or run one case of a report again: `python -m pytest_llmgpu.ranks REPORT CASE_ID`."""

from __future__ import annotations

from pytest_llmgpu.ranks.worker import main

if __name__ == "__main__":
    main()
