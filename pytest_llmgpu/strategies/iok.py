"""iok: DeepSpeed's fused CUDA kernels in the place of every decoder layer, on top of tensor parallelism.

DeepSpeed's own injection of LLaMA computes wrong numbers and, short of memory, answers garbage without a word. Both are
put right here, each by its narrowest means; `--llmgpu-iok-stock` and `--llmgpu-iok-min-tokens` bring them back.

Source: DeepSpeed 0.19.8, `csrc/transformer/inference`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies import divisibility
from pytest_llmgpu.strategies.deepspeed import kernels, workspace
from pytest_llmgpu.strategies.errors import WorkspaceError
from pytest_llmgpu.strategies.protocol import Loaded, Workspace

if TYPE_CHECKING:
    import torch

__all__ = ["KernelInjection"]

_LEAST_HEAD_DIM = 32
_MOST_TOKENS = 8192  # the softmax kernel's limit
_DEFAULT_MAX_OUT_TOKENS = 1024  # DeepSpeed's own
_INJECTED = "DeepSpeedGPTInference"
_MASKED = -10_000.0  # what DeepSpeed's softmax takes for minus infinity


class KernelInjection:
    """DeepSpeed kernel injection with tensor parallelism over all devices."""

    name = "iok"
    backend = "deepspeed"

    def __init__(self) -> None:
        self._min_tokens: int | None = None
        self._room = (0, 0)
        """Rows and tokens that the workspace was made for."""
        self._causal = False
        """Whether a token sees all before it, in the forward that runs."""

    def check(self, case: Case, source: ModelSource) -> None:
        """Refuse what the kernels cannot compute or would compute wrongly, and a machine that cannot build them."""
        self.check_model(case, source)
        self.check_machine(case)

    def check_model(self, case: Case, source: ModelSource) -> None:
        """Refuse a model that the kernels would compute wrongly."""
        fields = divisibility.architecture(source)
        wrong = _otherwise(fields)
        if wrong is not None:
            raise ValueError(f"--llmgpu-model={source.name}: strategy iok {wrong}")
        # Heads of keys and values are repeated to as many as those of queries before anything is shared out.
        divisibility.check_divisible(case, source, ("num_attention_heads", "intermediate_size"), least=1)
        hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
        if not isinstance(hidden, int) or not isinstance(heads, int):
            return  # its class's defaults, which are the published ones
        head_dim = fields.get("head_dim") or hidden // heads
        if head_dim * heads != hidden:
            raise ValueError(
                f"--llmgpu-model={source.name}: strategy iok needs heads that make up the hidden size, and "
                f"{heads} heads of {head_dim} are not {hidden}"
            )
        if head_dim < _LEAST_HEAD_DIM and case.dtype != "float32":
            raise ValueError(
                f"--llmgpu-dtype={case.dtype}: strategy iok needs heads of at least {_LEAST_HEAD_DIM} in half "
                f"precision, and those of {source.name} are {head_dim}"
            )

    def check_machine(self, case: Case) -> None:
        """Refuse a machine on which the kernels cannot be built or run."""
        if case.device != "cuda":
            raise ValueError("--strategy=iok: DeepSpeed's kernels run on CUDA GPUs only, and this run is on the CPU")
        kernels.check()

    def ranks(self, devices: int) -> int:
        """Return one process per device."""
        return devices

    def build(self, case: Case, say: Callable[[str], None]) -> None:  # noqa: ARG002 - one build serves every case
        """Compile DeepSpeed's op, unless it is there: each rank would wait for the first one to do it."""
        kernels.build(say)

    def open_kernels(self, case: Case) -> None:  # noqa: ARG002 - one op serves every case
        """Load DeepSpeed's op into a rank."""
        kernels.load()

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load this rank's part of every layer into DeepSpeed's kernels."""
        from pytest_llmgpu.strategies.deepspeed.engine import inject

        self.open_kernels(case)
        min_tokens = case.strategy_options.get("min_tokens")
        self._min_tokens = int(min_tokens) if min_tokens else None
        loaded = inject(
            case,
            source,
            on_layer=_expand_key_value_heads,
            replace_with_kernel_inject=True,
            # Its default answers tuples, which transformers 5 does not take apart.
            return_tuple=False,
            max_out_tokens=_DEFAULT_MAX_OUT_TOKENS,
            min_out_tokens=1,
        )
        layers = _layers(loaded)
        kept = [type(layer).__name__ for layer in layers if type(layer).__name__ != _INJECTED]
        if kept:
            raise RuntimeError(f"DeepSpeed left {len(kept)} of {len(layers)} layers as they were: {kept[0]}")
        for layer in layers:
            if not case.strategy_options.get("stock"):
                _correct_residual_add(layer)
            layer.register_forward_pre_hook(self._prepare_arguments, with_kwargs=True)
        # The kernels turn queries and keys themselves: what transformers computes for that at every forward is waste.
        decoder: Any = loaded.model.get_decoder()  # type: ignore[operator]  # a llama
        decoder.rotary_emb.forward = lambda *_, **__: None
        decoder.register_forward_pre_hook(self._see_whether_causal, with_kwargs=True)
        # Before every forward, since a user's function may run another shape than was prepared for.
        loaded.model.register_forward_pre_hook(
            lambda _model, arguments, named: self._make_room(loaded, arguments, named), with_kwargs=True
        )
        return loaded

    def prepare(self, loaded: Loaded, batch_size: int, tokens: int) -> Workspace:
        """Rebuild the workspace, which is otherwise that of the largest batch so far.

        Raises:
            oom.WorkspaceError: It cannot hold the longest sequence. DeepSpeed itself never compares the two.
        """
        from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

        if tokens > _MOST_TOKENS:
            raise ValueError(f"{tokens} tokens: DeepSpeed's kernels do sequences of up to {_MOST_TOKENS}")
        least = min(self._min_tokens or tokens, tokens)
        # With fewer than it needs allowed, all is as DeepSpeed has it by default.
        most = max(tokens, _DEFAULT_MAX_OUT_TOKENS) if least < tokens else tokens
        self._room = (batch_size, tokens)
        layers = list(_layers(loaded))
        try:
            granted = workspace.allocate(layers, batch_size, tokens, least=least, most=most)
        except RuntimeError as error:
            if "Workspace" not in str(error):
                raise
            raise WorkspaceError(tokens, workspace.grantable(layers, batch_size, tokens, most=most)) from error
        size = workspace.size_bytes(layers, batch_size, granted, most)
        BaseOp.inference_module.reset_cache()
        return Workspace(tokens_requested=tokens, tokens_granted=min(granted, tokens), workspace_bytes=size)

    def _make_room(self, loaded: Loaded, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

        given: Any = arguments[0] if arguments else named.get("input_ids", named.get("inputs_embeds"))
        rows, tokens = given.shape[:2]
        if rows > self._room[0] or tokens > self._room[1]:
            self.prepare(loaded, max(rows, self._room[0]), max(tokens, self._room[1]))
        # A single token would otherwise continue the text before it.
        BaseOp.inference_module.reset_cache()

    def _see_whether_causal(self, _decoder: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = (*arguments[1:3], named.get("attention_mask"), named.get("position_ids"))
        self._causal = all(each is None for each in given)

    def _prepare_arguments(
        self, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hand a layer what its kernel understands: a mask of its own dtype or none, nothing it would misread."""
        mask = named.get("attention_mask")
        if self._causal:
            # The kernel masks what comes later by itself. transformers 5.17 makes a mask while a CUDA graph is
            # recorded, and every layer's copy of it would be three kernels more in each replay.
            named["attention_mask"] = None
        elif mask is not None:
            # The kernel takes the mask's bytes for numbers of its own dtype, row after row.
            named["attention_mask"] = _additive(mask, layer.config.dtype)
        named["use_cache"] = False
        for name in ("position_embeddings", "past_key_values", "position_ids"):
            named.pop(name, None)
        return arguments, named


def _otherwise(fields: dict[str, Any]) -> str | None:
    """Return what of a config the kernels would leave out or compute as something else; None where they do it all."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    kind, activation = fields.get("model_type", "llama"), fields.get("hidden_act", "silu")
    biases = [name for name in ("attention_bias", "mlp_bias") if fields.get(name)]
    reasons = (
        (kind != "llama", f"injects into llama models only, this is {kind!r}"),
        (rope_type != "default", f"cannot do its rope type {rope_type!r}: the kernel knows default"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "would rotate whole heads, the model a part of each"),
        (bool(biases), f"would drop its biases ({', '.join(biases)} is true)"),
        (activation not in ("silu", "swish"), f"would compute its activation {activation!r} as silu"),
        (bool(fields.get("quantization_config")), "cannot read quantized weights"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _layers(loaded: Loaded) -> torch.nn.ModuleList:
    layers: torch.nn.ModuleList = loaded.model.get_decoder().layers  # type: ignore[operator]  # a llama
    return layers


def _expand_key_value_heads(layer: torch.nn.Module) -> None:
    """Repeat the heads of grouped-query attention, which the kernels refuse: the same numbers, with more memory."""
    import torch

    attention: Any = layer.self_attn
    groups, head_dim = attention.num_key_value_groups, attention.head_dim
    if groups == 1:
        return
    for projection in (attention.k_proj, attention.v_proj):
        heads_KDH = projection.weight.unflatten(0, (-1, head_dim))
        weight = heads_KDH.repeat_interleave(groups, dim=0).flatten(0, 1)
        projection.weight = torch.nn.Parameter(weight, requires_grad=False)
        projection.out_features = weight.shape[0]


def _correct_residual_add(layer: Any) -> None:
    """Have a layer add the attention's output to the residual once.

    The CUDA op `rms_mlp_gemm` adds it in place, and `ResidualAddOp.forward` adds it again (0.15.2, DeepSpeed's pull
    request 5490): x + 2 * attention + mlp. Remove this once a release has an op without `residual + attention_output`;
    such a one is left alone here already.
    """
    residual_add = layer.mlp.residual_add_func
    if "residual + attention_output" not in inspect.getsource(type(residual_add).forward):
        return

    def add_once(self: Any, hidden_state: torch.Tensor, residual: torch.Tensor, **_: Any) -> torch.Tensor:
        added: torch.Tensor = self.vector_add(residual, hidden_state, 1.0 / self.config.mp_size)
        return added

    residual_add.forward = MethodType(add_once, residual_add)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    import torch

    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, _MASKED)
    return mask.to(dtype).clamp(min=_MASKED).contiguous()
