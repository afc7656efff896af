"""What NVML sees of the GPUs: who they are (`nvml`), and what they do over a window (`window`).

`sampler` is the child process that reads the metrics of `devices`; `recording` keeps its stream and cuts profiles
out of it.
"""

from __future__ import annotations

__all__: list[str] = []
