from __future__ import annotations

import fnmatch
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from pytest_llmgpu.plugin import options
from pytest_llmgpu.report.options import Options

_NATIVE_TOML = pytest.mark.skipif(pytest.version_tuple < (9, 2), reason="pytest has typed keys from 9.2 on")


def _mark(**given: object) -> pytest.Mark:
    return pytest.mark.llmgpu(**given).mark


def test_defaults_are_those_of_the_help(pytestconfig: pytest.Config) -> None:
    """An option has its documented default without a flag, marker or ini key."""
    chosen = Options()
    assert (chosen.strategy, chosen.batch_sizes) == (("mp",), (1, 2, 4, 8, 16, 32, 64))
    assert chosen.sample_period == pytest.approx(1 / 6)
    assert (chosen.model, chosen.limit, chosen.timeout) == ("bundled", None, 600.0)
    assert options.resolve(pytestconfig) == chosen


@pytest.mark.parametrize(
    ("flags", "markers", "ini", "expected"),
    [
        (["--llmgpu-limit=1"], [{"limit": 2}], "llmgpu_limit=3", {"limit": 1}),
        ([], [{"limit": 2}], "llmgpu_limit=3", {"limit": 2}),
        ([], [], "llmgpu_limit=3", {"limit": 3}),
        ([], [{"limit": 5}, {"limit": 7, "devices": 2}], "", {"limit": 5, "devices": 2}),
        (["--llmgpu-iok-stock"], [{"iok_stock": False}], "llmgpu_iok_stock=false", {"iok_stock": True}),
        ([], [{"iok_stock": True}], "llmgpu_iok_stock=false", {"iok_stock": True}),
        ([], [{"iok_stock": False}], "llmgpu_iok_stock=true", {"iok_stock": False}),
        ([], [], "llmgpu_iok_stock=True", {"iok_stock": True}),
        ([], [], "", {"limit": None, "iok_stock": False, "save": None}),
        (["--llmgpu-save"], [], "llmgpu_save = theirs", {"save": ""}),
        (["--llmgpu-save=mine"], [], "", {"save": "mine"}),
        ([], [], "llmgpu_save = theirs", {"save": "theirs"}),
        (["--strategy=mp", "--strategy=tp,mp"], [], "", {"strategy": ("mp", "tp")}),
    ],
)
def test_flag_beats_marker_beats_ini_beats_default(
    pytester: pytest.Pytester, flags: list[str], markers: list[dict[str, Any]], ini: str, expected: dict[str, Any]
) -> None:
    """The most specific source wins: of markers the closest one, argument by argument. Strategies add up."""
    pytester.makeini(f"[pytest]\n{ini}\n")
    chosen = options.resolve(pytester.parseconfig(*flags), [_mark(**given) for given in markers])
    assert {name: getattr(chosen, name) for name in expected} == expected


_NATIVE = """
    llmgpu_limit = 3
    llmgpu_timeout = 90.5
    llmgpu_sample_period = 0.5
    llmgpu_gpu_memory = "24GiB"
    llmgpu_find_max_batch = true
    llmgpu_batch_sizes = ["1", "8"]
    llmgpu_strategy = ["mp", "tp"]
"""
_STRINGS = """
    llmgpu_limit = "3"
    llmgpu_timeout = "90.5"
    llmgpu_sample_period = "1/2"
    llmgpu_gpu_memory = "24GiB"
    llmgpu_find_max_batch = "true"
    llmgpu_batch_sizes = "1, 8"
    llmgpu_strategy = "mp,tp"
"""


@pytest.mark.parametrize(
    ("file", "table", "values"),
    [
        pytest.param("pytest.toml", "[pytest]", _NATIVE, marks=_NATIVE_TOML),
        pytest.param("pyproject.toml", "[tool.pytest]", _NATIVE, marks=_NATIVE_TOML),
        ("pyproject.toml", "[tool.pytest.ini_options]", _STRINGS),
        ("pytest.ini", "[pytest]", _STRINGS.replace('"', "")),
    ],
)
def test_files_have_typed_values_or_strings(pytester: pytest.Pytester, file: str, table: str, values: str) -> None:
    """Native TOML writes numbers, booleans and lists of strings; the other formats write strings."""
    pytester.path.joinpath(file).write_text(f"{table}\n{textwrap.dedent(values)}")
    config = pytester.parseconfig("-W", "error")
    chosen = options.resolve(config)
    assert (chosen.limit, chosen.timeout, chosen.sample_period) == (3, 90.5, 0.5)
    assert (chosen.gpu_memory, chosen.find_max_batch) == (24 * 2**30, True)
    assert (chosen.batch_sizes, chosen.strategy) == ((1, 8), ("mp", "tp"))


@pytest.mark.parametrize(
    ("file", "text", "parts"),
    [
        ("pytest.ini", "llmgpu_limit = some", ["llmgpu_limit", "'some'", "whole number"]),
        ("pytest.ini", "llmgpu_find_max_batch = maybe", ["llmgpu_find_max_batch", "'maybe'", "true and false"]),
        pytest.param("pytest.toml", "llmgpu_limit = 0", ["llmgpu_limit", "'0'"], marks=_NATIVE_TOML),
        pytest.param("pytest.toml", "llmgpu_limit = [3]", ["llmgpu_limit", "[3]"], marks=_NATIVE_TOML),
        pytest.param("pytest.toml", "llmgpu_batch_sizes = [1]", ["llmgpu_batch_sizes", "1"], marks=_NATIVE_TOML),
    ],
)
def test_a_bad_value_of_a_configuration_file_is_one_line(
    pytester: pytest.Pytester, refused: Callable[..., str], file: str, text: str, parts: list[str]
) -> None:
    """The line has the key, its value and what is allowed, and pytest ends as with every wrong option."""
    pytester.path.joinpath(file).write_text(f"[pytest]\n{text}")
    line = refused("-W", "error")
    assert all(part in line for part in parts), line


_UNKNOWN = ": {} is not allowed: allowed are strategy, model, "
_NO_BOOL = "(expect_oom=...): {} is not allowed: allowed are True and False"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"batch_sizes": "0,1"}, "(batch_sizes=...): '0,1' is not allowed: a comma list of different whole"),
        ({"dtype": "float8"}, "(dtype=...): 'float8' is not allowed: allowed are auto, float32, float16, bfloat16"),
        ({"model": " "}, "(model=...): ' ' is not allowed: a value is needed"),
        ({"modle": "x"}, _UNKNOWN.format("modle")),
        ({"json": "x.json"}, _UNKNOWN.format("json")),  # of a run, not of a test
        ({"expect_oom": "yes"}, _NO_BOOL.format("'yes'")),
        ({"expect_oom": 1}, _NO_BOOL.format("1")),
        ({"expect_oom": None}, _NO_BOOL.format("None")),
    ],
)
def test_a_bad_marker_is_refused(pytestconfig: pytest.Config, given: dict[str, object], complaint: str) -> None:
    """The line names the argument, its value and what is allowed."""
    with pytest.raises(pytest.UsageError) as caught:
        options.resolve(pytestconfig, [_mark(**given)])
    assert str(caught.value).startswith(f"@pytest.mark.llmgpu{complaint}")
    assert "\n" not in str(caught.value)


def test_every_option_is_declared_in_all_three_places(pytester: pytest.Pytester) -> None:
    """Each field of Options is a flag and an ini key of `pytest --help`."""
    text = pytester.runpytest_inprocess("--help").stdout.str()
    for flag in Options().in_force():
        assert re.search(rf"^  {flag}(=|\s)", text, re.MULTILINE)
    for name in Options.__dataclass_fields__:
        assert re.search(rf"^  llmgpu_{name} \(", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--llmgpu-batch-sizes=0"], "--llmgpu-batch-sizes: '0' is not allowed: *"),
        (
            ["--llmgpu-batch-sizes=8,8"],
            "--llmgpu-batch-sizes: '8,8' is not allowed: * list of different whole numbers *",
        ),
        (
            ["--strategy=mp,"],
            "--strategy: 'mp,' is not allowed: a comma list of different strategies is needed, such *",
        ),
        (["--llmgpu-strict"], "--llmgpu-strict: *--llmgpu-compare=REF is needed"),
        (["--llmgpu-limt=3"], "--llmgpu-limt: there is no such option (did you mean --llmgpu-limit[?])"),
        (["--llmgpu-allow-no-baseline"], "--llmgpu-allow-no-baseline: *--llmgpu-compare=REF is needed"),
        (["--llmgpu-save=latest"], "--llmgpu-save: 'latest' is not allowed: *means the newest report*"),
        (["--llmgpu-save", "suite"], "--llmgpu-save: 'suite' is not allowed: *is a file or folder here*"),
        (["--llmgpu-save=7"], "--llmgpu-save: '7' is not allowed: *at least one letter*"),
        (["--llmgpu-storage="], "--llmgpu-storage: '' is not allowed: a value is needed"),
    ],
)
def test_a_bad_flag_stops_the_run_before_the_collection(
    pytester: pytest.Pytester, refused: Callable[..., str], flags: list[str], complaint: str
) -> None:
    """A wrong value, a flag without effect or a name that would not be found again is refused in one line."""
    pytester.makepyfile("open('collected', 'w')")
    pytester.mkdir("suite")
    assert fnmatch.fnmatch(refused(*flags), f"ERROR: {complaint}")
    assert not (pytester.path / "collected").exists()


_SCORES = "def test_it(llm, hellaswag, batch_size, measure): ..."
_GENERATES = "def test_it(llm, prompts, batch_size, measure): ..."
_MARKED = "import pytest\n\n@pytest.mark.llmgpu(strategy='{}')\n" + _SCORES


@pytest.mark.parametrize(
    ("flag", "remedy", "without", "owning"),
    [
        ("--llmgpu-iok-stock", "--llmgpu-strategy=iok", _SCORES, _MARKED.format("iok")),
        ("--llmgpu-tp-backend=deepspeed", "--llmgpu-strategy=tp", _SCORES, _MARKED.format("tp")),
        ("--llmgpu-new-tokens=8", "--llmgpu-workload=generate", _SCORES, _GENERATES),
        ("--llmgpu-scoring=harness", "--llmgpu-workload=score", _GENERATES, _SCORES),
    ],
)
def test_a_flag_of_a_strategy_or_workload_that_no_test_has_is_refused(
    pytester: pytest.Pytester, refused: Callable[..., str], flag: str, remedy: str, without: str, owning: str
) -> None:
    """It would have no effect. A further flag, a marker or a fixture gives it one; an ini key is accepted."""
    name, _, value = flag.partition("=")
    pytester.makepyfile(without)
    assert fnmatch.fnmatch(refused(flag, "--collect-only"), f"ERROR: {name}: this is an option of *{remedy}")
    assert pytester.runpytest_inprocess(flag, remedy, "--collect-only").ret == 0
    pytester.makeini(f"[pytest]\n{name[2:].replace('-', '_')} = {value or 'true'}\n")
    assert pytester.runpytest_inprocess("--collect-only").ret == 0
    pytester.makeini("[pytest]\n")
    pytester.makepyfile(owning)
    assert pytester.runpytest_inprocess(flag, "--collect-only").ret == 0
