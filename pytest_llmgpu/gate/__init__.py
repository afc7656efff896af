"""Did the run get worse than the baseline?

`judge` compares two reports: `matching` pairs their results, `cases` collects the rows of each pair. The rules are
`times`, `exact` (work, traffic, memory, execution) and `answers`; `stats` has their distributions.
`policy` has the thresholds, `classify` the class of a row and the exit status. `cause` and `cause_groups` name what
changed, `headline` says it in one sentence. `ab` and `bisect` launch until a row is decided, `trends`
looks over many reports, `calibration` is the noise of a machine, `promotion` makes a report the baseline.
"""
