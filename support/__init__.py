"""The code that the scripts build on. It is not needed to understand how GPT-2 is trained, but needed to trust a run.

Each package may import the ones below it, but never a script:

    checkpoints     saving and resuming a run; models in Hugging Face's format
    console         log.txt, starts.jsonl, curves.png, console lines, TensorBoard and Weights & Biases
    runtime         processes, signals, devices, memory
    data, optim     text to tokens on disk; the loss and the optimizer Muon
    files, cli      atomic writes and locks; flags and errors
"""

__version__ = "2.1.0"
