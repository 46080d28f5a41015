"""Tokenizers by name, and the same tokenizers as Hugging Face files.

`gpt2` is OpenAI's vocabulary of 50,257 tokens through tiktoken. `bytes` is the 256 byte values and an end-of-text
token, and `bpe` an encoding trained on a text (`support/data/bpe.py`), in a `tokenizer.json`; both need no download.
End-of-text is always the last id.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from support.cli import UserError, warn
from support.data.download import download

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZES = {"gpt2": 50257, "bytes": 257}
MAX_VOCAB_SIZE = 2**16  # ids are uint16
MAX_TOKEN_BYTES = 64  # of a trained encoding
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_JSON, "tokenizer_config.json", "vocab.json", "merges.txt")

TokenIds: TypeAlias = npt.NDArray[np.unsignedinteger]  # one-dimensional, of some unsigned type
# What code raises that takes a JSON file for what it should be.
MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

# GPT-2's pattern of words, each of which is encoded on its own.
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

_GPT2_DEFINITION_SHA256 = "1d5a9da12a2cb5cee343bcb0ffcffa54f7ce0c9a3bc4b4c5c4f3e7bd2092f4bc"  # of `_definition`
_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_GPT2_FILES = {  # SHA-256, as in tiktoken
    _GPT2_URL + "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    _GPT2_URL + "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called "gpt2" or "bytes", or the one in a `tokenizer.json` with this path.

    Raises:
        UserError: the file cannot be read, or GPT-2's vocabulary is not on this machine and cannot be downloaded.
    """
    if Path(name).name == TOKENIZER_JSON:
        return load_bpe(Path(name))
    return {"gpt2": Gpt2Tokenizer, "bytes": BytesTokenizer}[name]()


def find_tokenizer(directory: Path) -> str | None:
    """The tokenizer of a model, by the files in its directory, as `get_tokenizer` takes it; None if there are none.

    The content of `tokenizer.json`, or of `vocab.json` and `merges.txt`, decides: vocabularies of one size can differ.

    Raises:
        UserError: the tokenizer is of a kind that this project cannot read.
    """
    try:
        content = _read_tokenizer_files(directory)
        if content is None:
            return None
        definition = _definition(content)
    except MALFORMED as error:
        problem = f"the tokenizer in {directory} is not a byte-level BPE ({error!r}). Use another model."
        raise UserError(problem) from error
    if hashlib.sha256(definition.encode()).hexdigest() == _GPT2_DEFINITION_SHA256:
        return "gpt2"
    if definition == _definition(json.loads(BytesTokenizer().huggingface_json)):
        return "bytes"
    name = str((directory / TOKENIZER_JSON).absolute())
    get_tokenizer(name)  # can it be read?
    return name


def tokenizer_name(directory: Path, vocab_size: int) -> str:
    """`find_tokenizer`, but a model that comes without one and has GPT-2's vocabulary size is taken for GPT-2's.

    Raises:
        UserError: as `find_tokenizer`, or the model comes without a tokenizer, or with one of another size.
    """
    name = find_tokenizer(directory)
    if name is None and vocab_size == VOCAB_SIZES["gpt2"]:
        if os.environ.get("RANK", "0") == "0":
            warn(f"{directory} has no {TOKENIZER_JSON}: its {vocab_size:,} tokens are taken for GPT-2's.")
        return "gpt2"
    size = None if name is None else VOCAB_SIZES.get(name) or get_tokenizer(name).vocab_size
    if name is None or size != vocab_size:
        raise UserError(
            f"{directory} has no {TOKENIZER_JSON} for its {vocab_size:,} tokens. "
            "Copy the one that it was trained with into it."
        )
    return name


def tokenizer_of_model(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of the model in a directory; errors as in `tokenizer_name`."""
    return get_tokenizer(tokenizer_name(directory, vocab_size))


def _read_tokenizer_files(directory: Path) -> dict[str, Any] | None:
    """The content of `tokenizer.json`, or that of the older `vocab.json` and `merges.txt` in its form."""
    if (directory / TOKENIZER_JSON).exists():
        content = json.loads((directory / TOKENIZER_JSON).read_text(encoding="utf-8"))
        options = directory / "tokenizer_config.json"
        if options.exists() and json.loads(options.read_text(encoding="utf-8")).get("add_prefix_space"):
            content["pre_tokenizer"]["add_prefix_space"] = True  # as Hugging Face's library does
        return content
    if not (directory / "vocab.json").exists():
        return None
    vocabulary = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    _version, *merges = (directory / "merges.txt").read_text(encoding="utf-8").splitlines()
    return {
        "model": {"vocab": vocabulary, "merges": merges},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "added_tokens": [{"content": END_OF_TEXT, "id": vocabulary[END_OF_TEXT]}],
    }


def _definition(content: Mapping[str, Any]) -> str:
    """What in a `tokenizer.json` decides the ids of a text, in one form for all versions of the `tokenizers` library."""
    model, words = content["model"], content["pre_tokenizer"]
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    split = [words["type"], words["add_prefix_space"], words.get("use_regex", True), content.get("normalizer")]
    return json.dumps([model["vocab"] | special, special, merges, split], sort_keys=True)


class Tokenizer:
    """Text to token ids and back, by an encoding of tiktoken's. The text of a special token is encoded as ordinary text."""

    name: str
    _encoding: tiktoken.Encoding

    @property
    def vocab_size(self) -> int:
        return self._encoding.n_vocab

    @property
    def eot(self) -> int:
        """The id of the end-of-text token, which `encode` never produces."""
        return self.vocab_size - 1

    def token_bytes(self) -> list[bytes]:
        """The bytes of all tokens except end-of-text, in order of id."""
        return [self._encoding.decode_single_token_bytes(i) for i in range(self._encoding.n_vocab - 1)]

    def count_bytes(self, ids: npt.NDArray[np.integer]) -> int:
        """Bytes of text that the tokens stand for; an end-of-text, or an id that does not exist, counts as one."""
        lengths = np.array([*map(len, self.token_bytes()), 1])
        return int(lengths[np.minimum(ids, len(lengths) - 1)].sum())

    def is_same_as(self, other: Tokenizer) -> bool:
        """Whether all texts have the same ids in both; two vocabularies of one size are two tokenizers."""
        return self.name == other.name and (self.name != "bpe" or self.token_bytes() == other.token_bytes())

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> TokenIds:
        """The ids of `encode` as an array, which takes a fifth of the memory of a list."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encoding.encode_to_numpy(to_utf8(text).decode(), disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(list(ids))

    @functools.cached_property
    def huggingface_json(self) -> str:
        """The content of `tokenizer.json`: a byte-level BPE, in which each byte is one printable character."""
        tokens, printable = self.token_bytes(), printable_bytes()

        def spell(token: bytes) -> str:
            return "".join(printable[b] for b in token)

        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        split_words = self.name != "bytes"
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split_words}
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {spell(token): i for i, token in enumerate(tokens)} | {END_OF_TEXT: self.eot},
            "merges": [[spell(a), spell(b)] for a, b in _recover_merges(tokens)],
        }
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": self.eot, "content": END_OF_TEXT, "special": True, **flags}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
        return json.dumps(content, ensure_ascii=False)

    def save_pretrained(self, directory: str | os.PathLike[str], model_max_length: int) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which Hugging Face's `AutoTokenizer` opens.

        Args:
            model_max_length: context length of the model, in tokens.
        """
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "model_max_length": model_max_length,
            # without it, transformers 4 returns token_type_ids, too, which GPT-2 would add to its embeddings
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        }
        Path(directory, TOKENIZER_JSON).write_text(self.huggingface_json, encoding="utf-8")
        Path(directory, "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class BpeTokenizer(Tokenizer):
    """A byte-pair encoding of words that are cut as GPT-2's.

    Args:
        tokens: the bytes of all tokens except end-of-text, in order of id, which is the order of the merges.
    """

    name = "bpe"

    def __init__(self, tokens: list[bytes]):
        import tiktoken

        ranks = {token: rank for rank, token in enumerate(tokens)}
        end_of_text = {END_OF_TEXT: len(tokens)}
        self._encoding = tiktoken.Encoding(
            self.name, pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens=end_of_text
        )


class BytesTokenizer(BpeTokenizer):
    """One token per UTF-8 byte, with ids 0 to 255, and end-of-text, 256."""

    name = "bytes"

    def __init__(self) -> None:
        super().__init__([bytes([i]) for i in range(256)])

    def encode_array(self, text: str) -> TokenIds:
        return np.frombuffer(to_utf8(text), dtype=np.uint8)


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's own. We download its two files, because tiktoken has no timeout and does not retry.

    Raises:
        UserError: they are not on this machine, and the download fails.
    """

    name = "gpt2"

    def __init__(self) -> None:
        import tiktoken

        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
        cache = Path(folder) if folder else Path(tempfile.gettempdir()) / "data-gym-cache"  # as in tiktoken
        try:
            for url, sha256 in _GPT2_FILES.items():
                download(url, cache / hashlib.sha1(url.encode()).hexdigest(), sha256=sha256)
        except UserError as error:
            raise UserError(
                f"the GPT-2 vocabulary is not in {cache}: {error} Or copy that folder from a machine that has it and "
                'name it in TIKTOKEN_CACHE_DIR; or make shards with "--tokenizer bytes".',
                this_rank_only=True,
            ) from error
        self._encoding = tiktoken.get_encoding("gpt2")


def load_bpe(path: Path) -> BpeTokenizer:
    """The encoding in a `tokenizer.json`: a byte-level BPE of GPT-2's kind whose last id is end-of-text.

    Raises:
        UserError: the file is missing, or has another kind of tokenizer.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        *tokens, _end_of_text = tokens_in_order(content["model"]["vocab"])
        is_byte_level = set(tokens) >= {bytes([i]) for i in range(256)} and max(map(len, tokens)) <= MAX_TOKEN_BYTES
        if not is_byte_level or len(tokens) >= MAX_VOCAB_SIZE:
            raise ValueError
        tokenizer = BpeTokenizer(tokens)
        if _definition(json.loads(tokenizer.huggingface_json)) != _definition(content):
            raise ValueError
    except MALFORMED as error:
        raise UserError(
            f"{path} is not a byte-level BPE as fineweb.py makes it, with end-of-text as its last token. Use another model."
        ) from error
    return tokenizer


def tokens_in_order(vocabulary: Mapping[str, int]) -> list[bytes]:
    """The tokens of a byte-level BPE, spelled as in a `tokenizer.json`, in order of id."""
    byte_of = {char: byte for byte, char in enumerate(printable_bytes())}
    return [bytes(byte_of[char] for char in token) for token in sorted(vocabulary, key=lambda token: vocabulary[token])]


def to_utf8(text: str) -> bytes:
    """UTF-8. Lone surrogates, which UTF-8 cannot represent, become U+FFFD, as in tiktoken."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")


def _recover_merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The BPE merge that made each token of two or more bytes, in order of rank."""
    rank = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        if len(token) < 2:
            continue
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:  # apply the earlier merges, lowest rank first, until two parts remain
            pairs = [rank.get(a + b, len(tokens)) for a, b in itertools.pairwise(parts)]
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        merges.append((parts[0], parts[1]))
    return merges


def printable_bytes() -> list[str]:
    """GPT-2's printable character for each byte value: Latin-1 where that is printable, else 256, 257, ... in turn."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
