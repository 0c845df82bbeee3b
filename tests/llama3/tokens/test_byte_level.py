"""Tokenizers of other models: ids against the `tokenizers` library, special tokens, files and GGUF metadata."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from herd.llama3.evaluate.generate import Sampler
from herd.llama3.tokens.adversarial_strings import adversarial_strings, random_strings
from herd.llama3.tokens.byte_level import GGUF_SPLITS, gguf_document, pre_tokenizer
from herd.llama3.tokens.tokenizer import (
    ByteLevelTokenizer,
    Tokenizer,
    parse_hugging_face,
    train_tokenizer,
    use_tokenizer,
)
from herd.llama3.tokens.vocabulary import GPT2_PATTERN, PATTERNS

TEXTS = [
    "The lazy dog's back; THEY'VE got 12345 reasons, we're told.\n\n  return x_1 /* */\n" * 3,
    "Größe привет 東京都は日本の首都です。 मुझे हिन्दी e\u0301\r\n\t ... ½Ⅷ" * 3,
]
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
STEPS = {
    "gpt2": BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
    },
    "qwen2": pre_tokenizer(PATTERNS["qwen2"]),
    "tekken": pre_tokenizer(PATTERNS["tekken"]),
}
"""Pre-tokenizers as the published files write them."""
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

pytestmark = pytest.mark.usefixtures("few")


@pytest.fixture(autouse=True)
def verdicts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def document(kind: str, first: bool) -> dict[str, Any]:
    """A `tokenizer.json` as transformers writes it; the special tokens are the first ids, or the last."""
    library = Library(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[kind]]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    specials = list(MARKERS) if first else []
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(TEXTS, trainer)
    library.add_special_tokens(list(MARKERS))
    made: dict[str, Any] = json.loads(library.to_str())
    return {**made, "pre_tokenizer": STEPS[kind], "normalizer": {"type": "NFC"} if kind == "qwen2" else None}


def write(folder: Path, made: dict[str, Any], **settings: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **settings}))
    return folder / "tokenizer.json"


def without_added(made: dict[str, Any]) -> Library:
    """The library, unable to read special tokens in text."""
    return Library.from_str(json.dumps({**made, "added_tokens": [], "post_processor": None}))


@pytest.fixture(scope="module", params=[("gpt2", False), ("smollm", True), ("qwen2", False), ("tekken", True)], ids=str)
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    return document(*request.param)


@pytest.fixture
def coder(made: dict[str, Any], tmp_path: Path) -> Tokenizer:
    return use_tokenizer(write(tmp_path, made))


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_ids_are_those_of_the_library(count: int, made: dict[str, Any], coder: Tokenizer) -> None:
    theirs = without_added(made)
    texts = [*TEXTS, *adversarial_strings(count)] if count > 1_000 else [*TEXTS, *random_strings(count)]
    texts.append("".join(random_strings(300, seed=5)))
    due = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    assert [coder.encode(text) for text in texts] == due
    assert [ids.tolist() for ids in coder.encode_batch(texts)] == due
    assert [ids.tolist() for ids in coder.encode_batch(texts, threads=2)] == due


def test_the_published_pattern_is_recognized(made: dict[str, Any], coder: Tokenizer) -> None:
    assert isinstance(coder, ByteLevelTokenizer)
    assert STEPS[coder.pattern] == made["pre_tokenizer"]


@given(st.text(max_size=40))
def test_any_text_survives(text: str) -> None:
    coder = smollm()
    assert coder.decode(coder.encode(text)) == text


@cache
def smollm() -> Tokenizer:
    return parse_hugging_face(json.dumps(document("smollm", True)).encode(), "x")


@pytest.mark.fault("F22")
def test_spelling_a_special_token_does_not_make_one(made: dict[str, Any], coder: Tokenizer) -> None:
    assert Library.from_str(json.dumps(made)).encode("<|im_end|>").ids == [coder.specials["<|im_end|>"]]
    for name in MARKERS:
        for ids in (coder.encode(f"a{name}{name}"), coder.encode_batch([f"a{name}{name}"])[0].tolist()):
            assert not {*ids} & {*coder.names}
            assert coder.decode(ids) == f"a{name}{name}"


def test_a_special_token_that_text_could_spell_is_refused(made: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(made))
    text = next(each for each in changed["model"]["vocab"] if each.isalpha() and len(each) > 2)
    token = {"content": text, "id": changed["model"]["vocab"][text], "special": True}
    changed["added_tokens"].append({**changed["added_tokens"][0], **token})
    with pytest.raises(ValueError, match=f"merge '.*' needs '{text}', which is no token"):
        parse_hugging_face(json.dumps(changed).encode(), "x")


def test_documents_begin_and_end_as_the_model_was_trained(coder: Tokenizer) -> None:
    assert coder.names[coder.end] == "<|endoftext|>"  # not <|im_end|>, which ends a turn
    assert coder.begin is None
    assert coder.start == coder.end
    assert coder.prompt("ab") == coder.encode("ab")
    assert coder.prompt("") == [coder.end]


@pytest.mark.parametrize("way", ["template", "setting"])
def test_a_begin_token_is_taken_from_the_file(way: str, tmp_path: Path) -> None:
    changed, settings = document("tekken", True), dict[str, Any]()
    if way == "template":
        single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
        changed["post_processor"] = {
            "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special
        }  # fmt: skip
    else:
        settings = {"add_bos_token": True, "bos_token": {"content": "<|im_start|>"}}
    coder = use_tokenizer(write(tmp_path, changed, **settings))
    assert coder.prompt("ab") == [coder.specials["<|im_start|>"], *coder.encode("ab")]
    coder.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").begin == coder.begin


def test_a_line_describes_it(tmp_path: Path) -> None:
    path = write(tmp_path, document("smollm", True))
    (tmp_path / "config.json").write_text('{"vocab_size": 400}')
    assert use_tokenizer(path).summary() == (
        "split pattern smollm, 327 tokens of text, 3 special, 70 of padding; prompts have no first token, "
        "documents end with <|endoftext|>"
    )


def test_a_tokenizer_without_an_end_is_refused(made: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps(made).replace("<|endoftext|>", "<|other|>")
    with pytest.raises(ValueError, match=r"has no token that ends a document .* eos_token in tokenizer_config.json"):
        parse_hugging_face(text.encode(), "x", {})
    coder = parse_hugging_face(text.encode(), "x", {"eos_token": "<|other|>"})
    assert coder.names[coder.end] == "<|other|>"


def test_what_was_saved_is_read_again(made: dict[str, Any], coder: Tokenizer, tmp_path: Path) -> None:
    coder.save(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    loaded = Tokenizer.load(tmp_path / "saved")
    facts = ("digest", "begin", "end", "turn_end", "vocab_size", "template", "specials", "pattern")
    assert [getattr(loaded, fact) for fact in facts] == [getattr(coder, fact) for fact in facts]
    theirs = Library.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert json.loads(theirs.to_str()) == json.loads(Library.from_str(json.dumps(made)).to_str())


def test_everything_that_determines_an_id_is_in_the_digest(made: dict[str, Any], tmp_path: Path) -> None:
    first = parse_hugging_face(json.dumps(made).encode(), "x")
    swapped = json.loads(json.dumps(made))
    swapped["model"]["merges"][:2] = swapped["model"]["merges"][1::-1]
    renamed = json.loads(json.dumps(made).replace("<|im_start|>", "<|im_begin|>"))
    split = {**made, "pre_tokenizer": pre_tokenizer(PATTERNS["llama3"])}
    whole = {**made, "model": {**made["model"], "ignore_merges": True}}
    others = [parse_hugging_face(json.dumps(each).encode(), "x") for each in (swapped, renamed, split, whole)]
    begun = parse_hugging_face(json.dumps(made).encode(), "x", {"add_bos_token": True, "bos_token": "<|im_start|>"})
    assert len({each.digest for each in (first, *others, begun)}) == 6
    again = {**made, "truncation": {"max_length": 5}, "decoder": None}
    assert parse_hugging_face(json.dumps(again).encode(), "x").digest == first.digest


def test_padding_of_the_embedding_has_no_text(made: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, made)
    (tmp_path / "config.json").write_text('{"vocab_size": 400}')
    coder = use_tokenizer(path)
    assert coder.vocab_size == 400
    assert (coder.decode([399, *coder.encode("x")]), coder.text_of(399)) == ("x", b"")
    with pytest.raises(ValueError, match="token id 400 is not below"):
        coder.decode([400])
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    with pytest.raises(ValueError, match=r"vocab_size is 300 for 33\d tokens"):
        use_tokenizer(path)


def test_special_tokens_and_padding_are_never_sampled(made: dict[str, Any], tmp_path: Path) -> None:
    import random

    import torch

    path = write(tmp_path, made)
    (tmp_path / "config.json").write_text('{"vocab_size": 400}')
    coder = use_tokenizer(path)
    end = coder.specials["<|im_end|>"]
    for temperature in (0.0, 1.0):
        logits = torch.zeros(1, 400)
        silent = [number for number in range(400) if not coder.text_of(number)]
        logits[:, silent] = 9.0
        sampler = Sampler.for_tokenizer(coder, temperature, 1.0)
        drawn = {sampler.pick(logits, [random.Random(seed)])[0] for seed in range(40)}
        assert {*drawn} <= {coder.end} | {n for n in range(400) if coder.text_of(n)}
        with_end = Sampler.for_tokenizer(coder, 0.0, 1.0, stop_token_ids=(end,))
        logits[:, end] = 10.0
        assert with_end.pick(logits, [random.Random(0)]) == [end]


@pytest.mark.parametrize("pattern", ["gpt2", "qwen2", "tekken"])
def test_a_tokenizer_is_trained_with_a_published_pattern(pattern: str, tmp_path: Path) -> None:
    coder = train_tokenizer(TEXTS, 330, pattern)
    assert (coder.pattern, coder.vocab_size, len(coder.specials)) == (pattern, 330 + 256, 256)
    assert coder.prompt("x") == [coder.specials["<|begin_of_text|>"], *coder.encode("x")]
    assert coder.names[coder.end] == "<|end_of_text|>"
    assert coder.names[coder.turn_end] == "<|eot_id|>"
    coder.save(tmp_path)
    theirs = Library.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode("hello 123").ids == coder.prompt("hello 123")
    assert Tokenizer.load(tmp_path).digest == coder.digest != train_tokenizer(TEXTS, 329, pattern).digest


@pytest.mark.parametrize(
    ("pattern", "pieces"),
    [
        ("gpt2", "we|'|LL| pay| 1234|€| for| fooBar|/|baz|...|\n\n"),
        ("smollm", "we|'|LL| pay| |1|2|3|4|€| for| fooBar|/|baz|...|\n\n"),
        ("qwen2", "we|'LL| pay| |1|2|3|4|€| for| fooBar|/baz|...\n\n"),
        ("tekken", "we|'LL| pay| |1|2|3|4|€| for| foo|Bar|/baz|...\n\n"),
        ("llama3", "we|'LL| pay| |123|4|€| for| fooBar|/baz|...\n\n"),
    ],
)
def test_patterns_split_as_published(pattern: str, pieces: str) -> None:
    steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in PATTERNS[pattern]]
    split = pre_tokenizers.Sequence(steps).pre_tokenize_str("we'LL pay 1234€ for fooBar/baz...\n\n")
    assert "|".join(piece for piece, _ in split) == pieces


# GGUF


def gguf(coder: Tokenizer, **metadata: Any) -> dict[str, Any]:
    table = coder.gguf_table()
    ggml = {"model": "gpt2", "pre": table.pre, "tokens": table.tokens, "token_type": table.types}
    ggml |= {"merges": table.merges, "eos_token_id": coder.specials["<|im_end|>"], "add_bos_token": False, **metadata}
    return {"tokenizer.chat_template": CHATML, **{f"tokenizer.ggml.{key}": value for key, value in ggml.items()}}


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    made, settings, rows = gguf_document(metadata, "x.gguf")
    return parse_hugging_face(json.dumps(made).encode(), "x.gguf", settings, rows)


def test_a_gguf_gives_the_same_tokenizer(made: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, made, chat_template=CHATML)
    (tmp_path / "config.json").write_text('{"vocab_size": 400}')
    coder = use_tokenizer(path)
    read = from_gguf(gguf(coder))
    assert (read.tokens, read.specials, read.pattern) == (coder.tokens, coder.specials, coder.pattern)
    assert (read.begin, read.end, read.turn_end) == (coder.begin, coder.end, coder.turn_end)
    assert (read.vocab_size, read.template) == (400, CHATML)
    for text in [*TEXTS, "a<|im_end|>"]:
        assert read.encode(text) == coder.encode(text)


def test_a_gguf_says_whether_texts_have_a_begin_token(coder: Tokenizer) -> None:
    start = coder.specials["<|im_start|>"]
    assert from_gguf(gguf(coder, bos_token_id=start)).begin is None
    assert from_gguf(gguf(coder, bos_token_id=start, add_bos_token=True)).begin == start


@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        ({"model": "llama"}, r"tokenizer.ggml.model is 'llama' \(a SentencePiece kind\), not 'gpt2'"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', not 'gpt2'"),
        (
            {"pre": "deepseek-llm"},
            "tokenizer.ggml.pre is 'deepseek-llm'; the split patterns of llama-bpe, .* are known",
        ),
        ({"tokens": None}, "has no tokens, types and merges of equal length"),
        ({"token_type": [1, 2]}, "has no tokens, types and merges of equal length"),
        ({"token_type": [6] * 333}, "token type 6 is of a SentencePiece kind"),
        ({"tokens": ["a"] * 333}, "tokens twice"),
        ({"merges": ["q qq"]}, "merge 'q qq' needs 'qq', which is no token"),
    ],
)
def test_a_damaged_gguf_is_refused(metadata: dict[str, Any], fault: str) -> None:
    coder = parse_hugging_face(json.dumps(document("gpt2", False)).encode(), "x")
    with pytest.raises(ValueError, match=rf"tokenizer.use: x.gguf: .*{fault}"):
        from_gguf(gguf(coder, **metadata))


def test_a_gguf_must_name_the_pattern() -> None:
    made = {**document("gpt2", False), "pre_tokenizer": pre_tokenizer([r"\p{Han}+", GPT2_PATTERN])}
    with pytest.raises(ValueError, match=r"format gguf: llama.cpp has no name for the split pattern .*Han.* then"):
        parse_hugging_face(json.dumps(made).encode(), "x").gguf_table()
    assert {*PATTERNS} == {*GGUF_SPLITS.values()}


def test_a_gguf_must_give_the_same_ids() -> None:
    """GPT-2's pattern merges always in llama.cpp: a word that is only found whole would get other ids there."""
    made = document("gpt2", False)
    made["model"]["ignore_merges"] = True
    parse_hugging_face(json.dumps(made).encode(), "x").gguf_table()  # merges lead to each token: it makes no difference
    made["model"]["merges"] = made["model"]["merges"][:-1]
    with pytest.raises(ValueError, match=r"format gguf: llama\.cpp merges before it looks up whole words for gpt-2"):
        parse_hugging_face(json.dumps(made).encode(), "x").gguf_table()


def test_hostile_files_are_refused_in_bounded_time(tmp_path: Path) -> None:
    import os

    path = tmp_path / "tokenizer.json"
    path.write_text("{" + '"a":[' * 200_000)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not JSON"):
        use_tokenizer(path)
    path.write_text('{"model": {"type": "BPE", "vocab": {"a": ' + "9" * 5_000 + "}}}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not JSON"):
        use_tokenizer(path)
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="no file of at most 268,435,456 bytes"):
        use_tokenizer(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="no file of at most"):
        use_tokenizer(path)
