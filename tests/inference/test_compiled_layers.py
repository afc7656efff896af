"""Compiled layers, mostly without inductor, which takes seconds for each graph."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import tiny_model
from support.request_factory import make_prompts
from support.texts import Texts, generated
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from pytest_llmgpu.inference import compiled_layers
from pytest_llmgpu.inference.batching import plan
from pytest_llmgpu.inference.compiled_layers import CompiledLayers, CompileError
from pytest_llmgpu.inference.generation import Generator

_CPU = torch.device("cpu")
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 300}

_compiled = functools.partial(CompiledLayers, compiler="eager")
"""Layers that are traced as for inductor, and whose graphs run eagerly."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the imports of inductor
]


@pytest.fixture(autouse=True)
def _own_graphs() -> Iterator[None]:
    """Drop the graphs after each test."""
    yield
    torch.compiler.reset()


def _model(**fields: Any) -> Any:
    return tiny_model.random_model(num_hidden_layers=2, vocab_size=300, initializer_range=0.12, **fields)


def _ids(rows: int, tokens: int = 9) -> torch.Tensor:
    return torch.randint(0, 300, (rows, tokens), generator=torch.Generator().manual_seed(1))


def _score(model: Any, rows: int = 2) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=_ids(rows), use_cache=False).logits
        return logits


def _generate(model: Any, after_warm_up: Callable[[], None] = lambda: None) -> Texts:
    prompts = make_prompts([(8, 7, 11), (7, 7), (6, 7, 11), (5, 7)], max_length=9, new_tokens=4)
    with Generator(model, plan(prompts, 2, few_shapes=True), input_device=_CPU, devices=[_CPU]) as generator:
        generator.warm_up()
        after_warm_up()
        return generated(generator)


@pytest.mark.parametrize(
    "config",
    [
        tiny_model.sensitive_config(num_hidden_layers=4),
        tiny_model.sensitive_config(attn_implementation="eager"),
        AutoConfig.for_model("gpt2", **_GPT),  # gives its layers the cache without a name
        AutoConfig.for_model("gptj", **_GPT, rotary_dim=4),  # and under the name of older models
    ],
    ids=["llama", "eager", "gpt2", "gptj"],
)
def test_one_graph_serves_all_layers(config: Any) -> None:
    """A forward of a shape compiles one graph, however many layers there are; so do prefill and decode step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected, texts = _score(model), _generate(model)
    layers = _compiled(model)
    for _ in range(2):  # a shape is compiled once
        torch.testing.assert_close(_score(model), expected, atol=1e-5, rtol=1e-5)
        assert layers.graphs == 1
    assert layers.compile_s > 0
    again = _generate(model, after_warm_up=layers.check)
    assert again.tokens == texts.tokens
    assert again.loglikelihoods == [pytest.approx(values, abs=5e-5) for values in texts.loglikelihoods]
    assert layers.graphs == 3, "two batches of one shape: a prefill and a decode step"


def test_a_forward_that_runs_eagerly_or_compiles_after_the_warm_up_is_an_error() -> None:
    """A compiler can be switched off. A time would have the compiler's; the next case begins again."""
    model = _model()
    layers = _compiled(model)
    with compiled_layers.suspended():
        _score(model)
    with pytest.raises(CompileError, match="TORCHDYNAMO_DISABLE"):
        layers.check()
    _score(model)
    layers.check()
    _score(model)
    with pytest.raises(CompileError, match=r"^torch.compile compiled LlamaDecoderLayer again after the warm-up"):
        _score(model, 3)
    layers.reset()
    assert (layers.graphs, layers.compile_s) == (0, 0.0)
    _score(model, 3)
    assert layers.graphs == 1, "a case does not use the graphs of the case before"


class _Wrapped(torch.nn.Module):
    """A layer of a test suite: it calls the one that it replaces."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, /, *arguments: Any, **named: Any) -> Any:
        return 2 * self.layer(hidden, *arguments, **named)


@pytest.mark.parametrize(
    ("change", "graphs"),
    [
        (lambda layers: layers.__setitem__(1, _Wrapped(layers[1])), 2),
        (lambda layers: layers.__delitem__(0), 1),
        (lambda layers: layers.__setitem__(1, copy.deepcopy(layers[0])), 1),
    ],
    ids=["wrapped", "removed", "copied"],
)
def test_layers_that_a_test_suite_changed_are_compiled(change: Callable[[Any], None], graphs: int) -> None:
    """Nothing of them runs eagerly or is left out; a case begins with the layers that the model has then."""
    model = _model()
    layers = _compiled(model)
    change(model.model.layers)
    layers.reset()
    with compiled_layers.suspended():
        expected = _score(model)
    torch.testing.assert_close(_score(model), expected, atol=1e-5, rtol=1e-5)
    assert layers.graphs == graphs, "one for each class"


def test_a_forward_of_one_layer_is_refused() -> None:
    """The forward of the class would run in its place."""
    model = _model()
    layers = _compiled(model)
    model.model.layers[0].forward = model.model.layers[1].mlp.forward
    with pytest.raises(ValueError, match=r"^the forward of layer 0 was replaced: compiled layers run that of their"):
        layers.reset()


class _Kernels:
    """Kernels of decode steps as torch computes them, and the shapes that they get."""

    def __init__(self) -> None:
        self.products: list[tuple[int, ...]] = []
        self.heads: list[tuple[int, ...]] = []

    def linear(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        self.products.append((*weight.shape,))
        return linear(input, weight)

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.heads.append(tuple(one.shape[1] for one in (query, key, value, mask)))
        return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> _Kernels:
    """What takes the place of kernels for a GPU."""
    found = _Kernels()
    monkeypatch.setattr(compiled_layers, "kernels_of", lambda _: found)
    return found


def test_products_of_one_input_are_joined_and_those_of_one_row_have_a_kernel(kernels: _Kernels) -> None:
    """The first layer, whose bias gives it a graph of its own and is added before rounding, and the others."""
    model = _model(intermediate_size=512)
    model.model.layers[0].self_attn.o_proj.bias = torch.nn.Parameter(torch.randn(width := model.config.hidden_size))
    ids = [_ids(rows, tokens) for rows, tokens in ((1, 9), (2, 1), (1, 1))]
    keys = 2 * model.config.num_key_value_heads * width // model.config.num_attention_heads
    with torch.inference_mode():
        expected = [model(input_ids=one, use_cache=False).logits for one in ids]
        _compiled(model)
        for one, logits in zip(ids, expected, strict=True):
            assert not kernels.products
            torch.testing.assert_close(model(input_ids=one, use_cache=False).logits, logits, atol=1e-5, rtol=1e-5)
    products = [(width + keys, width), (width, width), (1024, width), (width, 512)]
    assert kernels.products == [one for one in products if one != (width, width)] + products


@pytest.mark.parametrize("groups", [8, 2], ids=["all heads", "groups"])
def test_decode_steps_have_an_attention_of_one_query(
    kernels: _Kernels, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the keys and values that the cache keeps, not those that are repeated for each query head."""
    model = _model(num_attention_heads=8, num_key_value_heads=groups)
    expected = _generate(model)
    layers = _compiled(model)
    assert _generate(model).tokens == expected.tokens
    assert not kernels.heads, "few rows x heads"
    monkeypatch.setattr(compiled_layers, "_LEAST_QUERIES", 16)
    layers.reset()
    assert _generate(model).tokens == expected.tokens
    assert {*kernels.heads} == {(8, groups, groups, 1)}


class _Attention(torch.nn.Module):
    """A layer whose attention the kernel cannot compute, or computes with other arguments."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.attend(query, key, value, mask)


def _in_bfloat16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return scaled_dot_product_attention(q, k, v, mask)


def _repeated(part: torch.Tensor) -> torch.Tensor:
    rows, groups, slots, size = part.shape
    return part[:, :, None].expand(rows, groups, 2, slots, size).reshape(rows, 2 * groups, slots, size)


def _changed(part: torch.Tensor) -> torch.Tensor:
    return _repeated(part).mul_(2)


def _across(part: torch.Tensor) -> torch.Tensor:
    return part.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize(
    ("attend", "replaced"),
    [
        (lambda q, k, v, m: scaled_dot_product_attention(q, _repeated(k), _repeated(v), m), True),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _repeated(k), _repeated(v), m, 0.0, False), True),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _repeated(k), _repeated(v), m, scale=0.0), True),
        (lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m, enable_gqa=True), True),
        (lambda q, k, v, m: scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m, enable_gqa=True), True),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _repeated(k), torch.cat([v, v], 1), m), True),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _changed(k), _changed(v), m), True),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _repeated(k), _repeated(v), m & (m.sum() < 0)), True),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _repeated(k), _repeated(v), m, is_causal=True), False),
        (lambda q, k, v, m: _in_bfloat16(q, _repeated(k), _repeated(v), m), False),
        (lambda q, k, v, _: scaled_dot_product_attention(q, _repeated(k), _repeated(v)), False),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _repeated(k), _repeated(v), m.float()), False),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _repeated(k), _repeated(v), m[:1]), False),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _across(_repeated(k)), _repeated(v), m), False),
        (lambda q, k, v, m: scaled_dot_product_attention(q, _repeated(k), _repeated(v)[..., :4], m), False),
        (lambda q, k, v, m: scaled_dot_product_attention(q[:, :1], k[:1, :1], v[:1, :1], m), False),
        (lambda q, k, v, m: scaled_dot_product_attention(q.repeat(1, 1, 3, 1), _repeated(k), _repeated(v), m), False),
    ],
)
def test_an_attention_that_the_kernel_cannot_compute_stays(
    kernels: _Kernels, attend: Callable[..., torch.Tensor], replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose mask is not one of keys for each row, or whose parts differ in shape or layout."""
    monkeypatch.setattr(compiled_layers, "_LEAST_QUERIES", 1)
    model = torch.nn.Module()
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList(_Attention(attend) for _ in range(2))
    model.get_decoder = lambda: decoder  # type: ignore[assignment]
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = (torch.arange(5) < torch.tensor([[3], [5]]))[:, None, None]
    with torch.inference_mode():
        expected = decoder.layers[0](query, key, value, mask)
        _compiled(model)
        found = decoder.layers[0](query, key, value, mask)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert bool(kernels.heads) == replaced


def test_quantised_products_of_one_row_stay(kernels: _Kernels) -> None:
    """A kernel would read other numbers than those of the weight."""
    torchao = pytest.importorskip("torchao.quantization")
    model = _model(intermediate_size=512)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    with torch.inference_mode():
        expected = model(input_ids=_ids(1, 1), use_cache=False).logits
        _compiled(model)
        torch.testing.assert_close(model(input_ids=_ids(1, 1), use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)
    assert not kernels.products


class _Packed(torch.nn.Module):
    """A layer that multiplies by parts of one matrix, in ways that differ from those of joined linear layers."""

    def __init__(self, multiply: Callable[[_Packed, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(32, 16)), torch.nn.Parameter(torch.randn(32))
        self.q, self.k = (torch.nn.Linear(16, 16, bias=False) for _ in range(2))
        self.multiply = multiply

    def forward(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        return self.multiply(self, hidden_BTH)


def _with_bias(one: _Packed, hidden: torch.Tensor) -> torch.Tensor:
    halves = [linear(hidden, one.weight[rows], bias=one.bias[rows]) for rows in (slice(0, 16), slice(16, 32))]
    product: torch.Tensor = halves[0] * halves[1]
    return product


def _by_name(one: _Packed, hidden: torch.Tensor) -> torch.Tensor:
    return linear(input=hidden, weight=one.weight)


def _every_second(one: _Packed, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden, one.weight[0:16:2]).repeat(1, 1, 2) + linear(hidden, one.weight[16:32])


def _flat(one: _Packed, hidden: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = one.q(hidden).view(-1, 8) * one.k(hidden).view(-1, 8)
    return product


def _in_place(one: _Packed, hidden: torch.Tensor) -> torch.Tensor:
    doubled = 2 * hidden
    first = one.q(doubled)
    doubled += 1
    second = one.k(doubled)
    total: torch.Tensor = first + second + one.q(doubled.add_(1)) + one.k(doubled)
    return total


@pytest.mark.parametrize("multiply", [_with_bias, _by_name, _every_second, _flat, _in_place])
def test_products_that_cannot_be_joined_stay(multiply: Callable[[_Packed, torch.Tensor], torch.Tensor]) -> None:
    """Those with a bias, of other rows, of an input that changes between them, or whose rows are viewed as one."""
    model = torch.nn.Module()
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList(_Packed(multiply) for _ in range(2))
    model.get_decoder = lambda: decoder  # type: ignore[assignment]
    hidden = torch.randn(2, 3, 16)
    with torch.inference_mode():
        expected = decoder.layers[0](hidden)
        _compiled(model)
        torch.testing.assert_close(decoder.layers[0](hidden), expected, atol=1e-5, rtol=1e-5)


def test_weights_that_a_test_suite_changed_are_joined_again() -> None:
    """A layer computes with the weights that it has when a case begins, and uses no memory for others."""
    model = _model()
    layers = _compiled(model)
    stored = {weight.untyped_storage().data_ptr() for weight in model.model.layers[0].mlp.parameters()}
    assert len(stored) == 2, "the first two products of an MLP"
    layers.reset()
    assert stored == {weight.untyped_storage().data_ptr() for weight in model.model.layers[0].mlp.parameters()}
    model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(
        torch.randn(*model.model.layers[0].self_attn.k_proj.weight.shape)
    )
    with compiled_layers.suspended():
        expected = _score(model)
    layers.reset()
    torch.testing.assert_close(_score(model), expected, atol=1e-5, rtol=1e-5)


def test_a_weight_of_two_layers_stays_one() -> None:
    """It is in no joint tensor, which each of the layers would have; nor is one that a test suite ties later."""
    model = _model()
    first, second = model.model.layers
    second.mlp.gate_proj.weight = first.mlp.gate_proj.weight
    layers = _compiled(model)
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    layers.reset()
    given = torch.randn(2, 3, model.config.hidden_size)
    for layer in (first, second):
        for module in (layer.mlp.gate_proj, layer.self_attn.q_proj, layer.self_attn.k_proj):
            compiled: Any = torch.compile(module, backend="eager", fullgraph=True)
            assert torch.equal(compiled(given), linear(given, module.weight))
            joint = getattr(module, "joint", module.weight)
            assert joint.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()


def test_layers_of_suspended_texts_run_once() -> None:
    """Ops, FLOPs and traffic are counted in such forwards, with a KV cache that is new."""
    model = _model()
    calls: list[None] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(None))
    expected = _generate(model)
    plain = len(calls)
    layers = _compiled(model)
    with compiled_layers.suspended():
        texts = _generate(model)
    assert (texts.tokens, len(calls), layers.graphs) == (expected.tokens, 2 * plain, 0)


def test_more_shapes_than_torch_keeps_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch runs a ninth shape eagerly, without an error."""
    monkeypatch.setattr(compiled_layers, "MOST_GRAPHS", 2)
    model = _model()
    layers = _compiled(model)
    for rows in range(1, 3):
        _score(model, rows)
    assert layers.graphs == 2
    with pytest.raises(CompileError, match=r"^torch.compile failed: \w+: .*fewer or other batch sizes$"):
        _score(model, 3)


def test_a_layer_that_cannot_be_compiled_whole_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that ran eagerly would be measured as compiled."""
    model = _model()
    layer = type(model.model.layers[0])
    forward = layer.forward

    def broken(self: Any, *arguments: Any, **named: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(self, *arguments, **named)

    monkeypatch.setattr(layer, "forward", broken)
    _compiled(model)
    with pytest.raises(CompileError, match=r"^torch.compile failed: \w+: .*measure another strategy$"):
        _score(model)


def test_a_missing_compiler_is_named() -> None:
    """One line has what is missing and what to do."""
    model = _model()
    CompiledLayers(model)
    import torch._inductor.config as inductor

    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}),
        pytest.raises(CompileError, match=r"^torch.compile failed: .*no-such-compiler.*install a C\+\+ compiler.*$"),
    ):
        _score(model)


def test_a_mask_that_only_a_recording_makes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of transformers is made while a CUDA graph is recorded; the layer would be compiled again there."""
    model = _model()
    expected = _score(model)
    layers = _compiled(model)
    _score(model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    torch.testing.assert_close(_score(model), expected, atol=1e-5, rtol=1e-5)
    assert layers.graphs == 1
