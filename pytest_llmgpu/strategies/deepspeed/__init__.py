"""DeepSpeed: its inference engine, its kernels, their build and their workspace."""
