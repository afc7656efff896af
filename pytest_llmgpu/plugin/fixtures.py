"""The fixtures: llm, batch_size, nvml_profiler, measure, and one per task, such as hellaswag; the tests that use them.

This module is loaded with the plugin in every test run. It imports other libraries than pytest where they are used.
"""

from __future__ import annotations

import dataclasses
import shutil
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llmgpu.plugin import options
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.text import first_line, named, printable, printable_lines

if TYPE_CHECKING:
    from pytest_llmgpu.engines.function import Function
    from pytest_llmgpu.inference.tasks.protocol import Dataset, Item
    from pytest_llmgpu.profiling.profiler import Profiler
    from pytest_llmgpu.ranks.env_launcher import Peers
    from pytest_llmgpu.report.result import CaseResult, Launch
    from pytest_llmgpu.session.runner import CaseRequest
    from pytest_llmgpu.session.session import BenchmarkSession

SESSION: pytest.StashKey[BenchmarkSession] = pytest.StashKey()
"""In `config.stash`: the benchmark session of the run; absent until `session_of` makes it."""
PEERS: pytest.StashKey[Peers] = pytest.StashKey()
"""In `config.stash`: the processes that torchrun or srun started; absent with the launcher `local`."""
OUTCOME = pytest.StashKey[str]()
"""In `item.stash`: the outcome of the case that the test measured."""
KEPT = pytest.StashKey[bool]()
"""In `item.stash`: whether the result of the case is from the report that the run resumes."""
_MEASURED = pytest.StashKey["dict[str, CaseResult]"]()
"""In `item.stash`: the cases that the test measured, by case id, with all launches so far."""

DESELECTED = pytest.StashKey[list[str]]()
"""In `config.stash`: the limits of the selection (see `limits_of_selection`), then the ids of our deselected tests."""
_FIXTURES = ("llm", "batch_size", "nvml_profiler", "measure")
"""The fixtures that no task may hide."""

Measure = Callable[..., "CaseResult"]
"""`measure(llm, items, batch_size) -> CaseResult`"""


class StrategyName(str):  # noqa: SLOT000
    """The parameter of our fixture `llm`; a test suite can have another fixture of that name."""

    quantization = "none"


class BatchSize(int):
    """The parameter of our fixture `batch_size`."""


def options_of(item: pytest.Item) -> Options:
    """Return the options of a test; it has one quantisation if it has a strategy of the options."""
    chosen, name = options.resolve(item.config, item.iter_markers("llmgpu")), parameter(item, "llm")
    return dataclasses.replace(chosen, quantization=(name.quantization,)) if isinstance(name, StrategyName) else chosen


def parameter(item: pytest.Item, name: str) -> object:
    """Return a parameter of a test; None if it has none of that name."""
    return item.callspec.params.get(name) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None


def session_of(config: pytest.Config) -> BenchmarkSession:
    """Return the benchmark session of a run. The first call makes it, since most test runs need none.

    pytest.UsageError if the options, the strategies or the tasks are not allowed.
    """
    if SESSION in config.stash:
        if config.stash[SESSION].forked:
            allowed = "only the first process of pytest measures"
            reason = f"a test or a plugin (such as --forked) forked this process: {allowed}"
            raise pytest.fail.Exception(reason, pytrace=False)
        return config.stash[SESSION]
    from pytest_llmgpu.inference import tasks
    from pytest_llmgpu.ranks import registered
    from pytest_llmgpu.render.terminal.report import LiveLine
    from pytest_llmgpu.session import figures
    from pytest_llmgpu.session.session import BenchmarkSession
    from pytest_llmgpu.store.git import is_reference

    capture = config.pluginmanager.getplugin("capturemanager")
    writer = config.get_terminal_writer() if config.pluginmanager.hasplugin("terminalreporter") else None
    live = LiveLine(
        capture.global_and_fixture_disabled if capture is not None else nullcontext,
        # Not writer.fullwidth, which is 40 at least.
        lambda: shutil.get_terminal_size().columns - writer.width_of_current_line if writer is not None else 0,
    )
    chosen = options.resolve(config)
    peers = config.stash.get(PEERS, None)
    paths: dict[str, Path] = {}
    for name in ("json", "policy", "html", "storage", "trace"):
        # A path is relative to the working directory in a flag, to the rootdir in an ini key.
        folder = config.rootpath if config.getoption(f"llmgpu_{name}") is None else config.invocation_params.dir
        if text := getattr(chosen, name):
            paths[name] = folder / text
    if chosen.policy is not None and is_reference(chosen.policy):
        paths["policy"] = Path(chosen.policy)
    try:
        if peers is not None:
            peers.wait(chosen.load_timeout)
        declared = figures.merge(_registered(config, "pytest_llmgpu_metrics"))
        known_tasks = tasks.merge(_registered(config, "pytest_llmgpu_tasks"))
        if hidden := [name for name in known_tasks if name in _FIXTURES]:
            remedy = "a fixture of pytest-llmgpu has this name; register the task by another name"
            raise pytest.UsageError(f"pytest_llmgpu_tasks: {hidden[0]!r} is not allowed: {remedy}")
        session = BenchmarkSession(
            rootdir=config.rootpath,
            paths=paths,
            options=chosen,
            known=registered.merge(_registered(config, "pytest_llmgpu_strategies")),
            known_tasks=known_tasks,
            live=live,
            peers=peers,
        )
        config.add_cleanup(session.close)  # also of a run that is refused after the collection
        session.recorder.declared = declared
        if config.getoption("numprocesses", None) == 0:  # of xdist, whose workers pytest would start by default
            session.recorder.flags["-n"] = 0
    except ValueError as error:
        raise pytest.UsageError(printable(str(error))) from None
    config.stash[SESSION] = session
    return session


def _registered(config: pytest.Config, hook: str) -> list[Mapping[str, Any]]:
    """Return what the implementations of a hook return; pytest.UsageError in one line if one of them raises."""
    try:
        found: list[Mapping[str, Any]] = getattr(config.hook, hook)(config=config)
    except Exception as error:  # noqa: BLE001 - it is the code of a user
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{hook} raised {type(error).__name__}: {first_line(error)} ({Path(last.filename).name}:{last.lineno})"
        raise pytest.UsageError(printable(text)) from None
    return found


def running(config: pytest.Config) -> BenchmarkSession | None:
    """Return the benchmark session of a run if there is one and this process is not a forked one."""
    session = config.stash.get(SESSION, None)
    return None if session is None or session.forked else session


class LLM:
    """The model of a test under its strategy. It is loaded at its first use and kept for the next tests."""

    def __init__(
        self,
        session: BenchmarkSession,
        item: pytest.Item,
        options: Options,
        strategy: str,
        function: Function | None = None,
    ) -> None:
        self._session = session
        self._item = item
        self._function = function
        self.options = options
        """The options of the test."""
        self.strategy = strategy
        """The strategy as `--strategy` names it; empty for an engine of the test."""

    def request(self, items: Dataset | Sequence[Item], batch_size: int, new_tokens: int | None = None) -> CaseRequest:
        """Return the case of these items at a batch size; fail the test if the case is not allowed."""
        __tracebackhide__ = True
        session_of(self._item.config)
        try:
            _check_arguments(items, batch_size, new_tokens)
            return self.planned(items, batch_size, new_tokens)
        except ValueError as error:
            # Not pytest.fail, which would print the ValueError as the cause.
            raise pytest.fail.Exception(printable_lines(str(error)), pytrace=False) from None

    def planned(self, items: Dataset | Sequence[Item], batch_size: int, new_tokens: int | None) -> CaseRequest:
        """Return the case of these items at a batch size, with what the test suite changes in the loaded model.

        ValueError if the case is not allowed.
        """
        import msgspec

        from pytest_llmgpu.ranks.registered import ModelHook

        request = self._session.planner.request(
            self.options, self.strategy, batch_size, items, new_tokens=new_tokens, function=self._function
        )
        # In the order in which pytest would call them.
        found = []
        for one in reversed(self._item.ihook.pytest_llmgpu_model.get_hookimpls()):
            if one.wrapper or one.hookwrapper:
                raise ValueError(f"pytest_llmgpu_model of {one.plugin_name}: a wrapper is not allowed")
            found.append(ModelHook.of(one.function, one.argnames))
        return msgspec.structs.replace(request, model_hooks=tuple(found))

    def score(self, items: Dataset | Sequence[Item], batch_size: int) -> Launch:
        """Score items, or generate, and record no case; return the answers and latencies of the first rank."""
        __tracebackhide__ = True
        request = self.request(items, batch_size)
        launch: Launch = self._ask(request, request.commands.score, request.case)[0]
        return launch

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(loaded, *args)` on every rank and return a list with the result of each, in their order.

        mp has one rank, the others have one for each device. `fn` is a function at the top level of a module, whose
        first argument is the rank's `strategies.protocol.Loaded`. Arguments and results are pickled. An exception of
        `fn` is raised here again, with its class if that is imported here; the ranks are then ended. Out of memory ends
        the test as OOM.
        """
        __tracebackhide__ = True
        import pickle

        from pytest_llmgpu.ranks import worker
        from pytest_llmgpu.report.case import DEFAULT_TASK

        try:
            pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            reason = f"llm.run needs a function at the top level of a module and arguments that pickle: {error}"
            raise pytest.fail.Exception(printable_lines(reason), pytrace=False) from None
        planner = self._session.planner
        if planner.is_engine(self.strategy):
            pytest.fail(f"llm.run: {self.strategy} is an engine, which has no Loaded in this process", pytrace=False)
        task = next(iter(used(self._item, planner.known_tasks)), DEFAULT_TASK)
        return self._ask(self.request(planner.dataset(self.options, task), 1), worker.call, fn, args)

    def _ask(self, request: CaseRequest, fn: Callable[..., Any], *args: Any) -> list[Any]:
        __tracebackhide__ = True
        from pytest_llmgpu.ranks import worker
        from pytest_llmgpu.ranks.local import RankFailedError
        from pytest_llmgpu.ranks.serving import rebuild

        try:
            return self._session.runner.ask(request, fn, *args)
        except RankFailedError as error:
            outcome, failure, raised = error.outcome, error.failure, error.raised
        if outcome == "oom":
            self._item.stash[OUTCOME] = outcome
            self._session.note((self.strategy, self.options), outcome)
            pytest.skip(printable_lines(f"out of memory: {failure.message}"))
        in_function = fn is worker.call and failure.phase == "forward"
        if in_function and raised is not None and (again := rebuild(raised)) is not None:
            raise again
        pytest.fail(printable_lines(f"{outcome}: {failure.message}"), pytrace=False)


def make(chosen: Options) -> ModuleType:
    """Return a plugin with the fixtures of a run, whose parameters are its strategies and batch sizes.

    They are made per run and not parametrised by a hook, so that pytest's own rules decide which fixture a test gets: a
    suite with its own `llm` or `batch_size` keeps it. The plugin is a module because pytest looks for fixtures on the
    class of any other object.
    """
    plugin = ModuleType("pytest_llmgpu.plugin.fixtures of this run")
    functions = {"llm": _llm, "batch_size": _batch_size, "nvml_profiler": _nvml_profiler, "measure": _measure}
    for name, function in functions.items():
        setattr(plugin, name, pytest.fixture(name=name, **parameters(chosen).get(name, {}))(function))
    return plugin


def parameters(chosen: Options) -> dict[str, dict[str, Any]]:
    """Return the parameters of each parametrised fixture, and the function that returns their part of a test's id."""
    # Plain weights run first: quantised ones are compared with them.
    kinds = sorted(chosen.quantization, key="none".__ne__)
    strategies = [StrategyName(name) for _ in kinds for name in chosen.strategy]
    for number, strategy in enumerate(strategies):
        strategy.quantization = kinds[number // len(chosen.strategy)]
    return {
        "llm": {"params": strategies, "ids": lambda name: f"{name}-{name.quantization}".removesuffix("-none")},
        "batch_size": {"params": [BatchSize(size) for size in chosen.batch_sizes], "ids": lambda size: f"bs{size}"},
    }


class TaskFixtures:
    """A plugin that makes a fixture for each registered task, also of a conftest.py that pytest finds as it collects.

    A registration that is not allowed is refused later, when the session is made (see `tasks.merge`).
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._made: set[str] = set()

    def pytest_plugin_registered(self, plugin: object) -> None:
        """Make the fixtures of a plugin's tasks. pytest also calls this for plugins that were registered before."""
        if not hasattr(plugin, "pytest_llmgpu_tasks"):
            return
        for tasks in _registered(self._config, "pytest_llmgpu_tasks"):
            for name in tasks if isinstance(tasks, Mapping) else ():
                if isinstance(name, str) and name not in (*_FIXTURES, *self._made):
                    self._made.add(name)
                    fixtures = ModuleType(f"pytest_llmgpu.plugin.fixtures of task {name}")
                    setattr(fixtures, name, pytest.fixture(name=name)(_items))
                    self._config.pluginmanager.register(fixtures)


def used(item: pytest.Item, names: Collection[str]) -> list[str]:
    """Return the names of fixtures that a test uses; those of tasks have their names."""
    fixtures = item.fixturenames if isinstance(item, pytest.Function) else []
    return [name for name in names if name in fixtures]


def workloads_of(item: pytest.Item) -> set[str]:
    """Return the workloads of a test, as far as its options and fixtures decide: both, if it has its own items."""
    chosen = options_of(item).workload
    if chosen is not None:
        return {chosen}
    from pytest_llmgpu.inference import tasks

    found = {"generate" if name == tasks.PROMPTS else "score" for name in used(item, tasks.BUILT_IN)}
    return found or {"score", "generate"}


def is_ours(item: pytest.Item) -> bool:
    """Return whether a test uses the fixture `llm` of this plugin, or measures an engine of its own."""
    if isinstance(parameter(item, "llm"), StrategyName):
        return True
    return used(item, ["measure", "llm"]) == ["measure"] and isinstance(parameter(item, "batch_size"), BatchSize)


def measures(item: pytest.Item) -> bool:
    """Return whether a test of ours uses the fixture `measure`."""
    return is_ours(item) and bool(used(item, ["measure"]))


def group_of(item: pytest.Item) -> tuple[str, Options]:
    """Return the strategy and the options of a test of ours: tests with equal ones share a loaded model.

    The strategy is empty for a test that measures an engine of its own.
    """
    return str(parameter(item, "llm") or ""), options_of(item)


def runs_nothing(config: pytest.Config) -> bool:
    """Return whether pytest only lists tests, fixtures or the steps of a plan."""
    listing = ("collectonly", "showfixtures", "show_fixtures_per_test", "setupplan")
    return any(config.getoption(name, default=False) for name in listing)


def limits_of_selection(config: pytest.Config) -> list[str]:
    """Return the options that take out tests which pytest does not collect and therefore cannot name.

    The report lists them with the deselected tests, so that its reader does not take the run for a complete one.
    """
    cache = getattr(config, "cache", None)
    failed = cache is not None and cache.get("cache/lastfailed", {})
    found = ["--lf: tests that passed last time"] if failed and config.getoption("lf", default=False) else []
    if any("::" in argument for argument in config.args):
        found.append("tests not named on the command line")
    if any("[" in argument.rpartition("::")[2] for argument in config.args if "::" in argument):
        found.append("parameters not named on the command line")
    return found


def run_order(items: Sequence[pytest.Item], runs: Callable[[pytest.Item], bool]) -> list[pytest.Item]:
    """Return the tests with ours ordered, in the places that ours have; the others stay.

    Ours are run group by group, the reference strategy first, then in the order in which groups first appear, with
    ascending batch sizes: each model is loaded once, and small batches run before large ones that may not fit. A test
    that sets its batch size itself comes first. Tests of equal batch size keep their order. `runs` returns whether a
    test is one of ours that is measured.
    """
    from pytest_llmgpu.report.case import REFERENCE_STRATEGY

    turns: dict[tuple[object, ...], int] = {}
    places: dict[pytest.Item, tuple[bool, int, int]] = {}
    for item in filter(runs, items):
        group, size = group_of(item), parameter(item, "batch_size")
        # Folders whose conftest.py change the model have loadings of their own.
        changes = tuple(one.plugin_name for one in item.ihook.pytest_llmgpu_model.get_hookimpls())
        turn = turns.setdefault((*group, changes), len(turns))
        places[item] = (group[0] != REFERENCE_STRATEGY, turn, size if isinstance(size, int) else 0)
    ordered = iter(sorted(places, key=places.__getitem__))
    return [next(ordered) if item in places else item for item in items]


def idle_marker(item: pytest.Item) -> str | None:
    """Return an error if a marker of a test has no effect.

    In a `pytest.param` it cannot choose strategies or batch sizes: pytest makes the parameters of a test from the
    markers of its function, before it looks at those of a parameter. Options of the other workload are accepted in the
    marker of a class or a module, which can have tests of both.
    """
    chosen = options.resolve(item.config, item.iter_markers("llmgpu"))
    strategy, size = parameter(item, "llm"), parameter(item, "batch_size")
    quantization = strategy.quantization if isinstance(strategy, StrategyName) else None
    for name, value, allowed in (
        ("strategy", strategy if quantization else None, chosen.strategy),
        ("quantization", quantization, chosen.quantization),
        ("batch_sizes", size if isinstance(size, BatchSize) else None, chosen.batch_sizes),
    ):
        if value is not None and value not in allowed:
            remedy = f"and the test would run with {value}: put the marker on the test function"
            return f"marker llmgpu({name}=...): a marker of a pytest.param cannot choose it, {remedy}"
    workloads = workloads_of(item)
    for name in (name for marker in item.own_markers if marker.name == "llmgpu" for name in marker.kwargs):
        if owner := options.other_workload(name, workloads):
            remedy = f"and the test has workload {', '.join(sorted(workloads))}: remove it, or add workload={owner!r}"
            return f"marker llmgpu({name}=...): this is an option of workload {owner}, {remedy}"
    return None


def _items(request: pytest.FixtureRequest) -> Dataset:
    """The items of the task of this name in --llmgpu-dataset, such as `len(hellaswag)`, `hellaswag[:8]`."""
    task: str = request.fixturename or ""
    return session_of(request.config).planner.dataset(options_of(request.node), task)


def _batch_size(request: pytest.FixtureRequest) -> int:
    """The batch size, in sequences per forward: one of --llmgpu-batch-sizes. An item of HellaSwag has 4 sequences."""
    return int(request.param)


def _llm(request: pytest.FixtureRequest) -> LLM:
    """The model under a strategy of --strategy. It is loaded once and kept for all batch sizes."""
    return LLM(session_of(request.config), request.node, options_of(request.node), str(request.param))


def _nvml_profiler(request: pytest.FixtureRequest) -> Profiler:
    """The GPU profiler: `with nvml_profiler.window() as window: ...`, then `window.profile`."""
    session = session_of(request.config)
    profiler = session.profilers_of(session.planner.machine(options_of(request.node))).here
    profiler.start()
    return profiler


def _measure(request: pytest.FixtureRequest) -> Measure:
    """Measure one case and add it to the report: `measure(llm, hellaswag, batch_size)`.

    `measure(llm, prompts, batch_size, new_tokens=64)` generates text; without `new_tokens` the option decides.
    `measure("package.module:name", prompts, batch_size)` measures an engine of your own in a rank, and
    `measure(engine, prompts, batch_size)` in this process, where a crash or a time limit is no outcome.
    `figures={"cache_hit_rate": 0.93}` adds figures of your own, as `record` of the result does after the measurement.

    Returns the result of the case, with all its launches so far if --llmgpu-launches is above 1. Out of memory ends
    the test with the outcome OOM, which is not a failure. A timeout, a crash, an error or an accuracy below its
    baseline fails the test. With --llmgpu-find-max-batch, an out of memory is followed by further cases that find the
    largest batch size that fits. They are in the report too, and the outcome of the test is that of its own case. With
    --llmgpu-resume, a case that the report has is not measured again: the test gets that result, and is shown as KEPT.
    """
    from pytest_llmgpu.session.figures import checked

    session = session_of(request.config)
    item: pytest.Item = request.node

    def measure(
        llm: LLM | str | object,
        items: Dataset | Sequence[Item],
        batch_size: int,
        new_tokens: int | None = None,
        figures: Mapping[str, float] = MappingProxyType({}),
    ) -> CaseResult:
        __tracebackhide__ = True
        if not isinstance(llm, LLM):
            llm = _engine(session, item, llm)
        wanted = session.with_reference(llm.request(items, batch_size, new_tokens))
        checked(figures, session.recorder.declared)
        kept: list[CaseResult] = []
        measured = item.stash.setdefault(_MEASURED, {})

        def record(result: CaseResult) -> None:
            result.line = None if item.location[1] is None else item.location[1] + 1
            kept.append(session.record(result, llm.options, item.nodeid))
            measured[kept[-1].id] = kept[-1]

        result = session.recorder.kept(item.nodeid, wanted.case)
        item.stash[KEPT] = result is not None
        if result is None:
            session.runner.run(wanted, record)
            result = kept[0]
        else:
            measured[result.id] = result
        if result.outcome == "completed":
            for name, value in figures.items():
                result.record(name, value)
        item.stash[OUTCOME] = result.outcome
        group = (llm.strategy, llm.options)
        session.note(group, result.outcome)
        if result.outcome == "oom" and llm.options.find_max_batch:
            _find_max_batch(session, llm, items, result, record)
        _end_test(result, session.recorder.name, nothing_fits=session.nothing_fits(group, item.nodeid))
        return result

    return measure


def _engine(session: BenchmarkSession, item: pytest.Item, given: object) -> LLM:
    """Return an engine of a test, given as an object or as its place; fail the test if it is none."""
    __tracebackhide__ = True
    from pytest_llmgpu.engines.function import Function

    try:
        return LLM(session, item, options_of(item), "", Function(given))
    except ValueError as error:
        hidden = ". A fixture llm of the test suite hides that of pytest-llmgpu" if used(item, ["llm"]) else ""
        raise pytest.fail.Exception(printable_lines(f"{error}{hidden}"), pytrace=False) from None


def add_junit_properties(item: pytest.Item) -> None:
    """Add the figures of the cases of a test to its properties; they replace those of an earlier launch."""
    if _MEASURED not in item.stash:
        return
    from pytest_llmgpu.render.exports.tools import junit_properties

    others = [pair for pair in item.user_properties if not pair[0].startswith("llmgpu.")]
    ours = (pair for result in item.stash[_MEASURED].values() for pair in junit_properties(result))
    item.user_properties[:] = [*others, *ours]


def _find_max_batch(
    session: BenchmarkSession,
    llm: LLM,
    items: Dataset | Sequence[Item],
    failed: CaseResult,
    record: Callable[[CaseResult], None],
) -> None:
    """Measure batch sizes below one that ran out of memory, until the largest one that fits is known."""
    import msgspec

    from pytest_llmgpu.analysis import capacity

    def probe(batch_size: int) -> CaseResult | None:
        tokens = failed.case.new_tokens
        try:
            request = llm.planned(items, batch_size, tokens)
        except ValueError:
            return None  # a strategy of the user may refuse some batch sizes
        # The search is for what fits: work passes would only make it longer.
        request = session.with_reference(msgspec.structs.replace(request, work=False))
        return session.runner.run(request, record)

    assert session.recorder.report is not None, "it has the case that ran out of memory"
    cases = session.recorder.report.cases
    capacity.search([result for result in cases if result.case.series == failed.case.series], probe)


def _check_arguments(items: object, batch_size: object, new_tokens: object) -> None:
    from pytest_llmgpu.inference.tasks.protocol import Dataset, Item

    for name, value in (("batch_size", batch_size), ("new_tokens", 1 if new_tokens is None else new_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: {value!r} is not allowed: a whole number of at least 1 is needed")
    given = items.items if isinstance(items, Dataset) else items
    if not isinstance(given, Sequence) or not given:
        found = "nothing" if given in ((), []) else type(items).__name__
        raise ValueError(f"items: {found} is not allowed: a Dataset or a list of at least one Item is needed")
    for number, item in enumerate(given):
        if not isinstance(item, Item):
            raise ValueError(f"items[{number}]: {type(item).__name__} is not allowed: an Item is needed")  # noqa: TRY004 - one kind of error for every argument


def _end_test(result: CaseResult, report: str, *, nothing_fits: bool) -> None:
    """Skip a test whose case ran out of memory, fail a test whose case failed, and return if the case completed."""
    __tracebackhide__ = True
    from pytest_llmgpu.report.result import OUT_OF_MEMORY

    failures = [f"{finding.text} {finding.next_step}" for finding in result.findings if finding.severity == "failure"]
    if result.outcome in OUT_OF_MEMORY:
        reason = "not measured, because a smaller or equal batch size ran out of memory"
        if result.failure is not None:
            reason = f"out of memory: {result.failure.message}"
        if not nothing_fits:
            # A skip: the outcome was measured and is neither passed nor failed. The plugin shows it as OOM.
            pytest.skip(printable_lines(reason))
        reason += ", and no batch size of this model and strategy completed. Choose smaller batch sizes, more GPUs or"
        mark = "a smaller model, or mark the test with @pytest.mark.llmgpu(expect_oom=True)"
        failures.append(f"{result.id}: {reason} {mark}.")
    elif result.outcome != "completed" and not failures:
        failures.append(f"{result.id}: {result.outcome}: {result.failure.message if result.failure else ''}")
    if failures:
        pytest.fail(printable_lines(named("\n".join(failures), report)), pytrace=False)
