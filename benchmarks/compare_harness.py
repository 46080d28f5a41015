"""Compares `hellaswag.py --style harness` with lm-evaluation-harness, item by item, on the same model and items.

    pip install "lm-eval[hf]"
    python benchmarks/compare_harness.py --model gpt2 --limit 200

The harness runs a copy of its task `hellaswag` that reads the items from a file, 0-shot, in fp32, and cleans the texts
with its own code. The exit code is 1 if any prediction differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import hellaswag  # noqa: E402
from support.checkpoints import huggingface  # noqa: E402
from support.cli import run_cli  # noqa: E402


def run_harness(model: str, data: str, limit: int | None, device: str) -> list[dict[str, Any]]:
    """The sample that the harness logs for each item, in the order of the file."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.hellaswag.utils import process_docs

    task = {
        "task": "hellaswag_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": data}},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "process_docs": process_docs,
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
    }  # fmt: skip
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": model, "dtype": "float32"},
        tasks=[task],
        task_manager=TaskManager(),
        num_fewshot=0,
        batch_size=4,
        device=device,
        limit=limit,
        log_samples=True,
    )
    print({name: value for name, value in results["results"]["hellaswag_local"].items() if "acc" in name})
    return sorted(results["samples"]["hellaswag_local"], key=lambda sample: sample["doc_id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", default="gpt2", help="hub name or checkpoint directory (default: gpt2)")
    parser.add_argument("--data", metavar="FILE", help="a HellaSwag .jsonl file (default: downloaded once)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items (default: all)")
    parser.add_argument("-d", "--device", default="cpu", choices=("cpu", "cuda"), help="device (default: cpu)")
    args = parser.parse_args()
    data, model = str(args.data or hellaswag.download()), str(huggingface.find_model(args.model))
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-m", model, "--data", data, "-d", args.device, "--style", "harness", "--json", f"{folder}/ours.json"]
        hellaswag.main(flags + (["--limit", str(args.limit)] if args.limit else []))
        ours = json.loads(Path(folder, "ours.json").read_text())
    samples = run_harness(model, data, args.limit, args.device)
    differences, largest = {"acc": 0, "acc_norm": 0}, 0.0
    for our_result, sample in zip(ours["results"], samples, strict=True):
        log_likelihoods = np.array([response[0] for response in sample["filtered_resps"]])
        characters = [len(choice) for choice in sample["doc"]["choices"]]
        largest = max(largest, float(np.abs(log_likelihoods + our_result["losses"]).max()))
        with np.errstate(divide="ignore"):
            predictions = int(log_likelihoods.argmax()), int((log_likelihoods / characters).argmax())
        for metric, key, prediction in zip(differences, ("prediction", "prediction_norm"), predictions, strict=True):
            assert sample[metric] == (prediction == our_result["label"])  # we read the harness's log as it does
            differences[metric] += prediction != our_result[key]
    acc, acc_norm = differences.values()
    print(f"{len(samples):,} items; different predictions: {acc} (acc), {acc_norm} (acc_norm)")
    print(f"largest difference of a summed loss: {largest:.1e} nats")
    sys.exit(bool(acc + acc_norm))


if __name__ == "__main__":
    run_cli(main)
