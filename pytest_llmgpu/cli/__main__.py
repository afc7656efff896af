"""`python -m pytest_llmgpu.cli`."""

from __future__ import annotations

import sys

from pytest_llmgpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
