"""The processes of a strategy: how they start, and the work of one of them.

A rank runs the commands of `worker`, which it reads from a pipe (`serving`). `group` sends a command to all ranks of a
strategy. `local` has the process of a rank on this machine. Among processes that torchrun, srun or Ray started,
`env_launcher` drives one in each of them, over a `link` to rank 0's process.
"""
