"""Side by side with lm-evaluation-harness: the same tensors go into the model, the same numbers come out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_model

from pytest_llmgpu.inference import batching, models, scoring
from pytest_llmgpu.inference.batching import Requests
from pytest_llmgpu.inference.bundled import save_tokenizer
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.inference.tasks.protocol import Item

with warnings.catch_warnings():
    # Its dependencies warn of each other on import.
    warnings.simplefilter("ignore")
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-eval==0.4.13 to compare with")

LONGEST = 64
BUNDLED = HellaSwag().load("bundled", rootdir=Path.cwd(), limit=30).items
Drawn = tuple[Any, str]
"""A model with random weights, and the folder of its tokenizer."""

TRICKY = [
    Item("longer than the model", "Cooking: " + "stir the soup and wait. " * 30, ("then eat it.", "then wait."), 0),
    Item("one token apart", "Letters: the next one is", ("a", "b", "c", "d"), 0),
    Item("no context", "", ("She runs.", "He walks away."), 1),
    Item("not ASCII", "Café: 日本語 naïve 🎉", ("très bien", "日本語のテキスト", "ñandú"), 0),
    Item("same", "Twice: the very same question", ("has this answer.", "or that one."), 0),
    Item("same again", "Twice: the very same question", ("has this answer.", "or that one."), 0),
    Item("spaces", "Spaces: stand at the end   ", ("of this.", "of that."), 1),
    Item("brings its own start", "<|bos|>Start: is there already", ("once.", "twice."), 1),
]


def _encode(drawn: Drawn, items: Sequence[Item], add_bos: bool | None) -> tuple[Any, Requests]:
    """Return the tokenizer and the requests that it makes of items."""
    model, directory = drawn
    tokenizer = models.load_tokenizer(tiny_model.source({}, tokenizer_directory=directory), add_bos=add_bos)
    max_length = models.max_length(model.config)
    return tokenizer, batching.encode(HellaSwag(), items, tokenizer, max_length, add_bos=add_bos)


def _compare(drawn: Drawn, items: Sequence[Item], batch_size: int, add_bos: bool | None = None) -> None:
    """Score with both, and compare the inputs of the model, log-likelihoods and choices."""
    from lm_eval.api.instance import Instance

    model, directory = drawn
    inputs: list[torch.Tensor] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: inputs.append(ids[0].clone()))
    lm = huggingface.HFLM(
        pretrained=model,
        tokenizer=directory,
        add_bos_token=add_bos,
        backend="causal",
        softmax_dtype="float32",
        batch_size=batch_size,
        max_length=models.max_length(model.config),
    )
    instances = [
        Instance(request_type="loglikelihood", doc={}, arguments=(item.context, f" {ending}"), idx=number)
        for item in items
        for number, ending in enumerate(item.endings)
    ]
    answers = iter(lm.loglikelihood(instances, disable_tqdm=True))
    theirs = [[next(answers)[0] for _ in item.endings] for item in items]
    forwards = len(inputs)
    plan = batching.plan(_encode(drawn, items, add_bos)[1], batch_size)
    cpu = torch.device("cpu")
    ours = scoring.score(model, plan, input_device=cpu, devices=(cpu,)).loglikelihoods
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(inputs[:forwards], inputs[forwards:], strict=True))
    for a, b in zip(theirs, ours, strict=True):
        assert b == pytest.approx(a, rel=3e-5)
    expected, chosen = HellaSwag().score(items, theirs), HellaSwag().score(items, ours)
    assert chosen.predictions == expected.predictions
    assert chosen.predictions_norm == expected.predictions_norm


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """Return a small LLaMA with random weights, wide enough apart that endings differ."""
    directory = tmp_path_factory.mktemp("tokenizer")
    texts = [text for item in TRICKY for text in (item.context, *item.endings)]
    texts += ["a b c d"] * 50  # frequent enough that " a" is one token
    return _random(directory, save_tokenizer(texts, 400, directory))


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """Return a small LLaMA whose tokenizer merges letters over spaces, and so over the border of context and ending."""
    from tokenizers import Tokenizer, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    texts = [f"{item.context} {ending}" for item in BUNDLED for ending in item.endings]
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    named: dict[str, Any] = {"special_tokens": ["<s>", "</s>", "<unk>"], "max_token_length": 6, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, **named))
    directory = tmp_path_factory.mktemp("merging")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return _random(directory, tokenizer.get_vocab_size())


def _random(directory: Path, vocabulary: int) -> Drawn:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": vocabulary}
    model = tiny_model.random_model(**sizes, max_position_embeddings=LONGEST, initializer_range=0.3)
    return model, str(directory)


@pytest.mark.parametrize(("batch_size", "add_bos"), [(1, None), (3, None), (17, None), (3, True), (3, False)])
def test_tricky_requests_score_as_in_lm_eval(random_llama: Drawn, batch_size: int, add_bos: bool | None) -> None:
    """Truncated, empty, repeated, padded and non-ASCII requests give equal tensors and numbers, with any add_bos."""
    _compare(random_llama, TRICKY, batch_size, add_bos)


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_tokens_merged_over_the_border_score_as_in_lm_eval(merging: Drawn, add_bos: bool | None) -> None:
    """The context keeps its own tokens where the tokenizer would merge its last letters with the ending."""
    _compare(merging, BUNDLED, 8, add_bos)
    tokenizer, encoded = _encode(merging, BUNDLED, add_bos)
    joined = [tuple(tokenizer.encode(f"{item.context} {ending}")) for item in BUNDLED for ending in item.endings]
    apart = [request.tokens != whole for request, whole in zip(encoded.requests, joined, strict=True)]
    assert sum(apart) > len(apart) / 2
    assert {request.tokens[0] == tokenizer.bos_token_id for request in encoded.requests} == {add_bos is True}


def test_prompts_are_built_as_in_lm_eval(tmp_path: Path) -> None:
    """A record of the hub's format becomes the query and the cleaned choices of lm-evaluation-harness's task."""
    utils = pytest.importorskip("lm_eval.tasks.hellaswag.utils", reason="needs lm-eval's tasks")
    import datasets
    import msgspec

    record = {
        "ind": 7,
        "activity_label": "Home and Garden",
        "ctx_a": "[header] How to paint [title] Begin.",
        "ctx_b": "then JOHN adds",
        "ctx": "unused",
        "endings": ["  two  spaces   ", "Step. [title] Next [step]", "[a] [b] c", "a [title] [title]b", "no ] x ["],
        "label": "1",
    }
    path = tmp_path / "one.jsonl"
    path.write_bytes(msgspec.json.encode(record))
    expected = utils.process_docs(datasets.Dataset.from_list([record]))[0]
    item = HellaSwag().load(str(path), rootdir=tmp_path).items[0]
    assert (item.context, list(item.endings), item.label) == (expected["query"], expected["choices"], expected["gold"])
