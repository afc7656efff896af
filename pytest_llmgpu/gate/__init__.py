"""Did the run get worse than the baseline?"""
