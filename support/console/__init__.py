"""The output of a run: its files except checkpoints, console lines, TensorBoard and Weights & Biases.

May import `support.runtime` and what is below it.
"""
