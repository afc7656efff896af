"""The pytest plugin: hooks, fixtures, options and the items of the gate."""
