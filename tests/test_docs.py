"""The README and docs/: their commands, links, files and messages match the code."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT
from torch.distributed.run import get_args_parser
from training import config_with

import compare
import fineweb
import hellaswag
import sample
import train_gpt2
from support import __version__
from support.cli import flag_name, parse_flags
from support.config import TRAIN_FLAGS, CommandLine
from support.runtime.batch_size import rows_per_rank
from support.sizing.plan import split_flags

SCRIPTS = {"fineweb.py": fineweb, "hellaswag.py": hellaswag, "sample.py": sample, "compare.py": compare}
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "measurements").glob("*.md")),
]
PLACEHOLDERS = {"RATE": "1e-3", "BEST": "1e-3", "N": "9000", "M": "5", "NAME": "gpt2", "GPU": "H100"}


def fenced(page: Path, kind: str) -> list[str]:
    """The blocks of code of a page."""
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.M | re.DOTALL)


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```\n", "", page.read_text(), flags=re.M | re.DOTALL)


def split_command(line: str) -> list[str]:
    """The words of a command, without its comment and the variables set for it."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return [PLACEHOLDERS.get(word, word) for word in words]


def commands_of(page: Path) -> list[str]:
    """The commands in the blocks of a page, without comment.

    Scripts (`#!`) are left out: test_nodes.py runs them.
    """
    lines = []
    for block in fenced(page, "sh"):
        if not block.startswith("#!"):
            lines += block.replace("\\\n", " ").splitlines()
    return [
        re.sub(r"\s+#.*", "", command).strip()
        for line in lines
        if line and line[0] != "#"
        for command in line.split(" && ")
    ]


def inline_commands(page: Path) -> list[str]:
    text = re.findall(r"(?<!`)`([^`]+)`(?!`)", without_code(page))
    codes = [" ".join(code.split()) for code in text if re.match(r"(python|torchrun) .*\w\.py\b", code)]
    return [code for code in codes if "--help" not in code]


ALL_COMMANDS = [(page.name, command) for page in PAGES for command in commands_of(page) + inline_commands(page)]


def flags_of_benchmark(path: Path) -> set[str]:
    """The flags in the code of a benchmark, which would be slow to import."""
    return set(re.findall(r'add_argument\(\s*(?:"-\w", )?"(--[a-z-]+)', path.read_text()))


def parse_with_script(script: str, args: list[str], world_size: int = 1) -> None:
    """Parses a command line as the script does; an unknown flag or a bad value raises."""
    if script == "train_gpt2.py":
        options, flags = split_flags(parse_flags(CommandLine, args, ""), world_size)
        if options.plan:
            world_size = options.gpus
        if not flags.keys() & {"text", "demo", "resume", "init_from", "fork"}:  # these read files
            config = config_with(**flags)
            rows_per_rank(config, world_size)
    elif script in SCRIPTS:
        SCRIPTS[script].parse_arguments(args)
    else:
        assert {arg for arg in args if re.fullmatch("--[a-z-]+", arg)} <= flags_of_benchmark(ROOT / script)


@pytest.mark.parametrize(("page", "command"), ALL_COMMANDS)
def test_a_command_is_parsed_by_its_script(page, command, monkeypatch, tmp_path):
    if page == "use-a-model.md" and not re.match(r"python (\w+|benchmarks/\w+)\.py", command):  # another tool's
        return
    monkeypatch.chdir(tmp_path)
    words = split_command(re.sub(r"^timeout -s TERM \d+h ", "", command))
    if words[0] == "torchrun":
        launch = get_args_parser().parse_args(words[1:])
        nodes, processes = int(launch.nnodes.split(":")[0]), int(launch.nproc_per_node)
        parse_with_script(launch.training_script, launch.training_script_args, nodes * processes)
    elif words[:2] == ["python", "-c"]:
        exec(words[2], {})
    elif words[0] == "python" and words[1].endswith(".py"):
        parse_with_script(words[1], words[2:])
    elif words[:3] != ["python3", "-m", "venv"] and words[0] not in ("source", "hf", "git", "cd"):
        # what is left is in CI, or in a notebook that is tested
        command = re.sub(' -m "not slow"', "", command).replace("pip install", "pip install -q")
        assert command in (ROOT / ".ci" / "run").read_text() + (ROOT / "docs" / "free_gpu.ipynb").read_text()


def test_flags_in_the_text_exist(capsys):
    others = (
        "nnodes node_rank nproc_per_node master_addr master_port standalone max-restarts rdzv-backend"  # torchrun's
    )
    others += " dependency exclude gpus-per-node nodes parsable requeue"  # Slurm's
    others += " no-project with-requirements index-url logdir local-dir pid system-site-packages"
    known = {f"--{name}" for name in others.split()}
    for script in (train_gpt2, *SCRIPTS.values()):
        with pytest.raises(SystemExit):
            script.main(["--help"])
        known |= set(re.findall(r"--[a-z][a-z0-9_-]+", capsys.readouterr().out))
    for script in (ROOT / "benchmarks").glob("*.py"):
        known |= flags_of_benchmark(script)
    for diff in fenced(ROOT / "docs" / "code.md", "diff"):  # what the page adds
        known |= {f"--{name}".replace("_", "-") for name in re.findall(r"^\+ +(\w+): .* = [A-Z]+\(", diff, re.M)}
    for page in PAGES:
        if page.name != "comparison.md":  # other projects' flags
            text = re.sub(r"<?https?://\S+", "", without_code(page))
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text)) - known == set(), page


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_and_named_files_exist():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(page))):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert link.startswith("http") or target.exists(), f"{page.name}: {link}"
            assert not anchor or link.startswith("http") or anchor in anchors(target), f"{page.name}: {link}"
        named = re.findall(r"(?<![\w./-])(?:benchmarks|docs|support|tests)/[\w./]*\w\.\w+", page.read_text())
        assert [file for file in named if not (ROOT / file).exists()] == [], page
    for file in re.findall(r"^\| `([\w.]+\.\w+)`", (ROOT / "docs" / "code.md").read_text(), re.M):
        assert (ROOT / file).exists(), file
    linked = set(re.findall(r"\[docs/([\w.-]+)\]", README.read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= linked


def test_the_version_is_the_same_everywhere():
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def split_sentences(text: str) -> list[str]:
    """Returns a message, without its label, and each of its sentences."""
    message = re.sub(r"^(error: |warning:? |note +|step +\d+ \| )", "", text)
    return [message, *re.split(r"(?<=\.) ", message)]


def messages_in_the_code() -> list[re.Pattern[str]]:
    """Patterns of all texts in the code, and of their sentences, with anything where the code formats a value."""
    patterns, value = [], "\0"
    for path in [*ROOT.glob("*.py"), *(ROOT / "support").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else value for part in parts)
            for part in split_sentences(text):
                if len(part.replace(value, "")) >= 12:
                    patterns.append(re.compile(".+".join(map(re.escape, part.split(value)))))
    return patterns


FROM_OTHER_PROGRAMS = (
    "externally-managed-environment",
    "ERROR: No matching distribution",
    "Setting OMP_NUM_THREADS environment",
    "CUDA out of memory.",
)


def test_the_messages_in_troubleshooting_are_those_of_the_code():
    """Users find them there by what they see."""
    patterns = messages_in_the_code()
    lines = [line for block in fenced(ROOT / "docs" / "troubleshooting.md", "text") for line in block.splitlines()]
    assert len(lines) >= 30
    for line in lines:
        whole, *sentences = (
            text.startswith(FROM_OTHER_PROGRAMS) or any(pattern.fullmatch(text) for pattern in patterns)
            for text in split_sentences(line)
        )
        assert whole or all(sentences), line


def test_the_changes_still_apply():
    """A slow test trains with them."""
    for diff in fenced(ROOT / "docs" / "code.md", "diff"):
        subprocess.run(["git", "apply", "--check", "-"], input=diff, cwd=ROOT, text=True, check=True)


def test_the_table_of_what_may_happen_to_a_flag():
    flags = TRAIN_FLAGS
    rules = [
        lambda flag: flag.resume == "changes" and flag.stored,
        lambda flag: flag.resume == "keeps" and flag.fork == "changes",
        lambda flag: flag.fork == "keeps",
        lambda flag: flag.fork == "brings",
        lambda flag: flag.init_from == "brings",
        lambda flag: flag.per_node,
        lambda flag: not flag.stored,
        lambda flag: flag.counts_steps,
    ]
    table = re.search(r"^\| flags that \| \|\n.*?\n\n", (ROOT / "docs" / "training.md").read_text(), re.M | re.S)[0]
    rows = [set(re.findall(r"`(--[a-z0-9-]+)`", line.split(" | ")[1])) for line in table.strip().splitlines()[2:]]
    assert rows == [{flag_name(name) for name, flag in flags.items() if rule(flag)} for rule in rules]
