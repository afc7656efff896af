"""What holds for the package as a whole: its walls, its map and what it makes public."""

from __future__ import annotations

import importlib.util
import pkgutil
import re

import pytest

import pytest_llmgpu

_HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy", "pynvml", "deepspeed", "msgspec")
_MODULES = sorted(module.name for module in pkgutil.walk_packages(pytest_llmgpu.__path__, "pytest_llmgpu."))
_KERNELS = "pytest_llmgpu.inference.decode_kernels"


@pytest.mark.slow
def test_a_run_that_does_not_use_the_plugin_imports_nothing_heavy(pytester: pytest.Pytester) -> None:
    """Having the plugin installed costs an unrelated test run neither torch nor our own processes."""
    pytester.makepyfile(
        f"""
        import sys

        def test_other(pytestconfig):
            assert "pytest_llmgpu.plugin.hooks" in sys.modules
            assert [name for name in {_HEAVY!r} if name in sys.modules] == []
            assert "pytest_llmgpu.session.session" not in sys.modules
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_the_public_api_is_what_the_package_lists() -> None:
    """`__all__` of the package names everything public in it, and nothing else."""
    for name in pytest_llmgpu.__all__:
        assert getattr(pytest_llmgpu, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        pytest_llmgpu.Nothing  # noqa: B018 - the access is the test


def test_every_name_a_module_lists_is_there() -> None:
    """Each module can be imported, and its `__all__` holds names it has; kernels only where triton is, as with CUDA."""
    absent = {_KERNELS} if importlib.util.find_spec("triton") is None else set()
    assert _KERNELS in _MODULES
    for name in set(_MODULES) - absent:
        module = importlib.import_module(name)
        assert [listed for listed in getattr(module, "__all__", []) if not hasattr(module, listed)] == []


def test_the_map_names_every_room() -> None:
    """The package's docstring is the map: no module is missing from it."""
    words = set(re.findall(r"\w+", pytest_llmgpu.__doc__ or ""))
    rooms = {name.split(".")[1] for name in _MODULES}
    assert rooms - words == set()
