"""Tokenizers by name, and the same tokenizers as Hugging Face files.

`gpt2` is OpenAI's vocabulary of 50,257 tokens. `bytes` is the 256 byte values and an end-of-text token, and `bpe` is an
encoding trained on a text (`support/data/bpe.py`). Each is written as a `tokenizer.json`, with shards and with models, and
read from there; only GPT-2's, where there is none, is downloaded. End-of-text is always the last id.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from support.cli import UserError

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZES = {"gpt2": 50257, "bytes": 257}
MAX_VOCAB_SIZE = 2**16  # ids are uint16
MOST_PADDING = 1024  # rows that others add to an embedding; GPT-2 trainers, 47
COUNTED = 2**20  # ids whose bytes are counted at a time, which takes 16 MB
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_JSON, "tokenizer_config.json", "vocab.json", "merges.txt")

TokenIds: TypeAlias = npt.NDArray[np.unsignedinteger]  # one-dimensional, of any unsigned type
# exceptions from code that trusts the content of a JSON file
MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

# GPT-2's pattern of words; each word is encoded separately
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

KNOWN_FINGERPRINTS = {
    "1d5a9da12a2cb5cee343bcb0ffcffa54f7ce0c9a3bc4b4c5c4f3e7bd2092f4bc": "gpt2",
    "4302384a23b4a64b271c0f0e343dfdf3ef75b3e37f36f37cfa27a31eeb1da036": "bytes",
}
GPT2_MERGES = (  # URL and SHA-256, as in tiktoken
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)
CONVERT_COMMAND = (
    'python -c "from transformers import AutoTokenizer; '
    'AutoTokenizer.from_pretrained({directory!r}).save_pretrained({directory!r})"'
)
RESIZE_COMMAND = (  # in a new folder: the weights may still be mapped from the old one
    'python -c "from transformers import AutoTokenizer, GPT2LMHeadModel; '
    "model = GPT2LMHeadModel.from_pretrained({source!r}); model.resize_token_embeddings({vocab_size}); "
    "model.save_pretrained({folder!r}, max_shard_size='50GB'); "
    'AutoTokenizer.from_pretrained({source!r}).save_pretrained({folder!r})"'
)


def get_tokenizer(name: str, *folders: Path) -> Tokenizer:
    """Returns the tokenizer "gpt2" or "bytes".

    GPT-2's is read from the `tokenizer.json` in one of these folders; if none has it, it comes from tiktoken's cache, or
    is downloaded.

    Raises:
        UserError: GPT-2's vocabulary is not on this machine and cannot be downloaded; or as in `find_tokenizer`.
    """
    if name == "bytes":
        return BytesTokenizer()
    if name != "gpt2":
        raise ValueError(f"no tokenizer has the name {name}")
    found = (find_tokenizer(folder) for folder in folders)
    return next((tokenizer for tokenizer in found if tokenizer and tokenizer.is_gpt2), None) or _download_gpt2()


def find_tokenizer(directory: Path) -> Tokenizer | None:
    """Returns the tokenizer in the `tokenizer.json` of a folder, a model's or one of shards; None without one.

    Raises:
        UserError: the tokenizer is of a kind that this project cannot read, or in files of an older format.
    """
    path = directory / TOKENIZER_JSON
    if not path.exists():
        if (directory / "vocab.json").exists():
            raise UserError(
                f"{directory} has its tokenizer in vocab.json and merges.txt. Make a {TOKENIZER_JSON} from them: "
                + CONVERT_COMMAND.format(directory=str(directory))
            )
        return None
    try:
        content = path.read_text(encoding="utf-8")
        definition, fingerprint = _read_json(content)
        options = directory / "tokenizer_config.json"  # Hugging Face's library obeys either file, by version and class
        settings = [json.loads(options.read_text(encoding="utf-8"))] if options.exists() else []
        if any(each.get("add_prefix_space") for each in (definition["pre_tokenizer"], *settings)):
            raise UserError(
                f"the tokenizer in {directory} puts a space before each text (add_prefix_space), which is not supported. "
                f"Use another model; or, if it was trained without the space, set add_prefix_space to false in "
                f"{TOKENIZER_JSON} and tokenizer_config.json."
            )
        if KNOWN_FINGERPRINTS.get(fingerprint) == "bytes":
            return BytesTokenizer()
        # what Hugging Face's library would do to every text, such as adding tokens; training does not
        left_out = {"truncation": None, "padding": None, "post_processor": None}
        if any(map(definition.get, left_out)):
            content = json.dumps(definition | left_out, ensure_ascii=False, indent=2)
        return BpeTokenizer(content)
    except MALFORMED as error:
        raise UserError(
            f"{path} is not a byte-level BPE like fineweb.py's, with end-of-text as its last token. Use another model."
        ) from error


def tokenizer_of_model(directory: Path, vocab_size: int, stated: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a model, after checking it against the vocabulary size.

    Args:
        stated: the value of --tokenizer, if it was given: the tokenizer of a folder without `tokenizer.json`.

    Raises:
        UserError: as in `get_tokenizer`; or the model has no tokenizer, or one of a different size or name.
    """
    tokenizer = find_tokenizer(directory)
    if tokenizer and stated and tokenizer.name != stated:
        raise UserError(
            f"{directory} has its own tokenizer ({tokenizer.name}), not {stated}, in {TOKENIZER_JSON}. Leave out --tokenizer."
        )
    if tokenizer is None and stated in VOCAB_SIZES:
        tokenizer = get_tokenizer(stated)
    if tokenizer is None:
        raise UserError(
            f"{directory} has no {TOKENIZER_JSON} for its {vocab_size:,} tokens. Copy the one that the model was trained "
            "with into that folder, or say that they are GPT-2's tokens with --tokenizer gpt2."
        )
    if tokenizer.vocab_size != vocab_size:
        command = RESIZE_COMMAND.format(
            source=str(directory), vocab_size=tokenizer.vocab_size, folder=f"{directory.name}_resized"
        )
        may_be_padded = 0 < vocab_size - tokenizer.vocab_size <= MOST_PADDING
        raise UserError(
            f"the model in {directory} has {vocab_size:,} tokens, but its tokenizer ({tokenizer.name}) has "
            f"{tokenizer.vocab_size:,}. Copy the {TOKENIZER_JSON} that the model was trained with into that folder"
            + (f"; or, if its embedding was padded, remove the padding: {command}" if may_be_padded else ".")
        )
    return tokenizer


@functools.lru_cache(maxsize=4)  # reading GPT-2's takes 0.2 s
def _read_json(text: str) -> tuple[dict[str, Any], str]:
    """Parses a `tokenizer.json`, and hashes the parts that determine a text's ids, whichever `tokenizers` version wrote it."""
    content = json.loads(text)
    model, words = content["model"], content["pre_tokenizer"]
    affixes = (model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    # dropout: a text has different ids each time
    if model.get("type", "BPE") != "BPE" or model.get("dropout") or any(affixes):
        raise ValueError(model.get("type"))
    if content["decoder"]["type"] != "ByteLevel":  # as in Hugging Face's library, which decodes with it
        raise ValueError(content["decoder"])
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    split = [words["type"], words["add_prefix_space"], words.get("use_regex", True), content.get("normalizer")]
    definition = json.dumps([model["vocab"] | special, special, merges, split], sort_keys=True)
    return content, hashlib.sha256(definition.encode()).hexdigest()


class Tokenizer:
    """Converts text to token ids and back, through tiktoken. The text of a special token is encoded as ordinary text."""

    name: str
    _encoding: tiktoken.Encoding

    @property
    def is_gpt2(self) -> bool:
        """Whether the tokens are GPT-2's. Their number does not tell: a trained encoding may have as many."""
        return self.name == "gpt2"

    @property
    def vocab_size(self) -> int:
        return self._encoding.n_vocab

    @property
    def eot(self) -> int:
        """The id of the end-of-text token, which `encode` never produces."""
        return self.vocab_size - 1

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of all tokens except end-of-text, in order of id."""
        return [self._encoding.decode_single_token_bytes(i) for i in range(self._encoding.n_vocab - 1)]

    def count_bytes(self, ids: npt.NDArray[np.integer]) -> int:
        """Counts the bytes of text that the tokens stand for; an end-of-text, or an unknown id, counts as one byte."""
        lengths = np.array([*map(len, self.token_bytes()), 1])
        blocks = (ids[start : start + COUNTED] for start in range(0, len(ids), COUNTED))
        return sum(int(lengths[np.minimum(block, len(lengths) - 1)].sum()) for block in blocks)

    @property
    def fingerprint(self) -> str:
        """A SHA-256 that two tokenizers share if they give every text the same ids."""
        return _read_json(self.json)[1]

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> TokenIds:
        """Returns the ids as an array, which takes a fifth of the memory of a list."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encoding.encode_to_numpy(to_utf8(text).decode(), disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(list(ids))

    @functools.cached_property
    def json(self) -> str:
        """The content of `tokenizer.json`."""
        raise NotImplementedError

    def save_pretrained(self, directory: str | os.PathLike[str], model_max_length: int) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which Hugging Face's `AutoTokenizer` loads.

        Args:
            model_max_length: the model's context length, in tokens.
        """
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "model_max_length": model_max_length,
            # without it, transformers 4 also returns token_type_ids, which GPT-2 would add to its embeddings
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        }
        Path(directory, TOKENIZER_JSON).write_text(self.json, encoding="utf-8", newline="\n")
        Path(directory, "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class BpeTokenizer(Tokenizer):
    """The byte-pair encoding in a `tokenizer.json`, which splits text into words as GPT-2 does. GPT-2's own is one.

    The first 256 tokens are the bytes, the i-th merge makes token 255 + i, and the last token is end-of-text.

    Args:
        content: the content of `tokenizer.json`.

    Raises:
        An exception in MALFORMED: the content is a different kind of tokenizer.
    """

    def __init__(self, content: str):
        self.json = content
        definition, fingerprint = _read_json(content)
        self.name = KNOWN_FINGERPRINTS.get(fingerprint, "bpe")
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in definition["model"]["merges"]]
        *tokens, _end_of_text = tokens_in_order(definition["model"]["vocab"])
        pairs = [_bytes_of(first) + _bytes_of(second) for first, second in merges]
        if set(tokens[:256]) != {bytes([i]) for i in range(256)} or tokens[256:] != pairs:
            raise ValueError("its tokens are not the bytes followed by the merges")
        if len(tokens) >= MAX_VOCAB_SIZE:
            raise ValueError("it has too many tokens")
        if self.name == "bpe" and _read_json(tokenizer_json(tokens, merges))[1] != fingerprint:
            raise ValueError("it splits text differently, or has other special tokens")
        self._encoding = _tiktoken_encoding(self.name, tokens)


class BytesTokenizer(Tokenizer):
    """One token per UTF-8 byte, with ids 0 to 255, and end-of-text, 256."""

    name = "bytes"

    def __init__(self) -> None:
        self._encoding = _tiktoken_encoding(self.name, [bytes([i]) for i in range(256)])

    @functools.cached_property
    def json(self) -> str:
        return tokenizer_json(self.token_bytes(), [], split_words=False)

    def encode_array(self, text: str) -> TokenIds:
        return np.frombuffer(to_utf8(text), dtype=np.uint8)


@functools.cache
def _download_gpt2() -> BpeTokenizer:
    """Returns GPT-2's tokenizer, made from its merges. tiktoken downloads them once, into TIKTOKEN_CACHE_DIR.

    Raises:
        UserError: they are not on this machine, and the download fails.
    """
    import requests
    from tiktoken.load import read_file_cached

    try:
        _version, *lines = read_file_cached(*GPT2_MERGES).decode().splitlines()
    except (OSError, ValueError, requests.RequestException) as error:  # ValueError is a wrong checksum
        reason = "no connection to the server" if isinstance(error, requests.ConnectionError) else str(error)
        raise UserError(
            f"GPT-2's vocabulary is not on this machine, and cannot be downloaded ({reason}). Copy the {TOKENIZER_JSON} of "
            "GPT-2 (a checkpoint or shards with its tokens have it) into the model's folder, or name that folder with "
            "fineweb.py --tokenizer-from; or set TIKTOKEN_CACHE_DIR to a copy of tiktoken's cache; or use --tokenizer bpe "
            "for a new model.",
            this_rank_only=True,
        ) from error
    merges = [line.split(" ") for line in lines]
    tokens = [*sorted(printable_bytes()), *map("".join, merges)]  # in OpenAI's order
    return BpeTokenizer(tokenizer_json([*map(_bytes_of, tokens)], merges))


def _tiktoken_encoding(name: str, tokens: Sequence[bytes]) -> tiktoken.Encoding:
    """Returns an encoding with these tokens, in order of id, and end-of-text after them."""
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(tokens)}
    end_of_text = {END_OF_TEXT: len(tokens)}
    return tiktoken.Encoding(name, pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens=end_of_text)


def tokenizer_json(tokens: Sequence[bytes], merges: Sequence[Sequence[str]], split_words: bool = True) -> str:
    """Returns the content of a `tokenizer.json`: a byte-level BPE, with each byte written as one printable character.

    Args:
        tokens: all tokens except end-of-text, in order of id.
        merges: pairs of tokens, in printable characters.
        split_words: whether tokens are merged only within the words of GPT-2's pattern.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split_words}
    printable = printable_bytes()
    vocabulary = {"".join(printable[byte] for byte in token): i for i, token in enumerate(tokens)}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary | {END_OF_TEXT: len(tokens)},
        "merges": [*map(list, merges)],
    }  # fmt: skip
    content = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": len(tokens), "content": END_OF_TEXT, "special": True, **flags}],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    return json.dumps(content, ensure_ascii=False)


def tokens_in_order(vocabulary: Mapping[str, int]) -> list[bytes]:
    """Returns the bytes of the tokens in the vocabulary of a `tokenizer.json`, in order of id."""
    return [_bytes_of(token) for token in sorted(vocabulary, key=lambda token: vocabulary[token])]


def _bytes_of(token: str) -> bytes:
    return bytes(map(_byte_values().__getitem__, token))


@functools.cache
def _byte_values() -> dict[str, int]:
    return {char: byte for byte, char in enumerate(printable_bytes())}


def to_utf8(text: str) -> bytes:
    """Encodes text as UTF-8. Lone surrogates, which UTF-8 cannot represent, become U+FFFD, as in tiktoken."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")


def printable_bytes() -> list[str]:
    """Returns GPT-2's printable character for each byte: Latin-1 where that is printable, else U+0100, U+0101, ... in turn."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
