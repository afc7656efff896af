"""Findings on one run by itself, without a baseline; `assess.assess` is the entry point."""
