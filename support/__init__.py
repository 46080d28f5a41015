"""The code that the scripts build on. It is not needed to understand how GPT-2 is trained, but needed to trust a run.

Each package may import the ones below it, but never a script:

    console         log.txt, curves.png, console lines, TensorBoard and Weights & Biases
    checkpoints     the folder of a run: starting, saving, resuming; starts.jsonl; models in Hugging Face's format
    sizing          what suits a text, a time or a budget
    runtime         processes, signals, devices, memory
    data, optim     text to tokens on disk; the loss and the optimizer Muon
    files, config, cli, terminal, gpus, torch_private, startup    what all of these use
"""

__version__ = "2.1.0"
