"""DeepSpeed's kernels and what they need."""
