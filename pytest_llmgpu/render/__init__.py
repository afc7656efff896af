"""How people and other tools read a report."""
