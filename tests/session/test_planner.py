from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import tiny_model

from pytest_llmgpu import processes, strategies
from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.models import ModelFacts
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Gpu
from pytest_llmgpu.session.planner import Planner
from pytest_llmgpu.strategies.iok import KernelInjection
from pytest_llmgpu.strategies.mp import LayerParallel

_GIB = 2**30
_GPUS = [Gpu(index=number, uuid=f"GPU-{number}", name="H", memory_bytes=32 * _GIB) for number in (0, 1)]


class Mine(LayerParallel):
    """A user's strategy whose name is the first word of an option."""

    name = "load"


class AlsoMine(Mine):
    """Another strategy with the same name."""


class Unnamed(LayerParallel):
    """A strategy without a name of its own."""


class Tensor(LayerParallel):
    """A strategy with the options of tp."""

    name = "tp"
    backend = "nowhere"


class Ranks(LayerParallel):
    """A strategy with one rank for each device."""

    name = "tensor"

    def ranks(self, devices: int) -> int:
        """Return one for each."""
        return devices


class Injection(LayerParallel):
    """A strategy with the options of iok."""

    name = "iok"
    backend = "accelerate"


_KNOWN = {
    **strategies.BUILT_IN,
    "load": f"{__name__}:Mine",
    "wrong": f"{__name__}:AlsoMine",
    "tp": f"{__name__}:Tensor",
    "iok": f"{__name__}:Injection",
}


@pytest.fixture
def choose(model: Path, tmp_path: Path) -> Callable[..., Options]:
    """Options for the tiny model and its dataset."""
    tiny_model.write_dataset(tmp_path / "items.jsonl")

    def options(**fields: object) -> Options:
        chosen: dict[str, object] = {"model": str(model), "dataset": "items.jsonl", **fields}
        return Options(**chosen)  # type: ignore[arg-type]  # any mix of fields

    return options


def _planner(rootdir: Path, device: str = "cuda", devices: int = 2) -> Planner:
    gpus = _GPUS[:devices] if device == "cuda" else []
    machine = Machine(device=device, devices=len(gpus) or 1, gpus=gpus, facts=TorchFacts(version="2"))
    return Planner(rootdir, lambda *_: machine, _KNOWN)


def test_a_case_holds_what_the_options_mean_on_this_machine(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """The case has the resolved values of `auto` and of defaults, so that equal cases are the same measurement."""
    request = _planner(tmp_path).request(choose(), "mp", 4)
    case = request.case
    assert (case.strategy, case.backend, case.batch_size) == ("mp", "accelerate", 4)
    assert (case.device, case.devices, case.dtype) == ("cuda", 2, "float16")
    assert (case.model, case.dataset, case.limit) == ("tiny", "items.jsonl", None)
    assert case.revision is not None
    assert len(request.items) == tiny_model.ITEMS
    assert _planner(tmp_path, "cpu").request(choose(), "mp", 4).case.dtype == "float32"


@pytest.mark.parametrize(
    ("strategy", "changed", "message"),
    [
        ("tensor", {"nodes": [0]}, r"WORLD_SIZE=1, but tensor on 2 devices needs 2 processes"),
        ("mp", {"nodes": [0, 1]}, r"--llmgpu-devices=2: mp runs in one process, which can use 1 GPU of node 0"),
        ("mp", {"nodes": [0, 0], "one_gpu_each": True}, r"--llmgpu-devices=2: mp .* 1 GPU of node 0: pass at most 1"),
    ],
)
def test_a_strategy_that_the_started_processes_cannot_run_is_refused(
    tmp_path: Path, choose: Callable[..., Options], strategy: str, changed: dict[str, object], message: str
) -> None:
    """The message has the number of processes or GPUs."""
    machine = Machine(device="cuda", devices=2, gpus=_GPUS, facts=TorchFacts(version="2"), **changed)  # type: ignore[arg-type]
    known = {**_KNOWN, "tensor": f"{__name__}:Ranks"}
    with pytest.raises(ValueError, match=message):
        Planner(tmp_path, lambda *_: machine, known).request(choose(), strategy, 4)


def test_a_case_has_its_launcher_and_nodes(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """Runs of other launchers or other numbers of nodes are other measurements."""
    machine = Machine(device="cuda", devices=2, gpus=_GPUS, facts=TorchFacts(version="2"), nodes=[0, 1])
    planner = Planner(tmp_path, lambda *_: machine, {**_KNOWN, "tensor": f"{__name__}:Ranks"})
    case = planner.request(choose(launcher="env"), "tensor", 4).case
    assert (case.launcher, case.nodes, case.devices) == ("env", 2, 2)


def test_processes_that_no_strategy_takes_are_refused(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """On a CPU devices are processes: mp uses one, and alone it refuses more."""
    machine = Machine(device="cpu", devices=2, gpus=[], facts=TorchFacts(version="2"))
    known = {**_KNOWN, "tp": strategies.BUILT_IN["tp"]}
    planner = Planner(tmp_path, lambda *_: machine, known)
    together = choose(strategy=("mp", "tp"))
    assert [planner.request(together, name, 4).case.devices for name in ("mp", "tp")] == [1, 2]
    with pytest.raises(
        ValueError, match="--llmgpu-devices=2: on a CPU devices are processes, and mp has 1; allowed: 1"
    ):
        planner.request(choose(strategy=("mp",)), "mp", 4)


def test_the_first_token_is_part_of_the_case_where_it_is_chosen(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """`auto` leaves the choice to the tokenizer, as reports before this option did."""
    planner = _planner(tmp_path)
    cases = [planner.request(choose(add_bos=value), "mp", 4).case for value in ("auto", "yes", "no")]
    assert [case.add_bos for case in cases] == [None, True, False]
    assert len({case.key for case in cases}) == 3
    assert cases[0].key == planner.request(choose(), "mp", 4).case.key


def test_quantised_weights_without_their_library_are_refused(
    tmp_path: Path, model: Path, choose: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config alone suffices: no weights are looked for, and random weights need no library."""
    config = json.loads((model / "config.json").read_text())
    quantised = tmp_path / "quantised"
    shutil.copytree(model, quantised, ignore=shutil.ignore_patterns("*.safetensors"))
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    monkeypatch.setattr(processes, "ask", lambda *_, **__: '{"has_plan": true, "refusal": "it needs gptqmodel"}')
    planner = _planner(tmp_path, "cpu")
    with pytest.raises(ValueError, match=r"^--llmgpu-model=quantised: transformers cannot load it: it needs gptqmodel"):
        planner.request(choose(model=str(quantised)), "mp", 4)
    assert planner.request(choose(model=str(quantised), load_format="dummy"), "mp", 4).case.load_format == "dummy"


@pytest.mark.parametrize("limit", [None, 4])
def test_the_first_items_of_the_dataset_are_a_limit_of_it(
    tmp_path: Path, choose: Callable[..., Options], limit: int | None
) -> None:
    """`hellaswag[:2]` is the measurement of --llmgpu-limit=2, so that it has the same baseline."""
    planner, options = _planner(tmp_path), choose(limit=limit)
    dataset = planner.dataset(options)
    of_limit = planner.request(choose(limit=2), "mp", 4).case
    for first in (dataset[:2], list(dataset)[:2]):
        assert planner.request(options, "mp", 4, first).case == of_limit
    whole = planner.request(options, "mp", 4).case
    assert planner.request(options, "mp", 4, dataset[:]).case == whole
    assert (whole.limit, of_limit.limit, of_limit.dataset) == (limit, 2, "items.jsonl")


def test_a_dataset_with_other_prompts_is_noted(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """Items with a context in one text have other prompts than lm-evaluation-harness makes of two."""
    planner, options = _planner(tmp_path), choose()
    assert planner.notes == []
    planner.dataset(options)
    (note,) = planner.notes
    assert note.startswith("note: items.jsonl: ")
    assert "lm-evaluation-harness" in note
    planner.dataset(choose(dataset="bundled"))
    assert len(planner.notes) == 1


def test_items_of_a_tests_own_are_another_measurement(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """Items of a test have their own hash and no limit."""
    planner, options = _planner(tmp_path), choose(limit=4)
    chosen = planner.request(options, "mp", 4)
    own = planner.request(options, "mp", 4, planner.dataset(options)[1:3])
    assert (chosen.case.dataset, chosen.case.limit) == ("items.jsonl", 4)
    assert (own.case.dataset, own.case.limit, len(own.items)) == ("custom", None, 2)
    assert own.case.dataset_sha256 != chosen.case.dataset_sha256
    assert own.case.loading == chosen.case.loading, "the same loaded model serves both"
    assert own.case.series != chosen.case.series


@pytest.mark.parametrize(
    ("cap", "used", "complaint"),
    [
        (40 * _GIB, 0, r"--llmgpu-gpu-memory=40.00 GiB: .* 32.00 GiB of GPU 0"),
        (8 * _GIB, 9 * _GIB, r"--llmgpu-gpu-memory=8.00 GiB: .* 9.00 GiB of GPU 1"),
    ],
)
def test_an_impossible_cap_is_refused(
    tmp_path: Path,
    choose: Callable[..., Options],
    monkeypatch: pytest.MonkeyPatch,
    cap: int,
    used: int,
    complaint: str,
) -> None:
    """A cap above the memory of the device or below the memory in use is refused before a model loads."""
    monkeypatch.setattr(nvml, "used_bytes", lambda _: {"GPU-0": 0, "GPU-1": used})
    with pytest.raises(ValueError, match=complaint):
        _planner(tmp_path).request(choose(gpu_memory=cap), "mp", 4)


def test_a_cap_is_compared_with_memory_of_other_programs_only(
    tmp_path: Path, choose: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of our own ranks does not refuse the next case."""
    used = {"GPU-0": 0, "GPU-1": 0}
    monkeypatch.setattr(nvml, "used_bytes", lambda _: used)
    planner, options = _planner(tmp_path), choose(gpu_memory=8 * _GIB)
    planner.request(options, "mp", 4)
    used["GPU-1"] = 32 * _GIB
    assert planner.request(options, "mp", 8).case.gpu_memory_bytes == 8 * _GIB


def test_machine_and_dataset_are_looked_up_once(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """All batch sizes share one probe of torch and one read of the file."""
    asked: list[tuple[str, int | None]] = []
    machine = Machine(device="cpu", devices=1, gpus=[], facts=TorchFacts(version="2"))

    def find(device: str, devices: int | None) -> Machine:
        asked.append((device, devices))
        return machine

    planner = Planner(tmp_path, find, _KNOWN)
    first = planner.request(choose(), "mp", 1)
    second = planner.request(choose(), "mp", 2)
    assert asked == [("auto", None)]
    assert first.items is second.items


def test_a_strategy_without_its_library_is_refused(
    tmp_path: Path, choose: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ValueError, match=r"--strategy=mp needs accelerate: pip install 'pytest-llmgpu\[transformers\]'$"
    ):
        _planner(tmp_path).request(choose(), "mp", 4)
    # The extra installs the library of the chosen backend in the right version.
    with pytest.raises(
        ValueError, match=r"--llmgpu-tp-backend=deepspeed needs deepspeed: pip install 'pytest-llmgpu\[deepspeed\]'$"
    ):
        _planner(tmp_path).request(choose(tp_backend="deepspeed"), "tp", 4)


@pytest.mark.parametrize(
    ("strategy", "fields", "backend", "own"),
    [
        ("mp", {}, "accelerate", {}),
        ("tp", {"iok_stock": True}, "transformers", {}),
        ("tp", {"tp_backend": "torch"}, "torch", {}),
        ("iok", {}, "accelerate", {"stock": False, "min_tokens": None}),
        ("iok", {"iok_stock": True, "iok_min_tokens": 1}, "accelerate", {"stock": True, "min_tokens": 1}),
        ("load", {}, "accelerate", {}),
    ],
)
def test_a_case_holds_the_options_of_its_strategy_alone(
    tmp_path: Path,
    choose: Callable[..., Options],
    strategy: str,
    fields: dict[str, object],
    backend: str,
    own: dict[str, object],
) -> None:
    """Options of other strategies are not part of the case; a chosen library is the backend."""
    case = _planner(tmp_path).request(choose(**fields), strategy, 4).case
    assert (case.strategy, case.backend, case.strategy_options) == (strategy, backend, own)


def test_scoring_like_the_harness_is_another_measurement(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """It keeps a KV cache, so that CUDA graphs are refused."""
    lean, harness = (
        _planner(tmp_path, devices=1).request(choose(scoring=way), "mp", 4).case for way in ("lean", "harness")
    )
    assert (lean.scoring, harness.scoring) == ("lean", "harness")
    assert lean.key != harness.key
    with pytest.raises(ValueError, match="--llmgpu-cuda-graphs=on: --llmgpu-scoring=harness keeps a KV cache"):
        _planner(tmp_path, devices=1).request(choose(scoring="harness", cuda_graphs="on"), "mp", 4)


def test_cuda_graphs_are_another_measurement(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """The case has the choice; only `on` decides the execution before the run."""
    cases = {
        choice: _planner(tmp_path, devices=1).request(choose(cuda_graphs=choice), "mp", 4).case
        for choice in ("auto", "on", "off")
    }
    assert {choice: (case.cuda_graphs, case.execution) for choice, case in cases.items()} == {
        "auto": ("auto", "eager"),
        "on": ("on", "cuda_graphs"),
        "off": ("off", "eager"),
    }
    assert len({case.key for case in cases.values()}) == 3
    with pytest.raises(ValueError, match="--llmgpu-cuda-graphs=on: CUDA graphs need a GPU, the run is on the CPU"):
        _planner(tmp_path, "cpu").request(choose(cuda_graphs="on"), "mp", 4)


def test_work_passes_are_no_part_of_a_case(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """They follow the measurement and leave it as it is; the option switches them off."""
    requests = [_planner(tmp_path).request(choose(**fields), "mp", 4) for fields in ({}, {"work": "off"})]
    assert [request.work for request in requests] == [True, False]
    assert requests[0].case == requests[1].case


def test_a_case_has_the_name_that_its_strategy_has(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """A strategy chosen by name or by place is the same measurement."""
    planner = _planner(tmp_path)
    by_name = planner.request(choose(), "load", 4)
    by_place = planner.request(choose(), f"{__name__}:Mine", 4)
    assert by_name.case.id == "load-bs4"
    assert by_name.case == by_place.case
    assert by_name.strategy == by_place.strategy == f"{__name__}:Mine"


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ("wrong", f"{__name__}:AlsoMine is registered as 'wrong', but its name is 'load'$"),
        (
            f"{__name__}:AlsoMine",
            f"{__name__}:AlsoMine and {__name__}:Mine are both named 'load'; give each a",
        ),
        (
            f"{__name__}:Unnamed",
            f"{__name__}:Unnamed and pytest_llmgpu.strategies.mp:LayerParallel are both named",
        ),
        (f"{__name__}:Missing", f"strategy {__name__}:Missing cannot be imported: AttributeError: "),
    ],
)
def test_a_name_stands_for_one_strategy(
    tmp_path: Path, choose: Callable[..., Options], wanted: str, complaint: str
) -> None:
    """Measurements of two strategies under one name would be compared."""
    with pytest.raises(ValueError, match=f"^--strategy: {complaint}"):
        _planner(tmp_path).request(choose(), wanted, 4)


def test_two_unregistered_strategies_of_one_name_are_refused(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """The message has the places of both."""
    machine = Machine(device="cpu", devices=1, gpus=[], facts=TorchFacts(version="2"))
    planner = Planner(tmp_path, lambda *_: machine, {})
    planner.request(choose(), f"{__name__}:Mine", 4)
    with pytest.raises(ValueError, match=rf"^--strategy: {__name__}:AlsoMine and {__name__}:Mine are both named"):
        planner.request(choose(), f"{__name__}:AlsoMine", 4)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model": "lama-7b"}, r"--llmgpu-model=lama-7b: model 'lama-7b' is unknown"),
        ({"dataset": "nowhere.jsonl"}, r"--llmgpu-dataset=nowhere\.jsonl: dataset 'nowhere\.jsonl' is unknown"),
        ({"tokenizer": "nowhere"}, r"--llmgpu-tokenizer=nowhere: model 'nowhere' is unknown"),
        ({"tokenizer": "."}, r"--llmgpu-tokenizer=\.: .* has no tokenizer"),
        ({"model": "lama-7b", "tokenizer": "."}, r"--llmgpu-model=lama-7b: "),
    ],
)
def test_a_value_that_names_nothing_is_refused_with_its_flag(
    tmp_path: Path,
    choose: Callable[..., Options],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object],
    complaint: str,
) -> None:
    """The message begins with the flag."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{complaint}"):
        _planner(tmp_path).request(choose(**fields), "mp", 4)


def test_an_unknown_strategy_is_refused_with_its_flag(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """The message begins with the flag."""
    with pytest.raises(ValueError, match=r"^--strategy: 'pp' is no strategy: allowed are "):
        _planner(tmp_path).request(choose(), "pp", 4)


def test_a_batch_size_above_the_number_of_sequences_is_refused(tmp_path: Path, choose: Callable[..., Options]) -> None:
    """The message names the flag, unless the test itself chose the batch size."""
    planner, options = _planner(tmp_path), choose(limit=2)
    with pytest.raises(
        ValueError, match=r"^batch size 9 is more .*--llmgpu-limit=2\): pass --llmgpu-batch-sizes with at"
    ):
        planner.request(options, "mp", 9)
    with pytest.raises(ValueError, match=r"^batch size 9 is more than the 8 sequences of \S+ \(--llmgpu-limit=2\)$"):
        planner.request(options, "mp", 9, planner.dataset(options))


def test_prompts_are_continued_and_other_items_where_the_option_asks(
    tmp_path: Path, choose: Callable[..., Options]
) -> None:
    """The fixture or the option decides; each item is one sequence, and the same loaded model serves both workloads."""
    planner = _planner(tmp_path)
    scored = planner.request(choose(), "mp", 4).case
    assert (scored.workload, scored.prompt_tokens, scored.new_tokens) == ("score", None, None)
    prompts = planner.request(choose(), "mp", 4, task="prompts").case
    assert (prompts.id, prompts.prompt_tokens, prompts.new_tokens) == ("mp-generate-bs4", 96, 64)
    contexts = planner.request(choose(workload="generate", prompt_tokens=8), "mp", 4).case
    assert (contexts.id, contexts.task, contexts.prompt_tokens) == ("mp-generate-bs4", "hellaswag", 8)
    own = planner.request(choose(new_tokens=5), "mp", 4, planner.dataset(choose(), "prompts"), new_tokens=7).case
    assert own.new_tokens == 7, "the argument of measure comes first"
    assert len({case.series for case in (scored, prompts, contexts, own)}) == 4
    assert len({case.loading for case in (scored, prompts, contexts, own)}) == 1
    with pytest.raises(ValueError, match=rf"batch size 7 is more than the {tiny_model.ITEMS} sequences"):
        planner.request(choose(), "mp", 7, task="prompts")


@pytest.mark.parametrize(
    ("fields", "task", "new_tokens", "complaint"),
    [
        ({"workload": "score"}, "prompts", None, "dataset .*: prompts have no endings to score"),
        ({"scoring": "harness"}, "prompts", None, "--llmgpu-scoring=harness: this is an option of workload score"),
        ({}, "hellaswag", 5, "new_tokens=5: this is an argument of workload generate"),
        ({"prompt_tokens": 250}, "prompts", None, "its context has 256 tokens, but 250 of a prompt and 64 new ones"),
    ],
)
def test_what_a_workload_does_not_have_is_refused(
    tmp_path: Path,
    choose: Callable[..., Options],
    fields: dict[str, object],
    task: str,
    new_tokens: int | None,
    complaint: str,
) -> None:
    """The message names the value, its source and what is needed, before a process starts."""
    planner, options = _planner(tmp_path), choose(**fields)
    with pytest.raises(ValueError, match=complaint):
        planner.request(options, "mp", 1, planner.dataset(options, task), new_tokens=new_tokens)


def test_a_file_of_prompts_serves_a_test_that_scores_where_the_option_asks_to_generate(
    tmp_path: Path, choose: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same test continues contexts or prompts; a model without a KV cache is refused before it is loaded."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "One, two,"}\n')
    planner = _planner(tmp_path)
    case = planner.request(choose(dataset="prompts.jsonl", workload="generate"), "mp", 1).case
    assert (case.id, case.task) == ("mp-generate-bs1", "hellaswag")
    with pytest.raises(
        ValueError, match=r"^dataset prompts\.jsonl: prompts have no endings .* --llmgpu-workload=generate$"
    ):
        planner.request(choose(dataset="prompts.jsonl"), "mp", 1)
    monkeypatch.setattr(models, "facts", lambda _: ModelFacts(has_plan=True, without="past_key_values"))
    with pytest.raises(ValueError, match=r"^--llmgpu-model=tiny takes no past_key_values, .* is not possible$"):
        planner.request(choose(workload="generate"), "mp", 1)


def test_the_attention_is_part_of_the_case_where_transformers_would_not_choose_it(
    tmp_path: Path, choose: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old baselines still match; the model that is loaded has the attention of the case."""
    planner = _planner(tmp_path)
    plain, sdpa, eager = (planner.request(choose(attention=value), "mp", 4) for value in (None, "sdpa", "eager"))
    assert [one.case.attention for one in (plain, sdpa, eager)] == [None, None, "eager"]
    assert plain.case.key == sdpa.case.key != eager.case.key
    assert plain.case.loading != eager.case.loading
    assert eager.source.attention == "eager"
    monkeypatch.setattr(models, "facts", lambda _: ModelFacts(has_plan=True, has_sdpa=False))
    other = _planner(tmp_path)
    assert other.request(choose(attention="eager"), "mp", 4).case.attention is None
    with pytest.raises(ValueError, match=r"^--llmgpu-attention=sdpa: .* of tiny \(llama\): allowed: eager$"):
        other.request(choose(attention="sdpa"), "mp", 4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_kernels_with_an_attention_of_their_own_refuse_the_option(
    tmp_path: Path, choose: Callable[..., Options], monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """It would have no effect."""
    monkeypatch.setattr(KernelInjection, "backend", "accelerate")  # an installed library
    monkeypatch.setitem(_KNOWN, "iok", strategies.BUILT_IN["iok"])
    with pytest.raises(ValueError, match=f"^--llmgpu-attention={attention}: the kernels of strategy iok"):
        _planner(tmp_path).request(choose(attention=attention), "iok", 4)
