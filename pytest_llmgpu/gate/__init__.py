"""Did the run get worse than the baseline?

`judge` compares two reports: `matching` pairs their results, `cases` collects the rows of each pair. The rules are
`time` (with `noise_model`), `exact` (traffic, memory), `work` (FLOPs, kernels), `execution`, `accuracy` and `series`.
`policy` has the thresholds, `classify` the class of a row and the exit status. `cause` and `cause_groups` name what
changed, `headline` says it in one sentence. `ab` and `bisect` launch until a row is decided, `history` and `trends`
look over many reports, `calibration` is the noise of a machine, `promotion` makes a report the baseline.
"""
