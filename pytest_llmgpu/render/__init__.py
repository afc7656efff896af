"""Outputs of a report: terminal, HTML, charts and exports."""
