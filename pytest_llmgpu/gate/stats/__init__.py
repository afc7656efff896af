"""Statistics that the verdicts rest on."""
