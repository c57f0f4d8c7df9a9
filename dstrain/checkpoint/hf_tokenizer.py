"""The tokenizer of a Hugging Face folder: taken as it is, converted from Moonlight's tiktoken.model, or written.

A checkpoint keeps a folder's tokenizer files among its own files, and an export gives them back byte for byte.
"""

import ast
import base64
import binascii
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dstrain.config.build import show
from dstrain.config.errors import InputError
from dstrain.data.tokenizer import Tokenizer, byte_of_character

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CARRIED = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja", GENERATION_CONFIG)
TIKTOKEN, CODE = "tiktoken.model", "tokenization_*.py"

# How Moonlight and Kimi cut text before merging: runs of Han characters; words with the sign before them and an English
# contraction behind, lower case after upper case; up to three digits; punctuation; line ends; white space.
_NOT_HAN = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
MOONSHOT_PIECES = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_NOT_HAN}*[\p{{Ll}}{_NOT_HAN}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_NOT_HAN}+[\p{{Ll}}{_NOT_HAN}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def read_tokenizer_files(folder: Path, vocab_size: int) -> dict[str, bytes]:
    """The tokenizer files of a folder, for a checkpoint; empty where it has no tokenizer.

    InputError if the tokenizer cannot be used here, or has more ids than the model, or is of an unknown kind.
    """
    files = {name: (folder / name).read_bytes() for name in CARRIED if (folder / name).is_file()}
    if TOKENIZER not in files:
        if (folder / TIKTOKEN).is_file():
            files |= convert_tiktoken(folder, vocab_size)
        elif (folder / "tokenizer.model").is_file():
            raise InputError(f"{folder}: a SentencePiece tokenizer.model alone cannot be read; valid: a {TOKENIZER}")
        else:
            return {}
    where = str(folder / TOKENIZER)
    tokenizer = Tokenizer(_text(files[TOKENIZER], where), where)
    if tokenizer.vocab_size > vocab_size:
        raise InputError(f"{where}: {tokenizer.vocab_size} ids, config.json says vocab_size={vocab_size}")
    return files


def written_tokenizer_files(files: dict[str, bytes], tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The tokenizer files of an exported folder, from those of the checkpoint.

    An imported tokenizer goes out as it came. One of dstrain's own gets what makes transformers and vLLM put the begin
    mark first, as `generate` does: a post-processor, and a tokenizer_config.json that names the marks.
    """
    out = {name: data for name, data in files.items() if name in CARRIED}
    if tokenizer is None:
        return out
    if GENERATION_CONFIG not in out:
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        out[GENERATION_CONFIG] = _json(ids)
    if TOKENIZER_CONFIG in out:
        return out
    definition = json.loads(files[TOKENIZER])
    library = tokenizers.Tokenizer.from_str(files[TOKENIZER].decode())
    bos, eos, pad = (library.id_to_token(i) for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id))
    if library.encode("a").ids[:1] != [tokenizer.bos_id]:
        template = _begin_mark(bos, tokenizer.bos_id)
        before = definition.get("post_processor")
        definition["post_processor"] = {"type": "Sequence", "processors": [before, template]} if before else template
        out[TOKENIZER] = json.dumps(definition, ensure_ascii=False).encode()
    out[TOKENIZER_CONFIG] = _json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
        }
    )
    return out


def convert_tiktoken(folder: Path, vocab_size: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json from Moonlight's tiktoken.model (lines of base64 bytes and their rank).

    tiktoken merges the two neighbours whose joined bytes have the lowest rank; as BPE merges that is every split of
    every token into two tokens, by the rank of the whole. A piece that is a token is taken whole. Ids from the file's
    end to the model's vocab_size are control tokens, named in tokenizer_config.json or reserved.
    """
    where = folder / TIKTOKEN
    config = _read_json(folder / TOKENIZER_CONFIG)
    if config.get("tokenizer_class") != "TikTokenTokenizer":
        raise InputError(
            f"{where}: only Moonlight's TikTokenTokenizer can be converted, {TOKENIZER_CONFIG} has "
            f"tokenizer_class={show(config.get('tokenizer_class'))}; add a {TOKENIZER}"
        )
    for code in sorted(folder.glob(CODE)):
        if _pattern_in_code(code) not in (None, MOONSHOT_PIECES):
            raise InputError(f"{code}: cuts text by another pattern than Moonlight's; add a {TOKENIZER}")
    ranks = _read_ranks(where)
    if len(ranks) > vocab_size:
        raise InputError(f"{where}: {len(ranks)} tokens, config.json says vocab_size={vocab_size}")

    characters = {byte: character for character, byte in byte_of_character().items()}
    spell = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(spell[left], spell[right]) for left, right in splits]
    library = tokenizers.Tokenizer(
        models.BPE({spell[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(MOONSHOT_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    named = {int(i): entry["content"] for i, entry in config.get("added_tokens_decoder", {}).items()}
    names = [named.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), vocab_size)]
    library.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    if library.get_vocab_size() != vocab_size:
        raise InputError(f"{folder / TOKENIZER_CONFIG}: two control tokens of one name, or named like a text token")

    # what names the folder's own code is left out: the converted file needs none
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "added_tokens_decoder")}
    return {
        TOKENIZER: library.to_str().encode(),
        TOKENIZER_CONFIG: _json(kept | {"tokenizer_class": "PreTrainedTokenizerFast"}),
    }


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise InputError(f"{path}: line {number} is not a token in base64 and its rank") from None
    bytes_missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or bytes_missing or b"" in ranks:
        raise InputError(f"{path}: ranks must be 0 to the number of tokens, and every single byte a token")
    return ranks


def _pattern_in_code(path: Path) -> str | None:
    """The text assigned to `pat_str` in a folder's tokenizer code, which is read and never run; None without it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        raise InputError(f"{path}: not Python") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pat_str" for t in node.targets):
            texts = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            joined = isinstance(node.value, ast.Call)  # "|".join([...]): the separator comes first
            return "|".join(text for text in texts if text != "|") if joined else "".join(texts)
    return None


def _begin_mark(bos: str, bos_id: int) -> dict:
    """A post-processor of the tokenizers library that puts the begin mark in front."""
    mark, first = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, first],
        "pair": [mark, first, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise InputError(f"{path}: missing; it names the control tokens of {TIKTOKEN}")
    try:
        parsed = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InputError(f"{path}: not a JSON object")
    return parsed


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8") from None


def _json(value: dict) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
