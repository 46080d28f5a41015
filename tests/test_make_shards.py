"""Shards equal those of the plain loop, whatever interrupts the command and whoever encodes the parts."""

import contextlib
import hashlib
import itertools
import json
import random
import shutil
import time
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers import FORKS, in_threads
from shard_helpers import (
    ADVERSARIAL,
    LONG,
    corpus_of,
    documents_of,
    file_size_limit,
    files_in,
    flip_bit,
    interrupt,
    plain_bytes,
    plain_loop,
    shards_in,
    small_disk,
    split_sizes,
    tokens_in,
    valid_unicode,
)

import fineweb
from support import files
from support.cli import UserError
from support.data import make_shards as module
from support.data import shards, text_files
from support.data.make_shards import make_shards
from support.data.text_files import Documents, TextFiles, find_input


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Files of every kind in `texts/`: an empty one, one without a line, long documents, many row groups. Small parts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    documents = valid_unicode(ADVERSARIAL)
    (folder / "a.txt").write_text("one document " * 300)
    (folder / "b.txt").write_text("")
    pa.parquet.write_table(pa.table({"text": [*LONG, *documents] * 2}), folder / "c.parquet", row_group_size=9)
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*documents, *LONG]))
    (folder / "e.jsonl").write_text("")
    (folder / "f.txt").write_text("the end")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_files, "MIN_PART_BYTES", 1500)
    return folder


def make(out, **options):
    """The shards of `texts/`; the corpus is opened again, as by the same command."""
    return make_shards(TextFiles(find_input(["texts"])), out, **{"tokenizer": "bytes", "shard_size": 2000} | options)


# ---- the plain loop


@pytest.mark.parametrize("shard_size", [3, 255, 256, 700])
def test_shards_equal_the_plain_loop(tmp_path, shard_size):
    make_shards(corpus_of(ADVERSARIAL), tmp_path, tokenizer="bytes", shard_size=shard_size)
    expected = plain_loop(ADVERSARIAL, plain_bytes, 256, shard_size)
    assert shards_in(tmp_path) == [("train" if i else "val", i, tokens) for i, tokens in enumerate(expected)]
    assert all(np.load(path).dtype == np.uint16 for path in tmp_path.glob("*.npy"))


@pytest.mark.parametrize("shard_size", [37, 2000])
@pytest.mark.parametrize("max_tokens", [None, 9001])
def test_shards_of_many_parts_equal_the_plain_loop(texts, monkeypatch, shard_size, max_tokens):
    monkeypatch.setattr(module, "BLOCK", 100)
    make("out", shard_size=shard_size, max_tokens=max_tokens)
    corpus = TextFiles(find_input(["texts"]))
    documents = documents_of(corpus)
    [tokens] = plain_loop(documents, plain_bytes, 256, 10**9)
    assert len(corpus.parts()) > 20 and len(documents) > 200
    assert list(itertools.chain(*tokens_in("out"))) == tokens[:max_tokens]
    assert {len(shard) for shard in tokens_in("out")[:-1]} == {shard_size}


def test_the_manifest_describes_the_shards(tmp_path):
    source = Documents("some texts", ADVERSARIAL, "abc123", "texts")
    make_shards(source, tmp_path, tokenizer="bytes", shard_size=256)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    expected = dict(tokenizer="bytes", vocab_size=257, source="some texts", revision="abc123", complete=True)
    assert expected.items() <= manifest.items()
    assert sum(manifest["parts"]) == sum(shard["tokens"] for shard in manifest["shards"])
    for shard in manifest["shards"]:
        file = tmp_path / shard["file"]
        assert shard["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest() and shard["split"] in shard["file"]
        assert (shard["tokens"], shard["documents"]) == (len(np.load(file)), np.count_nonzero(np.load(file) == 256))


# ---- the validation split


def test_the_last_documents_of_a_small_corpus_are_held_out(tmp_path):
    texts = ["a" * 9] * 20  # 200 tokens in documents of 10
    make_shards(corpus_of(texts), tmp_path / "tenth", tokenizer="bytes")
    assert split_sizes(tmp_path / "tenth") == [("val", 20), ("train", 180)]
    make_shards(corpus_of(texts), tmp_path / "third", tokenizer="bytes", val_fraction=1 / 3)
    assert split_sizes(tmp_path / "third") == [("val", 70), ("train", 130)]  # 7 documents are nearest to 66.7 tokens
    make_shards(corpus_of(texts), tmp_path / "many", tokenizer="bytes", val_fraction=0.3, shard_size=50)
    assert [(split, index, len(tokens)) for split, index, tokens in shards_in(tmp_path / "many")] == [
        ("val", 0, 50), ("val", 1, 10), ("train", 2, 50), ("train", 3, 50), ("train", 4, 40),
    ]  # fmt: skip
    make_shards(corpus_of(["b" * 999]), tmp_path / "one", tokenizer="bytes")
    assert tokens_in(tmp_path / "one") == [[98] * 100, [256] + [98] * 899]  # cut inside the only document


def test_only_a_corpus_of_one_shard_is_split(tmp_path):
    for max_tokens, expected in ((500, [("val", 50), ("train", 450)]), (501, [("val", 500), ("train", 1)])):
        out, texts = tmp_path / str(max_tokens), ["a" * 9] * 99
        make_shards(corpus_of(texts), out, tokenizer="bytes", shard_size=500, max_tokens=max_tokens)
        assert split_sizes(out) == expected


def test_split_documents_cuts_inside_a_document(tmp_path, capsys):
    """Of documents of 10, 30 and 60 tokens, a cut between documents holds out 60."""
    texts = ["a" * 9, "b" * 29, "c" * 59]
    make_shards(corpus_of(texts), tmp_path / "between", tokenizer="bytes")
    assert split_sizes(tmp_path / "between") == [("val", 60), ("train", 40)]
    assert "note: that is more than 10%" in capsys.readouterr().out
    make_shards(corpus_of([*texts, "d"]), tmp_path / "less", tokenizer="bytes")
    assert split_sizes(tmp_path / "less") == [("val", 2), ("train", 100)]
    assert "note: that is less than 10%" in capsys.readouterr().out
    make_shards(corpus_of(texts), tmp_path / "inside", tokenizer="bytes", split_documents=True)
    assert split_sizes(tmp_path / "inside") == [("val", 10), ("train", 90)]
    assert "note" not in capsys.readouterr().out
    texts = ["a" * 59, "b" * 29, "c" * 10]  # a document starts one token from the ideal cut: near enough
    make_shards(corpus_of(texts), tmp_path / "near", tokenizer="bytes", split_documents=True)
    assert split_sizes(tmp_path / "near") == [("val", 11), ("train", 90)]


def test_the_split_point_is_the_start_of_the_nearest_document():
    """In blocks of any sizes, compared with all starts at once."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = (rng.random(rng.integers(2, 60)) < rng.choice([0.02, 0.2, 0.9])).astype(np.uint16)
        tokens[0] = 1  # the first document starts here
        blocks = np.split(tokens, np.sort(rng.integers(0, len(tokens), rng.integers(0, 5))))
        fraction = rng.random()
        ideal = len(tokens) - max(1, round(fraction * len(tokens)))
        starts = np.flatnonzero(tokens)[1:]
        expected = starts[np.abs(starts - ideal).argmin()] if len(starts) else max(1, ideal)
        assert module.val_split_point(blocks, len(tokens), 1, fraction) == expected


@pytest.mark.parametrize("texts", [[], ["", ""][:1]])
def test_nothing_is_left_of_a_corpus_without_text(tmp_path, texts):
    with pytest.raises(UserError, match="there is no text in texts"):
        make_shards(corpus_of(texts), tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out").exists()


# ---- parts by several processes

OPTIONS = [
    {},
    {"shard_size": 10**6},  # a single shard, which is split
    {"val_fraction": 0.3},
    {"val_fraction": 0.02, "split_documents": True},
    {"max_tokens": 9_001},
    {"max_tokens": 9_001, "val_fraction": 0.1},
    {"tokenizer": "bpe", "vocab_size": 300},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parts_by_several_processes_make_the_same_bytes(texts, options):
    """In any order, twice, at once; and what nobody has encoded, the last command encodes."""
    make("one", **options)
    for number in (3, 1, 3):
        assert not make("out", only_parts=(number, 4), **options)["complete"]
    outcomes = in_threads([1, 2, 3], lambda number: make("out", only_parts=(number, 4), **options))
    assert not any(isinstance(outcome, Exception) for outcome in outcomes.values()), outcomes
    encoded = {path: path.stat().st_mtime_ns for path in Path("out").glob("parts_*/*.bin")}
    assert len(encoded) > (15 if "max_tokens" not in options else 1) and not list(Path("out").glob("*.npy"))
    assert make("out", **options)["complete"]
    assert files_in(Path("out")) == files_in(Path("one"))
    make("out", only_parts=(2, 4), **options)  # too late
    assert files_in(Path("out")) == files_in(Path("one"))


def test_finished_parts_are_not_encoded_again(texts, monkeypatch):
    make("out", only_parts=(1, 2))
    monkeypatch.setattr(module, "encode_pieces", None)
    make("out", only_parts=(1, 2))
    with pytest.raises(TypeError):
        make("out", only_parts=(2, 2))


def test_no_more_parts_are_encoded_than_are_needed(texts):
    for options, out in (({}, "first"), ({"only_parts": (1, 1)}, "second")):
        with pytest.MonkeyPatch.context() as patch:
            written = []
            encode_pieces = module.encode_pieces
            patch.setattr(module, "encode_pieces", lambda *args: written.append(args) or encode_pieces(*args))  # noqa: B023
            make(out, max_tokens=3000, **options)
            assert len(written) == 2  # of 1,500 bytes


def test_parts_are_not_added_while_shards_are_cut(texts):
    Path("out").mkdir()
    with files.lock_folder(Path("out"), "--output"), pytest.raises(UserError, match="is in use by process"):
        make("out", only_parts=(1, 2))
    with files.lock_folder(Path("out"), "--output", shared=True):
        make("out", only_parts=(1, 2))
        with pytest.raises(UserError, match="is in use by process"):
            make("out")


def test_used_parts_are_removed(texts, monkeypatch):
    """So the disk never has many more tokens than those in the shards, and the parts of one more."""
    encode_pieces, most = module.encode_pieces, []

    def encode_pieces_and_look(*args):
        most.append(0)
        for path in Path("out").glob("parts_*/*.bin"):
            with contextlib.suppress(FileNotFoundError):  # removed by the thread that writes shards
                most[-1] += path.stat().st_size
        return encode_pieces(*args)

    monkeypatch.setattr(module, "encode_pieces", encode_pieces_and_look)
    make("out")
    assert len(most) == len(TextFiles(find_input(["texts"])).parts()) > 20  # none is removed too early
    assert max(most) <= 2 * (2 * 2000 + 2 * 1500)  # of two shards, one of which is being written


# ---- interrupted runs


def test_the_same_command_again_resumes_or_has_nothing_to_do(tmp_path, monkeypatch):
    interrupt(LONG, tmp_path, monkeypatch, 4, shard_size=500)
    with pytest.raises(UserError, match="are not complete .* Run the same fineweb.py command again"):
        shards.open_shards(tmp_path, "train")
    make_shards(corpus_of(LONG), tmp_path, tokenizer="bytes", shard_size=500)
    assert tokens_in(tmp_path) == plain_loop(LONG, plain_bytes, 256, 500)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    make_shards(corpus_of(LONG), tmp_path, tokenizer="bytes", shard_size=500)
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def make_slowly(out, options):
    """So that a kill can come at any moment of it."""
    text_files.MIN_PART_BYTES = 1500
    atomic_write = files.atomic_write
    files.atomic_write = lambda *args, **more: (time.sleep(0.003), atomic_write(*args, **more))[1]
    make(out, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"val_fraction": 0.3}, {"max_tokens": 30_000}, {"tokenizer": "bpe"}])
def test_killed_at_any_moment_the_same_command_makes_the_same_bytes(texts, tmp_path, options):
    rng = random.Random(0)
    options = options | {"shard_size": 700}
    make("expected", **options)
    stamps, kills = {}, 0
    while True:
        process = FORKS.Process(target=make_slowly, args=(tmp_path / "out", options))
        process.start()
        before = len(list(tmp_path.glob("out/**/*.*")))
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("out/**/*.*"))) < before + rng.randrange(1, 20) and process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.random() * 0.01)
        if kills < 6:
            process.kill()
            kills += process.is_alive()
        process.join(60)
        for path, stamp in stamps.items():
            assert not path.exists() or path.stat().st_mtime_ns == stamp, f"{path.name} was written again"
        manifest = json.loads(content) if (content := _text(tmp_path / "out" / "manifest.json")) else {"shards": []}
        finished = [tmp_path / "out" / shard["file"] for shard in manifest["shards"]]
        finished += [path.with_suffix(".bin") for path in tmp_path.glob("out/parts_*/part_*.json")]
        stamps = {path: path.stat().st_mtime_ns for path in finished if path.exists()}
        if process.exitcode == 0:
            break
    assert kills >= 3
    assert files_in(tmp_path / "out") == files_in(tmp_path / "expected")


def _text(path):
    return path.read_text() if path.exists() else None


@pytest.mark.parametrize("options, interrupted_after", [({}, 5), ({"val_fraction": 0.3}, 5)])
@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-50]), flip_bit])
def test_only_lost_shards_are_made_again(tmp_path, monkeypatch, options, interrupted_after, harm):
    """Those of a finished run, and of one that was interrupted."""

    def make(folder):
        make_shards(corpus_of(LONG), folder, tokenizer="bytes", shard_size=500, **options)
        return {path: path.stat().st_mtime_ns for path in sorted(folder.glob("*_train_*.npy"))}

    before = make(tmp_path / "expected")
    shutil.copytree(tmp_path / "expected", tmp_path / "finished", copy_function=shutil.copy2)
    harm(list(before)[2])
    after = make(tmp_path / "expected")
    assert files_in(tmp_path / "expected") == files_in(tmp_path / "finished")
    assert [before[path] == after[path] for path in before] == [i != 2 for i in range(len(before))]
    interrupt(LONG, tmp_path / "out", monkeypatch, interrupted_after, shard_size=500, **options)
    harm(max((tmp_path / "out").glob("*.npy")))
    make(tmp_path / "out")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "finished")


@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-50])])
def test_a_shard_that_is_lost_while_others_are_written_is_named(tmp_path, monkeypatch, harm):
    write_manifest = module.write_manifest

    def write_and_harm(folder, manifest):
        write_manifest(folder, manifest)
        if len(manifest["shards"]) == 4:
            harm(folder / manifest["shards"][2]["file"])

    monkeypatch.setattr(module, "write_manifest", write_and_harm)
    with pytest.raises(UserError, match=r"_train_000002\.npy (is not a readable|does not match) .* Rerun the command"):
        make_shards(corpus_of(LONG), tmp_path, tokenizer="bytes", shard_size=500)
    monkeypatch.undo()
    make_shards(corpus_of(LONG), tmp_path, tokenizer="bytes", shard_size=500)
    assert tokens_in(tmp_path) == plain_loop(LONG, plain_bytes, 256, 500)


@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_text("{}")])
def test_a_tokenizer_that_is_lost_while_shards_are_written_is_named(tmp_path, monkeypatch, harm):
    write_manifest = module.write_manifest

    def write_and_harm(folder, manifest):
        write_manifest(folder, manifest)
        if len(manifest["shards"]) == 2:
            harm(folder / "tokenizer.json")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_manifest", write_and_harm)
        with pytest.raises(UserError, match=r"tokenizer\.json was removed or changed\. Rerun the command"):
            make_shards(corpus_of(LONG), tmp_path, tokenizer="bpe", vocab_size=300, shard_size=500)
    make_shards(corpus_of(LONG), tmp_path, tokenizer="bpe", vocab_size=300, shard_size=500)
    assert shards.read_manifest(tmp_path)["complete"] and shards.read_tokenizer(tmp_path).name == "bpe"


@pytest.mark.parametrize("lost", ["_val_000000.npy", "_train_000007.npy"])
def test_only_the_parts_of_a_lost_shard_are_encoded_again(texts, monkeypatch, lost):
    make("one")
    make("out")
    next(Path("out").glob(f"*{lost}")).unlink()
    encoded, encode_pieces = [], module.encode_pieces
    monkeypatch.setattr(module, "encode_pieces", lambda *args: encoded.append(args) or encode_pieces(*args))
    make("out")
    assert 1 <= len(encoded) <= 4 and files_in(Path("out")) == files_in(Path("one"))


@pytest.mark.parametrize("name", ["part_000005.bin", "part_000005.json"])
@pytest.mark.parametrize("harm", [flip_bit, lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-2])])
def test_a_corrupt_part_is_encoded_again(texts, name, harm):
    make("one")
    make("out", only_parts=(1, 1))
    harm(next(Path("out").glob(f"parts_*/{name}")))
    make("out")
    assert files_in(Path("out")) == files_in(Path("one"))


def test_a_folder_that_is_named_by_its_absolute_path_is_the_same_text(texts, monkeypatch):
    make("one")
    make("out", only_parts=(1, 2))
    encoded, encode_pieces = [], module.encode_pieces
    monkeypatch.setattr(module, "encode_pieces", lambda *args: encoded.append(args) or encode_pieces(*args))
    corpus = TextFiles(find_input([str(texts)]))
    make_shards(corpus, "out", tokenizer="bytes", shard_size=2000)
    assert len(encoded) == len(corpus.parts()) // 2 and files_in(Path("out")) == files_in(Path("one"))


def cut_until(shards, monkeypatch):
    """Makes so many shards of `texts/` in `out/`, then fails."""
    write = module.write_tokens

    def fails(path, *args, **more):
        if path.name.endswith(f"_{shards:06d}.npy"):
            raise UserError("killed")
        return write(path, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="killed"):
        patch.setattr(module, "write_tokens", fails)
        make("out")


def test_after_a_killed_cut_no_used_part_is_encoded_again(texts, monkeypatch):
    cut_until(3, monkeypatch)
    known = json.loads(Path("out/manifest.json").read_text())["parts"]
    encoded, encode_pieces = [], module.encode_pieces
    monkeypatch.setattr(module, "encode_pieces", lambda *args: encoded.append(args) or encode_pieces(*args))
    make("out", only_parts=(1, 1))
    total = len(TextFiles(find_input(["texts"])).parts())
    assert 3 < len(known) < total and len(encoded) <= total - len(known)


@pytest.mark.parametrize("shards_before", [0, 3])
def test_the_parts_of_a_version_that_cut_elsewhere_are_not_used(texts, monkeypatch, shards_before):
    """Neither those on the disk, nor the lengths in the manifest of those that were removed."""
    make("one")
    with monkeypatch.context() as patch:
        patch.setattr(text_files, "MIN_PART_BYTES", 2300)
        if shards_before:
            cut_until(shards_before, monkeypatch)
        make("out", only_parts=(1, 1))
    assert len(list(Path("out").glob("*.npy"))) == shards_before
    make("out")
    assert files_in(Path("out")) == files_in(Path("one"))


def test_a_text_that_is_not_what_it_was_is_noticed(tmp_path):
    """The revision of a corpus says that; where it is wrong, so do the lengths of the parts."""
    make_shards(corpus_of(LONG), tmp_path, tokenizer="bytes", shard_size=500)
    next(tmp_path.glob("*_train_000003.npy")).unlink()
    with pytest.raises(
        UserError, match="texts changed since its shards were begun, or is now encoded differently. Use another"
    ):
        make_shards(corpus_of(LONG[1:]), tmp_path, tokenizer="bytes", shard_size=500)


# ---- the folder


def test_other_shards_are_never_mixed_or_lost(tmp_path):
    def make(text, **settings):
        make_shards(corpus_of([text * 250]), tmp_path, tokenizer="bytes", **settings)

    make("a", shard_size=100)
    before = shards_in(tmp_path)
    for settings in ({"shard_size": 50}, {"shard_size": 100, "max_tokens": 60}):
        with pytest.raises(
            UserError, match="a different source or setting: --[-a-z]+ was .* and is now .*other --output"
        ):
            make("b", **settings)
    assert shards_in(tmp_path) == before
    np.save(tmp_path / "foreign_train_000007.npy", np.zeros(9, dtype=np.uint16))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    for _ in ("with a manifest", "without one"):
        with pytest.raises(UserError, match=r"shards from another tool, such as .*_train_00000\d\.npy\. Move them"):
            make("a", shard_size=100)
        assert (tmp_path / "foreign_train_000007.npy").exists()
        manifest.unlink(missing_ok=True)


@pytest.mark.parametrize("locked", ["run", "run/data"])
def test_shards_that_are_in_use_are_not_said_to_be_in_the_way(tmp_path, monkeypatch, locked):
    """The message would advise to remove the folder; a run holds the lock of the folder around its data."""
    monkeypatch.chdir(tmp_path)
    command = "--input {} --output run/data --tokenizer bytes --shard-size 50"
    for name in "ab":
        Path(f"{name}.txt").write_text(name * 250)
    fineweb.main(command.format("a.txt").split())
    with files.lock_folder(Path(locked), "--out"), pytest.raises(UserError, match=rf"^{locked} is in use by process"):
        fineweb.main(command.format("b.txt").split())
    with pytest.raises(UserError, match="remove run/data"):
        fineweb.main(command.format("b.txt").split())


@pytest.mark.parametrize("separator, name", [(None, "a.txt"), (None, "a.jsonl"), ("\n<|endoftext|>\n", "a.txt")])
def test_a_text_with_end_of_text_in_it_is_noted(tmp_path, capsys, separator, name):
    """Many dumps have it between documents."""
    paths, story = [tmp_path / "LICENSE.txt", tmp_path / name], "A story.\n<|endoftext|>\n" * 9
    paths[0].write_text("Free.")
    paths[1].write_text(story if name == "a.txt" else json.dumps({"text": story}))
    manifest = make_shards(TextFiles(paths, separator=separator), tmp_path / "out", tokenizer="bytes")
    notes = capsys.readouterr().out.count("note: the text has <|endoftext|> in it, which is read as text")
    documents = sum(shard["documents"] for shard in manifest["shards"])
    assert (notes, documents) == ((0, 10) if separator else (1, 2))


@pytest.mark.parametrize("tokens, share", [(120, "83%"), (401, None)])
def test_a_text_that_is_hardly_longer_than_a_shard_is_noted(tmp_path, capsys, tokens, share):
    """Most of it would be validated on."""
    make_shards(corpus_of(["a" * (tokens - 1)]), tmp_path, tokenizer="bytes", shard_size=100)
    out = capsys.readouterr().out
    assert (f"note: the validation shard has {share} of the tokens" in out) == bool(share)
    assert ("of the tokens" in out) == bool(share)


def test_a_folder_of_text_that_was_renamed_is_named(texts, tmp_path):
    make("out")
    texts.rename(tmp_path / "other")
    with pytest.raises(UserError, match=r"another name, such as texts_.*: the folder of the text was renamed"):
        make_shards(TextFiles(find_input(["other"])), "out", tokenizer="bytes", shard_size=2000)


def test_parts_that_would_be_encoded_again_are_noted(texts, capsys, monkeypatch):
    """They may have taken many machines hours."""
    for share in ((1, 2), (2, 2)):
        make("out", only_parts=share)
    assert "are not used" not in capsys.readouterr().out
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # who reads the note stops the command ...
        patch.setattr(module, "encode_pieces", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        make("out", val_fraction=0.25)
    assert "are not used" in capsys.readouterr().out
    make("out", only_parts=(2, 2))  # ... and goes on with the right one
    assert "are not used" not in capsys.readouterr().out
    make("out", val_fraction=0.25)
    said = capsys.readouterr().out
    assert (
        said.count("note: parts in out are not used, and removed at the end: --val-fraction was None and is now") == 1
    )


def test_a_complete_folder_with_a_shard_that_is_not_listed_is_refused(texts):
    """As --check and training refuse it."""
    manifest = make("out")
    name = manifest["shards"][0]["file"]
    shutil.copy(f"out/{name}", f"out/{name.rpartition('_')[0]}_000099.npy")
    with pytest.raises(UserError, match="_000099.npy is not in the manifest. Move it out of the folder"):
        make("out")


def test_the_parts_of_another_text_are_not_used(texts):
    """As after a bad line was corrected."""
    make("out", only_parts=(1, 2))
    encoded = set(Path("out").rglob("*.bin"))
    (texts / "f.txt").write_text("another end")
    with pytest.raises(UserError, match="shards from a different source or setting: the text was changed or copied"):
        make("out", only_parts=(2, 2))  # another machine would go on with the other text
    assert encoded == set(Path("out").rglob("*.bin"))
    (Path("out") / "parts_of_mine").mkdir()
    make("out")
    make("one")
    assert [path for path in Path("out").iterdir() if path.is_dir()] == [Path("out/parts_of_mine")]
    Path("out/parts_of_mine").rmdir()
    assert files_in(Path("out")) == files_in(Path("one"))


def test_the_tokenizer_of_something_else_stays(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")  # of a checkpoint
    with pytest.raises(
        UserError, match=r"a tokenizer\.json but no manifest\.json, like a checkpoint. Use another --output."
    ):
        make_shards(corpus_of(["a" * 250]), tmp_path, tokenizer="bytes")
    assert files_in(tmp_path) == {"tokenizer.json": b"{}"}


def test_leftovers_of_a_killed_run_are_removed(tmp_path, monkeypatch):
    options = {"shard_size": 500, "val_fraction": 0.3}
    leftovers = [
        ".texts_val_000003.npy.partial",
        ".manifest.json.0123.partial",
        "parts_0123456789abcdef/part_000000.bin",
    ]
    others = ["notes.txt", "other_train.npy"]
    make_shards(corpus_of(LONG), tmp_path / "expected", tokenizer="bytes", **options)
    expected = files_in(tmp_path / "expected") | dict.fromkeys(others, b"x")
    interrupt(LONG, tmp_path / "out", monkeypatch, 5, **options)
    (tmp_path / "out" / "parts_0123456789abcdef").mkdir()
    for name in (*leftovers, *others):
        (tmp_path / "out" / name).write_bytes(b"x")
    make_shards(corpus_of(LONG), tmp_path / "out", tokenizer="bytes", **options)
    assert files_in(tmp_path / "out") == expected


PARTS_OF_ANOTHER_KIND = json.dumps(dict(tokenizer="bytes", vocab_size=257, shards=[], complete=False, parts=["9"]))


@pytest.mark.parametrize("content", ["null", '"x"', "{", "[" * 100_000, '{"settings": {}}', PARTS_OF_ANOTHER_KIND])
def test_a_file_that_is_not_a_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(
        UserError, match=r"manifest\.json is not a manifest of shards .*Restore it, or make the shards again"
    ):
        make_shards(corpus_of(["a" * 250]), tmp_path, tokenizer="bytes")
    assert (tmp_path / "manifest.json").read_text() == content


# ---- disks


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    """A resumed run needs only the rest."""
    options = {"shard_size": 500, "val_fraction": 0.5}
    characters = sum(map(len, LONG))

    def try_with(folder, free):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
            make_shards(corpus_of(LONG), folder, tokenizer="bytes", **options)

    with pytest.raises(UserError, match=r"new has 0\.0 MB free, but about 0\.0 MB are needed to make the shards"):
        try_with(tmp_path / "new", 2 * 2 * characters - 1)
    assert not (tmp_path / "new").exists()
    interrupt(LONG, tmp_path / "out", monkeypatch, 7, **options)  # while the two splits are written
    on_disk = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.bin"))
    needed = 2 * 2 * characters - on_disk - sum(2 * len(np.load(path)) for path in _listed(tmp_path / "out"))
    with pytest.raises(UserError, match="are needed"):
        try_with(tmp_path / "out", needed - 1)
    try_with(tmp_path / "out", needed)


def test_a_small_corpus_needs_twice_its_size(tmp_path, monkeypatch):
    """Its parts are kept until it is split; those of a larger one are removed."""
    characters = sum(map(len, LONG))
    for shard_size, copies in ((10**6, 2), (500, 1)):
        for free in (2 * copies * characters - 1, 2 * copies * characters):
            monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))  # noqa: B023
            out = tmp_path / f"{shard_size} {free}"
            with contextlib.suppress(UserError):
                make_shards(corpus_of(LONG), out, tokenizer="bytes", shard_size=shard_size)
            assert out.exists() == (free % 2 == 0)


def test_a_full_disk_is_named_with_its_free_space(tmp_path):
    with small_disk(tmp_path / "disk", 1_000_000) as out:
        wanted = (
            rf"^cannot write to {out} \(No space left on device, 0\.0 MB free\)\. Fix this, then run the same command"
        )
        with pytest.raises(UserError, match=wanted), module.report_disk_errors(out):
            (out / "part").write_bytes(bytes(2_000_000))


def _listed(folder):
    return [folder / shard["file"] for shard in json.loads((folder / "manifest.json").read_text())["shards"]]


@pytest.mark.parametrize("kind", [".npy", ".bin"])
def test_after_a_full_disk_the_same_command_resumes(texts, monkeypatch, kind):
    write = module.write_tokens

    def write_to_full_disk(path, *args, **more):
        with file_size_limit(100) if path.name.endswith(f"_000002{kind}") else contextlib.nullcontext():
            return write(path, *args, **more)

    make("one")
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tokens", write_to_full_disk)
        with pytest.raises(UserError, match=r"cannot write to out \(File too large\)\. .*same command again to resume"):
            make("out")
    assert not shards.is_complete("out") and not list(Path("out").rglob("*partial*"))
    make("out")
    assert files_in(Path("out")) == files_in(Path("one"))
