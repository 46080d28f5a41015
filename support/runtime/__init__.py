"""The processes of a run and the machine below them: ranks, signals, devices, memory, the profiler.

May import `support.optim` and what is below it.
"""
