"""Which report is meant, and where it is kept."""
