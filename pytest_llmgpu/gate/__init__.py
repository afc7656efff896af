"""Did the run get worse than the baseline?

`judge` compares two reports: it pairs their results and collects the rows of each pair, by the rules in `times`,
`exact` and `answers`; it has the class of a row and the exit status as well. `policy` has the
thresholds. `cause` and `cause_groups` name what changed, `headline` says it in one sentence. `ab` launches until a row
is decided, `trends` looks over many reports.
"""
