"""Tokenizers that lose text are refused; those that only write it in another way are not."""

import json

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.data.text_loss import PLAIN_TEXTS, check_round_trip
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.records import ModelError
from support.hostile import model_folder
from support.jobs import batchinfer, write_job, write_shard
from support.paths import RANDOM_MODEL, ROOT

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
CORPUS = [*PLAIN_TEXTS, "the ferry sails again and again", "12 34 56"]
ALPHABET = "".join(CORPUS)


def byte_level(**parts):
    """A tokenizer of bytes, as GPT-2's and DeepSeek's are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return with_parts(tokenizer, **parts)


def sentence_piece(*, byte_fallback=True, unknown=None, alphabet=ALPHABET, **parts):
    """A tokenizer of characters, as Llama-2's is: a blank is ▁, one is put before the text."""
    characters = sorted({*alphabet.replace(" ", "▁"), "▁"})
    names = [unknown] if unknown else []
    names += [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    vocabulary = {token: number for number, token in enumerate([*names, *characters])}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=byte_fallback, unk_token=unknown, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if unknown:
        tokenizer.add_special_tokens([AddedToken(unknown, special=True)])
    return with_parts(tokenizer, **parts)


def with_parts(tokenizer, **parts):
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def refuse(tokenizer, tmp_path):
    check_round_trip(PromptTokenizer(tokenizer, tmp_path / "tokenizer.json", {}, {}, frozenset(), ""))


SOUND = {
    "bytes": byte_level,
    "bytes behind a blank": lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "bytes in normal form C": lambda: byte_level(normalizer=normalizers.NFC()),
    "bytes in normal form D": lambda: byte_level(normalizer=normalizers.NFD()),
    "bytes in normal form KC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "pieces": sentence_piece,
    "pieces of bytes alone": lambda: sentence_piece(alphabet=" "),
    "pieces without a blank before them": lambda: sentence_piece(
        normalizer=normalizers.Replace(" ", "▁"),
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
    ),
    "pieces whose first blank stays": lambda: sentence_piece(
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "pieces by Metaspace": lambda: sentence_piece(
        normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace()
    ),
    "pieces with an unknown token": lambda: sentence_piece(unknown="<unk>"),
}
HELLO, CASE, CODE, LINES, LANGUAGES = PLAIN_TEXTS
ASCII = "".join(map(chr, [9, 10, *range(32, 127)]))
# how text is lost → (the tokenizer, what is lost first, a part of what comes back)
LOSSY = {
    "blanks, by another pre-tokenizer": (
        lambda: byte_level(pre_tokenizer=pre_tokenizers.Metaspace()), HELLO, "helloworldagain"
    ),
    "blanks, without a pre-tokenizer": (lambda: byte_level(pre_tokenizer=None), HELLO, "helloworldagain"),
    "blanks, by words": (lambda: byte_level(pre_tokenizer=pre_tokenizers.Whitespace()), HELLO, "helloworldagain"),
    "blanks, by a normalizer": (
        lambda: byte_level(normalizer=normalizers.Replace(" ", "")), HELLO, "helloworldagain"
    ),
    "double blanks": (lambda: byte_level(normalizer=normalizers.Replace(Regex(r"\s+"), " ")), CODE, "if a: b = c"),
    "blanks of answers, by another decoder": (lambda: byte_level(decoder=decoders.Metaspace()), HELLO, "Ġworld"),
    "blanks of answers, without a decoder": (lambda: byte_level(decoder=None), HELLO, "Ġ"),
    "capitals": (lambda: byte_level(normalizer=normalizers.Lowercase()), CASE, "hello world"),
    "line breaks at the end": (
        lambda: byte_level(normalizer=normalizers.Strip(left=False, right=True)), LINES, r"``lines``"
    ),
    "line breaks at the start": (
        lambda: byte_level(normalizer=normalizers.Strip(left=True, right=False)), LINES, r"``lines``\n \n"
    ),
    "quotes": (lambda: byte_level(normalizer=normalizers.Replace("``", '"')), LINES, r'\"lines\"'),
    "accents": (
        lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
        LANGUAGES,
        "Große, deja vu",
    ),
    "characters, without bytes to fall back to": (
        lambda: sentence_piece(byte_fallback=False, alphabet=ASCII), LANGUAGES, "Gre, dj vu"
    ),
    "characters, as unknown tokens": (
        lambda: sentence_piece(byte_fallback=False, unknown="<unk>", alphabet=ASCII), LANGUAGES, "Gre, dj vu"
    ),
    "signs of bytes": (lambda: sentence_piece(alphabet=" ", decoder=decoders.Metaspace()), HELLO, "<0x68>"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_a_tokenizer_that_keeps_text_is_taken(name, tmp_path):
    refuse(SOUND[name](), tmp_path)


@pytest.mark.parametrize("name", LOSSY)
def test_a_tokenizer_that_loses_text_is_refused(name, tmp_path):
    make, text, part = LOSSY[name]
    with pytest.raises(ModelError) as raised:
        refuse(make(), tmp_path)
    sentence = str(raised.value)
    began = json.dumps(text[:5], ensure_ascii=False)[:-1]
    assert sentence.startswith(f"{tmp_path}/tokenizer.json loses text: it encodes {began}")
    assert part in sentence
    assert "\n" not in sentence


def test_texts_that_cannot_be_encoded_are_no_loss(tmp_path):
    """Their rows become error rows."""
    refuse(Tokenizer(models.WordLevel({"hello": 0})), tmp_path)


@pytest.mark.parametrize("folder", [ROOT / "sample_data" / "model", RANDOM_MODEL])
def test_models_of_these_tests_keep_text(folder):
    check_round_trip(load_tokenizer(folder))


def test_a_plan_with_such_a_file_is_refused(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["hello world again"], "ids": [[1, 2]]})
    folder = model_folder(tmp_path / "model", pre_tokenizer=METASPACE)
    ended = batchinfer("plan", write_job(tmp_path, model={"path": str(folder)}))
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(f'error: {folder}/tokenizer.json loses text: it encodes "hello world again" as tokens of')
    assert '"helloworldagain"' in line
    ids = {"prompt": None, "token_ids": "ids"}  # which the file has no part in
    assert batchinfer("plan", write_job(tmp_path, input=ids, model={"path": str(folder)})).code == 0
