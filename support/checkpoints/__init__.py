"""The state of a run on disk and back: checkpoint directories, resuming, Hugging Face's format, LoRA.

May import all other packages of `support`.
"""
