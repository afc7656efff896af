"""The child process that reads NVML at a steady rate."""
