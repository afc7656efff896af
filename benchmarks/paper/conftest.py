"""Two settings of the experiment that no option has: variables for NCCL, and the model if none is given.

Both are lines of `pytest.ini`. `pytest benchmarks` loads this file too, with an ini file that has neither.
"""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the two lines."""
    parser.addini("paper_environment", "variables NAME=VALUE of every process, unless they are set", type="args")
    parser.addini("paper_stand_in", "flags that apply if --llmgpu-model is not given", type="args")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Apply both before the plugin reads its options."""
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
