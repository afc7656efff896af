"""Comparison of times: noise of a machine, usable launches, change of each case, verdicts."""
