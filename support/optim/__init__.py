"""The loss in chunks, and the optimizer Muon: both replace a line of plain PyTorch, for speed and memory.

They import nothing else of `support`.
"""
