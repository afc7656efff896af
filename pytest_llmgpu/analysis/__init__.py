"""What one run states by itself, without a baseline; `assess.assess` is the entry point."""
