"""The commands of `llmgpu`: each module of this folder is one, with its name.

A command has `add_arguments(parser)`, which declares its arguments (`cli.arguments` has those of several commands), and
`run(arguments)`, which returns the exit status. All output goes through `output.show`. A ValueError of `run` is one
line, which `llmgpu` prints before it exits with 2. A command is imported when it is named.
"""

from __future__ import annotations

COMMANDS = {
    "ab": "measure two commits alternately and judge the second",
    "bisect": "find the commit that made a metric worse",
    "calibrate": "measure the noise between launches of one commit on this runner; the gate reads it",
    "compare": "show what changed between reports, worst first; the exit status is 0 also for a regression",
    "export": "write a report in the format of another tool or page",
    "gate": "judge a report against a baseline; the exit status is the result",
    "html": "write a report as one HTML page that needs no network",
    "list": "list the reports of the store",
    "plot": "draw the charts of a report as PNG or SVG",
    "promote": "make a report the baseline unless it is dirty, failed, invalid, undecided or worse",
    "ray": "run pytest on the nodes of a Ray cluster, one process for each GPU",
    "schema": "print the JSON Schema of a report",
    "show": "show the tables and findings of a report",
    "trend": "show how each case changed over stored reports",
}
"""Name of each command to its line in `llmgpu --help`."""
