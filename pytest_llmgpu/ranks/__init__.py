"""The processes of a strategy: how they start, and the work of one of them.

A rank runs the commands of `worker`, which it reads from a pipe (`serving`). `group` sends a command to all ranks of a
strategy, through ranks that a launcher starts (`protocol`; the launchers are `local` and `env`). Every
launcher shares the futures of a rank (`futures.ProcessRank`) and its process (`local.LocalProcess`); its own is the
`Channel` between them.
"""
