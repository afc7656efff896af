"""What pytest sees: hooks, fixtures, options and the items of the gate."""
