"""Did the run get worse than the baseline?

`judge` compares two reports: it pairs their results, and the rows of each pair follow the rules in `times`, `cause`
(the program, also one slower kernel), `exact` (also memory), `answers`, `figures` and `promotion` (creep, and what is
wrong with a report); it has the exit status as well. `fixed_clock` and `stats` are for times, `program` compares calls.
`policy` has the thresholds. `cause` names what changed in the program, `headline` has it in one sentence and groups the
rows that have one cause. `ab` launches until a row is decided, `trends` looks over many reports.
"""
