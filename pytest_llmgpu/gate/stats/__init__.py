"""Statistics of the verdicts."""
