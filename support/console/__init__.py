"""The output of a run: log.txt, console lines, TensorBoard and Weights & Biases.

May import `support.runtime` and what is below it.
"""
