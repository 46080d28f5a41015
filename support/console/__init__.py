"""What a person sees of a run: the log, the lines on the console, TensorBoard and Weights & Biases.

May import `support.runtime` and what is below it.
"""
