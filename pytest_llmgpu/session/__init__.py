"""How one run goes from options to a report."""
