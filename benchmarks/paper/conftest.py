"""What an option cannot say of the experiment: variables for NCCL, and which model is measured until one is named.

Both are lines of `pytest.ini`. `pytest benchmarks` comes by here too, with another ini file that has neither.
"""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the two lines."""
    parser.addini("paper_environment", "variables NAME=VALUE of every process, unless they are set", type="args")
    parser.addini("paper_stand_in", "flags in force as long as --llmgpu-model is not given", type="args")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Put both in force, before the plugin looks."""
    for variable in config.getini("paper_environment"):
        name, _, value = variable.partition("=")
        os.environ.setdefault(name, value)
    if config.getoption("llmgpu_model") is not None:
        return
    for flag in config.getini("paper_stand_in"):
        name, _, value = flag.removeprefix("--").partition("=")
        option = name.replace("-", "_")
        if config.getoption(option) is None:
            setattr(config.option, option, value)
