"""Opens a checkpoint in other tools, and compares their results with this project's.

    pip install ctranslate2 "lm-eval[hf]"
    python benchmarks/try_elsewhere.py log/model_19073
    python benchmarks/try_elsewhere.py log/model_19073 --data hellaswag_val.jsonl --limit 200
    python benchmarks/try_elsewhere.py log/model_19073 --only ctranslate2 --rounds 5

Each tool's text at temperature 0 is compared with sample.py's, in fp32. lm-eval scores HellaSwag items from a file,
and its scores are compared with those of `hellaswag.py --style harness`. Tools that are not installed are skipped.
optimum-onnx needs an environment of its own, with an older transformers. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from harness import run_script

import sample
from support.checkpoints import huggingface
from support.cli import run_cli
from support.data.tokenizer import Tokenizer, tokenizer_of_model
from train_gpt2 import GPT


class Reference:
    """A checkpoint, and the text that sample.py generates with it at temperature 0."""

    def __init__(self, directory: Path, prompt: str, most_tokens: int):
        self.directory, self.prompt, self.model = directory, prompt, GPT.from_pretrained(directory).eval()
        self.tokenizer: Tokenizer = tokenizer_of_model(directory, self.model.config.vocab_size)
        sample.prepare_weights(self.model, torch.float32, single_row=True)
        self.ids = self.tokenizer.encode(prompt)
        self.tokens = min(most_tokens, self.model.config.block_size - len(self.ids))
        self.new_ids = self.generate()
        self.text = self.tokenizer.decode(self.new_ids)

    def generate(self) -> list[int]:
        new = sample.generate(self.model, torch.tensor([self.ids]), self.tokens, temperature=0.0)
        return [int(token) for token in new]


def transformers_pipeline(reference: Reference, args: argparse.Namespace) -> bool:
    from transformers import pipeline

    generate = pipeline("text-generation", model=str(reference.directory))
    length = {"max_new_tokens": reference.tokens, "min_new_tokens": reference.tokens}
    (result,) = generate(reference.prompt, do_sample=False, return_full_text=False, **length)
    return result["generated_text"] == reference.text


def optimum_onnx(reference: Reference, args: argparse.Namespace) -> bool:
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoTokenizer

    model = ORTModelForCausalLM.from_pretrained(reference.directory, export=True)
    inputs = AutoTokenizer.from_pretrained(reference.directory)(reference.prompt, return_tensors="pt")
    length = {"max_new_tokens": reference.tokens, "min_new_tokens": reference.tokens}
    return model.generate(**inputs, do_sample=False, **length)[0, len(reference.ids) :].tolist() == reference.new_ids


def ctranslate2(reference: Reference, args: argparse.Namespace) -> bool:
    """Also measures tokens per second: of sample.py, and of CTranslate2 in fp32 and with 8-bit weights, in turn."""
    from ctranslate2 import Generator
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as folder:
        TransformersConverter(str(reference.directory)).convert(folder, force=True)
        names = json.loads(Path(folder, "vocabulary.json").read_text(encoding="utf-8"))
        fp32, int8 = (
            Generator(folder, compute_type=kind, intra_threads=torch.get_num_threads()) for kind in ("float32", "int8")
        )

    def generate(model: Generator) -> list[int]:
        prompt = [names[i] for i in reference.ids]
        length = {"min_length": reference.tokens, "max_length": reference.tokens}
        return model.generate_batch([prompt], sampling_topk=1, include_prompt_in_result=False, **length)[
            0
        ].sequences_ids[0]

    same = generate(fp32) == reference.new_ids
    rows: dict[str, Callable[[], list[int]]] = {
        "sample.py": reference.generate, "fp32": lambda: generate(fp32), "int8": lambda: generate(int8),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(args.rounds):
        for name, work in rows.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    for name, measured in seconds.items():
        print(f"    {name:10} {reference.tokens / statistics.median(measured):8.1f} tokens per second")
    return same


def lm_eval(reference: Reference, args: argparse.Namespace) -> bool:
    """Scores HellaSwag items from a file with the harness, whose own task would download them."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks.hellaswag.utils import process_docs

    task = {
        "task": "hellaswag_file",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(args.data)}},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "process_docs": process_docs,
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
    }  # fmt: skip
    model_args = {"pretrained": str(reference.directory), "dtype": "float32"}
    scores = simple_evaluate("hf", model_args=model_args, tasks=[task], limit=args.limit, batch_size=8, device="cpu")
    theirs = scores["results"]["hellaswag_file"]
    with tempfile.TemporaryDirectory() as folder:
        file, limit = Path(folder, "scores.json"), ["--limit", args.limit] if args.limit else []
        flags = ["--data", args.data, "--style", "harness", "--device", "cpu", "--json", file, *limit]
        run_script("hellaswag.py", "--model", reference.directory, *flags)
        ours = json.loads(file.read_text())
    print(
        f"    acc {theirs['acc,none']:.4f} and {ours['acc']:.4f}, acc_norm {theirs['acc_norm,none']:.4f} and {ours['acc_norm']:.4f}"
    )
    return all(abs(theirs[f"{name},none"] - ours[name]) < 1e-9 for name in ("acc", "acc_norm"))


# rows by name: the module and the package that they need
ROWS: dict[str, tuple[str, str, Callable[[Reference, argparse.Namespace], bool]]] = {
    "pipeline": ("transformers", "transformers", transformers_pipeline),
    "onnx": ("optimum.onnxruntime", "optimum-onnx", optimum_onnx),
    "ctranslate2": ("ctranslate2", "ctranslate2", ctranslate2),
    "lm-eval": ("lm_eval", "lm_eval", lm_eval),
}


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="DIR", help="checkpoint directory")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows (default: all)")
    parser.add_argument("--prompt", default="Once upon a time", metavar="TEXT", help="(default: Once upon a time)")
    parser.add_argument(
        "--tokens", type=int, default=100, metavar="N", help="tokens to generate, within the context (default: 100)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each speed (default: 3)")
    parser.add_argument(
        "--data", metavar="FILE", help="HellaSwag items, a .jsonl file, for lm-eval (default: skip that row)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="score only the first N items (default: all)")
    args = parser.parse_args()
    reference = Reference(huggingface.find_model(args.model), args.prompt, args.tokens)
    print(f"{reference.tokens} tokens at temperature 0 by sample.py: {reference.text[:60]!r}...")
    failed = False
    for name in args.only:
        module, package, row = ROWS[name]
        if not is_installed(module) or (name == "lm-eval" and args.data is None):
            print(f"{name}: skipped ({'no --data' if is_installed(module) else 'not installed'})")
            continue
        same = row(reference, args)
        failed |= not same
        print(f"{name}: {'the same' if same else 'DIFFERENT'}, by {package} {metadata.version(package)}")
    sys.exit(failed)


if __name__ == "__main__":
    run_cli(main)
