"""vllm: what it refuses, and with vLLM (`tox -e vllm`) the same answers as mp and exact counts of every worker."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.report_factory import known, make_case
from transformers.models.openai import OpenAIGPTConfig, OpenAIGPTLMHeadModel

# pytester forgets what a run inside this process has imported; a module that is here already keeps its identity.
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.engines.vllm import Vllm
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report import derived, file
from pytest_llmgpu.report.result import CaseResult

pytestmark = pytest.mark.usefixtures("no_gpu")

_LAUNCHES = 5
_with_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: tox -e vllm")
_SCORES = """
def test_scores(measure, llm, hellaswag, batch_size):
    measure(llm, hellaswag, batch_size)
"""
_GENERATES = """
def test_generates(measure, llm, prompts, batch_size):
    measure(llm, prompts, batch_size)
"""
_OWN = """
from pytest_llmgpu.engines.vllm import Vllm

PLANTED = False

def plant(device):
    from vllm.model_executor.models import llama

    forward = llama.LlamaMLP.forward
    if forward.__name__ == "forward":
        llama.LlamaMLP.forward = lambda self, x: forward(self, x) + 0

class Own(Vllm):
    name = "vllm-own"

    def prepare(self, *sizes):
        super().prepare(*sizes)  # it may have started new workers
        if PLANTED and self.workers(plant) is None:
            plant(None)
"""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"load_format": "dummy"}, "--llmgpu-load-format=dummy: vllm makes other random weights than mp"),
        ({"devices": 5}, "--llmgpu-devices=5: bundled has 8 attention heads: choose a divisor"),
        ({"devices": 2, "gpu_memory_bytes": 2**30}, "--llmgpu-gpu-memory: vllm on 2 GPUs takes no cap"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str, bundled: ModelSource) -> None:
    """Before a process starts, without vLLM."""
    case = msgspec.structs.replace(make_case(), **{"load_format": "auto", "dtype": "float32", "devices": 1, **fields})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Vllm().check(case, bundled)


def test_a_build_for_other_devices_is_refused(bundled: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for GPUs finds no device on a machine without one."""
    missing = SimpleNamespace(current_platform=SimpleNamespace(device_type=""))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=missing))
    monkeypatch.setitem(sys.modules, "vllm.platforms", missing)
    message = "--llmgpu-device=cpu: the installed vLLM computes on no device here: install its build for this device"
    with pytest.raises(ValueError, match=f"^{message}"):
        Vllm().start(msgspec.structs.replace(make_case(), device="cpu"), bundled)


def _run(
    pytester: pytest.Pytester, devices: int, *flags: str, test: str = _SCORES + _GENERATES
) -> tuple[pytest.RunResult, list[CaseResult]]:
    pytester.makepyfile(test_engine=test)
    common = ("-p", "no:cacheprovider", "--llmgpu-device=cpu", f"--llmgpu-devices={devices}", "--llmgpu-limit=4")
    result = pytester.runpytest_inprocess(*common, "--llmgpu-batch-sizes=4", *flags)
    return result, file.load(pytester.path / ".llmgpu" / "last.json").cases


@_with_vllm
@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_scores_are_those_of_mp_and_counts_are_exact(pytester: pytest.Pytester, devices: int) -> None:
    """Log-likelihoods within rounding, and in each worker the same ops and collectives in every launch."""
    flags = ("--strategy=mp,vllm", f"--llmgpu-launches={_LAUNCHES}")
    result, (mp, vllm) = _run(pytester, devices, *flags, test=_SCORES)
    result.assert_outcomes(passed=2)
    scores = [derived.decode(known(known(one.launches[0].accuracy).loglikelihoods)) for one in (mp, vllm)]
    assert list(scores[1]) == pytest.approx(list(scores[0]), rel=1e-6, abs=1e-6)
    ranks = [[rank.ops_by_module for rank in known(one.work).ranks] for one in vllm.launches]
    assert all(ranks[0])
    assert len(ranks[0]) == devices
    assert ranks == ranks[:1] * _LAUNCHES
    kinds = [[(one.collective, one.calls) for one in rank] for rank in known(vllm.traffic).ranks]
    # Four batches: after the embedding, the attention and the MLP of two layers; the logits of each prompt, and of all.
    assert kinds == [[("all_reduce", 20), ("all_gather", 20)] * (devices - 1)] * devices


@_with_vllm
@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_texts_are_those_of_mp(pytester: pytest.Pytester, devices: int) -> None:
    """Tokens are equal; of their times the first one is known."""
    result, (mp, vllm) = _run(pytester, devices, "--strategy=mp,vllm", test=_GENERATES)
    result.assert_outcomes(passed=2)
    texts = [known(one.launches[0].generation) for one in (mp, vllm)]
    assert texts[0].tokens == texts[1].tokens
    assert (len(texts[1].first_token_s), texts[1].step_s) == (1, [])
    assert texts[1].prefill_loglikelihoods is not None
    assert len(known(vllm.launches[0].work).ranks) == devices


@_with_vllm
@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_an_op_that_was_added_is_found_with_its_module(pytester: pytest.Pytester, devices: int) -> None:
    """In the rank and in both workers."""
    own = pytester.makepyfile(own_vllm=_OWN)
    flags = (devices, "--strategy=own_vllm:Own")
    result, _ = _run(pytester, *flags, "--llmgpu-save=base")
    result.assert_outcomes(passed=2)
    own.write_text(_OWN.replace("PLANTED = False", "PLANTED = True"))
    result, _ = _run(pytester, *flags, "--llmgpu-compare=base")
    result.stdout.fnmatch_lines(
        [
            "PASSED, program changed: 1 more aten::add in each model.layers.[*].mlp;*",
            "CHANGED  program: vllm-own-bs4, vllm-own-generate-bs4",
        ]
    )


@_with_vllm
@pytest.mark.slow
def test_a_model_that_vllm_does_not_have_is_an_error_of_its_case(
    pytester: pytest.Pytester, bundled: ModelSource
) -> None:
    """Its reason is one line, and the case of mp has run."""
    folder = pytester.path / "gpt1"
    config = OpenAIGPTConfig(vocab_size=bundled.config["vocab_size"], n_positions=1024, n_embd=8, n_layer=1, n_head=2)
    OpenAIGPTLMHeadModel(config).save_pretrained(folder)
    for path in Path(bundled.tokenizer_directory).glob("tokenizer*"):
        shutil.copy(path, folder)
    result, cases = _run(pytester, 1, "--strategy=mp,vllm", "--llmgpu-model=gpt1", test=_SCORES)
    result.assert_outcomes(passed=1, failed=1)
    assert known(cases[1].failure).message == (
        "ValueError: --llmgpu-model=gpt1: vLLM cannot run it: Model architectures ['OpenAIGPTLMHeadModel'] are not "
        "supported for now"
    )
