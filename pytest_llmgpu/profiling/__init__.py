"""The machine and its GPUs: which ones there are (`machine`, `nvml`) and the load on them over time.

`nodes` compares several machines that measure together; `node_profilers` has a profiler for each of them.

`profiler` starts one child process per session, the `sampler`. It reads NVML in a fixed period and writes the lines
of `stream` to its stdout. `recording` keeps them and cuts a profile out of them for every window of time;
`counter_deltas` computes the part that comes from counters. In the sampler, `devices` chooses a source for each metric
out of `sources`, `cumulative` and `calls`; `sampling` makes one round of readings; `deadlines` has the times of the
rounds; `marking` reads the counters of `cumulative` between rounds.
"""
