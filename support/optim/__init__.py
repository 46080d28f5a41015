"""The cross-entropy in chunks and the Muon optimizer. Each replaces a line of plain PyTorch, to save time or memory.

They import nothing else of `support`.
"""
