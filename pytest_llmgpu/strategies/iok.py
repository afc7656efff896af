"""iok: DeepSpeed's fused CUDA kernels replace every decoder layer, on top of tensor parallelism.

DeepSpeed's injection of LLaMA computes wrong numbers, and returns garbage without an error if memory is short. This
module corrects both with the smallest change; `--llmgpu-iok-stock` and `--llmgpu-iok-min-tokens` turn that off.

Source: DeepSpeed 0.19.8, `csrc/transformer/inference`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference.generation import KernelCache
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies.deepspeed import engine, kernels
from pytest_llmgpu.strategies.protocol import Loaded, Strategy, Workspace, WorkspaceError
from pytest_llmgpu.strategies.tp import check_divisible

if TYPE_CHECKING:
    import torch

_LEAST_HEAD_DIM = 32
_MOST_TOKENS = 8192  # The limit of the softmax kernel.
_DEFAULT_MAX_OUT_TOKENS = 1024  # DeepSpeed's default.
_INJECTED = "DeepSpeedGPTInference"
_MASKED = -10_000.0  # DeepSpeed's softmax uses this value as minus infinity.


class KernelInjection(Strategy):
    """DeepSpeed kernel injection with tensor parallelism over all devices."""

    name = "iok"
    backend = "deepspeed"
    own_attention = True
    """The attention of transformers is not used (an option of transformers' attention is refused)."""

    def __init__(self) -> None:
        self._min_tokens: int | None = None
        self._allocated = (0, 0)
        """The workspace was allocated for this many rows and tokens."""
        self._causal = False
        """Each token of the running forward attends to all tokens before it, and to no mask."""

    def check(self, case: Case, source: ModelSource) -> None:
        """Refuse a model that the kernels cannot compute, and a machine that cannot build them."""
        self.check_model(case, source)
        self.check_machine(case)

    def check_model(self, case: Case, source: ModelSource) -> None:
        """Refuse a model that the kernels would compute wrongly."""
        fields = source.decoder
        problem = _unsupported(fields)
        if problem is not None:
            raise ValueError(f"--llmgpu-model={source.name}: strategy iok {problem}")
        # Key and value heads are repeated to the number of query heads before they are split.
        check_divisible(case, source, ("num_attention_heads", "intermediate_size"), least=1)
        hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
        if not isinstance(hidden, int) or not isinstance(heads, int):
            return  # The defaults of the model class are those of the published models.
        head_dim = fields.get("head_dim") or hidden // heads
        if head_dim * heads != hidden:
            needed = "strategy iok needs heads that add up to the hidden size"
            found = f"{heads} heads of {head_dim} are not {hidden}"
            raise ValueError(f"--llmgpu-model={source.name}: {needed}, but {found}: use another strategy")
        if head_dim < _LEAST_HEAD_DIM and case.dtype != "float32":
            needed = f"a head dimension of at least {_LEAST_HEAD_DIM} in half precision"
            remedy = f"{source.name} has {head_dim}: use --llmgpu-dtype=float32"
            raise ValueError(f"--llmgpu-dtype={case.dtype}: strategy iok needs {needed}, but {remedy}")

    def check_machine(self, case: Case) -> None:
        """Refuse a machine on which the kernels cannot be built or run."""
        if case.device != "cuda":
            raise ValueError("--strategy=iok: DeepSpeed's kernels run on CUDA GPUs only, but this run is on the CPU")
        kernels.check()

    def ranks(self, devices: int) -> int:
        """Return one process per device."""
        return devices

    def build(self, case: Case, say: Callable[[str], None]) -> None:  # noqa: ARG002 - one build serves every case
        """Compile DeepSpeed's op if necessary: the ranks would wait for the first one that compiles it."""
        kernels.build(say)

    def open_kernels(self, case: Case) -> None:  # noqa: ARG002 - one op serves every case
        """Load DeepSpeed's op into a rank."""
        kernels.load()

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the part of every layer that belongs to this rank into DeepSpeed's kernels."""
        self.open_kernels(case)
        min_tokens = case.strategy_options.get("min_tokens")
        self._min_tokens = int(min_tokens) if min_tokens else None
        loaded = engine.inject(
            case,
            source,
            on_layer=_expand_key_value_heads,
            replace_with_kernel_inject=True,
            # By default the layers return tuples, which transformers 5 does not unpack.
            return_tuple=False,
            max_out_tokens=_DEFAULT_MAX_OUT_TOKENS,
            min_out_tokens=1,
        )
        layers = _layers(loaded)
        kept = [type(layer).__name__ for layer in layers if type(layer).__name__ != _INJECTED]
        if kept:
            raise RuntimeError(f"DeepSpeed did not replace {len(kept)} of {len(layers)} layers: {kept[0]}")
        for layer in layers:
            if not case.strategy_options.get("stock"):
                _correct_residual_add(layer)
            layer.register_forward_pre_hook(self._prepare_arguments, with_kwargs=True)
        # The kernels rotate queries and keys themselves, so that the rotary tables of transformers are not needed.
        decoder: Any = loaded.model.get_decoder()  # type: ignore[operator]  # a llama
        decoder.rotary_emb.forward = lambda *_, **__: None
        decoder.register_forward_pre_hook(self._note_causal, with_kwargs=True)
        # Before every forward: a function of the user may run a larger shape than `prepare` was called for.
        loaded.model.register_forward_pre_hook(
            lambda _model, arguments, named: self._ensure_workspace(loaded, arguments, named), with_kwargs=True
        )
        return loaded

    def prepare(self, loaded: Loaded, batch_size: int, tokens: int) -> Workspace:
        """Rebuild the workspace: DeepSpeed would keep the one of the largest batch.

        WorkspaceError if it cannot hold the longest sequence: DeepSpeed itself does not compare the two.
        """
        from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

        if tokens > _MOST_TOKENS:
            raise ValueError(f"{tokens} tokens: DeepSpeed's kernels compute sequences of at most {_MOST_TOKENS} tokens")
        least = min(self._min_tokens or tokens, tokens)
        # If fewer tokens than necessary are allowed, the workspace has the default size of DeepSpeed.
        most = max(tokens, _DEFAULT_MAX_OUT_TOKENS) if least < tokens else tokens
        self._allocated = (batch_size, tokens)
        layers: list[Any] = list(_layers(loaded))
        try:
            granted = engine.allocate_workspace(layers, batch_size, tokens, least=least, most=most)
        except RuntimeError as error:
            if "Workspace" not in str(error):
                raise
            granted = 0
            with contextlib.suppress(RuntimeError):
                granted = min(engine.allocate_workspace(layers, batch_size, tokens, least=1, most=most), tokens - 1)
                layers[0].workspace.release_workspace()
            raise WorkspaceError(tokens, granted) from error
        cache_bytes, other_bytes = engine.workspace_bytes(layers, batch_size, granted, most)
        BaseOp.inference_module.reset_cache()
        return Workspace(
            tokens_requested=tokens,
            tokens_granted=min(granted, tokens),
            workspace_bytes=cache_bytes + other_bytes,
            kv_cache_bytes=cache_bytes,
        )

    def _ensure_workspace(self, loaded: Loaded, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

        cache = named.get("past_key_values")
        if isinstance(cache, KernelCache) and cache.length and not cache.prefilling:
            return  # A decode step continues the texts of the step before.
        given: Any = arguments[0] if arguments else named.get("input_ids", named.get("inputs_embeds"))
        rows, tokens = given.shape[:2]
        if rows > self._allocated[0] or tokens > self._allocated[1]:
            self.prepare(loaded, max(rows, self._allocated[0]), max(tokens, self._allocated[1]))
        # Without a reset the kernels take a single token as the continuation of the previous text.
        BaseOp.inference_module.reset_cache()

    def _note_causal(self, _decoder: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = (*arguments[1:3], named.get("attention_mask"), named.get("position_ids"))
        self._causal = all(each is None for each in given)

    def _prepare_arguments(
        self, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a layer only arguments that its kernel supports: no mask, or one of its own dtype."""
        import torch

        mask = named.get("attention_mask")
        if self._causal:
            # The kernel applies the causal mask itself. transformers 5.17 creates a mask while a CUDA graph is
            # recorded; converting it in every layer would add three kernels to each replay.
            named["attention_mask"] = None
        elif mask is not None:
            # The kernel reads the bytes of the mask as numbers of its own dtype.
            dtype = layer.config.dtype
            if mask.dtype == torch.bool:
                numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, _MASKED)
            else:
                numbers = mask.to(dtype).clamp(min=_MASKED).contiguous()
            named["attention_mask"] = numbers
        named["use_cache"] = False
        for name in ("position_embeddings", "past_key_values", "position_ids"):
            named.pop(name, None)
        return arguments, named


def _unsupported(fields: dict[str, Any]) -> str | None:
    """Return the part of a config that the kernels ignore or compute wrongly; None if there is none."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    kind, activation = fields.get("model_type", "llama"), fields.get("hidden_act", "silu")
    biases = [name for name in ("attention_bias", "mlp_bias") if fields.get(name)]
    reasons = (
        (kind != "llama", f"supports model_type 'llama' only, and this is {kind!r}"),
        (rope_type != "default", f"supports rope type 'default' only, and this is {rope_type!r}"),
        (rope.get("partial_rotary_factor", 1) != 1, "would rotate whole heads, but the model rotates parts of them"),
        (bool(biases), f"would ignore the biases of the model ({', '.join(biases)} is true)"),
        (activation not in ("silu", "swish"), f"would compute the activation {activation!r} as silu"),
        (bool(fields.get("quantization_config")), "cannot read quantized weights"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _layers(loaded: Loaded) -> torch.nn.ModuleList:
    layers: torch.nn.ModuleList = loaded.model.get_decoder().layers  # type: ignore[operator]  # a llama
    return layers


def _expand_key_value_heads(layer: torch.nn.Module) -> None:
    """Repeat the key and value heads, since the kernels have no grouped-query attention: same numbers, more memory."""
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
    """Make a layer add the output of the attention to the residual once.

    The CUDA op `rms_mlp_gemm` adds it in place, and `ResidualAddOp.forward` adds it again (0.15.2, DeepSpeed's pull
    request 5490): x + 2 * attention + mlp. One without `residual + attention_output` is not changed: this can go then.
    """
    residual_add = layer.mlp.residual_add_func
    if "residual + attention_output" not in inspect.getsource(type(residual_add).forward):
        return

    def add_once(self: Any, hidden_state: torch.Tensor, residual: torch.Tensor, **_: Any) -> torch.Tensor:
        added: torch.Tensor = self.vector_add(residual, hidden_state, 1.0 / self.config.mp_size)
        return added

    residual_add.forward = MethodType(add_once, residual_add)
