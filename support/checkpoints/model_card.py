"""The model card of a checkpoint: a `README.md` in the format of the Hugging Face hub, which its owner may edit.

It depends on the run alone, not on the machine: it has no times, folders or host names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from support.checkpoints.directory import step_of
from support.checkpoints.history import argmin_loss
from support.checkpoints.huggingface import options_of
from support.checkpoints.run_info import RunInfo
from support.cli import flag_words
from support.config import TRAIN_FLAGS
from support.data.hub import FINEWEB_PREFIXES
from support.terminal import pluralize

# without an owner, only these names: `mine` is a folder that was removed since the run began
_HUB_NAME = re.compile(r"(gpt2(-medium|-large|-xl)?|distilgpt2|[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")
_CARD = """---
# Choose a license, then remove the "# " from the next line.
# license: mit
{metadata}
---

# {name}

A {name}, {origin} with `train_gpt2.py`. It continues text; it was not trained to follow instructions.

{facts}

NAME is the name of this model on the hub, or its folder. {usage}

```sh
python sample.py --model NAME --prompt "Once upon a time"
```

The flags that determine the weights:

```sh
{command}
```
"""
_WITH_TRANSFORMERS = """In Python, and with the script that comes with the trainer:

```python
from transformers import pipeline

pipeline("text-generation", model="NAME")("Once upon a time", max_new_tokens=32)
```"""
_WITH_OPTIONS = "Only the trainer that made this model can open it, since it is not a GPT-2:"


def model_card(run: RunInfo, step: int, tokens: int, val: Mapping[int, float], hellaswag: Mapping[int, float]) -> str:
    """Returns the card for the checkpoint of `step`, which has been trained on `tokens` tokens.

    Args:
        val, hellaswag: comparable values up to this step, by step.
    """
    config, model_config, base, source = (
        run.config,
        run.model_config,
        run.config.init_from,
        run.identity["source"] or "",
    )
    options = ", ".join(f"{option} {value}" for option, value in options_of(model_config).items())
    on_hub = base is not None and not Path(base).exists() and step_of(Path(base)) < 0 and _HUB_NAME.fullmatch(base)
    base_name = base if on_hub or base is None else _printable(Path(base).name)
    metadata = {
        "library_name": None if options else "transformers",
        "pipeline_tag": "text-generation",
        "tags": None if options else ["gpt2"],
        "datasets": [name for name in FINEWEB_PREFIXES if source.startswith(f"{name}/")],
        "base_model": base_name if on_hub else None,
    }
    vocab_size = model_config.vocab_size
    facts = {
        "parameters": f"{run.parameters:,}",
        "sizes": f"{pluralize(model_config.n_layer, 'layer')}, {pluralize(model_config.n_head, 'head')}, "
        f"{pluralize(model_config.n_embd, 'channel')}, "
        f"context {model_config.block_size:,}",
        "vocabulary": f"{vocab_size:,} tokens ({run.data.tokenizer.name})",
        "data": f"`{_printable(source)}`" if source else "token shards without a description",
        "tokens seen": f"{tokens:,}, in {step:,} steps",
    }
    if config.fork is not None:
        facts["started from"] = f"`{_printable(Path(config.fork).name)}` of another run, whose tokens count, too"
    if config.fork is None:  # whose steps may have had another size before
        facts["tokens seen"] += f" of {config.total_batch_size:,}"
    if at := max(val, default=0):  # at step 0, nothing has been trained
        loss = f"{val[at]:.4f} nats per token, {val[at] / run.bytes_per_token:.4f} per byte"
        facts["validation loss"] = f"{loss}, over {run.validated_tokens:,} tokens (step {at:,})"
        best = argmin_loss(val)
        if best is not None and val[best] < val[at]:
            facts["best validation loss of this run"] = f"{val[best]:.4f} nats per token (step {best:,})"
    if at := max(hellaswag, default=0):
        items = f" on {run.hellaswag_items:,} items" if run.hellaswag_items else ""  # this process may not score
        T = run.model_config.block_size
        cut = f", in contexts of {T:,} tokens" if T < 1024 else ""  # published scores are of whole texts
        facts["HellaSwag"] = f"acc_norm {hellaswag[at]:.4f}{items}{cut} (step {at:,})"
    return _CARD.format(
        # JSON is valid YAML, and its quotes keep names such as "on" or "1e3" strings
        metadata="\n".join(f"{name}: {json.dumps(value)}" for name, value in metadata.items() if value),
        name=f"GPT-2 with {options}" if options else "GPT-2",
        usage=_WITH_OPTIONS if options else _WITH_TRANSFORMERS,
        origin="trained from random weights" if base is None else f"fine-tuned from `{base_name}`",
        facts="\n".join(f"- **{name}**: {fact}" for name, fact in facts.items()),
        command=" \\\n  ".join(["python train_gpt2.py", *_flags(run, base_name)]),
    )


def _printable(text: str) -> str:
    """Makes text safe for a code span: replaces line breaks and backticks, drops the folders of an absolute path."""
    text = Path(text).name if Path(text).is_absolute() else text
    return "".join(c if c.isprintable() and c != "`" else "?" for c in text)


def _flags(run: RunInfo, base_name: str | None) -> Iterator[str]:
    """Yields the flags that determine the weights, first those that were typed. Paths lose their folders.

    Those that the pretrained model or the forked checkpoint decides are left out, and so are defaults.
    """
    config, sources, values = run.config, run.start.sources, run.config.used_flags() | {"init_from": base_name}
    text_flags = () if config.text is None else ("text", "text_field", "tokenizer")
    data = ("data",) if not config.is_demo_or_text else ()
    included = {"demo", "minutes", "dtype", "tf32", *text_flags, *data}
    if config.fork is not None:
        yield flag_words("fork", _printable(Path(config.fork).name))
    for name in sorted(values, key=lambda name: not sources[name].startswith("command line")):
        flag, value = TRAIN_FLAGS[name], values[name]
        determines = flag.resume == "keeps" and flag.group != "text" and name not in ("fork", "text", "demo", "minutes")
        if value is None or not (determines or name in included):
            continue
        if config.fork is not None and flag.fork != "changes" or base_name and flag.init_from == "brings":
            continue
        if sources[name] not in ("default", "other flags", "--model", "--recipe"):
            yield flag_words(name, _printable(Path(value).name) if name in ("text", "data") else value)
