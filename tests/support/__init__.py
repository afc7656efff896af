"""Factories, stand-ins and functions that ranks import."""
