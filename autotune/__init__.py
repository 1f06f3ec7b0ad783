"""Knowing and choosing the time of a kernel.

From the bottom: `chips` (what each generation can do), `bundles` (the compiler's schedule, read), `replay` (the schedule, run),
`roofline` (bounds without a compiler), `estimating` (`tpukern.estimate`), `timeline` (what happens when). On them stand the
tuner (`rejecting`, `searching`, `trials`, `verifying`, `tuning`), its records (`recording`, `recalling`) and the report
(`drawing`, `reporting`).
"""
