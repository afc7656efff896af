"""What the page of a report is made of: its template, style and script, and what they are filled with."""
