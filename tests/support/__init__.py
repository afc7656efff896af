"""Factories, emulations and functions that ranks import."""
