"""docs/from-scratch: the ten programs run, and check.py says what is right and what is wrong in them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

LESSON = ROOT / "docs" / "from-scratch"
sys.path.insert(0, str(LESSON))  # where the processes that check.py starts find it, too
import check  # noqa: E402


def program(step: int) -> Path:
    return LESSON / f"step_{step:02d}.py"


@pytest.fixture(autouse=True)
def one_thread():
    """The models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A folder with the shards of step 6."""
    folder = tmp_path_factory.mktemp("from_scratch")
    check.load(program(6), folder).make_shards()
    return folder


@pytest.fixture
def shards_once(shards, monkeypatch):
    """check.py copies the shards of step 6 instead of making them for each program."""
    load = check.load

    def load_and_copy(path: Path, folder: Path) -> object:
        module = load(path, folder)
        if path == program(6):
            module.make_shards = lambda: shutil.copytree(shards / "data", module.DATA)
        return module

    monkeypatch.setattr(check, "load", load_and_copy)


def some_slow(*slow: int):
    return [pytest.param(step, marks=pytest.mark.slow) if step in slow else step for step in range(1, 11)]


@pytest.mark.parametrize("step", some_slow(9, 10))  # they start processes
def test_each_step_passes_the_facts_up_to_it(step):
    results = list(check.check(program(step), step))
    assert len(results) >= 4
    assert not [words for holds, words in results if not holds]


# what is wrong in a copy of a step, and words of the answer
FAULTS = [
    (1, "(EOT, *text.encode())", "text.encode()", "one for each document"),
    (1, "counts += 1", "counts += 0", "the probability of b is 0.666667; (2 + 1) / (3 + 257) is 0.011538"),
    (1, "return -probs[", "return probs[", "the loss of two pairs is -"),
    (1, "probs[tokens[-1]]", "probs[tokens[0]]", "5 is continued as [5, 6, 6, 6], not [5, 6, 7, 8]"),
    (2, "return rows[:, :-1], rows[:, 1:]", "return rows[:, :-1], rows[:, :-1]", "the target of"),
    (2, "torch.randint(len(tokens) - T, (B,)).tolist()", "[0] * B", "begin at the same place"),
    (2, "nn.init.zeros_(self.lm_head.weight)", "nn.init.normal_(self.lm_head.weight)", "with lm_head at zero it is ln 257"),
    (2, "self(idx)[0][:, -1]", "self(idx)[0][:, 0]", "the likeliest tokens are"),
    (3, "triu(1)", "triu(2)", "logits at 7 change: they see the future"),
    (3, " / math.sqrt(C)", "", "are not divided; they should be divided by sqrt(C) = 5.66"),
    (3, "-math.inf), dim=-1)", "-math.inf), dim=-2)", "see the future. Look at the mask and the softmax"),
    (3, " + self.wpe(torch.arange(idx.size(1)))", "", "position embeddings are missing"),
    (4, "self.attn(self.ln_1(x))", "self.attn(x)", "difference from transformers' logits"),
    (4, "math.sqrt(C // self.n_head)", "math.sqrt(C)", "are divided by sqrt(C) = 5.66; they should be divided by sqrt(C // n_head) = 4"),
    (4, " / math.sqrt(C // self.n_head)", "", "are not divided; they should be divided by sqrt(C // n_head) = 4"),
    (4, "return x + self.mlp", "return self.mlp", "difference from transformers' logits"),
    (4, 'nn.GELU(approximate="tanh")', "nn.GELU()", "difference from transformers' logits"),
    (4, "nn.ModuleList(Block(config) for _ in range(config.n_layer))", "nn.ModuleList([Block(config)] * config.n_layer)", "blocks share"),
    (4, "triu(1)", "triu()", "is nan. Does the mask hide"),
    (4, "self.ln_f", "self.ln", "GPT-2 does not have a ln.bias: use its names"),
    (5, "self.lm_head.weight = self.wte.weight", "pass", "tie them"),
    (5, "0.02 / scale", "1.0 / scale", "it is near ln 257 = 5.549"),
    (5, "if name.endswith(\"c_proj.weight\") else 1", "if False else 1", "c_proj.weight is 0.02"),
    (5, '"weight_decay": 0.0', '"weight_decay": weight_decay', "the weight decay of h.0.ln_1.weight is 0.1"),
    (5, "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "pass", "the norm of large gradients after a step"),
    (5, "MAX_LR * (step + 1)", "MAX_LR * step", "the learning rate of step 0 is 0; it should be 0.00015"),
    (6, "len(shard) - T, T)", "len(shard) - T, T + 1)", "batch 0 begins at [0, 9, 18, 27, 36], not [0, 8, 16, 24, 32]"),
    (6, '("val", tokens[n:])', '("val", tokens[: len(tokens) - n])', "are not the documents"),
    (6, "*bpe.encode(text).ids)], np.uint16)", "*bpe.encode(text).ids)])", "has int64 tokens, not uint16"),
    (6, 'DATA.glob(f"*_{split}_*.npy")', 'DATA.glob("*.npy")', "open_shards('train') has"),
    (7, "logits / max(temperature, 1e-10)", "logits * temperature", "temperature 0.5 and top_k None give"),
    (7, "top_k or logits.size(-1)", "logits.size(-1)", "temperature 2.0 and top_k 2 give"),
    (7, "ids.gather(1, torch.multinomial(probs, 1))", "torch.multinomial(probs, 1)", "the frequency of a token"),
    (7, "loss[len(context) - 1 : len(row) - 1]", "loss[: len(row) - 1]", "after [1, 2, 3, 4] is"),
    (8, 'reduction="sum"', 'reduction="mean"', "the mean of -ln softmax(logits)[target] is"),
    (8, "checkpoint(self.summed_loss, *chunk, use_reentrant=False)", "self.summed_loss(*chunk)", "as much is kept"),
    (8, "is_causal=True", "is_causal=False", "they see the future"),
    (8, "    with amp:", "    with FP32:", "train_step does not use amp"),
    (9, "loss = loss / loader.grad_accum", "loss = loss / 1", "micro-batches is"),
    (9, "        loss.backward()", "        (loss * loader.grad_accum).backward()", "the norm of the gradients of a step of 2 micro-batches is"),
    (9, "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "pass", "of the full batch it is 9.77"),
    (9, "micro_step == loader.grad_accum - 1", "micro_step == 0", "is [True, False, False, False], not"),
    (9, "self.position * self.world_size + self.rank", "self.position + self.rank", "of rank 0 of 2 begin at rows [0, 3, 6]"),
    (10, "p.T if name", "p if name", "c_attn.weight is stored as (96, 32)"),
    (10, 'f".model_{step:05d}.partial"', 'f"model_{step:05d}"', "leaves model_00008, which is not complete"),
    (10, "os.fsync(file)", "pass", "does not call os.fsync"),
    (10, 'optimizer.load_state_dict(trainer["optimizer"])', "pass", "restore the optimizer's state?"),
    (10, "loader.position = first_step * loader.grad_accum", "pass", "restore the weights, and is loader.position set?"),
    (10, "dist.all_reduce(loss_accum)", "pass", "rank 0's loss of step 0 is"),
    (10, "torch.manual_seed(1337)", "torch.manual_seed(1338)", "train_gpt2.py has 6.95"),
]  # fmt: skip
SLOW_ANSWERS = ("restore", "rank 0's loss", "train_gpt2.py has")


def is_slow(answer: str) -> tuple:
    return (pytest.mark.slow,) if answer.startswith(SLOW_ANSWERS) else ()


@pytest.mark.parametrize(
    "step, right, wrong, answer",
    [pytest.param(*row, marks=is_slow(row[-1]), id=f"{row[0]}-{row[-1]}") for row in FAULTS],
)
def test_a_typical_mistake_is_named(shards_once, tmp_path, step, right, wrong, answer):
    text = program(step).read_text()
    assert right in text
    copy = tmp_path / "my_gpt.py"
    copy.write_text(text.replace(right, wrong))
    said = next((words for holds, words in check.check(copy, step) if not holds), "nothing")
    assert answer in said


@pytest.mark.parametrize(
    "right, wrong, answer",
    [
        ("GPT\\b", "Gpt", "my_gpt.py has no class GPT"),
        ("get_batch", "batch", "my_gpt.py has no function get_batch"),
        ("x = self.wte\\(idx\\)", "x = self.wte(idx) +", "my_gpt.py, line {line}: SyntaxError: invalid syntax"),
        ("x = self.wte\\(idx\\)", "x = self.wte(idx) @ idx", "my_gpt.py, line {line}: RuntimeError: "),
        ("get_batch\\(tokens: Tensor\\)", "get_batch()", "my_gpt.py: TypeError: get_batch() takes 0 positional"),
    ],
)
def test_an_error_is_one_line_and_no_traceback(tmp_path, monkeypatch, capsys, right, wrong, answer):
    text = program(2).read_text()
    line = 1 + text.split("x = self.wte(idx)")[0].count("\n")
    (tmp_path / "my_gpt.py").write_text(re.sub(right, wrong, text))
    monkeypatch.setattr(sys, "argv", ["check.py", str(tmp_path / "my_gpt.py"), "--step", "2"])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 1
    assert any(
        said.startswith("wrong") and answer.format(line=line) in said for said in capsys.readouterr().out.splitlines()
    )


def test_its_command_line_as_in_the_lesson():
    command = [sys.executable, "docs/from-scratch/check.py", "docs/from-scratch/step_01.py", "--step", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 4


def run_main(step: int, folder: Path, capsys, **constants: object) -> str:
    """What a program prints with other constants."""
    module = check.load(program(step), folder)
    for name, value in constants.items():
        assert hasattr(module, name)
        setattr(module, name, value)
    module.main()
    return capsys.readouterr().out


def test_the_program_of_counts_prints_its_losses(tmp_path, capsys):
    uniform, train, val = map(float, re.findall(r"(\d\.\d{4})", run_main(1, tmp_path, capsys)))
    assert uniform == pytest.approx(5.5491, abs=1e-4)
    assert 2 < train < 3 and 2 < val < 3


@pytest.mark.parametrize("step", [2, 3, 4, 5, 6, 7, 9, 10])
def test_the_program_of_each_step_runs_and_learns(shards, capsys, monkeypatch, step):
    constants = {"ITEMS": 4} if step == 7 else {"WARMUP_STEPS": 2} if step in (5, 6, 9, 10) else {}
    monkeypatch.setattr(sys, "argv", [str(program(step))])
    printed = run_main(step, shards, capsys, MAX_STEPS=12, **constants)
    losses = [float(loss) for loss in re.findall(r"\| loss (\d\.\d+)", printed)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.05
    if step == 10:
        with pytest.raises(SystemExit, match="there is a run in .*Continue it with --resume"):
            run_main(step, shards, capsys)
        monkeypatch.setattr(sys, "argv", [str(program(step)), "--resume"])
        run_main(step, shards, capsys, MAX_STEPS=13, WARMUP_STEPS=2)
        assert sorted(path.name for path in (shards / "log").iterdir()) == ["model_00012", "model_00013"]


@pytest.mark.parametrize("compiler", [None, pytest.param("c++", marks=pytest.mark.slow)])
def test_the_table_of_step_eight_has_a_row_for_each_feature(shards, capsys, monkeypatch, compiler):
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    rows = [line.split() for line in run_main(8, shards, capsys, MAX_STEPS=2, T=64, WARMUP_STEPS=1).splitlines()[1:]]
    assert len(rows) == 5 if compiler else 4
    kept, losses = ([float(row[column]) for row in rows] for column in (-2, -1))
    assert kept[0] > kept[1] > kept[2]
    assert max(losses) - min(losses) < 0.01


def test_a_program_without_shards_says_what_to_run_first(tmp_path):
    with pytest.raises(SystemExit, match="Run step_06.py first"):
        check.load(program(7), tmp_path).main()
