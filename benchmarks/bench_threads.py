"""What waiting threads cost on a free and on a busy CPU: the time of a training step with several settings of OpenMP.

    python benchmarks/bench_threads.py                              # the demo's model, about three minutes
    python benchmarks/bench_threads.py --model gpt2:1x512           # 124M, rows x tokens
    python benchmarks/bench_threads.py --busy 0 1 --ranks 2         # two processes that reduce gradients with gloo

Each setting has a process of its own. They take turns, some steps each, so a change of the machine's speed meets all of
them. `--busy` are the numbers of other programs, each a loop that takes a core. The figures are the mean time of a step, in
milliseconds, over all turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SETTINGS: dict[str, dict[str, str]] = {
    "libgomp's default": {},
    **{f"GOMP_SPINCOUNT={n}": {"GOMP_SPINCOUNT": str(n)} for n in (10000, 3000, 1000, 300)},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
MODELS = {
    "demo": ((3, 2, 128), 16, 64, 4096),
    "gpt2": ((12, 12, 768), 1, 512, 50257),
}  # sizes, rows, tokens, vocabulary
TURN_SECONDS = 1.5  # at least a step


def make_step(model_name: str, ranks: int) -> Callable[[], None]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch
    from torch import nn

    from support.runtime import devices
    from train_gpt2 import GPT, GPTConfig

    name, _, shape = model_name.partition(":")
    (n_layer, n_head, n_embd), B, T, vocab_size = MODELS[name]
    if shape:
        B, T = map(int, shape.split("x"))
    torch.manual_seed(0)
    model = GPT(GPTConfig(max(T, 64), vocab_size, n_layer, n_head, n_embd))
    muon_dtype = torch.bfloat16 if name == "demo" else None
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), muon_dtype)
    train_model: nn.Module = model
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        train_model = nn.parallel.DistributedDataParallel(model)
    device = torch.device("cpu")
    amp = devices.autocast(device, devices.DTYPES[devices.pick_dtype("auto", device)])
    tokens = torch.randint(vocab_size, (B, T + 1))

    def step() -> None:
        with amp:
            loss = train_model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.grad_scale = None
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def work(model_name: str, ranks: int) -> None:
    """Does as many steps as each line of stdin says, and prints their mean time in seconds."""
    step = make_step(model_name, ranks)
    step()
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        print((time.perf_counter() - began) / int(line), flush=True)


class Worker:
    """The process of a setting, or several that train together."""

    def __init__(self, model: str, ranks: int, settings: dict[str, str], port: int):
        command = [sys.executable, __file__, "--work", "--model", model, "--ranks", str(ranks)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        self.processes = [
            subprocess.Popen(
                command,
                env=clean | settings | rendezvous | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            assert process.stdout and process.stdout.readline() == "ready\n"

    def seconds(self, steps: int) -> float:
        for process in self.processes:
            assert process.stdin
            process.stdin.write(f"{steps}\n")
        return max(float(process.stdout.readline()) for process in self.processes if process.stdout)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or gpt2, and rows x tokens (default: demo)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="other programs (default: 0 1 2)")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together (default: 1)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each setting (default: 4)")
    parser.add_argument(
        "--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), help="settings (default: all)"
    )
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.model, args.ranks)
    workers = {name: Worker(args.model, args.ranks, SETTINGS[name], 29600 + i) for i, name in enumerate(args.only)}
    results: dict[str, list[float]] = {name: [] for name in workers}
    for busy in args.busy:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        times: dict[str, list[float]] = {name: [] for name in workers}
        steps = {name: max(1, int(TURN_SECONDS / worker.seconds(1))) for name, worker in workers.items()}
        for _ in range(args.rounds):
            for name, worker in workers.items():
                times[name].append(worker.seconds(steps[name]))
        for process in others:
            process.kill()
        for name in workers:
            results[name].append(1000 * statistics.fmean(times[name]))
    print(f"| {args.model}, {args.ranks} rank(s) | " + " | ".join(f"{n} busy" for n in args.busy) + " |")
    print("|---" * (1 + len(args.busy)) + "|")
    for name, means in results.items():
        print(f"| {name} | " + " | ".join(f"{mean:,.0f}" for mean in means) + " |")
    for worker in workers.values():
        worker.kill()


if __name__ == "__main__":
    main()
