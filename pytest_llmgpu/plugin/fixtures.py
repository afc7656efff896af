"""What a user writes tests with: llm, hellaswag, batch_size, nvml_profiler and measure.

Everything but pytest is imported where it is used: this module is loaded with the plugin, in every test run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llmgpu.plugin import options
from pytest_llmgpu.report.options import Options

if TYPE_CHECKING:
    from pytest_llmgpu.inference.tasks.protocol import Dataset, Item
    from pytest_llmgpu.profiling.profiler import Profiler
    from pytest_llmgpu.ranks.worker import ScoreReply
    from pytest_llmgpu.report.result import CaseResult
    from pytest_llmgpu.session.runner import Request
    from pytest_llmgpu.session.session import BenchmarkSession

__all__ = [
    "LLM",
    "OUTCOME",
    "SESSION",
    "BatchSize",
    "Measure",
    "SessionMaker",
    "StrategyName",
    "batch_size_id",
    "batch_sizes",
    "make",
    "options_of",
    "parameters",
    "strategy_names",
]

SESSION = pytest.StashKey["SessionMaker"]()
"""In `config.stash`: gives the session's one object."""
OUTCOME = pytest.StashKey[str]()
"""In `item.stash`: outcome of the case that a test measured."""
_PROPERTIES = pytest.StashKey[dict[str, list[tuple[str, str]]]]()
"""In `item.stash`: id of each case that a test measured to its properties in JUnit's XML."""

_FIXTURES = ("llm", "batch_size", "nvml_profiler", "measure")

Measure = Callable[..., "CaseResult"]
"""`measure(llm, items, batch_size) -> CaseResult`"""


class SessionMaker:
    """Makes the session's one object when it is first asked for: most test runs never ask."""

    def __init__(self, make: Callable[[], BenchmarkSession]) -> None:
        self._make = make
        self.made: BenchmarkSession | None = None

    def __call__(self) -> BenchmarkSession:
        """Return the session."""
        if self.made is None:
            self.made = self._make()
        return self.made


class StrategyName(str):
    """Parameter of our `llm`: tells it from a fixture of the same name that a test suite has of its own."""

    __slots__ = ()


class BatchSize(int):
    """Parameter of our `batch_size`."""


def options_of(item: pytest.Item) -> Options:
    """Return the options in force for a test: flag, then its markers, the closest first, then ini, then default."""
    return options.resolve(item.config, item.iter_markers("llmgpu"))


class LLM:
    """The model of a test under its strategy. It is loaded at first use and kept for the tests that follow."""

    def __init__(self, session: BenchmarkSession, item: pytest.Item, options: Options, strategy: str) -> None:
        self._session = session
        self._item = item
        self.options = options
        self.strategy = strategy

    def request(self, items: Dataset | Sequence[Item], batch_size: int) -> Request:
        """Return the case of these items at that batch size; the test fails where it cannot be."""
        __tracebackhide__ = True
        try:
            _check_arguments(items, batch_size)
            return self._session.planner.request(self.options, self.strategy, batch_size, items)
        except ValueError as error:
            complaint = str(error)
        # Not in the except block: pytest would print the ValueError as the cause.
        pytest.fail(complaint, pytrace=False)

    def score(self, items: Dataset | Sequence[Item], batch_size: int) -> ScoreReply:
        """Score items without recording a case: choices, log-likelihoods and latencies, as the first rank has them."""
        __tracebackhide__ = True
        from pytest_llmgpu.ranks import worker

        request = self.request(items, batch_size)
        replies = self._ask(request, worker.score, request.case.dataset_sha256, batch_size)
        reply: ScoreReply = replies[0]
        return reply

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(loaded, *args)` on every rank and return the answers in the order of the ranks.

        Args:
            fn: A function that can be imported by its name; it gets the rank's `strategies.protocol.Loaded`.
            args: What pickles.
        """
        __tracebackhide__ = True
        import pickle

        from pytest_llmgpu.ranks import worker
        from pytest_llmgpu.report.case import DEFAULT_TASK

        complaint = None
        try:
            pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            complaint = f"llm.run needs a function at the top of a module and arguments that pickle: {error}"
        if complaint is not None:
            pytest.fail(complaint, pytrace=False)
        planner = self._session.planner
        task = next(iter(tasks_of(self._item, planner.known_tasks)), DEFAULT_TASK)
        return self._ask(self.request(planner.dataset(self.options, task), 1), worker.call, fn, args)

    def _ask(self, request: Request, fn: Callable[..., Any], *args: Any) -> list[Any]:
        __tracebackhide__ = True
        from pytest_llmgpu.ranks.protocol import RankFailedError

        try:
            return self._session.runner.ask(request, fn, *args)
        except RankFailedError as error:
            outcome, failure = error.outcome, error.failure
        if outcome == "oom":
            self._item.stash[OUTCOME] = outcome
            self._session.note((self.strategy, self.options), outcome)
            pytest.skip(f"out of memory: {failure.message}")
        pytest.fail(f"{outcome}: {failure.message}\n{failure.log_tail or ''}", pytrace=False)


def make(chosen: Options) -> ModuleType:
    """Return a plugin of the fixtures, with the parameters that the options of this run give them.

    They are made per run, not parametrised by a hook, so that pytest's own rules decide whose fixture a test gets: a
    suite that has an `llm` or a `batch_size` of its own keeps it as it is. A module, since pytest looks for fixtures on
    an object's class otherwise.
    """
    plugin = ModuleType("pytest_llmgpu.plugin.fixtures of this run")
    strategies = pytest.fixture(name="llm", params=strategy_names(chosen), ids=str)
    sizes = pytest.fixture(name="batch_size", params=batch_sizes(chosen), ids=batch_size_id)
    vars(plugin).update(
        llm=strategies(_llm),
        batch_size=sizes(_batch_size),
        nvml_profiler=pytest.fixture(name="nvml_profiler")(_nvml_profiler),
        measure=pytest.fixture(name="measure")(_measure),
    )
    return plugin


class TaskFixtures:
    """A plugin that makes the fixture of each registered task, also for a conftest.py that pytest reads as it collects.

    A registration that is not allowed is refused when the session is made (see `tasks.merge`).
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._made: set[str] = set()

    def pytest_plugin_registered(self, plugin: object) -> None:
        """Make the fixtures of tasks that a plugin or conftest.py brings; pytest calls it for earlier ones too."""
        if not hasattr(plugin, "pytest_llmgpu_tasks"):
            return
        for tasks in self._config.hook.pytest_llmgpu_tasks(config=self._config):
            for name in tasks if isinstance(tasks, Mapping) else ():
                if isinstance(name, str) and name not in (*_FIXTURES, *self._made):
                    self._made.add(name)
                    # A module, as in `make`: pytest looks for fixtures on an object's class otherwise.
                    fixtures = ModuleType(f"pytest_llmgpu.plugin.fixtures of task {name}")
                    setattr(fixtures, name, _task_fixture(name))
                    self._config.pluginmanager.register(fixtures)


def check_task_names(names: Collection[str]) -> None:
    """Refuse tasks whose fixtures would hide those of this plugin.

    Raises:
        ValueError: In one line with the name.
    """
    for name in names:
        if name in _FIXTURES:
            raise ValueError(
                f"pytest_llmgpu_tasks: {name!r} is not allowed: a fixture of pytest-llmgpu has this name; "
                "register the task by another name"
            )


def tasks_of(item: pytest.Item, known: Collection[str]) -> list[str]:
    """Return the tasks whose fixtures a test uses."""
    used = item.fixturenames if isinstance(item, pytest.Function) else []
    return [name for name in known if name in used]


def _task_fixture(name: str) -> object:
    def items(request: pytest.FixtureRequest) -> Dataset:
        return request.config.stash[SESSION]().planner.dataset(options_of(request.node), name)

    items.__doc__ = f"Items of task {name}, from --llmgpu-dataset: `len({name})`, `{name}[:8]`."
    return pytest.fixture(name=name)(items)


def strategy_names(chosen: Options) -> list[StrategyName]:
    """Return the parameters of `llm`."""
    return [StrategyName(name) for name in chosen.strategy]


def batch_sizes(chosen: Options) -> list[BatchSize]:
    """Return the parameters of `batch_size`."""
    return [BatchSize(size) for size in chosen.batch_sizes]


def parameters(chosen: Options, wanted: Collection[str]) -> list[pytest.MarkDecorator]:
    """Return markers that give one test the strategies and batch sizes of its own options."""
    marks = {
        "llm": pytest.mark.parametrize("llm", strategy_names(chosen), ids=str, indirect=True),
        "batch_size": pytest.mark.parametrize("batch_size", batch_sizes(chosen), ids=batch_size_id, indirect=True),
    }
    return [mark for name, mark in marks.items() if name in wanted]


def batch_size_id(size: int) -> str:
    """Return the part of a test's id that names its batch size."""
    return f"bs{size}"


def _batch_size(request: pytest.FixtureRequest) -> int:
    """Sequences per forward, from --llmgpu-batch-sizes (a HellaSwag item is 4 sequences)."""
    return int(request.param)


def _llm(request: pytest.FixtureRequest) -> LLM:
    """The model under the chosen strategy, on all its devices; loaded once and kept across batch sizes."""
    return LLM(request.config.stash[SESSION](), request.node, options_of(request.node), str(request.param))


def _nvml_profiler(request: pytest.FixtureRequest) -> Profiler:
    """NVML at the sampling period: `with nvml_profiler.window() as w: ...`, then `w.profile`."""
    session = request.config.stash[SESSION]()
    profiler = session.profiler_of(session.planner.machine(options_of(request.node)))
    profiler.start()
    return profiler


def _measure(request: pytest.FixtureRequest) -> Measure:
    """Measure, record and judge one case: `measure(llm, hellaswag, batch_size)`.

    Returns the case's result, with --llmgpu-launches of all its launches so far. Out of memory ends the test as
    expected; a time limit, a crash, an error and an accuracy below its baseline fail it. With --llmgpu-find-max-batch
    the first out of memory is followed by the cases that find the largest batch size that fits; they are recorded, and
    the test's outcome stays that of its own case.
    """
    session = request.config.stash[SESSION]()
    item: pytest.Item = request.node

    def measure(llm: LLM, items: Dataset | Sequence[Item], batch_size: int) -> CaseResult:
        __tracebackhide__ = True
        wanted = llm.request(items, batch_size)
        kept: list[CaseResult] = []

        def record(result: CaseResult) -> None:
            result.markers = sorted({mark.name for mark in item.iter_markers()})
            kept.append(session.record(result, llm.options, item.nodeid))
            _tell_junit(item, kept[-1])

        session.runner.run(wanted, record)
        result = kept[0]
        item.stash[OUTCOME] = result.outcome
        group = (llm.strategy, llm.options)
        session.note(group, result.outcome)
        if result.outcome == "oom" and llm.options.find_max_batch:
            _find_max_batch(session, llm, items, result, record)
        _judge(result, hopeless=session.was_last_hope(group, item.nodeid))
        return result

    return measure


def _tell_junit(item: pytest.Item, result: CaseResult) -> None:
    """Make a case properties of its test; a further launch of it takes their place."""
    from pytest_llmgpu.render.exports import junit

    told = item.stash.setdefault(_PROPERTIES, {})
    told[result.id] = junit.properties(result)
    others = [pair for pair in item.user_properties if not pair[0].startswith("llmgpu.")]
    item.user_properties[:] = [*others, *(pair for pairs in told.values() for pair in pairs)]


def _find_max_batch(
    session: BenchmarkSession,
    llm: LLM,
    items: Dataset | Sequence[Item],
    failed: CaseResult,
    record: Callable[[CaseResult], None],
) -> None:
    """Measure batch sizes below one that was out of memory until the largest that fits is known."""
    from pytest_llmgpu.analysis import capacity

    def probe(batch_size: int) -> CaseResult | None:
        try:
            request = session.planner.request(llm.options, llm.strategy, batch_size, items)
        except ValueError:
            return None  # a strategy of somebody's own need not take every batch size
        return session.runner.run(request, record)

    report = session.recorder.report
    assert report is not None, "it holds the case that was out of memory"
    series = [result for result in report.cases if result.case.series == failed.case.series]
    capacity.search(series, session.planner.machine(llm.options).gpus, probe)


def _check_arguments(items: object, batch_size: object) -> None:
    from pytest_llmgpu.inference.tasks.protocol import Dataset, Item

    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size: {batch_size!r} is not allowed: a whole number of at least 1 is needed")
    given = items.items if isinstance(items, Dataset) else items
    if not isinstance(given, Sequence) or not given:
        found = "nothing" if given in ((), []) else type(items).__name__
        raise ValueError(f"items: {found} is not allowed: a Dataset or a list of at least one Item is needed")
    for number, item in enumerate(given):
        if not isinstance(item, Item):
            raise ValueError(f"items[{number}]: {type(item).__name__} is not allowed: an Item is needed")  # noqa: TRY004 - one kind of error for every argument


def _judge(result: CaseResult, *, hopeless: bool) -> None:
    __tracebackhide__ = True
    failures = [f"{finding.text} {finding.next_step}" for finding in result.findings if finding.severity == "failure"]
    if result.outcome in ("oom", "skipped_after_oom"):
        if not hopeless:
            # As pytest's own skip: measured and expected, neither passed nor failed. The plugin shows it as OOM.
            pytest.skip(_oom_text(result))
        failures.append(
            f"{result.id}: {_oom_text(result)}, and no selected batch size of this model and strategy completed. Take "
            "smaller batch sizes, more GPUs or a smaller model, or say @pytest.mark.llmgpu(expect_oom=True)."
        )
    elif result.outcome != "completed" and not failures:
        failures.append(f"{result.id}: {result.outcome}: {result.failure.message if result.failure else ''}")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def _oom_text(result: CaseResult) -> str:
    if result.failure is None:
        return "a smaller or equal batch size ran out of memory"
    return f"out of memory: {result.failure.message}"
