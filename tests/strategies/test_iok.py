from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import tiny_model
from support.emulated_inference import EmulatedInference, free_bytes_granting
from support.emulated_iok import FREE_BYTES, EmulatedInjection, reset_deepspeed
from support.faked_runs import BENCHMARK
from support.report_factory import known, make_case
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pytest_llmgpu.inference import weights
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.ranks import memory, registered
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import decode
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.strategies.iok import KernelInjection
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import Loaded, Workspace, WorkspaceError

with pytest.MonkeyPatch.context() as _environment:
    # DeepSpeed reads it on import. Without it DeepSpeed warns that there is no GPU.
    _environment.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed", exc_type=ImportError)

_BUNDLED = {"layers": 2, "heads": 8, "hidden": 256, "element_bytes": 4}
_VOCABULARY = 896
_CASE = make_case(strategy="iok", backend="deepspeed", model="bundled", dtype="float32", device="cpu", devices=1)


@dataclasses.dataclass(frozen=True)
class _Injected:
    """A strategy with a loaded model, and the emulated kernels."""

    strategy: EmulatedInjection
    loaded: Loaded
    op: EmulatedInference

    def prepare(self, rows: int, tokens: int) -> Workspace:
        return self.strategy.prepare(self.loaded, rows, tokens)

    def logits(self, ids_BS: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return _logits(self.loaded.model, ids_BS, **named)


Inject = Callable[..., _Injected]
"""`inject(source, free_bytes=..., stock=True)`: a model in DeepSpeed's kernels, with options of the strategy."""


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch, bundled: ModelSource) -> Inject:
    """Strategy iok in this process, with the bundled model by default."""
    reset_deepspeed(monkeypatch)

    def load(source: ModelSource = bundled, free_bytes: int = 64 * 2**30, **options: bool | int | None) -> _Injected:
        monkeypatch.setenv(FREE_BYTES, str(free_bytes))
        strategy = EmulatedInjection()
        loaded = strategy.load(msgspec.structs.replace(_CASE, strategy_options=options), source)
        from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

        return _Injected(strategy, loaded, BaseOp.inference_module)

    return load


@pytest.fixture(scope="module")
def plain(bundled: ModelSource) -> torch.nn.Module:
    """The bundled model as transformers computes it."""
    return _plain(bundled)


def _plain(source: ModelSource) -> torch.nn.Module:
    return LayerParallel().load(msgspec.structs.replace(_CASE, strategy="mp"), source).model


def _ids(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, _VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def _logits(model: torch.nn.Module, ids_BS: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids_BS, **named).logits
    return logits


def _exact(found: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def _agreement(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.argmax(-1) == right.argmax(-1)).float().mean())


@pytest.mark.parametrize(
    ("fields", "stock"), [({}, False), ({"num_key_value_heads": 2}, False), ({}, True)], ids=["", "grouped", "stock"]
)
def test_kernels_answer_as_the_plain_model(inject: Inject, tmp_path: Path, fields: dict[str, int], stock: bool) -> None:
    """They differ by rounding only, with grouped heads too; `--llmgpu-iok-stock` has wrong numbers."""
    torch.manual_seed(0)
    config = tiny_model.sensitive_config(vocab_size=_VOCABULARY, **fields)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    source = tiny_model.source(config.to_dict(), tmp_path)
    injected = inject(source, stock=stock)
    injected.prepare(4, 40)
    found, right = injected.logits(_ids(4, 40)), _logits(_plain(source), _ids(4, 40))
    if stock:
        assert _agreement(found, right) < 0.5
    else:
        _exact(found, right)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_unequal_length_are_masked(inject: Inject, plain: torch.nn.Module, side: str) -> None:
    """The kernel gets a mask of its own dtype, for padding on the left and on the right."""
    injected = inject()
    injected.prepare(4, 40)
    ids_BS, mask_BS = _ids(4, 40), torch.ones(4, 40, dtype=torch.int64)
    mask_BS[1, slice(15) if side == "left" else slice(25, None)] = 0
    seen = mask_BS.bool()
    found = injected.logits(ids_BS, attention_mask=mask_BS)
    _exact(found[seen], _logits(plain, ids_BS, attention_mask=mask_BS)[seen])
    if side == "left":
        assert not torch.allclose(found[1, 15:], _logits(plain, ids_BS)[1, 15:], atol=1e-2), "the mask matters"


def test_whole_rows_need_no_mask(inject: Inject, plain: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that transformers creates by itself is not passed on: each layer would convert it."""
    injected = inject()
    injected.prepare(4, 40)
    decoder: Any = injected.loaded.model.get_decoder()  # type: ignore[operator]  # a llama
    seen: list[bool] = []
    for layer in decoder.layers:
        layer.register_forward_pre_hook(
            lambda _layer, _given, named: seen.append(named["attention_mask"] is not None), with_kwargs=True
        )
    made = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: made)
    ids_BS, mask_BS = _ids(4, 40), torch.ones(4, 40, dtype=torch.int64)
    _exact(injected.logits(ids_BS), _logits(plain, ids_BS))
    injected.logits(ids_BS, attention_mask=mask_BS)
    injected.logits(ids_BS, position_ids=torch.arange(40)[None])  # the mask of several texts in a row
    with torch.inference_mode():
        decoder(ids_BS, mask_BS)
    assert seen == [False] * 2 + [True] * 3 * 2, "a mask that is given is passed on, as a positional argument too"


def test_a_larger_batch_gets_a_larger_workspace(inject: Inject, plain: torch.nn.Module) -> None:
    """A function of the user may run a larger shape than the prepared one; one token starts a new text."""
    injected = inject()
    injected.prepare(2, 20)
    for seed, (rows, tokens) in enumerate(((2, 20), (2, 1), (8, 20), (8, 50), (1, 50))):
        ids_BS = _ids(rows, tokens, seed)
        _exact(injected.logits(ids_BS), _logits(plain, ids_BS))
    assert injected.op.batch_size == 8


def test_a_smaller_batch_gets_a_smaller_workspace(inject: Inject, plain: torch.nn.Module) -> None:
    """A case takes the same memory alone and after a larger one: the workspace is rebuilt and its size reported."""
    injected = inject()
    sizes = []
    for rows in (4, 32, 4):
        workspace = injected.prepare(rows, 70)
        assert (workspace.tokens_requested, workspace.tokens_granted) == (70, 70)
        assert workspace.workspace_bytes == injected.op.workspace_bytes
        _exact(injected.logits(_ids(rows, 70)), _logits(plain, _ids(rows, 70)))
        sizes.append(workspace.workspace_bytes)
    assert sizes[0] == sizes[2] == sizes[1] // 8


@pytest.mark.parametrize(
    ("free_bytes", "capacity_bytes", "granted"),
    [
        (free_bytes_granting(23, **_BUNDLED, batch=32, max_out=70), None, 23),
        # DeepSpeed has two errors where it can hold nothing: less than its reserve, and malloc.
        (100 * 2**20, None, 0),
        (2**30, 2**20, 0),
    ],
)
def test_too_few_tokens_are_out_of_memory(
    inject: Inject, free_bytes: int, capacity_bytes: int | None, granted: int
) -> None:
    """By default a workspace that cannot hold the longest sequence is an error with both numbers of tokens."""
    injected = inject(free_bytes=free_bytes)
    injected.op.capacity_bytes = capacity_bytes
    message = f"holds {granted} tokens, but the longest sequence has 70"
    with pytest.raises(WorkspaceError, match=message) as caught:
        injected.prepare(32, 70)
    found = known(memory.decide_out_of_memory(caught.value))
    assert (found.tokens_requested, found.tokens_granted) == (70, granted)
    if granted:
        assert injected.prepare(8, 70).tokens_granted == 70, "a smaller batch size fits in the same process"


def test_allowing_too_few_tokens_gives_wrong_numbers(inject: Inject, plain: torch.nn.Module) -> None:
    """`--llmgpu-iok-min-tokens=1` is DeepSpeed's default: tokens that do not fit are garbage, without an error."""
    injected = inject(free_bytes=free_bytes_granting(23, **_BUNDLED, batch=32, max_out=1024), min_tokens=1)
    workspace = injected.prepare(32, 70)
    assert (workspace.tokens_requested, workspace.tokens_granted) == (70, 23)
    assert workspace.workspace_bytes == injected.op.workspace_bytes
    fits, too_long = _ids(32, 23), _ids(32, 70)
    _exact(injected.logits(fits), _logits(plain, fits))
    found = injected.logits(too_long)
    assert found.isfinite().all()
    assert _agreement(found[:, 23:], _logits(plain, too_long)[:, 23:]) < 0.6


def test_a_layer_that_was_not_replaced_is_an_error(inject: Inject, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed keeps a layer of an unknown class without an error."""
    skeleton = weights.skeleton

    def with_another_layer(source: ModelSource, dtype: torch.dtype) -> Any:
        model: Any = skeleton(source, dtype)
        model.model.layers[1].__class__ = type("OtherLayer", (LlamaDecoderLayer,), {})
        return model

    monkeypatch.setattr(weights, "skeleton", with_another_layer)
    with pytest.raises(RuntimeError, match=r"did not replace 1 of 2 layers: OtherLayer"):
        inject()


@pytest.mark.parametrize(
    ("fields", "dtype", "message"),
    [
        ({"num_attention_heads": 6}, "float32", "6 attention heads .* 1, 2, 3, 6$"),
        ({"intermediate_size": 6}, "float32", "6 columns .* 1, 2, 3, 6$"),
        ({"model_type": "mistral"}, "float32", "'mistral'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "float32", "rope type .* 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, "float32", "rope type .* 'linear'"),
        ({"attention_bias": True}, "float32", "attention_bias is true"),
        ({"hidden_act": "gelu"}, "float32", "'gelu' as silu"),
        ({"quantization_config": {"bits": 4}}, "float32", "quantized weights"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "float32", "rotate whole heads"),
        ({"mlp_bias": True}, "float32", "mlp_bias is true"),
        ({"hidden_size": 128, "num_attention_heads": 4, "head_dim": 16}, "float32", "4 heads of 16 are not 128"),
        ({"hidden_size": 128, "num_attention_heads": 8}, "float16", "--llmgpu-dtype=float16: .* 32 .* has 16"),
    ],
)
def test_unsupported_models_are_refused(bundled: ModelSource, fields: dict[str, Any], dtype: str, message: str) -> None:
    """The check runs before the model is loaded; the message has the value."""
    source = msgspec.structs.replace(bundled, config=fields)
    with pytest.raises(ValueError, match=message):
        KernelInjection().check_model(msgspec.structs.replace(_CASE, dtype=dtype, devices=4), source)


@pytest.mark.slow
def test_sequences_beyond_the_softmax_kernel_are_refused(inject: Inject) -> None:
    """The kernel would ignore more tokens: they are refused before a workspace is allocated."""
    injected = inject()
    with pytest.raises(ValueError, match=r"^8193 tokens: .* 8192 tokens$"):
        injected.prepare(1, 8193)
    assert injected.prepare(1, 8192).tokens_granted == 8192


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_two_ranks_answer_as_one(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes hold half of every layer each, and give the log-likelihoods of the plain model."""
    monkeypatch.setitem(registered.BUILT_IN, "iok", "support.emulated_iok:EmulatedInjection")
    tiny_model.write_model(tmp_path / "tiny")
    tiny_model.write_dataset(pytester.path / "items.jsonl")
    pytester.makepyfile(test_it=BENCHMARK)
    # On GPUs the ranks have different free memory; here both lack memory at the larger batch size.
    tiny = {"layers": 1, "heads": 2, "hidden": 32, "element_bytes": 4, "tp": 2}
    monkeypatch.setenv(FREE_BYTES, str(free_bytes_granting(20, **tiny, batch=24, max_out=40)))
    files = (f"--llmgpu-model={tmp_path / 'tiny'}", "--llmgpu-dataset=items.jsonl", "--llmgpu-dtype=float32")

    def measure(*arguments: str) -> list[CaseResult]:
        pytester.runpytest_inprocess("--llmgpu-device=cpu", *files, *arguments)
        return file.load(pytester.path / ".llmgpu" / "last.json").cases

    fits, too_large = measure("--strategy=iok", "--llmgpu-devices=2", "--llmgpu-batch-sizes=4,24")
    (plain,) = measure("--strategy=mp", "--llmgpu-batch-sizes=4")
    assert (fits.outcome, too_large.outcome) == ("completed", "oom")
    found, right = (decode(known(one.launches[0].accuracy).loglikelihoods) for one in (fits, plain))
    assert found == pytest.approx(right, abs=1e-4)
    failure = known(too_large.failure)
    assert known(failure.tokens_requested) > known(failure.tokens_granted) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_the_stock_binding_fails_a_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accuracy stays 1, but the log-likelihoods differ; the finding does not need a run of mp."""
    monkeypatch.setitem(registered.BUILT_IN, "iok", "support.emulated_iok:EmulatedInjection")
    pytester.makepyfile(test_it=BENCHMARK)
    result = pytester.runpytest_inprocess(
        "--strategy=iok", "--llmgpu-iok-stock", "--llmgpu-limit=10", "--llmgpu-batch-sizes=8"
    )
    case = file.load(pytester.path / ".llmgpu" / "last.json").cases[-1]
    assert case.acc_norm == 1.0
    assert [(finding.code, finding.severity) for finding in case.findings][:1] == [("wrong-answers", "failure")]
    assert result.ret == pytest.ExitCode.TESTS_FAILED
