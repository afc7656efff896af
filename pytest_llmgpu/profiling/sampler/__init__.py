"""The child process that reads NVML in a fixed period."""
