"""What is true: events, the fold, the residency machine, the planner, and the stores that keep the log.

Imports nothing else of the project. The functional core (`fleet.apply`, `plan.plan`) has no I/O, no clock and no
randomness; the only shell here is the stores (`memory_log`, `redis_log`, `segment_log`).
"""
