"""What NVML sees of the GPUs: who they are (`nvml`), and what they do over a window (`window`).

`sampler` is the child process: `devices` choose for each metric among `sources`, `counters` and `calls`, `sampling`
makes one round of readings, `deadlines` say when, `marking` reads counters in between, `promptness` gets it a core on
a busy machine. `stream` is what it writes; `recording` keeps that and cuts profiles out of it, by the rules of
`figures`.
"""

from __future__ import annotations

__all__: list[str] = []
