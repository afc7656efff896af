"""One declaration of every option: flag, ini key, marker argument, default and help in one place.

A flag wins over the marker, the marker over the ini file, the ini file over the default.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["EXPECT_OOM", "Options", "declare", "resolve"]

EXPECT_OOM = "expect_oom"
"""The one marker argument that is no option: the series may run out of memory at every batch size."""

_UNITS = {"": 1, "B": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("a comma list of strategies is needed")
    return tuple(dict.fromkeys(names))


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"allowed are {', '.join(allowed)}")
        return text

    return parse


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise ValueError("a whole number of at least 1 is needed")
    return int(text)


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("allowed are true and false")
    return text.lower() == "true"


def _batch_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = {_whole(part.strip()) for part in text.split(",")}
    except ValueError:
        raise ValueError("a comma list of whole numbers of at least 1 is needed, such as 1,2,4") from None
    return tuple(sorted(sizes))


def _seconds(text: str) -> float:
    above, _, below = text.partition("/")
    try:
        value = float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("seconds above 0 are needed, such as 0.5 or 1/6")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ValueError("a fraction from 0 to 1 is needed, such as 0.82")
    return value


def _memory_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise ValueError("a size such as 32GiB, 24GB or 8192MiB is needed")
    return round(float(match[1]) * unit)


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("a value is needed")
    return text


def _option(
    parse: Callable[[str], Any],
    default: str | None,
    metavar: str | None,
    help: str,  # noqa: A002 - argparse's word
    *,
    flag: str | None = None,
    marker: bool = True,
) -> Any:
    """Declare an option; without a metavar the flag takes no value, and ini file and marker say true or false."""
    metadata = {"parse": parse, "metavar": metavar, "help": help, "flag": flag, "marker": marker, "text": default}
    return dataclasses.field(default=None if default is None else parse(default), metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options in force for one test; the field names are the legal marker arguments and, after `llmgpu_`, ini keys."""

    strategy: tuple[str, ...] = _option(
        _names,
        "mp",
        "NAME[,NAME]",
        "strategies to measure: mp (layers spread over the GPUs), tp (tensor parallel), iok (tp with DeepSpeed's "
        "kernels), a registered one, or module:attribute",
        flag="--strategy",
    )
    model: str = _option(
        _text,
        "bundled",
        "MODEL",
        "bundled, a directory, a hub id, or a preset (llama-7b, llama-13b, llama-30b, llama-65b, llama-3-8b) with "
        "dummy weights",
    )
    revision: str | None = _option(_text, None, "REV", "branch, tag or commit of a hub model")
    tokenizer: str | None = _option(_text, None, "DIR", "directory or hub id of the tokenizer (default: the model's)")
    load_format: str = _option(
        _one_of("auto", "dummy"),
        "auto",
        "{auto,dummy}",
        "auto: safetensors; dummy: seeded random weights, no checkpoint",
    )
    dtype: str = _option(
        _one_of("auto", "float32", "float16", "bfloat16"),
        "auto",
        "{auto,float32,float16,bfloat16}",
        "dtype of weights and activations (auto: float16 on GPUs, float32 on a CPU)",
    )
    device: str = _option(
        _one_of("auto", "cuda", "cpu"), "auto", "{auto,cuda,cpu}", "auto: every visible GPU, else the CPU"
    )
    devices: int | None = _option(_whole, None, "N", "number of devices (default: every visible GPU; 1 on a CPU)")
    dataset: str = _option(_text, "bundled", "DATASET", "bundled, hellaswag (from the hub), or a JSON Lines file")
    limit: int | None = _option(_whole, None, "ITEMS", "score only the first items of the dataset")
    batch_sizes: tuple[int, ...] = _option(
        _batch_sizes, "1,2,4,8,16,32,64", "N[,N]", "batch sizes, in sequences per forward (an item is 4 sequences)"
    )
    gpu_memory: int | None = _option(_memory_size, None, "SIZE", "cap on each GPU's memory, such as 32GiB")
    cuda_graphs: str = _option(
        _one_of("auto", "on", "off"),
        "auto",
        "{auto,on,off}",
        "replay forwards from CUDA graphs; auto: in each case where it gives the same answers and saves time; on: "
        "wherever they can be recorded (not mp over several GPUs)",
    )
    tp_backend: str = _option(
        _one_of("transformers", "deepspeed"), "transformers", "{transformers,deepspeed}", "library that carries tp out"
    )
    iok_stock: bool = _option(
        _switch, "false", None, "iok with DeepSpeed's own binding of the kernels, wrong residual sum included"
    )
    iok_min_tokens: int | None = _option(
        _whole,
        None,
        "N",
        "tokens per sequence that iok's workspace must hold (default: the longest sequence; 1: DeepSpeed's own, which "
        "computes nonsense where memory grants fewer than there are)",
    )
    sample_period: float = _option(_seconds, "1/6", "SECONDS", "sampling period of the GPU profile", marker=False)
    timeout: float = _option(_seconds, "600", "SECONDS", "time limit without a finished batch")
    load_timeout: float = _option(
        _seconds, "1800", "SECONDS", "time limit for starting processes and loading the model"
    )
    json: str = _option(
        str, ".llmgpu/last.json", "PATH", "report to write, .json or .json.gz; empty for none", marker=False
    )
    accuracy_baseline: float | None = _option(
        _fraction, None, "FRACTION", "accuracy to hold (default: the registered or published one, where known)"
    )
    accuracy_metric: str = _option(
        _one_of("acc", "acc_norm"), "acc_norm", "{acc,acc_norm}", "accuracy that is held against the baseline"
    )
    accuracy_tolerance: float = _option(_fraction, "0.01", "FRACTION", "how far below the baseline still passes")

    def in_force(self) -> dict[str, Any]:
        """Return flag to value, for the report."""
        return {_flag(field): getattr(self, field.name) for field in dataclasses.fields(self)}


def _flag(field: dataclasses.Field[Any]) -> str:
    return field.metadata["flag"] or f"--llmgpu-{field.name.replace('_', '-')}"


def _destination(field: dataclasses.Field[Any]) -> str:
    return f"llmgpu_{field.name}"


def declare(parser: pytest.Parser) -> None:
    """Add every option to pytest's command line and ini file."""
    group = parser.getgroup("llmgpu", "LLM inference on GPUs (pytest-llmgpu)")
    for field in dataclasses.fields(Options):
        text = field.metadata["help"].replace("%", "%%")
        default = field.metadata["text"]
        shown = f"{text} (default: {default})" if default is not None else text
        metavar = field.metadata["metavar"]
        action = "append" if field.name == "strategy" else "store" if metavar else "store_true"
        group.addoption(
            _flag(field),
            dest=_destination(field),
            default=None,
            action=action,
            help=shown,
            **({"metavar": metavar} if metavar else {}),
        )
        parser.addini(_destination(field), f"default of {_flag(field)}", type="string", default=None)


def resolve(config: pytest.Config, markers: Iterable[pytest.Mark] = ()) -> Options:
    """Return the options in force.

    Args:
        config: Where flags and ini keys are.
        markers: `llmgpu` markers of a test, the closest first.

    Raises:
        pytest.UsageError: A value is not allowed; the text names it, its source and what is allowed.
    """
    given: dict[str, Any] = {}
    for marker in markers:
        _check_marker(marker)
        given = {**marker.kwargs, **given}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        flag, ini = config.getoption(_destination(field), None), config.getini(_destination(field))
        if flag is not None:
            raw, source = flag, _flag(field)
        elif given.get(field.name) is not None:
            raw, source = given[field.name], f"@pytest.mark.llmgpu({field.name}=...)"
        elif ini is not None:
            raw, source = ini, _destination(field)
        else:
            continue
        text = ",".join(map(str, raw)) if isinstance(raw, (list, tuple)) else str(raw)
        try:
            values[field.name] = field.metadata["parse"](text)
        except ValueError as error:
            raise pytest.UsageError(f"{source}: {text!r} is not allowed: {error}") from None
    return Options(**values)


def _check_marker(marker: pytest.Mark) -> None:
    allowed = [field.name for field in dataclasses.fields(Options) if field.metadata["marker"]]
    allowed.append(EXPECT_OOM)
    unknown = [name for name in marker.kwargs if name not in allowed]
    if marker.args or unknown:
        wrong = repr(marker.args[0]) if marker.args else unknown[0]
        raise pytest.UsageError(
            f"@pytest.mark.llmgpu: {wrong} is not allowed: allowed are {', '.join(allowed)}, by name"
        )
    expected = marker.kwargs.get(EXPECT_OOM, False)
    if not isinstance(expected, bool):
        raise pytest.UsageError(
            f"@pytest.mark.llmgpu({EXPECT_OOM}=...): {expected!r} is not allowed: allowed are True and False"
        )
