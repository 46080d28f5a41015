"""What a run writes besides checkpoints: console lines, log files, curves, TensorBoard and Weights & Biases.

May import `support.runtime` and what is below it.
"""
