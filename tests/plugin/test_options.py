from __future__ import annotations

import re
import textwrap

import pytest

from pytest_llmgpu.plugin import options
from pytest_llmgpu.report.options import Options

_NATIVE_TOML = pytest.mark.skipif(pytest.version_tuple < (9, 2), reason="pytest has typed keys from 9.2 on")


def _mark(**given: object) -> pytest.Mark:
    return pytest.mark.llmgpu(**given).mark


def test_defaults_are_those_of_the_help(pytestconfig: pytest.Config) -> None:
    """An option has its documented default without a flag, marker or ini key."""
    chosen = Options()
    assert chosen.strategy == ("mp",)
    assert chosen.batch_sizes == (1, 2, 4, 8, 16, 32, 64)
    assert chosen.sample_period == pytest.approx(1 / 6)
    assert (chosen.model, chosen.limit, chosen.timeout) == ("bundled", None, 600.0)
    assert options.resolve(pytestconfig) == chosen


@pytest.mark.parametrize(
    ("flags", "marker", "ini", "expected"),
    [
        (["--llmgpu-limit=1"], {"limit": 2}, "llmgpu_limit=3", {"limit": 1}),
        ([], {"limit": 2}, "llmgpu_limit=3", {"limit": 2}),
        ([], {}, "llmgpu_limit=3", {"limit": 3}),
        ([], {}, "", {"limit": None}),
        (["--llmgpu-iok-stock"], {"iok_stock": False}, "llmgpu_iok_stock=false", {"iok_stock": True}),
        ([], {"iok_stock": True}, "llmgpu_iok_stock=false", {"iok_stock": True}),
        ([], {"iok_stock": False}, "llmgpu_iok_stock=true", {"iok_stock": False}),
        ([], {}, "llmgpu_iok_stock=True", {"iok_stock": True}),
        ([], {}, "", {"iok_stock": False, "save": None}),
        (["--llmgpu-save"], {}, "llmgpu_save = theirs", {"save": ""}),
        (["--llmgpu-save=mine"], {}, "", {"save": "mine"}),
        ([], {}, "llmgpu_save = theirs", {"save": "theirs"}),
        (["--strategy=mp", "--strategy=tp,mp"], {}, "", {"strategy": ("mp", "tp")}),
    ],
)
def test_flag_beats_marker_beats_ini_beats_default(
    pytester: pytest.Pytester, flags: list[str], marker: dict[str, object], ini: str, expected: dict[str, object]
) -> None:
    """The most specific source of an option wins; a flag may go without its value, and strategies add up."""
    pytester.makeini(f"[pytest]\n{ini}\n")
    chosen = options.resolve(pytester.parseconfig(*flags), [_mark(**marker)])
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
def test_configuration_files_have_typed_values_or_strings(
    pytester: pytest.Pytester, file: str, table: str, values: str
) -> None:
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
        ("pytest.ini", "[pytest]\nllmgpu_limit = some", ["llmgpu_limit", "'some'", "whole number"]),
        (
            "pytest.ini",
            "[pytest]\nllmgpu_find_max_batch = maybe",
            ["llmgpu_find_max_batch", "'maybe'", "true and false"],
        ),
        pytest.param("pytest.toml", "[pytest]\nllmgpu_limit = 0", ["llmgpu_limit", "'0'"], marks=_NATIVE_TOML),
        pytest.param("pytest.toml", "[pytest]\nllmgpu_limit = [3]", ["llmgpu_limit", "[3]"], marks=_NATIVE_TOML),
        pytest.param(
            "pytest.toml", "[pytest]\nllmgpu_batch_sizes = [1]", ["llmgpu_batch_sizes", "1"], marks=_NATIVE_TOML
        ),
    ],
)
def test_a_bad_value_of_a_configuration_file_is_one_line(
    pytester: pytest.Pytester, file: str, text: str, parts: list[str]
) -> None:
    """The line has the key, its value and what is allowed, and pytest ends as with every wrong option."""
    pytester.path.joinpath(file).write_text(text)
    result = pytester.runpytest_inprocess("-W", "error")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    [line] = [line for line in result.stderr.lines if line.startswith("ERROR")]
    assert all(part in line for part in parts), line


def test_the_closest_marker_wins(pytestconfig: pytest.Config) -> None:
    """A test's own marker overrides its module's, argument by argument."""
    chosen = options.resolve(pytestconfig, [_mark(limit=5), _mark(limit=7, devices=2)])
    assert (chosen.limit, chosen.devices) == (5, 2)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"batch_sizes": "0,1"}, "'0,1' is not allowed: a comma list of whole numbers of at least 1"),
        ({"dtype": "float8"}, "allowed are auto, float32, float16, bfloat16"),
        ({"model": " "}, "a value is needed"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(
    pytestconfig: pytest.Config, given: dict[str, object], complaint: str
) -> None:
    """A value that is not allowed is refused in one line that names it, its source and the allowed ones."""
    with pytest.raises(pytest.UsageError) as caught:
        options.resolve(pytestconfig, [_mark(**given)])
    assert complaint in str(caught.value)
    assert f"({next(iter(given))}=...)" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{"modle": "x"}, {"json": "x.json"}, {"sample_period": 1}])
def test_an_unknown_marker_argument_is_refused(pytestconfig: pytest.Config, given: dict[str, object]) -> None:
    """A marker accepts only options of a single test."""
    with pytest.raises(pytest.UsageError, match=r"is not allowed: allowed are strategy, model, .*expect_oom"):
        options.resolve(pytestconfig, [_mark(**given)])


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_expect_oom_is_true_or_false(pytestconfig: pytest.Config, value: object) -> None:
    """Values that are not bool are refused."""
    with pytest.raises(
        pytest.UsageError, match=r"\(expect_oom=\.\.\.\): .* is not allowed: allowed are True and False"
    ):
        options.resolve(pytestconfig, [_mark(expect_oom=value)])
    options.resolve(pytestconfig, [_mark(expect_oom=False)])


def test_every_option_is_declared_in_all_three_places(pytester: pytest.Pytester) -> None:
    """Each field of Options is a flag and an ini key of `pytest --help`."""
    text = pytester.runpytest_inprocess("--help").stdout.str()
    for flag in Options().in_force():
        assert re.search(rf"^  {flag}(=|\s)", text, re.MULTILINE)
    for name in Options.__dataclass_fields__:
        assert re.search(rf"^  llmgpu_{name} \(", text, re.MULTILINE)


def test_a_bad_flag_stops_the_run_before_the_collection(pytester: pytest.Pytester) -> None:
    """A wrong flag is a usage error, whatever is collected."""
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_inprocess("--llmgpu-batch-sizes=0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --llmgpu-batch-sizes: '0' is not allowed: *"])


@pytest.mark.parametrize(
    "flag",
    [
        "--llmgpu-policy=gate.toml",
        "--llmgpu-strict",
        "--llmgpu-allow-no-baseline",
    ],
)
def test_a_flag_of_the_gate_needs_a_baseline(pytester: pytest.Pytester, flag: str) -> None:
    """A flag of the gate without a baseline is refused."""
    result = pytester.runpytest_inprocess(flag)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    name = flag.partition("=")[0]
    result.stderr.fnmatch_lines([f"ERROR: {name}: *--llmgpu-compare=REF is needed"])


@pytest.mark.parametrize(
    ("flag", "owner"),
    [("--llmgpu-iok-stock", "iok"), ("--llmgpu-tp-backend=deepspeed", "tp")],
)
def test_a_flag_of_a_strategy_that_is_not_measured_is_refused(pytester: pytest.Pytester, flag: str, owner: str) -> None:
    """The flag would have no effect; an ini key is accepted, and the strategy of a marker counts."""
    pytester.makepyfile(
        """
        def test_hellaswag(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)
        """
    )
    result = pytester.runpytest_inprocess(flag, "--collect-only")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    name = flag.partition("=")[0]
    result.stderr.fnmatch_lines([f"ERROR: {name}: *strategy {owner}*measures mp*--strategy={owner}"])
    assert pytester.runpytest_inprocess(flag, f"--strategy=mp,{owner}", "--collect-only").ret == 0
    pytester.makeini("[pytest]\nllmgpu_iok_min_tokens = 1\n")
    assert pytester.runpytest_inprocess("--collect-only").ret == 0
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.llmgpu(strategy="{owner}")
        def test_hellaswag(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)
        """
    )
    assert pytester.runpytest_inprocess(flag, "--collect-only").ret == 0


@pytest.mark.parametrize(
    ("flag", "owner", "other"),
    [
        ("--llmgpu-new-tokens=8", "generate", "score"),
        ("--llmgpu-scoring=harness", "score", "generate"),
    ],
)
def test_a_flag_of_a_workload_that_no_test_has_is_refused(
    pytester: pytest.Pytester, flag: str, owner: str, other: str
) -> None:
    """The fixture or the option decides on the workload of a test; an ini key is accepted."""
    tests = {
        "score": "def test_it(llm, hellaswag, batch_size, measure): ...",
        "generate": "def test_it(llm, prompts, batch_size, measure): ...",
    }
    pytester.makepyfile(tests[other])
    result = pytester.runpytest_inprocess(flag, "--collect-only")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    name, _, value = flag.partition("=")
    result.stderr.fnmatch_lines([f"ERROR: {name}: *workload {owner}*"])
    assert pytester.runpytest_inprocess(flag, f"--llmgpu-workload={owner}", "--collect-only").ret == 0
    pytester.makeini(f"[pytest]\n{name[2:].replace('-', '_')} = {value}\n")
    assert pytester.runpytest_inprocess("--collect-only").ret == 0
    pytester.makeini("[pytest]\n")
    pytester.makepyfile(tests[owner])
    assert pytester.runpytest_inprocess(flag, "--collect-only").ret == 0
