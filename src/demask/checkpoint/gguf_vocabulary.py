"""The tokenizer of a folder in a GGUF file.

llama.cpp has code of its own for how texts are split before pairs of tokens are merged, by name.
Folders say it in tokenizer.json; those that are listed here are written, others are not.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from demask.checkpoint.folder import read_json
from demask.errors import DemaskError

TOKENIZER = "tokenizer.json"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By pattern of words, and whether words that are tokens are not split: what llama.cpp calls it.
_SPLITS = {(None, False): "gpt-2", (_WORDS % r"\p{N}{1,3}", True): "llama-bpe", (_WORDS % r"\p{N}", False): "qwen2"}


def add_vocabulary(writer: Any, folder: Path, size: int) -> list[str]:
    """Add a folder's tokenizer to a file, and return notes. size: of the model's embedding."""
    import gguf

    data, split, tokens = dict[str, Any](), None, list[tuple[str, int]]()
    if (folder / TOKENIZER).exists():
        with suppress(DemaskError, AttributeError, LookupError, TypeError, ValueError):
            data = read_json(folder, TOKENIZER)
            split, tokens = _find_split(data), _tokens(data, size)
    if split is None or not tokens:
        writer.add_tokenizer_model("no_vocab")
        reason = "is of no kind that is written" if data else "is not in the folder"
        return [f"the file has no tokenizer: {TOKENIZER} {reason}; programs must give llama.cpp tokens by number"]
    model, prefix = split
    writer.add_tokenizer_model("llama" if model is None else "gpt2")
    writer.add_tokenizer_pre(model or "default")
    writer.add_token_list([text for text, _ in tokens])
    if model is None:  # of pairs, that with the largest score is merged first
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(data["model"]["merges"]):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            ranks.setdefault("".join(pair), rank)
        writer.add_token_scores([-float(ranks.get(text, -1) + 1) for text, _ in tokens])
        writer.add_add_space_prefix(prefix)
    writer.add_token_types([kind for _, kind in tokens])
    special = gguf.SpecialVocab(folder, model is not None, n_vocab=size)
    for name in ("bos", "eos"):  # what llama.cpp puts around texts otherwise depends on the split
        special.add_special_token.setdefault(name, False)
    special.add_to_gguf(writer, quiet=True)
    return []


def _find_split(data: dict[str, Any]) -> tuple[str | None, bool] | None:
    """What llama.cpp calls the way in which a tokenizer splits texts, None for SentencePiece's, and
    whether it puts a space in front; None if it knows no such way."""
    model, normal, pre = (data.get(key) or {} for key in ("model", "normalizer", "pre_tokenizer"))
    if model.get("type") != "BPE" or not model.get("merges"):  # llama.cpp refuses a file of none
        return None
    steps = pre.get("pretokenizers", [pre] if pre else [])
    changes = normal.get("normalizers", [normal] if normal else [])
    kinds = [step["type"] for step in (*changes, *steps)]
    if model.get("byte_fallback"):
        if kinds not in (["Prepend", "Replace"], ["Replace"], ["Metaspace"]):
            return None
        scheme = steps[0].get("prepend_scheme", "always") if steps else "always"
        return None, kinds[0] == "Prepend" or (kinds[0] == "Metaspace" and scheme != "never")
    if kinds[:1] == ["NFC"]:  # which llama.cpp leaves out, for all tokenizers
        kinds = kinds[1:]
    pattern = None
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = steps[0]["pattern"].get("Regex")
    elif kinds != ["ByteLevel"] or steps[0].get("add_prefix_space", True):
        return None
    name = _SPLITS.get((pattern, bool(model.get("ignore_merges"))))
    return None if name is None else (name, False)


def _tokens(data: dict[str, Any], size: int) -> list[tuple[str, int]]:
    """Text and type of each token; [] if a token is none of the model's. Numbers between them are
    unused."""
    import gguf

    kind = gguf.TokenType
    tokens = [(f"[PAD{k}]", int(kind.UNUSED)) for k in range(size)]
    for text, k in data["model"]["vocab"].items():
        is_byte = data["model"].get("byte_fallback") and len(text) == 6 and text[:3] == "<0x"
        tokens[k] = text, int(kind.BYTE if is_byte else kind.NORMAL)
    for token in data.get("added_tokens", []):
        special = kind.CONTROL if token["special"] else kind.USER_DEFINED
        unknown = token["content"] == data["model"].get("unk_token")
        tokens[token["id"]] = token["content"], int(kind.UNKNOWN if unknown else special)
    return tokens if len(tokens) == size else []
