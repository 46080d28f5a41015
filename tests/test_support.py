"""The helpers: encodings, downloads, checkpoints on disk, the log, the flags."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, fields

import pytest
import torch
from conftest import GPT2_VOCABULARY, ROOT, needs_gpt2_vocabulary, run_script

import train_gpt2
from support import checkpoint, devices
from support import download as downloads
from support.cli import Parser, UserError, add_flags, flag
from support.log import RunLog
from support.tokenizer import get_tokenizer, name_for_vocab_size

TEXTS = [
    "Hello, I'm a language model,",
    "",
    " \n\n\t x",
    "naïve 日本語 🙂 \u0001\u00a0",
    "we've 123 it's<|endoftext|>a",
    "  def f(x):\n      return x",
]

# ---- encodings


def test_bytes_are_utf8_and_an_end_of_text():
    tokenizer = get_tokenizer("bytes")
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_array(text).tolist() == list(text.encode())
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([72, 256, 105]) == "H<|endoftext|>i"


@needs_gpt2_vocabulary
def test_gpt2_is_tiktokens():
    import tiktoken

    tokenizer, reference = get_tokenizer("gpt2"), tiktoken.get_encoding("gpt2")
    assert tokenizer.encode("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    for text in TEXTS:
        assert tokenizer.encode_array(text).tolist() == reference.encode_ordinary(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=needs_gpt2_vocabulary)])
def test_huggingface_reads_the_same_encoding(name, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = get_tokenizer(name)
    tokenizer.save_pretrained(tmp_path, model_max_length=64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == tokenizer.vocab_size and theirs.model_max_length == 64
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.eot
    for text in [t.replace("<|endoftext|>", "") for t in TEXTS]:
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs("a<|endoftext|>")["input_ids"] == [*tokenizer.encode("a"), tokenizer.eot]


@needs_gpt2_vocabulary
def test_the_merges_are_openais(tmp_path):
    """Found again from the tokens alone, against the published list (vocab.bpe: a version line, then a pair a line)."""
    url = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
    published = (
        (GPT2_VOCABULARY.parent / hashlib.sha1(url.encode()).hexdigest()).read_text(encoding="utf-8").splitlines()[1:]
    )
    found = json.loads(get_tokenizer("gpt2").huggingface_json)["model"]["merges"]
    assert [" ".join(pair) for pair in found] == published


def test_encodings_are_known_by_their_size():
    assert [name_for_vocab_size(n) for n in (50257, 257)] == ["gpt2", "bytes"]
    with pytest.raises(UserError, match="vocabulary of 32,000 tokens. Known are gpt2: 50,257, bytes: 257"):
        name_for_vocab_size(32000)


def test_without_the_vocabulary_the_way_on_is_told(tmp_path):
    code = (
        "from support.cli import run; from support.tokenizer import get_tokenizer; run(lambda: get_tokenizer('gpt2'))"
    )
    no_way = {
        "TIKTOKEN_CACHE_DIR": str(tmp_path),
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    quick = "import support.download as d; d.ATTEMPTS = 1; "
    done = subprocess.run(
        [sys.executable, "-c", quick + code], cwd=ROOT, env=os.environ | no_way, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith(
        f"error: the GPT-2 vocabulary is not in {tmp_path}: cannot download"
    )
    assert "TIKTOKEN_CACHE_DIR" in done.stderr and done.stderr.count("\n") == 1


# ---- downloads, from a server that misbehaves in the ways it is told to


@pytest.fixture
def server(monkeypatch):
    answers, asked = [], []
    body = bytes(range(256)) * 1000

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            answer = answers.pop(0) if answers else 200
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:1000] if answer == "cut off" else body)

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: asked.append(seconds))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield f"http://127.0.0.1:{httpd.server_port}/file.bin", body, answers, asked
    httpd.shutdown()
    httpd.server_close()


def test_a_download_survives_passing_trouble(server, tmp_path):
    url, body, answers, asked = server
    answers += [500, "cut off", 429]
    sha256 = hashlib.sha256(body).hexdigest()
    path = downloads.download(url, tmp_path / "deep" / "file", sha256=sha256)
    assert path.read_bytes() == body and os.listdir(path.parent) == ["file"]
    assert asked == ["/file.bin", 2, "/file.bin", 4, "/file.bin", 8, "/file.bin"]
    downloads.download(url, path, sha256=sha256)
    assert len(asked) == 7  # it was there


@pytest.mark.parametrize(
    "answer, times, message",
    [(404, 1, "answered 404 Not Found"), (503, 4, "answered 503"), ("cut off", 4, "the connection broke off")],
)
def test_a_download_that_fails_leaves_nothing(server, tmp_path, answer, times, message):
    url, _, answers, asked = server
    answers += [answer] * 9
    with pytest.raises(UserError, match=message):
        downloads.download(url, tmp_path / "file")
    assert asked.count("/file.bin") == times and not os.listdir(tmp_path)


def test_a_damaged_file_is_fetched_again(server, tmp_path):
    url, body, _, asked = server
    (tmp_path / "file").write_bytes(b"half")
    assert downloads.download(url, tmp_path / "file", sha256=hashlib.sha256(body).hexdigest()).read_bytes() == body
    assert asked == ["/file.bin"]


def test_another_file_than_expected_is_not_kept(server, tmp_path):
    url, body, _, _ = server
    with pytest.raises(UserError, match="wrong checksum"):
        downloads.download(url, tmp_path / "file", sha256="0" * 64)
    assert not os.listdir(tmp_path)
    (tmp_path / "same").write_bytes(body)
    blob = subprocess.run(
        ["git", "hash-object", tmp_path / "same"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert downloads.download(url, tmp_path / "file", git_blob=blob).read_bytes() == body


# ---- checkpoints on disk


def write_one(directory, text="x"):
    return checkpoint.save(directory, lambda folder: (folder / "model.txt").write_text(text))


def test_a_checkpoint_is_whole_or_not_there(tmp_path):
    good = write_one(tmp_path / "model_00005")

    def dies(folder):
        (folder / "model.txt").write_text("half")
        raise OSError("disk full")

    for directory in (tmp_path / "model_00010", good):
        with pytest.raises(OSError, match="disk full"):
            checkpoint.save(directory, dies)
    assert checkpoint.newest(tmp_path) == good and (good / "model.txt").read_text() == "x"
    write_one(tmp_path / "model_00010")  # what lies about from the failure is in nobody's way
    write_one(good, "replaced")
    assert (good / "model.txt").read_text() == "replaced" and checkpoint.damage(good) is None
    assert sorted(os.listdir(tmp_path)) == ["model_00005", "model_00010"]
    write_one(tmp_path / "model_100000")
    assert checkpoint.newest(tmp_path).name == "model_100000"  # by number, not by name


@pytest.mark.parametrize(
    "harm", ["altered", "is missing", "bytes, not", "names '../x'", "is not readable", "lists nothing"]
)
def test_damage_is_described(tmp_path, harm):
    directory = write_one(tmp_path / "model_00001", "four")
    file, contents = directory / "model.txt", directory / "checkpoint.json"
    if harm == "altered":
        file.write_text("five")
    elif harm == "is missing":
        file.unlink()
    elif harm == "bytes, not":
        file.write_text("fo")
    elif harm == "is not readable":
        contents.write_text('{"files": 1}')
    elif harm == "lists nothing":
        contents.write_text('{"files": {}}')
    else:
        contents.write_text(json.dumps({"files": {"../x": {"bytes": 0, "sha256": ""}}}))
    assert harm in checkpoint.damage(directory)


# ---- the log


def test_the_log_goes_on_from_a_step(tmp_path):
    path = tmp_path / "log.txt"
    log = RunLog(path, 0)
    for step in range(4):
        log.write(step, "train", 1 / 3)
    log.write(4, "val", 1 / 3)
    log.write(4, "hella", 0.25)
    whole = "".join(f"{i} train 0.333333\n" for i in range(4)) + "4 val 0.3333\n4 hella 0.2500\n"
    assert path.read_text() == whole
    with open(path, "a") as file:
        file.write("\nmine\n\0\0\0\n")
    with open(path, "ab") as file:
        file.write(b"\xff\n1")  # cut short: it was to be 10
    RunLog(path, 4).write(4, "val", 2)
    assert path.read_text() == whole.replace("4 val 0.3333\n4 hella 0.2500\n", "4 val 2.0000\n")
    RunLog(None, 0).write(0, "train", 1.0)
    assert not (tmp_path / "other.txt").exists()


# ---- flags and imports


def test_flags_are_the_fields(capsys):
    @dataclass
    class Config:
        rate: float = flag(0.5, "how fast", "speed")
        size: int | None = flag(None, "how big", "shape", auto="as it fits")
        fast: bool = flag(False, "hurry", "speed")
        check: bool | None = flag(None, "look", "shape", auto="sometimes")

    parser = Parser(prog="x")
    add_flags(parser, Config)
    assert vars(parser.parse_args([])) == {}
    given = vars(parser.parse_args("--rate 2 --size 3 --fast --no-check".split()))
    assert given == {"rate": 2.0, "size": 3, "fast": True, "check": False} and type(given["rate"]) is float
    help = parser.format_help()
    assert "how fast (default: 0.5)" in help and "how big (default: as it fits)" in help and "\nspeed:" in help
    with pytest.raises(UserError, match="unrecognized arguments: --siz 3"):
        parser.parse_args(["--siz", "3"])


def test_help_names_every_flag_with_its_default(tmp_path):
    done = run_script("train_gpt2.py", "--help", cwd=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    for field in fields(train_gpt2.TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in done.stdout
    for text in (
        "(default: 524288)",
        "(default: 19073)",
        "(default: 6e-4; with --recipe fast 3.6e-3)",
        "(default: 64 on CUDA, else 4)",
        "schedule:",
    ):
        assert text in " ".join(done.stdout.split())


@pytest.mark.parametrize("module", ["train_gpt2", "fineweb", "hellaswag", "sample"])
def test_importing_does_nothing_and_pulls_in_nothing_heavy(module, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import {module}
heavy = ["transformers", "datasets", "tiktoken", "requests", "pyarrow", "huggingface_hub", "matplotlib"]
print([name for name in heavy if name in sys.modules])
"""
    if module == "fineweb":  # each of its workers imports it again
        code = code.replace("heavy = [", 'heavy = ["torch", ')
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "") and not list(tmp_path.iterdir())


def test_helpers_never_import_the_trainer():
    for path in [ROOT / "fineweb.py", ROOT / "hellaswag.py", *(ROOT / "support").glob("*.py")]:
        assert "import train_gpt2" not in path.read_text() and "from train_gpt2" not in path.read_text(), path


def test_precision_follows_the_hardware(monkeypatch):
    cpu = torch.device("cpu")
    for capabilities, expected in (
        ({"avx512_f": True}, torch.float32),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        assert devices.pick_dtype("auto", cpu) == expected
    for native, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native or including_emulation
        )
        assert devices.pick_dtype("auto", torch.device("cuda")) == expected
    assert devices.pick_dtype("fp32", cpu) == torch.float32


def test_peaks_are_of_whole_names(monkeypatch):
    for name, peak in (
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", None),
        ("Tesla V100", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert devices.peak_flops(torch.device("cuda")) == peak
    assert devices.peak_flops(torch.device("cpu")) is None


def test_generators_depend_on_each_seed():
    first = [
        torch.rand(1, generator=devices.seeded_generator(torch.device("cpu"), *s)).item()
        for s in ((1, 2, 3), (1, 2, 3), (1, 3, 2), (1, 2))
    ]
    assert first[0] == first[1] and len(set(first)) == 3
