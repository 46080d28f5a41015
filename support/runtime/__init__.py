"""The processes of a run and the machine below them: ranks, signals, devices, memory, the profiler.

May import `support.data`, `support.optim` and what is below them.
"""
