"""Text to tokens on disk: sources and readers, tokenizers, encoding, shards and their manifest, downloads.

May import `support.files`, `support.cli` and `support.startup`. Nothing here imports torch.
"""
