"""Text to tokens on disk: sources and readers, tokenizers, encoding, shards and their manifest, downloads.

May import `support.files` and `support.cli`. Nothing here imports torch: every process that tokenises would load it.
"""
