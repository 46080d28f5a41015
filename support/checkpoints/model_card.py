"""The model card of a checkpoint: a `README.md` in the format of the Hugging Face hub.

It depends on the run alone, not on the machine: no time, no path, no name of a host. Its owner may edit it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from support.checkpoints.directory import step_of
from support.cli import flag_fields, flag_name
from support.console.terminal import on_one_line
from support.data.hub import FINEWEB_PREFIXES
from support.data.presets import DEMO_SOURCE
from support.runtime.memory import count_parameters
from support.runtime.options import RunOptions
from support.runtime.run_info import RunInfo

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CARD = """---
# The license is yours to choose. Then remove the "# " of the next line.
# license: mit
{metadata}
---

<!-- To publish this folder, choose a license above, then

hf upload NAME FOLDER --exclude trainer.pt --exclude checkpoint.json

Those two files are only needed to resume the run. -->

# GPT-2, {size} parameters

{kind}, {origin} with `train_gpt2.py`. It continues text; it was not trained to follow instructions.

{facts}

## How to use it

NAME is the name of this model on the hub or its folder, FOLDER its folder on your disk.

```python
from transformers import pipeline

generate = pipeline("text-generation", model="NAME")
print(generate({prompt}, max_new_tokens=32)[0]["generated_text"])
```

`GPT2LMHeadModel.from_pretrained("NAME")` and `AutoTokenizer.from_pretrained("NAME")` open its parts.{adapter}

With the scripts that trained it:

```sh
{commands}
```

## How it was trained

{flags}
"""


def model_card(run: RunInfo, step: int, trained: int, val: Mapping[int, float], hellaswag: Mapping[int, float]) -> str:
    """The text of the card of the checkpoint of `step`.

    Args:
        trained: number of parameters that are trained, all or LoRA's.
        val, hellaswag: the validation losses, in nats per token, and accuracies in the log, by step; the newest count.
    """
    config, base, source = run.config, run.config.init_from, run.identity.get("source") or ""
    tokenizer, parameters = run.data.tokenizer.name, count_parameters(run.sizes)
    is_adapter, base_on_hub = config.lora_rank is not None, base is not None and _is_on_hub(base)
    base_name = base if base is None or base_on_hub else _printable(Path(base).name)
    fineweb = [name for name in FINEWEB_PREFIXES if source.startswith(f"{name}/")]
    metadata = {
        "language": "en" if fineweb or source == DEMO_SOURCE else None,
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gpt2", "lora"] if is_adapter else ["gpt2"],
        "datasets": fineweb,
        "base_model": base if base_on_hub else None,
    }
    facts = [
        f"**parameters**: {parameters:,}" + (f", and {trained:,} of the adapter" if is_adapter else ""),
        f"**sizes**: {config.n_layer} layers, {config.n_head} heads, {config.n_embd} channels, context {config.block_size:,}",
        f"**vocabulary**: {run.sizes['vocab_size']:,} tokens ({tokenizer})",
        f"**data**: `{_printable(source)}`" if source else "**data**: token shards without a description",
        f"**tokens seen**: {step * config.total_batch_size:,}, in {step:,} steps of {config.total_batch_size:,}",
    ]
    # Training has gone on: the log may be ahead of the checkpoint. At step 0 the weights are random, or those of the base.
    if at := max((n for n in val if n <= step), default=0):
        per_byte = val[at] / run.data.bytes_per_token
        facts.append(f"**validation loss**: {val[at]:.4f} nats per token, {per_byte:.4f} per byte (step {at:,})")
    if at := max((n for n in hellaswag if n <= step), default=0):
        known = at >= run.first_step and run.hellaswag_items  # an earlier process of this run may have scored others
        items = f" of {run.hellaswag_items:,} items" if known else ""
        facts.append(f"**HellaSwag**: acc_norm {hellaswag[at]:.4f}{items} (step {at:,})")
    prompt = on_one_line(run.prompt) if config.text is not None else "The" if config.demo else "Once upon a time"
    commands = [f"python sample.py --model FOLDER --prompt {shlex.quote(prompt)}"]
    commands += ["python hellaswag.py --model FOLDER"] if tokenizer == "gpt2" else []
    return _CARD.format(
        # JSON is YAML, too, and quoted: a name such as "on" or "1e3" stays a string
        metadata="\n".join(f"{name}: {json.dumps(value)}" for name, value in metadata.items() if value),
        size=f"{parameters / 1e6:.0f}M" if parameters >= 1e7 else f"{parameters / 1e6:.2g}M",
        kind=f"An adapter (LoRA of rank {config.lora_rank}) for a GPT-2" if is_adapter else "A GPT-2",
        origin="trained from random weights" if base is None else f"fine-tuned from `{base_name}`",
        facts="\n".join(f"- {fact}" for fact in facts),
        prompt=json.dumps(prompt, ensure_ascii=False),
        adapter=" They need `peft`, and its base model." if is_adapter else "",
        commands="\n".join(commands),
        flags=_flags(config, base_name),
    )


def _is_on_hub(name: str) -> bool:
    """Whether a base model is one of the hub, as far as its name tells."""
    return not Path(name).exists() and step_of(Path(name)) < 0 and bool(_HUB_NAME.fullmatch(name))


def _printable(text: str) -> str:
    """Text for a code span on one line: without line breaks, backticks and the folders of an absolute path."""
    text = Path(text).name if Path(text).is_absolute() else text
    return "".join(c if c.isprintable() and c != "`" else "?" for c in text)


def _flags(config: RunOptions, base_name: str | None) -> str:
    """The flags that determine the weights, where they differ from the defaults."""
    words = []
    for field in flag_fields(type(config)):
        name = field.name
        value = base_name if name == "init_from" else getattr(config, name)
        is_unused = config.minutes is not None and name in ("max_steps", "decay_steps", "warmup_steps")
        if name in RunOptions.__dataclass_fields__ or value == field.default or is_unused:
            continue
        if isinstance(value, bool):
            words.append(flag_name(name) if value else f"--no-{flag_name(name)[2:]}")
        else:
            value = f"{value:.6g}" if isinstance(value, float) else str(value)
            words.append(f"{flag_name(name)} {shlex.quote(value)}")
    if not words:
        return "With the default flags of `train_gpt2.py`."
    return "With these flags, and the defaults for all others:\n\n```\n" + "\n".join(words) + "\n```"
