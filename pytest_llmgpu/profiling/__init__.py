"""The machine and its GPUs: which ones there are (`machine`, `nvml`) and the load on them over time.

`profiler` starts one child process per session and node, the `sampler`. It reads NVML in a fixed period and writes the
readings to its stdout. `recording` keeps them and cuts a profile out of them for every window of time. In the sampler,
`devices` has the sources of each metric and the choice.
"""
