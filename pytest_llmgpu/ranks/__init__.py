"""The processes of a strategy: how they start, and the work of one of them.

A rank runs the commands of `worker`, which it reads from a pipe (`serving`). `group` sends a command to all ranks of a
strategy. `local` has the process of a rank on this machine; on several nodes a `supervisor` in each of the processes
that torchrun started drives one, over a `link` to rank 0's process.
"""
