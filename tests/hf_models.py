"""Hugging Face's GPT-2, small and random: the reference for the model and its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from training import TINY

from support.checkpoints import huggingface
from train_gpt2 import GPT

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def hf_model() -> GPT2LMHeadModel:
    """A model of TINY's sizes, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256
    )
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():  # its own initialization has zero biases, where an error in them hides
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


def copy_of(reference: GPT2LMHeadModel) -> GPT:
    """Our model with the same weights."""
    model = GPT(TINY)
    model.load_state_dict(
        huggingface.from_hf(reference.state_dict(), model.state_dict(keep_vars=True), TINY.vocab_size)
    )
    return model
