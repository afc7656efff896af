"""Recorders of what a process computes: kernels, ops, calls of the host. Ranks use them, and the workers of engines."""
