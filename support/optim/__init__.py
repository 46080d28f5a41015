"""The loss in chunks, and the optimizer Muon: both replace a line of plain PyTorch, for speed and memory.

Imports nothing else of `support`.
"""
