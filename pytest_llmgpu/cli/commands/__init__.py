"""The commands of `llmgpu`.

The command `gate` has `add_gate(parser)`, which declares its arguments (`cli.arguments` has those of several commands),
and `run_gate(arguments)`, which returns the exit status. All output goes through `output.show`. A ValueError of
`run_gate` is one line, which `llmgpu` prints before it exits with 2. A module is imported when its command is named.
"""

from __future__ import annotations

COMMANDS = {
    "ab": ("judging", "measure two commits alternately and judge the second"),
    "bisect": ("bisect", "find the commit that made a metric worse"),
    "export": ("reports", "write a report in the format of another tool or page"),
    "gate": ("judging", "judge a report against a baseline; the exit status is the result"),
    "html": ("reports", "write a report as one HTML page that needs no network"),
    "init": ("init", "write a test, its options, a policy and a workflow into this repository, after showing them"),
    "list": ("reports", "list the reports of the store"),
    "plot": ("reports", "draw the charts of a report as PNG or SVG"),
    "promote": ("judging", "make a report the baseline if it is clean and complete and passes the gate"),
    "ray": ("ray", "run pytest on the nodes of a Ray cluster, one process for each GPU"),
    "rm": ("reports", "remove reports of the store"),
    "schema": ("reports", "print the JSON Schema of a report"),
    "show": ("reports", "show the tables and findings of a report, or what changed between several"),
    "trend": ("reports", "show how each case changed over stored reports; the exit status is 1 if one changed"),
}
"""Name of each command to its module in this folder and its line in `llmgpu --help`."""
