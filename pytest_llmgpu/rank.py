"""The old name of `python -m pytest_llmgpu.ranks`."""

from pytest_llmgpu.ranks.rerun import main

if __name__ == "__main__":
    main()
