"""The machine and its GPUs: which ones there are (`machine`, `nvml`) and the load on them over time.

`profiler` starts one child process per session, the `sampler`. It reads NVML in a fixed period and writes the lines
of `stream` to its stdout. `recording` keeps them and cuts a profile out of them for every window of time;
`node_profilers` has a profiler for each node. In the sampler, `devices` chooses one of the `sources` for each metric,
and `rounds` has the readings, their deadlines and the marks between them.
"""
