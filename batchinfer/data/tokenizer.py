"""The model's tokenizer and chat template, read from the files of the model folder."""

import hashlib
import json
from pathlib import Path
from types import UnionType
from typing import Any

from tokenizers import AddedToken, Tokenizer

from batchinfer.data import tekken_file, tiktoken_model
from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.records import ModelError
from batchinfer.sanitize import error_text

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FURTHER, _OLDER_FURTHER = "extra_special_tokens", "additional_special_tokens"
_OF_CODE, _FLAGS = "model_specific_special_tokens", "flags_of_special_tokens"
# These marks of tool calls and channels are special tokens, which decoding leaves out; answers need the marks.
_MISTRAL_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_MINIMAX_MARKS = ("<minimax:tool_call>", "</minimax:tool_call>")
_HARMONY_CHANNEL = "<|channel|>"
_HARMONY_MARKS = (_HARMONY_CHANNEL, "<|start|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
SHOWN_MARKS = (*_MISTRAL_MARKS, *_MINIMAX_MARKS)  # in any vocabulary
OWN_TEMPLATES = Path(__file__).with_name("chat_templates")
HAVE_OWN_TEMPLATE = (
    "deepseek_v32",
    "deepseek_v4",
)  # model types whose folders have no chat template (at most a program instead)


def load_tokenizer(folder: Path) -> PromptTokenizer:
    """Read tokenizer.json, tiktoken.model or tekken.json, and Hugging Face's settings files in the same folder.

    Raises:
        ModelError: none of the three files exists, or a file is broken; the message names the file.
    """
    settings_file = folder / "tokenizer_config.json"
    config = _settings(folder)
    file = _vocabulary_file(folder, config)
    try:
        text = file.read_text(encoding="utf-8")
        if file.name == tiktoken_model.FILE:
            tokenizer = tiktoken_model.tokenizer_of(file, text)
            names = tiktoken_model.named_tokens(settings_file, config, tokenizer.get_vocab_size())
            config["added_tokens_decoder"] = names
        elif file.name == tekken_file.FILE:
            tokenizer = tekken_file.tokenizer_of(file, text, SHOWN_MARKS)
            config = tekken_file.NAMED | config
        else:
            tokenizer = Tokenizer.from_str(_with_marks_shown(text))
        known = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
        named = _named_tokens(config)
        of_code = [token for token in config[_OF_CODE] if not known.get(token)]
        further = [token for token in config[_FURTHER] if token not in known]
        new = _add_tokens(tokenizer, config, [*named.values(), *of_code], further, _shown_marks(text))
        if file.name == tiktoken_model.FILE:
            tiktoken_model.check_names(settings_file, tokenizer, names)
        else:
            _check_ids(folder, tokenizer, config, new)
    except ModelError:
        raise
    except Exception as error:
        # the tokenizers library raises plain Exception for every error in the file
        raise ModelError(f"cannot read {file}: {' '.join(str(error).split())[:200]}; restore the file") from None
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise ModelError(
            f"model.dropout in {file} is {dropout}: it cuts a text into other tokens each time, which is for training; "
            "set it to null"
        )
    # the file may have been saved with a training set-up; a prompt is never cut or filled up
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    templates = _templates(folder, config)
    eos_token_ids = _eos_token_ids(folder, tokenizer, named)
    settings = [named, config.get("added_tokens_decoder"), tokenizer.encode_special_tokens, sorted(eos_token_ids)]
    digest = hashlib.blake2b(digest_size=16)
    flags = {text: flags for text, flags in config[_FLAGS].items() if text not in known}
    of_flags = [json.dumps(flags, sort_keys=True)] if flags else []
    others = [*of_flags, *(templates[name] for name in ("tool_use",) if name in templates), *of_code, *further]
    for part in (text, templates.get("default", ""), json.dumps(settings, sort_keys=True), *others):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return PromptTokenizer(tokenizer, file, templates, named, eos_token_ids, digest.hexdigest())


def has_chat_template(folder: Path) -> bool:
    """Return whether a model folder has a chat template for chats without tools.

    Raises:
        ModelError: a settings file is broken.
    """
    return "default" in chat_template_names(folder)


def chat_template_names(folder: Path) -> tuple[str, ...]:
    """Return the names of a model folder's chat templates, sorted.

    Raises:
        ModelError: a settings file is broken.
    """
    return tuple(sorted(_templates(folder, _read_json(folder / "tokenizer_config.json"))))


def _vocabulary_file(folder: Path, config: dict[str, Any]) -> Path:
    file, other = folder / "tokenizer.json", folder / tiktoken_model.FILE
    if not file.exists() and other.is_file():
        if config.get("tokenizer_class") == tiktoken_model.TOKENIZER_CLASS:
            return other
        raise ModelError(
            f"{other} says nothing of how texts are split, and tokenizer_class in tokenizer_config.json is "
            f"{config.get('tokenizer_class')!r}, not {tiktoken_model.TOKENIZER_CLASS!r}, whose rule is known here; "
            "add a tokenizer.json"
        )
    if not file.exists() and (folder / tekken_file.FILE).is_file():
        return folder / tekken_file.FILE
    if not file.is_file():
        raise ModelError(f"there is no {file}; the model folder needs the tokenizer in this (fast) format")
    return file


def _read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if the file does not exist."""
    if not file.exists():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {error_text(error)}; restore the file") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object; restore the file")
    return value


def _read_text(file: Path) -> str:
    try:
        if not file.is_file():  # reading a pipe would wait for ever
            raise OSError("it is not a regular file")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}; restore the file") from None


def _settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; without `added_tokens_decoder`, with two older files merged in, as in transformers.

    Keys of special_tokens_map.json replace those of tokenizer_config.json; added_tokens.json lists the added tokens.
    `extra_special_tokens` lists the texts of special tokens without names. Their older key counts where the newer one
    is empty; in special_tokens_map.json, where neither key is in tokenizer_config.json. `model_specific_special_tokens`
    lists those with names that only the model's code knows.
    """
    config = _read_json(folder / "tokenizer_config.json")
    if not config.get(_FURTHER) and _OLDER_FURTHER in config:
        config[_FURTHER] = config.pop(_OLDER_FURTHER)
    of_code, added = _tokens_of_code(config, str) | _taken_object(config), {}
    if "added_tokens_decoder" not in config:
        older = _read_json(folder / "special_tokens_map.json")
        if isinstance(older.get(_FURTHER), list):
            older[_FURTHER] = [*(config.get(_FURTHER) or []), *older[_FURTHER]]
        config |= older
        of_code = _tokens_of_code(older, str | dict) | of_code | _taken_object(config)
        file = folder / "added_tokens.json"
        if added := _read_json(file):
            if not all(type(id) is int and id >= 0 for id in added.values()):
                raise ModelError(f"{file} is no object of token ids by their texts; restore the file")
            # without flags: those of tokenizer.json count
            config["added_tokens_decoder"] = {str(id): {"content": text} for text, id in added.items()}
    given: Any = config[_FURTHER] if _FURTHER in config else config.get(_OLDER_FURTHER)
    further = [text for text in _texts(given) if _FURTHER in config or text not in added]
    values = [*(config.get(name) for name in NAMED_TOKENS), *of_code.values(), *(given if further else [])]
    return config | {_FURTHER: further, _OF_CODE: _texts([*of_code.values()]), _FLAGS: _flags(values)}


def _tokens_of_code(values: dict[str, Any], form: type | UnionType) -> dict[str, Any]:
    """Return the tokens by names that only the model's code knows, those in this form."""
    names = [name for name in values if name.endswith("_token") and name not in NAMED_TOKENS]
    return {name: values[name] for name in names if isinstance(values[name], form)}


def _taken_object(config: dict[str, Any]) -> dict[str, Any]:
    """Take such tokens out of the settings where they are an object instead of the list of tokens without names."""
    found: dict[str, Any] = config.pop(_FURTHER) if isinstance(config.get(_FURTHER), dict) else {}
    return found


def _texts(tokens: Any) -> list[str]:
    """Return the texts of a list of tokens, each as text or as {"content": text, ...}; [] for anything else."""
    found = tokens if isinstance(tokens, list) else []
    texts = [token.get("content") if isinstance(token, dict) else token for token in found]
    return [text for text in texts if isinstance(text, str) and text]


def _flags(tokens: list[Any]) -> dict[str, dict[str, Any]]:
    """Return the flags of tokens by text; of a token that is given twice the last form counts, text or object."""
    found = {}
    for token in tokens:
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[text] = token if isinstance(token, dict) else {}
    return {text: flags for text, flags in found.items() if flags}


def _shown_marks(text: str) -> list[str]:
    """Return the marks that answers need, by the text of the vocabulary file."""
    return [*SHOWN_MARKS, *(_HARMONY_MARKS if json.dumps(_HARMONY_CHANNEL) in text else ())]


def _with_marks_shown(text: str) -> str:
    """Return the text of tokenizer.json with the marks that answers need as ordinary tokens: decoding keeps these."""
    shown = _shown_marks(text)
    if not any(json.dumps(mark) in text for mark in shown):
        return text
    file = json.loads(text)
    for token in file.get("added_tokens") or []:
        token["special"] = token.get("special") and token.get("content") not in shown
    return json.dumps(file)


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return {"bos_token": text, ...}; the settings have a token as text or as {"content": text, ...}."""
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            named[name] = value
    return named


def _add_tokens(
    tokenizer: Tokenizer, config: dict[str, Any], named: list[str], further: list[str], shown: list[str]
) -> set[str]:
    """Add the tokens that only the settings declare, in the order of their ids; return their texts.

    Tokens that `added_tokens_decoder` lists get its flags, and those in `named` are special, also if they are known.

    Args:
        named: texts of special tokens that the settings name.
        further: texts of tokens that are special unless `added_tokens_decoder` says otherwise.
        shown: texts of tokens that are not special.
    """
    listed = config.get("added_tokens_decoder") or {}
    details = {value["content"]: value for _, value in sorted(listed.items(), key=lambda item: int(item[0]))}
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for text in dict.fromkeys([*details, *named, *further]):
        old = known.get(text)
        flags = {} if old is None else old.__getstate__()
        flags = flags | details[text] if text in details else flags or config[_FLAGS].get(text, {})
        is_special = text in named or bool(flags.get("special", text in further))
        token = AddedToken(
            text,
            special=is_special and text not in shown,
            normalized=bool(flags.get("normalized", not is_special)),
            **{name: bool(flags.get(name)) for name in ("lstrip", "rstrip", "single_word")},
        )
        if old is None or old.__getstate__() != token.__getstate__():
            tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    return {text for text in details if text not in known}


def _check_ids(folder: Path, tokenizer: Tokenizer, config: dict[str, Any], new: set[str]) -> None:
    """Raise ModelError if a token that tokenizer.json lacks has another id than the settings say."""
    for listed, token in (config.get("added_tokens_decoder") or {}).items():
        found = tokenizer.token_to_id(token["content"])
        if token["content"] in new and found != int(listed):
            raise ModelError(
                f"the tokenizer's settings in {folder} give {token['content']!r} the id {listed}, but it is {found} "
                "behind the tokens of the vocabulary file, which does not have it; restore the files"
            )


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: of .jinja files, else `chat_template` in tokenizer_config.json, else our own.

    `chat_template` is a text, or a list of named templates. A template without a name is called `default`.
    """
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (file := folder / "chat_template.jinja").exists():
        files = {"default": file, **files}
    if files:
        return {name: _read_text(files[name]) for name in sorted(files)}
    found = config.get("chat_template")
    if isinstance(found, list):
        entries = [(entry.get("name"), entry.get("template")) for entry in found if isinstance(entry, dict)]
        named = {name: text for name, text in entries if isinstance(name, str) and isinstance(text, str)}
        if named:
            return named
    if isinstance(found, str):
        return {"default": found}
    kind = _read_json(folder / "config.json").get("model_type")
    return {"default": _read_text(OWN_TEMPLATES / f"{kind}.jinja")} if kind in HAVE_OWN_TEMPLATE else {}


def _eos_token_ids(folder: Path, tokenizer: Tokenizer, named: dict[str, str]) -> frozenset[int]:
    """Return the ids that end an answer: of generation_config.json, else config.json; and the tokenizer's own.

    Fine-tuned models may name the end token of their chats in the tokenizer alone. vLLM ends answers by both, too.
    """
    own = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    ends = set() if own is None else {own}
    for file in (folder / "generation_config.json", folder / "config.json"):
        values = _read_json(file)
        found = values.get("eos_token_id")
        if found is None and isinstance(values.get("text_config"), dict):  # of a model of text and images
            found = values["text_config"].get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ModelError(f"eos_token_id in {file} is {found!r}, which is not a token id or a list of them")
        return frozenset(ends | set(ids))
    return frozenset(ends)
