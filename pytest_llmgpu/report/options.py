"""The declaration of every option: flag, ini key, marker argument, default and help.

The kinds of values come first: what is allowed, and how a text becomes a value.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pytest_llmgpu.report.text import guess

LATEST = "latest"
"""Name of the report that was measured last. No report can be saved under it."""

LONGEST_NAME = 80
"""Letters of the name of a report or a machine, far below the limits of file systems."""

_NAME = re.compile(rf"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")
_UNITS = {"": 1, "B": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def check_name(name: str) -> None:
    """Check that a report can be saved under `name`; ValueError if it is not allowed, or has another meaning."""
    if not _NAME.fullmatch(name) or name.endswith((".json", ".json.gz")):
        allowed = f"allowed are at most {LONGEST_NAME} letters, digits, '.', '_' and '-'"
        raise ValueError(f"name {name!r}: {allowed}, with at least one letter and without '.json' at the end")
    if name == LATEST:
        raise ValueError(f"name {name!r}: means the newest report of the store; choose another name")


def check_name_is_free(name: str) -> None:
    """Check before a run that a report would be found by `name`; ValueError if it is that of a file or folder here."""
    if Path(name).exists():
        raise ValueError(f"name {name!r}: is a file or folder here, which the name would refer to; choose another name")


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError
    return int(text)


def _seconds(text: str) -> float | None:
    above, _, below = text.partition("/")
    value = float(above) / float(below or 1)
    return value if 0 < value < math.inf else None


def _bytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    return None if match is None else round(float(match[1]) * _UNITS.get(match[2].upper(), 0)) or None


def _distinct(values: list[Any]) -> tuple[Any, ...] | None:
    return tuple(values) if all(values) and len({*values}) == len(values) else None


_KINDS: dict[str | None, tuple[str, Callable[[str], Any]]] = {
    None: ("allowed are true and false", lambda text: {"true": True, "false": False}.get(text.lower())),
    "FRACTION": (
        "a fraction from 0 to 1 is needed, such as 0.82",
        lambda text: float(text) if 0 <= float(text) <= 1 else None,
    ),
    "ITEMS": ("a whole number of at least 1 is needed", _whole),
    "N": ("a whole number of at least 1 is needed", _whole),
    "N[,N]": (
        "a comma list of different whole numbers of at least 1 is needed, such as 1,2,4",
        lambda text: _distinct(sorted(_whole(size.strip()) for size in text.split(","))),
    ),
    "NAME[,NAME]": (
        "a comma list of different strategies is needed, such as mp,tp",
        lambda text: _distinct([name.strip() for name in text.split(",")]),
    ),
    "SECONDS": ("seconds above 0 are needed, such as 0.5 or 1/6", _seconds),
    "SIZE": ("a size such as 32GiB, 24GB or 8192MiB is needed", _bytes),
}
"""Placeholder of a value in the help to the values that are allowed, and the function that returns the value of a text:
None or an error if it is not allowed. The placeholder of a flag without a value is None."""


def parse(metavar: str | None, empty: bool, text: str) -> Any:
    """Return the value of a text by the placeholder in the help; ValueError with the allowed values.

    `{auto,cuda}` allows these words, `{auto,cuda}[,...]` a comma list of them, NAME the name of a report, and any other
    a text; `empty` allows an empty one.
    """
    if metavar == "NAME" and text:
        check_name(text)
    if metavar is not None and metavar.startswith("{"):
        inside, _, several = metavar.strip("{").partition("}")
        words, given = inside.split(","), text.split(",") if several else [text]
        given = [one.strip() if several else one for one in given]
        if (wrong := next((one for one in given if one not in words), None)) is not None:
            raise ValueError(f"allowed are {', '.join(words)}{guess(wrong, words)}")
        if _distinct(given) is None:
            raise ValueError(f"allowed are {', '.join(words)}, each once")
        return tuple(given) if several else text
    allowed, read = _KINDS.get(metavar, ("a value is needed", lambda text: text if text.strip() or empty else None))
    with suppress(ValueError, ZeroDivisionError):
        if (value := read(text)) is not None:
            return value
    raise ValueError(allowed)


def _option(
    metavar: str | None,
    help: str,  # noqa: A002 - argparse's word
    default: str | None = None,
    *,
    bare: str | None = None,
    empty: bool = False,
) -> Any:
    """Declare an option. Its `default` is a text, or None for None.

    `metavar` is None for true and false. `bare` is the value of a flag that is given without one; None if it must have
    one. `empty` allows an empty text.
    """
    read = partial(parse, metavar, empty)
    metadata = {"parse": read, "metavar": metavar, "help": help, "text": default, "bare": bare}
    return dataclasses.field(default=None if default is None else read(default), metadata=metadata)


GATE_OPTIONS = ("policy", "strict", "allow_no_baseline")
"""Options that have an effect only if the run is compared with a baseline."""

OUTPUT_OPTIONS = ("json", "save", "storage", "compare", "html", "trace", "resume")
"""Options that are about the report and change nothing in what is measured."""

RUN_OPTIONS = (*GATE_OPTIONS, *OUTPUT_OPTIONS, "launcher", "launches", "sample_period", "profile_method")
"""Options of a whole run, which the marker of a test cannot set."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Values of all options for one test. Field names are marker arguments and, with the prefix `llmgpu_`, ini keys."""

    strategy: tuple[str, ...] = _option(
        "NAME[,NAME]",
        "strategies to measure: mp (layers spread over the GPUs), tp (tensor parallel), iok (tp with DeepSpeed's "
        "kernels), compile (tp with torch.compile, also on one GPU), an engine (transformers-cb, vllm, openai), a "
        "registered one, or module:attribute",
        "mp",
    )
    model: str = _option(
        "MODEL",
        "bundled, a directory, a hub id, or a preset (llama-7b, llama-13b, llama-30b, llama-65b, llama-3-8b, "
        "qwen3-8b, qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b, gemma-3-12b) with dummy weights",
        "bundled",
    )
    revision: str | None = _option("REV", "branch, tag or commit of a hub model")
    tokenizer: str | None = _option("DIR", "bundled, a directory or a hub id (default: the tokenizer of the model)")
    add_bos: str = _option(
        "{auto,yes,no}",
        "begin texts with the beginning-of-sequence token, as add_bos_token in lm-evaluation-harness; auto: as the "
        "tokenizer is set",
        "auto",
    )
    load_format: str = _option("{auto,dummy}", "auto: safetensors; dummy: seeded random weights, no checkpoint", "auto")
    dtype: str = _option(
        "{auto,float32,float16,bfloat16}",
        "dtype of weights and activations (auto: float16 on GPUs, float32 on a CPU)",
        "auto",
    )
    quantization: tuple[str, ...] = _option(
        "{none,int8,int8-dynamic,int4,fp8-weight,fp8}[,...]",
        "quantise the weights by torchao after loading; int8, int4, fp8-weight: weights only; int8-dynamic, fp8: "
        "products in 8 bits too; several are measured one after the other and compared with none",
        "none",
    )
    device: str = _option("{auto,cuda,cpu}", "auto: every visible GPU, else the CPU", "auto")
    devices: int | None = _option("N", "number of devices (default: every visible GPU; 1 on a CPU)")
    launcher: str = _option(
        "{local,env}",
        "local: start the ranks on this machine; env: start one rank for each process that torchrun, srun or "
        "`llmgpu ray` started, on one or several nodes",
        "local",
    )
    dataset: str = _option(
        "DATASET",
        "bundled, hellaswag (from the hub), or a JSON Lines file (.jsonl, .jsonl.gz) whose lines have activity_label, "
        "ctx_a, ctx_b, endings and label, or a prompt (workload generate)",
        "bundled",
    )
    limit: int | None = _option("ITEMS", "use only the first items of the dataset")
    workload: str | None = _option(
        "{score,generate}",
        "score: log-likelihoods of endings; generate: continue the context of each item greedily (default: generate "
        "for the items of the fixture prompts, else score)",
    )
    prompt_tokens: int | None = _option(
        "N", "workload generate: tokens that are kept of each prompt, the last ones (default: 96)"
    )
    new_tokens: int | None = _option(
        "N",
        "workload generate: tokens generated for each prompt, end-of-sequence tokens ignored (default: 64); the "
        "argument new_tokens of measure wins over it",
    )
    batch_sizes: tuple[int, ...] = _option(
        "N[,N]", "batch sizes, in sequences per forward (an item of HellaSwag has 4 sequences)", "1,2,4,8,16,32,64"
    )
    find_max_batch: bool = _option(
        None,
        "after a batch size ran out of memory, search the largest batch size that fits by measuring sizes in between",
        "false",
    )
    gpu_memory: int | None = _option("SIZE", "cap on each GPU's memory, such as 32GiB")
    cuda_graphs: str = _option(
        "{auto,on,off}",
        "replay forwards from CUDA graphs; auto: where they can be recorded (not for mp over several GPUs) and the "
        "largest forward has at most 8,192 tokens; on: wherever they can be recorded",
        "auto",
    )
    scoring: str = _option(
        "{lean,harness}",
        "lean: logits only where an ending is predicted; harness: logits of every position and a KV cache, as in "
        "lm-evaluation-harness, which needs more memory and excludes CUDA graphs",
        "lean",
    )
    attention: str | None = _option(
        "NAME",
        "attention of transformers: sdpa, eager, flex_attention, flash_attention_2, or another one that is installed "
        "(default: sdpa if the architecture has it, else eager); not for iok, whose kernels compute it themselves",
    )
    experts: str | None = _option(
        "NAME",
        "experts of transformers: grouped_mm, batched_mm, eager, or another one that is installed (default: grouped_mm "
        "if torch has it for the architecture, else eager)",
    )
    work: str = _option(
        "{on,off}",
        "after each case, run forwards that are not measured and record their kernels, ops, FLOPs and CUDA calls",
        "on",
    )
    tp_backend: str = _option("{transformers,deepspeed}", "library that implements tp", "transformers")
    tp_expert_parallel: str = _option(
        "{off,all_reduce,all_to_all}",
        "whole experts on each rank of tp in place of a part of every expert; all_reduce: a rank runs its experts on "
        "all tokens, and outputs are summed; all_to_all: a token is sent to the ranks of its experts",
        "off",
    )
    iok_stock: bool = _option(
        None, "use DeepSpeed's own binding of the kernels for iok, including its wrong residual sum", "false"
    )
    iok_min_tokens: int | None = _option(
        "N",
        "tokens per sequence that iok's workspace must hold (default: the longest sequence; 1: DeepSpeed's own limit, "
        "with wrong answers if memory holds fewer tokens than the longest sequence has)",
    )
    server_url: str | None = _option(
        "URL", "server with OpenAI's API that strategy openai measures, such as http://localhost:8000"
    )
    server_command: str | None = _option(
        "COMMAND",
        "command that starts the server of strategy openai, with {port} and {model}, such as "
        "'vllm serve {model} --port {port}'; it is ended with the case",
    )
    launches: int = _option(
        "N",
        "measure every case in N launches of its processes, all cases in turn; the gate distinguishes a change from "
        "noise by the differences between launches",
        "1",
    )
    sample_period: float = _option("SECONDS", "sampling period of the GPU profile", "1/6")
    profile_method: Literal["auto", "polling"] = _option(
        "{auto,polling}",
        "how NVML is read; auto: counters and averages that cover all of the time, where a GPU has them; polling: one "
        "PCIe window of 20 ms, utilisation and memory in each period, the method of Shin et al. 2024",
        "auto",
    )
    timeout: float = _option("SECONDS", "time limit until the next batch is finished", "600")
    load_timeout: float = _option("SECONDS", "time limit for starting processes and loading the model", "1800")
    json: str = _option(
        "PATH", "report to write, .json or .json.gz; empty for no report", ".llmgpu/last.json", empty=True
    )
    save: str | None = _option("NAME", "keep this run in the store, optionally under a name", bare="", empty=True)
    storage: str = _option("DIR", "folder of the store", ".llmgpu")
    resume: str | None = _option(
        "REPORT",
        "continue the session of this report with the cases that are missing, on the same machine and commit with the "
        "same options; the tests of the other cases get their results from it",
    )
    compare: str | None = _option(
        "REF",
        "compare this run with a report and fail on regressions: a path, git:REV:PATH, or a report of the store by its "
        "number, name, commit, or latest (which moves with every run, so that small regressions add up unnoticed)",
    )
    policy: str | None = _option(
        "PATH",
        "thresholds of the gate, a TOML file or git:REV:PATH, which a change cannot edit (default: [tool.llmgpu.gate] "
        "of pyproject.toml)",
    )
    strict: bool | None = _option(None, "fail if a gated figure is undecided")
    allow_no_baseline: bool | None = _option(
        None, "pass although nothing could be compared, because there is no baseline, nor one of a similar name"
    )
    html: str | None = _option(
        "PATH", "HTML page to write at the end, .html; it needs no network (requires the extra `report`)"
    )
    trace: str | None = _option(
        "DIR",
        "write traces of the work passes of each case and rank into this folder; they open in Perfetto or "
        "chrome://tracing",
    )
    accuracy_baseline: float | None = _option(
        "FRACTION", "accuracy to reach, 0.01 less is allowed (default: the registered or published one, if known)"
    )
    accuracy_metric: str = _option("{acc_norm,acc}", "accuracy metric that is compared with the baseline", "acc_norm")

    def in_force(self) -> dict[str, Any]:
        """Return key to value of all options, for the report."""
        return {key_of(field): getattr(self, field.name) for field in dataclasses.fields(self)}


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the flag of an option on the command line that every repository has."""
    return f"--llmgpu-{field.name.replace('_', '-')}"


def key_of(field: dataclasses.Field[Any]) -> str:
    """Return the key of an option in a report: its flag, of the strategy the short one."""
    return "--strategy" if field.name == "strategy" else flag_of(field)


def ini_key_of(field: dataclasses.Field[Any]) -> str:
    """Return the key of an option in ini files, which is also its name in pytest's configuration."""
    return f"llmgpu_{field.name}"
