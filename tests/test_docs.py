"""The README and docs/: their commands, links, files and messages match the code."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from helpers import ROOT
from torch.distributed.run import get_args_parser

import compare
import fineweb
import hellaswag
import sample
import train_gpt2
from support import __version__
from support.cli import parse_flags
from support.runtime.batch_size import rows_per_rank

SCRIPTS = {"fineweb.py": fineweb, "hellaswag.py": hellaswag, "sample.py": sample, "compare.py": compare}
README = ROOT / "README.md"
PAGES = [README, ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
# Command lines that are no script of ours
IN_CI = ["python -m pytest", "ruff check", "ruff format --check", "mypy"]
OTHER_COMMANDS = {
    *IN_CI,
    "python3 -m venv .venv",  # .ci/run makes one, too
    "source .venv/bin/activate",
    'python -m pytest -m "not slow"',  # the same, with a marker of pyproject.toml
}
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
    return [re.sub(r"\s+#.*", "", command).strip() for line in lines if line for command in line.split(" && ")]


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
        flags = parse_flags(train_gpt2.TrainConfig, args, "")
        if not flags.keys() & {"text", "demo", "resume", "init_from"}:  # these read files
            config = train_gpt2.resolve(flags)
            rows_per_rank(config.total_batch_size, config.block_size, world_size)
    elif script in SCRIPTS:
        SCRIPTS[script].parse_arguments(args)
    else:
        assert {arg for arg in args if re.fullmatch("--[a-z-]+", arg)} <= flags_of_benchmark(ROOT / script)


@pytest.mark.parametrize(("page", "command"), ALL_COMMANDS)
def test_a_command_is_parsed_by_its_script(page, command, monkeypatch, tmp_path):
    if command in OTHER_COMMANDS or (page == "use-elsewhere.md" and "benchmarks/" not in command):  # other tools'
        return
    monkeypatch.chdir(tmp_path)
    words = split_command(command)
    if words[0] == "torchrun":
        launch = get_args_parser().parse_args(words[1:])
        nodes, processes = int(launch.nnodes.split(":")[0]), int(launch.nproc_per_node)
        parse_with_script(launch.training_script, launch.training_script_args, nodes * processes)
    elif words[:2] == ["python", "-c"]:
        exec(words[2], {})
    elif words[0] == "python":
        parse_with_script(words[1], words[2:])
    elif words[:3] == ["pip", "install", "-r"]:
        assert f"pip install -q {words[2]} {words[3]}" in (ROOT / ".ci" / "run").read_text()
    else:
        assert words[:2] in (["hf", "upload"], ["hf", "download"]), (
            "an unknown command: test it, and add it to OTHER_COMMANDS"
        )


def test_commands_are_found():
    """The test above sees the commands of all pages: some that must be there."""
    assert ("README.md", "python train_gpt2.py --demo") in ALL_COMMANDS
    assert ("training.md", "torchrun --standalone --nproc_per_node=8 train_gpt2.py") in ALL_COMMANDS  # in a table
    assert any(page == "normal.md" and "--batch-size 12" in command for page, command in ALL_COMMANDS)  # on two lines
    for bad, error in (("--max-stepz 3", "--max-stepz"), ("--n-embd 100", "multiple"), ("--recipe slow", "slow")):
        with pytest.raises(Exception, match=error):
            parse_with_script("train_gpt2.py", bad.split())


def test_ci_runs_the_readmes_test_command():
    ci = (ROOT / ".ci" / "run").read_text()
    command = "pip install -r tests/requirements.txt && python -m pytest"
    assert f"\n{command}  " in README.read_text() and command in ci.replace("-q ", "")
    for command in IN_CI:
        assert re.search(rf"(^|&& ){re.escape(command)}$", ci, re.M), command


def test_flags_in_the_text_exist(capsys):
    # torchrun's, and other tools'
    known = {"--nnodes", "--node_rank", "--nproc_per_node", "--master_addr", "--master_port", "--standalone"}
    known |= {
        "--no-project",
        "--with-requirements",
        "--max-restarts",
        "--rdzv-backend",
        "--logdir",
        "--local-dir",
        "--exclude",
        "--pid",
    }
    for script in (train_gpt2, *SCRIPTS.values()):
        with pytest.raises(SystemExit):
            script.main(["--help"])
        known |= set(re.findall(r"--[a-z][a-z0-9_-]+", capsys.readouterr().out))
    for script in (ROOT / "benchmarks").glob("*.py"):
        known |= flags_of_benchmark(script)
    for page in PAGES:
        if page.name != "comparison.md":  # other projects' flags
            text = re.sub(r"<?https?://\S+", "", without_code(page))
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text)) - known == set(), page


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def test_links_lead_somewhere():
    for page in PAGES:
        links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(page)))
        for link in links:
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", without_code(target), re.M)
                assert anchor in map(slug, headings), f"{page.name}: {link}"


def test_named_files_exist():
    for page in PAGES:
        named = re.findall(r"(?<![\w./-])(?:benchmarks|docs|support|tests)/[\w./]*\w\.\w+", page.read_text())
        assert [file for file in named if not (ROOT / file).exists()] == [], page
    for file in re.findall(r"^\| `([\w.]+\.\w+)`", (ROOT / "docs" / "architecture.md").read_text(), re.M):
        assert (ROOT / file).exists(), file
    linked = set(re.findall(r"\[docs/([\w.-]+)\]", README.read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= linked


def test_the_counts_of_the_readme_are_right():
    text = README.read_text()
    [script, support] = re.findall(r"\| (\d+), and about ([\d,]+) in `support/` \|", text)[0]
    assert int(script) == pytest.approx(len((ROOT / "train_gpt2.py").read_text().splitlines()), abs=10)
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "support").rglob("*.py"))
    assert int(support.replace(",", "")) == pytest.approx(lines, rel=0.1)


def test_the_version_is_the_same_everywhere():
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


# ---- messages


VALUE = "\0"  # where the code formats a value


def messages_in_the_code() -> list[str]:
    """The texts in the code, as literals with VALUE."""
    texts = []
    for path in [*ROOT.glob("*.py"), *(ROOT / "support").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, ast.FormattedValue | ast.Constant) for part in parts):
                values = [part.value if isinstance(part, ast.Constant) else VALUE for part in parts]
                if all(isinstance(value, str) for value in values):
                    texts.append(re.sub(r"^(error: |warning: |note +)", "", "".join(values)))
    return texts


def pattern(text: str) -> re.Pattern[str]:
    return re.compile(".+".join(map(re.escape, text.split(VALUE))))


def split_sentences(text: str) -> list[str]:
    return re.split(r"(?<=\.) ", text)


FROM_OTHER_PROGRAMS = ("externally-managed-environment", "Setting OMP_NUM_THREADS environment", "CUDA out of memory.")


def test_the_messages_in_troubleshooting_are_those_of_the_code():
    """A literal gives the whole line, or literals, or sentences of them, give each of its sentences."""
    texts = [text for text in messages_in_the_code() if len(text.replace(VALUE, "")) >= 12]
    whole = [pattern(text) for text in texts if not text.endswith(VALUE)]
    parts = [pattern(part) for text in texts for part in split_sentences(text) if len(part.replace(VALUE, "")) >= 12]
    lines = [line for block in fenced(ROOT / "docs" / "troubleshooting.md", "text") for line in block.splitlines()]
    assert len(lines) >= 30
    for line in lines:
        message = re.sub(r"^(error: |warning:? |note +|step +\d+ \| )", "", line)
        if any(text.fullmatch(message) for text in whole):
            continue
        for sentence in split_sentences(message):
            known = sentence.startswith(FROM_OTHER_PROGRAMS) or any(part.fullmatch(sentence) for part in parts)
            assert known, f"{sentence!r} of: {line}"
