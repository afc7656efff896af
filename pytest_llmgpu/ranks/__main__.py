"""Start one rank; a launcher runs this module."""

from __future__ import annotations

import sys

from pytest_llmgpu.ranks import serving

if __name__ == "__main__":
    serving.main(sys.argv[1:])
