"""Every option, declared once: flag, ini key, marker argument, default and help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from pytest_llmgpu.report import option_values

__all__ = ["Options"]


def _option(
    parse: Callable[[str], Any],
    default: str | None,
    metavar: str | None,
    help: str,  # noqa: A002 - argparse's word
    *,
    flag: str | None = None,
    marker: bool = True,
    bare: str | None = None,
) -> Any:
    """Declare an option.

    Without a metavar the flag takes no value, and ini file and marker say true or false. With `bare` the flag may go
    without its value and then has that one.
    """
    metadata = {
        "parse": parse,
        "metavar": metavar,
        "help": help,
        "flag": flag,
        "marker": marker,
        "text": default,
        "bare": bare,
    }
    return dataclasses.field(default=None if default is None else parse(default), metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options in force for one test; the field names are the legal marker arguments and, after `llmgpu_`, ini keys."""

    strategy: tuple[str, ...] = _option(
        option_values.names,
        "mp",
        "NAME[,NAME]",
        "strategies to measure: mp (layers spread over the GPUs), tp (tensor parallel), iok (tp with DeepSpeed's "
        "kernels), a registered one, or module:attribute",
        flag="--strategy",
    )
    model: str = _option(
        option_values.text,
        "bundled",
        "MODEL",
        "bundled, a directory, a hub id, or a preset (llama-7b, llama-13b, llama-30b, llama-65b, llama-3-8b) with "
        "dummy weights",
    )
    revision: str | None = _option(option_values.text, None, "REV", "branch, tag or commit of a hub model")
    tokenizer: str | None = _option(
        option_values.text, None, "DIR", "directory or hub id of the tokenizer (default: the model's)"
    )
    load_format: str = _option(
        option_values.one_of("auto", "dummy"),
        "auto",
        "{auto,dummy}",
        "auto: safetensors; dummy: seeded random weights, no checkpoint",
    )
    dtype: str = _option(
        option_values.one_of("auto", "float32", "float16", "bfloat16"),
        "auto",
        "{auto,float32,float16,bfloat16}",
        "dtype of weights and activations (auto: float16 on GPUs, float32 on a CPU)",
    )
    device: str = _option(
        option_values.one_of("auto", "cuda", "cpu"), "auto", "{auto,cuda,cpu}", "auto: every visible GPU, else the CPU"
    )
    devices: int | None = _option(
        option_values.whole, None, "N", "number of devices (default: every visible GPU; 1 on a CPU)"
    )
    dataset: str = _option(
        option_values.text, "bundled", "DATASET", "bundled, hellaswag (from the hub), or a JSON Lines file"
    )
    limit: int | None = _option(option_values.whole, None, "ITEMS", "score only the first items of the dataset")
    batch_sizes: tuple[int, ...] = _option(
        option_values.batch_sizes,
        "1,2,4,8,16,32,64",
        "N[,N]",
        "batch sizes, in sequences per forward (an item is 4 sequences)",
    )
    find_max_batch: bool = _option(
        option_values.switch,
        "false",
        None,
        "once a batch size is out of memory, measure sizes between it and the largest that completed until the largest "
        "that fits is found",
    )
    gpu_memory: int | None = _option(option_values.memory_size, None, "SIZE", "cap on each GPU's memory, such as 32GiB")
    cuda_graphs: str = _option(
        option_values.one_of("auto", "on", "off"),
        "auto",
        "{auto,on,off}",
        "replay forwards from CUDA graphs; auto: in each case where it gives the same answers and saves time; on: "
        "wherever they can be recorded (not mp over several GPUs)",
    )
    scoring: str = _option(
        option_values.one_of("lean", "harness"),
        "lean",
        "{lean,harness}",
        "lean: logits only where an ending is predicted; harness: logits of every position and a KV cache, as "
        "lm-evaluation-harness computes them, with its memory and without CUDA graphs",
    )
    tp_backend: str = _option(
        option_values.one_of("transformers", "deepspeed"),
        "transformers",
        "{transformers,deepspeed}",
        "library that carries tp out",
    )
    iok_stock: bool = _option(
        option_values.switch,
        "false",
        None,
        "iok with DeepSpeed's own binding of the kernels, wrong residual sum included",
    )
    iok_min_tokens: int | None = _option(
        option_values.whole,
        None,
        "N",
        "tokens per sequence that iok's workspace must hold (default: the longest sequence; 1: DeepSpeed's own, which "
        "computes nonsense where memory grants fewer than there are)",
    )
    launches: int = _option(
        option_values.whole,
        "1",
        "N",
        "measure every case in this many launches of its processes, all cases in turn: launches are what the gate "
        "tells a change from noise by",
        marker=False,
    )
    sample_period: float = _option(
        option_values.seconds, "1/6", "SECONDS", "sampling period of the GPU profile", marker=False
    )
    profile_method: Literal["auto", "polling"] = _option(
        option_values.one_of("auto", "polling", paper="polling"),
        "auto",
        "{auto,polling}",
        "how NVML is read; auto: counters and averages that cover all of the time, where a GPU has them; polling: one "
        "PCIe window of 20 ms, utilisation and memory in each period, the method of Shin et al. 2024 (old name: paper)",
        marker=False,
    )
    timeout: float = _option(option_values.seconds, "600", "SECONDS", "time limit without a finished batch")
    load_timeout: float = _option(
        option_values.seconds, "1800", "SECONDS", "time limit for starting processes and loading the model"
    )
    json: str = _option(
        str, ".llmgpu/last.json", "PATH", "report to write, .json or .json.gz; empty for none", marker=False
    )
    save: str | None = _option(
        option_values.save_name,
        None,
        "NAME",
        "keep this run in the store, under a name if one is given",
        marker=False,
        bare="",
    )
    autosave: bool = _option(
        option_values.switch, "false", None, "keep every run in the store that is complete and green", marker=False
    )
    storage: str = _option(option_values.text, ".llmgpu", "DIR", "folder of the store", marker=False)
    compare: str | None = _option(
        option_values.text,
        None,
        "REF",
        "judge this run against a report, and fail on what regressed: a path, git:REV:PATH, or one of the store: its "
        "number, name, commit, or latest, which moves with every run that is kept, so that small losses add up unseen",
        marker=False,
    )
    policy: str | None = _option(
        option_values.text,
        None,
        "PATH",
        "the gate's margins, TOML; git:REV:PATH is read from a commit, so that a change cannot edit them (default: "
        "[tool.llmgpu.gate] of pyproject.toml)",
        marker=False,
    )
    calibration: str | None = _option(
        option_values.text,
        None,
        "PATH",
        "this runner's noise between launches, also git:REV:PATH (default: what llmgpu calibrate keeps in the store)",
        marker=False,
    )
    on_inconclusive: str | None = _option(
        option_values.one_of("pass", "fail"),
        None,
        "{pass,fail}",
        "whether what cannot be told fails (default: the policy's, pass)",
        marker=False,
    )
    allow_missing: bool | None = _option(
        option_values.switch, None, None, "let cases and figures pass that only the baseline has", marker=False
    )
    allow_no_baseline: bool | None = _option(
        option_values.switch,
        None,
        None,
        "let a run pass of which nothing could be compared for want of a baseline",
        marker=False,
    )
    require_armed: bool | None = _option(
        option_values.switch,
        None,
        None,
        "fail where anything that is gated could not be compared; cases that -k and the like left out do not count",
        marker=False,
    )
    html: str | None = _option(
        option_values.text,
        None,
        "PATH",
        "page for a browser to write at the end, .html, which needs no network (needs the extra report)",
        marker=False,
    )
    accuracy_baseline: float | None = _option(
        option_values.fraction,
        None,
        "FRACTION",
        "accuracy to hold (default: the registered or published one, where known)",
    )
    accuracy_metric: str = _option(
        option_values.one_of("acc", "acc_norm"),
        "acc_norm",
        "{acc,acc_norm}",
        "accuracy that is held against the baseline",
    )
    accuracy_tolerance: float = _option(
        option_values.fraction, "0.01", "FRACTION", "how far below the baseline still passes"
    )

    def in_force(self) -> dict[str, Any]:
        """Return flag to value, for the report."""
        return {_flag(field): getattr(self, field.name) for field in dataclasses.fields(self)}


def _flag(field: dataclasses.Field[Any]) -> str:
    return field.metadata["flag"] or f"--llmgpu-{field.name.replace('_', '-')}"


def _destination(field: dataclasses.Field[Any]) -> str:
    return f"llmgpu_{field.name}"
