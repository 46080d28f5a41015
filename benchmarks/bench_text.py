"""`--text` against nanoGPT's small recipe for a CPU, on the bytes of one text: the validation loss, and the time for it.

    python benchmarks/bench_text.py tinyshakespeare.txt

The small recipe: 4 layers, 4 heads, 128 channels, context 64, 12 rows an update, 2,000 updates of AdamW. `--text` has its
own defaults. Both begin with the text, hold out its last tenth, are validated on all of that, and are timed from start to end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = (
    "--recipe gpt2 --n-layer 4 --n-head 4 --n-embd 128 --block-size 64 --batch-size 12 --total-batch-size 768 --max-steps 2000 "
    "--warmup-steps 100 --max-lr 1e-3 --beta2 0.99 --val-every 2000 --sample-every 0 --checkpoint-every 0"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", metavar="FILE")
    args = parser.parse_args()
    print("| | updates | seconds | validation loss |\n|---|---|---|---|")
    for name, flags in (("small recipe", SMALL), ("--text", "")):
        with tempfile.TemporaryDirectory() as out:
            command = [
                sys.executable,
                ROOT / "train_gpt2.py",
                "--text",
                args.text,
                "--tokenizer",
                "bytes",
                "--out",
                out,
            ]
            started = time.perf_counter()
            done = subprocess.run([*map(str, command), *flags.split()], stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - started
            if done.returncode:
                sys.exit(f"{name} failed, see above")
            values = [line.split() for line in (Path(out) / "log.txt").read_text().splitlines()]
            step, _, loss = [value for value in values if value[1] == "val"][-1]
        print(f"| {name} | {step} | {seconds:.0f} | {loss} |", flush=True)


if __name__ == "__main__":
    main()
