"""The model card of a checkpoint: a `README.md` in the format of the Hugging Face hub.

It depends on the run alone, not on the machine: no time, no path, no name of a host. Its owner may edit it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from support.checkpoints.directory import step_of
from support.cli import flag_fields, flag_name
from support.console.terminal import on_one_line
from support.data.hub import FINEWEB_PREFIXES
from support.data.presets import DEMO_SOURCE
from support.runtime.memory import count_parameters
from support.runtime.options import RunOptions
from support.runtime.run_info import RunInfo

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_NOTICE = """<!-- To publish this folder, choose a license above, then

hf upload NAME FOLDER --exclude trainer.pt --exclude checkpoint.json

Those two files are only needed to resume the run. -->"""

_OPEN_MODEL = """```python
from transformers import pipeline

generate = pipeline("text-generation", model="NAME")
print(generate({prompt}, max_new_tokens=32)[0]["generated_text"])
```

`GPT2LMHeadModel.from_pretrained("NAME")` and `AutoTokenizer.from_pretrained("NAME")` open its parts."""
_OPEN_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoTokenizer, GPT2LMHeadModel

model = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained("{base}"), "NAME")
tokenizer = AutoTokenizer.from_pretrained("NAME")
```

`model.merge_and_unload()` merges the two."""


class Score(NamedTuple):
    """A value, and the step before which it was measured."""

    step: int
    value: float


def model_card(
    run: RunInfo, step: int, trained: int, val: Score | None, hellaswag: Score | None, hellaswag_items: int | None
) -> str:
    """The text of the card.

    Args:
        trained: number of parameters that are trained, all or LoRA's.
        val, hellaswag: the newest validation loss, in nats per token, and accuracy.
        hellaswag_items: how many were scored, if that is known.
    """
    config, sizes, tokenizer, source = run.config, run.sizes, run.data.tokenizer.name, run.identity.get("source")
    base, is_adapter = config.init_from, config.lora_rank is not None
    on_hub = base is not None and _is_on_hub(base)
    metadata: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    metadata |= {"pipeline_tag": "text-generation", "tags": ["gpt2", "lora"] if is_adapter else ["gpt2"]}
    metadata |= {"base_model": base} if on_hub else {}
    metadata |= _about_data(source)
    parameters = count_parameters(sizes)
    kind = f"An adapter (LoRA of rank {config.lora_rank}) for a GPT-2" if is_adapter else "A GPT-2"
    origin = "trained from random weights" if base is None else f"fine-tuned from `{_local_name(base)}`"
    facts = {
        "parameters": f"{parameters:,}" + (f", and {trained:,} of the adapter" if is_adapter else ""),
        "sizes": f"{sizes['n_layer']} layers, {sizes['n_head']} heads, {sizes['n_embd']} channels, "
        f"context of {sizes['block_size']:,} tokens",
        "vocabulary": f"{sizes['vocab_size']:,} tokens ({tokenizer})",
        "data": f"`{_printable(source)}`" if source else "token shards without a description",
        "tokens seen": f"{step * config.total_batch_size:,}, in {step:,} steps of {config.total_batch_size:,}",
    }
    if val:
        per_byte = val.value / run.data.bytes_per_token
        facts["validation loss"] = f"{val.value:.4f} nats per token, {per_byte:.4f} per byte (step {val.step:,})"
    if hellaswag:
        items = f" of {hellaswag_items:,} items" if hellaswag_items else ""
        facts["HellaSwag"] = f"acc_norm {hellaswag.value:.4f}{items} (step {hellaswag.step:,})"
    prompt = on_one_line(run.prompt) if config.text is not None else "The" if config.demo else "Once upon a time"
    in_python = json.dumps(prompt, ensure_ascii=False)
    how = _OPEN_ADAPTER.format(base=base if on_hub else "BASE") if is_adapter else _OPEN_MODEL.format(prompt=in_python)
    return "\n\n".join([
        _front_matter(metadata), _NOTICE, f"# GPT-2, {_rounded(parameters)} parameters",
        f"{kind}, {origin} with `train_gpt2.py`. It continues text; it was not trained to follow instructions.",
        "\n".join(f"- **{name}**: {fact}" for name, fact in facts.items()),
        "## How to use it", "NAME is the name of this model on the hub or its folder, FOLDER its folder on your disk.", how,
        _own_scripts(tokenizer, prompt), "## How it was trained", _command(config),
    ]) + "\n"  # fmt: skip


def _front_matter(metadata: Mapping[str, Any]) -> str:
    """YAML. JSON's values are YAML, too, and quoted: a name such as "on" or "1e3" stays a string."""
    lines = [f"{key}: {json.dumps(value)}" for key, value in metadata.items()]
    license = ['# The license is yours to choose. Then remove the "# " of the next line.', "# license: mit"]
    return "\n".join(["---", *license, *lines, "---"])


def _about_data(source: str | None) -> dict[str, Any]:
    """What the front matter says about the data, where it is known."""
    for name in FINEWEB_PREFIXES:
        if source and source.startswith(f"{name}/"):
            return {"language": "en", "datasets": [name]}
    return {"language": "en"} if source == DEMO_SOURCE else {}


def _is_on_hub(name: str) -> bool:
    """Whether a base model is one of the hub, as far as its name tells."""
    return not Path(name).exists() and step_of(Path(name)) < 0 and bool(_HUB_NAME.fullmatch(name))


def _local_name(name: str) -> str:
    """A hub name, or the last part of a path."""
    return name if _is_on_hub(name) else _printable(Path(name).name)


def _printable(text: str) -> str:
    """Text for a code span on one line: without line breaks, backticks and the folders of an absolute path."""
    text = Path(text).name if Path(text).is_absolute() else text
    return "".join(c if c.isprintable() and c != "`" else "?" for c in text)


def _rounded(parameters: int) -> str:
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e7 else f"{parameters / 1e6:.2g}M"


def _own_scripts(tokenizer: str, prompt: str) -> str:
    quoted = shlex.quote(prompt) if re.search(r'["$`\\!]', prompt) else f'"{prompt}"'
    lines = [f"python sample.py --model FOLDER --prompt {quoted}"]
    lines += ["python hellaswag.py --model FOLDER"] if tokenizer == "gpt2" else []
    return "With the scripts that trained it:\n\n```sh\n" + "\n".join(lines) + "\n```"


def _command(config: RunOptions) -> str:
    """The flags that determine the weights, where they differ from the defaults."""
    words = []
    for field in flag_fields(type(config)):
        name, value = field.name, getattr(config, field.name)
        is_open = config.open_ended and name in ("max_steps", "decay_steps")  # the number of steps is not known yet
        if name in RunOptions.__dataclass_fields__ or value == field.default or is_open:
            continue
        if isinstance(value, bool):
            words.append(flag_name(name) if value else f"--no-{flag_name(name)[2:]}")
        else:
            value = f"{value:.6g}" if isinstance(value, float) else str(value)
            words.append(f"{flag_name(name)} {shlex.quote(_local_name(value) if name == 'init_from' else value)}")
    if not words:
        return "With the default flags of `train_gpt2.py`."
    return (
        "With these flags, and the defaults for all others:\n\n```\n"
        + fill(" ".join(words), 80, break_on_hyphens=False)
        + "\n```"
    )
