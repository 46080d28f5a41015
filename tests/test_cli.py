"""Command lines that are made from a dataclass."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import train_gpt2
from support.cli import Parser, UserError, add_flags, flag, flag_fields, flag_name, parse_flags


@dataclass
class Config:
    rate: float = flag(0.5, "how fast", "speed", at_least=0)
    size: int | None = flag(None, "how big", "shape", default_help="as it fits", at_least=1, below=10)
    fast: bool = flag(False, "hurry", "speed")
    check: bool = flag(True, "look", "shape", default_help="sometimes")
    part: float = flag(0.5, "how much", "shape", at_most=1)
    not_a_flag: int = 3


def test_flags_are_the_fields():
    parser = Parser(prog="x")
    add_flags(parser, Config)
    assert vars(parser.parse_args([])) == {}
    given = vars(parser.parse_args("--rate 2 --size 3 --fast --no-check".split()))
    assert given == {"rate": 2.0, "size": 3, "fast": True, "check": False} and type(given["rate"]) is float
    help = parser.format_help()
    assert "how fast (default: 0.5)" in help and "how big (default: as it fits)" in help and "\nspeed:" in help
    assert "not-a-flag" not in help
    with pytest.raises(UserError, match="unrecognized arguments: --siz 3"):
        parser.parse_args(["--siz", "3"])


def test_values_out_of_range_are_reported_together():
    assert parse_flags(Config, "--rate 0 --size 9".split(), "") == {"rate": 0.0, "size": 9}
    with pytest.raises(UserError) as error:
        parse_flags(Config, "--rate nan --size 10 --part 2".split(), "")
    assert error.value.problems == (
        "--rate is nan. It must be a finite number.",
        "--size is 10. It must be less than 10.",
        "--part is 2.0. It must be 1 or less.",
    )


def test_help_lists_every_flag_with_its_default(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        train_gpt2.main(["--help"])
    help = capsys.readouterr().out
    assert exit.value.code == 0 and not list(tmp_path.iterdir())
    for field in flag_fields(train_gpt2.TrainConfig):
        assert flag_name(field.name) in help
    for text in (
        "(default: 524288)",
        "(default: 19073)",
        "(default: 6e-4; 3.6e-3 with --recipe fast)",
        "(default: 64 on CUDA, otherwise 4)",
        "schedule:",
    ):
        assert text in " ".join(help.split())
