"""The records of a report and their file."""
