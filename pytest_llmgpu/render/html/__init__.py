"""The page of a report: its template, style and script, and the data that fill them."""
