"""Which result of a baseline a result is held against, and whether the machines allow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import msgspec

from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.file import Environment
from pytest_llmgpu.report.result import CaseResult

__all__ = ["Pair", "hardware_differences", "other_devices", "pairs", "software_differences"]

_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed")

_WIDTH = 40
"""Most characters of a value that a reason shows whole: less than a digest has."""


class Pair(NamedTuple):
    """A result of each side, at least one of them."""

    base: CaseResult | None
    head: CaseResult | None
    differing: list[str]
    """What makes them different measurements in spite of the same id: `dtype float16 -> bfloat16`."""


def pairs(base: Sequence[CaseResult], head: Sequence[CaseResult]) -> list[Pair]:
    """Match results: by key and test, by key alone what is left, the second of a key with the second; then by id.

    Results of one id whose cases differ are matched too, and say in what. In the candidate's order; what only the
    baseline has comes last.
    """
    left = list(base)
    matched: dict[int, CaseResult] = {}
    for name_of in (_key_and_test, _key, _id):
        waiting = [number for number in range(len(head)) if number not in matched]
        there = dict(zip(_numbered(left, name_of), left, strict=True))
        names = _numbered([head[number] for number in waiting], name_of)
        matched |= {number: there.pop(name) for number, name in zip(waiting, names, strict=True) if name in there}
        left = list(there.values())
    found = [Pair(matched.get(number), now, []) for number, now in enumerate(head)]
    found = [
        pair._replace(differing=_differing(pair.base.case, pair.head.case))
        if pair.base is not None and pair.head is not None and pair.base.key != pair.head.key
        else pair
        for pair in found
    ]
    return [*found, *(Pair(result, None, []) for result in left)]


def other_devices(base: Sequence[CaseResult], head: Sequence[CaseResult]) -> list[str]:
    """Return in a line that two reports measured other kinds of devices; nothing where they have one in common."""
    then, now = ({result.case.device for result in cases} for cases in (base, head))
    if not then or not now or then & now:
        return []
    was, is_now = (" and ".join(sorted(devices)) for devices in (then, now))
    return [f"the baseline was measured on {was} and the candidate on {is_now}: they do not compare"]


def hardware_differences(base: Environment, head: Environment, device: str) -> list[str]:
    """Return in what the machines differ so much that figures cannot be compared, each in a few words.

    Args:
        base: machine of the baseline.
        head: machine of the candidate.
        device: `cuda` or `cpu`: what the case ran on. Only that counts.
    """
    if device == "cpu":
        seen = [("CPU", base.cpu, head.cpu), ("cores", base.cores, head.cores)]
    else:
        seen = [
            ("GPUs", len(base.gpus), len(head.gpus)),
            ("GPU model", _models(base), _models(head)),
            ("GPU memory", _memory(base), _memory(head)),
            ("topology", _links(base), _links(head)),
        ]
    return [f"{name} {then} -> {now}" for name, then, now in seen if None not in {then, now} and then != now]


def software_differences(base: Environment, head: Environment) -> list[str]:
    """Return what else differs between the machines, which may explain a change but does not forbid comparing."""
    seen: list[tuple[str, Any, Any]] = [
        ("driver", base.driver, head.driver),
        ("CUDA", base.cuda, head.cuda),
        ("NCCL", base.nccl, head.nccl),
        ("Python", base.python, head.python),
        *((name, base.versions.get(name), head.versions.get(name)) for name in _LIBRARIES),
        *(
            (name, base.variables.get(name, "unset"), head.variables.get(name, "unset"))
            for name in sorted(base.variables.keys() | head.variables.keys())
        ),
        ("PCIe", _lanes(base), _lanes(head)),
    ]
    if (base.topology is None) != (head.topology is None) and base.gpus and head.gpus:
        # Where both are known it is hardware, and they are not compared.
        seen.append(("topology", _links(base) or "unknown", _links(head) or "unknown"))
    # Reports of before it was recorded say nothing of it.
    if None not in (limits := (_power_limits(base), _power_limits(head))):
        seen.append(("power limit", *limits))
    found = [f"{name} {_word(then)} -> {_word(now)}" for name, then, now in seen if then != now]
    if base.gpus and head.gpus and {gpu.uuid for gpu in base.gpus} != {gpu.uuid for gpu in head.gpus}:
        found.append("other boards of the same kind")
    return found


def _key_and_test(result: CaseResult) -> Hashable:
    return result.key, result.nodeid


def _key(result: CaseResult) -> Hashable:
    return result.key


def _id(result: CaseResult) -> Hashable:
    return result.id


def _numbered(results: Sequence[CaseResult], name_of: Callable[[CaseResult], Hashable]) -> list[tuple[Hashable, int]]:
    """Return each result's name and how many had it before."""
    counts: Counter[Hashable] = Counter()
    numbered = []
    for name in map(name_of, results):
        numbered.append((name, counts[name]))
        counts[name] += 1
    return numbered


def _differing(base: Case, head: Case) -> list[str]:
    then, now = msgspec.structs.asdict(base), msgspec.structs.asdict(head)
    # `execution` is an answer and no part of the key. Keys may also differ because an older version knew fewer fields.
    names = [name for name in then if then[name] != now[name] and name != "execution"]
    return [f"{name} {_word(then[name])} -> {_word(now[name])}" for name in names]


def _models(environment: Environment) -> str:
    return ", ".join(sorted({gpu.name for gpu in environment.gpus})) or "none"


def _memory(environment: Environment) -> str | None:
    sizes = [gpu.memory_bytes for gpu in environment.gpus]
    return ", ".join(f"{size / 2**30:.1f} GiB" for size in sorted({size for size in sizes if size})) or None


def _links(environment: Environment) -> str | None:
    if environment.topology is None:
        return None
    links = Counter(link for number, row in enumerate(environment.topology) for link in row[:number])
    return ", ".join(f"{count} x {link}" for link, count in sorted(links.items())) or "one device"


def _lanes(environment: Environment) -> str | None:
    lanes = sorted({f"gen {gpu.pcie_gen} x{gpu.pcie_width}" for gpu in environment.gpus if gpu.pcie_gen})
    return ", ".join(lanes) or None


def _power_limits(environment: Environment) -> str | None:
    limits = [gpu.power_limit_w for gpu in environment.gpus]
    if not limits or not all(limits):
        return None
    return f"{limits[0]:g} W" if len(set(limits)) == 1 else ", ".join(f"{limit:g} W" for limit in limits)


def _word(value: Any) -> str:
    """Return a value in a few characters: a digest by its beginning."""
    text = "none" if value is None else str(value)
    return text if len(text) <= _WIDTH else f"{text[:12]}..."
