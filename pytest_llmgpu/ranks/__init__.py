"""How the ranks of a strategy are started; see `protocol`."""
