"""What NVML sees of the GPUs: who they are (`nvml`), how joined (`topology`), what they do in a window (`window`).

`sampler` is the child process: `devices` choose for each metric among `sources`, `counters` and `calls`, `sampling`
makes one round of readings, `deadlines` say when, `marking` reads in between what is `cumulative`, `promptness` gets it
a core on a busy machine; `ask` keeps the reason of what NVML refuses. `stream` is what it writes; `recording` keeps
that and cuts profiles out of it, by the rules of `figures` and, for what was counted, of `marks`.
"""

from __future__ import annotations

__all__: list[str] = []
