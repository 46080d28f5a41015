"""Saving a run to disk and restoring it: checkpoint directories, resuming, Hugging Face's format, LoRA.

May import all other packages of `support`.
"""
