"""How time is compared."""
