from __future__ import annotations

import base64
import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe
from tokenizers import Tokenizer as HuggingFaceTokenizer

from herd.llama3.tokens.tokenizer import Tokenizer, make_tokenizer, train_tokenizer, use_tokenizer
from herd.llama3.tokens.vocabulary import PATTERN, special_tokens
from tests.llama3.tokens.token_samples import recipe, stage, write_documents

TEXTS = [
    "The quick brown fox jumps over the lazy dog's back; they've 12345 reasons, no?\n\n  def f(x):\n\treturn x\n",
    "Größe, naïve café — “quoted” … ΑΒΓ привет мир, 東京都は日本の首都です。 مرحبا بالعالم नमस्ते 👩‍👩‍👧‍👦🇩🇪\r\n",
    "\\begin{align} \\sum_{i=0}^{n} x_i^2 &= 3.14159 \\\\ \\end{align}   \t\t  \n\n\n   trailing   ",
]


BYTES = [bytes([value]) for value in range(256)]


pytestmark = pytest.mark.usefixtures("few")


@pytest.fixture(autouse=True)
def verdicts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_tokenizer(TEXTS * 3, 400)


@pytest.fixture(scope="module")
def published(shared: Path) -> Tokenizer:
    return use_tokenizer(shared / "tokenizer" / "tokenizer.model")


def real_texts(shared: Path) -> list[str]:
    files = sorted((shared / "corpora").glob("*/*.jsonl.gz"))
    texts = []
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            texts += [json.loads(next(lines))["text"][:5000] for _ in range(4)]
    return texts


def test_special_tokens_stand_where_llama_3_1_has_them() -> None:
    names = special_tokens()
    assert len(names) == len(set(names)) == 256
    assert names[:6] == [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>",
        "<|reserved_special_token_2|>",
    ]
    assert names[6:11] == ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    assert names[-1] == "<|reserved_special_token_247|>"


@pytest.mark.slow
def test_published_ids_equal_tiktoken_and_hugging_face(published: Tokenizer, shared: Path, tmp_path: Path) -> None:
    ranks = load_tiktoken_bpe(str(shared / "tokenizer" / "tokenizer.model"))
    reference = tiktoken.Encoding("reference", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    published.save(tmp_path)
    hugging_face = HuggingFaceTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, *real_texts(shared)]:
        ids = published.encode(text)
        assert ids == reference.encode_ordinary(text)
        assert ids == hugging_face.encode(text, add_special_tokens=False).ids
        assert published.decode(ids) == text
    assert (published.vocab_size, published.begin, published.end) == (128_256, 128_000, 128_001)
    assert len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]) == 280_147
    assert hugging_face.encode("hello").ids == [128_000, *published.encode("hello")]
    assert hugging_face.token_to_id("<|eot_id|>") == 128_009


def test_text_is_cut_as_llama_3_cuts_it(published: Tokenizer) -> None:
    """The pattern, seen from outside: contractions, digits by three, a blank with its word, line ends."""
    ids = published.encode("I've seen 1234567 things...\n\n  Then   went\thome !?  ")
    pieces = ["I", "'ve", " seen", " ", "123", "456", "7", " things", "...\n\n"]
    pieces += [" ", " Then", "  ", " went", "\t", "home", " !", "?", "  "]
    assert [published.decode([token]) for token in ids] == pieces
    assert published.encode("hello world") == [15339, 1917]


@given(st.text(max_size=60))
def test_any_text_survives_and_yields_base_ids(small: Tokenizer, text: str) -> None:
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert all(token < len(small.base) for token in ids)


def test_trained_ids_equal_hugging_face(small: Tokenizer, tmp_path: Path) -> None:
    small.save(tmp_path)
    hugging_face = HuggingFaceTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert hugging_face.encode(text, add_special_tokens=False).ids == small.encode(text)
        assert hugging_face.decode(small.encode(text)) == text


def test_a_word_no_merge_leads_to_is_found_whole_by_both_libraries(tmp_path: Path) -> None:
    tokenizer = Tokenizer([*BYTES, b"abc"])
    tokenizer.save(tmp_path)
    hugging_face = HuggingFaceTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("abc") == hugging_face.encode("abc", add_special_tokens=False).ids == [256]


def test_training_compresses(small: Tokenizer) -> None:
    assert len(small.encode(TEXTS[0])) < 0.6 * len(TEXTS[0].encode())


@pytest.mark.fault("F22")
def test_spelling_a_special_token_does_not_make_one(small: Tokenizer) -> None:
    for name in special_tokens():
        text = f"a{name}{name}\n{name.upper()}"
        ids = small.encode(text)
        assert max(ids) < len(small.base)
        assert small.decode(ids) == text


def test_decode_leaves_specials_out_or_names_them(small: Tokenizer) -> None:
    ids = [small.begin, *small.encode("x"), small.end]
    assert small.decode(ids) == "x"
    assert small.decode(ids, special=True) == "<|begin_of_text|>x<|end_of_text|>"
    with pytest.raises(ValueError, match=f"token id {small.vocab_size} is not below"):
        small.decode([small.vocab_size])


@pytest.mark.parametrize("text", [" " * 1_200_000, "x" + "\n \t" * 400_000 + "y", "a" * 300_000])
def test_endless_runs_of_one_character_are_encoded(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text)) == text


def test_threads_do_not_change_ids(small: Tokenizer) -> None:
    texts = [text[start:] for text in TEXTS for start in range(20)]
    expected = [small.encode(text) for text in texts]
    assert [ids.tolist() for ids in small.encode_batch(texts)] == expected
    assert [ids.tolist() for ids in small.encode_batch(texts, threads=3)] == expected


def test_flat_ids_are_those_of_the_batch(small: Tokenizer) -> None:
    for texts in (["", *TEXTS, ""], [], [""]):
        ids, offsets = small.encode_flat(texts)
        assert (ids.dtype, offsets.dtype) == (np.uint32, np.int64)
        assert [ids[a:b].tolist() for a, b in pairwise(offsets.tolist())] == [small.encode(text) for text in texts]
        in_arrow = small.encode_flat(pa.array(["cut off", *texts], pa.string())[1:])
        assert all(map(np.array_equal, in_arrow, (ids, offsets)))


def test_same_text_same_bytes(tmp_path: Path) -> None:
    saved = []
    for name in ("a", "b"):
        train_tokenizer(iter(TEXTS * 3), 400).save(tmp_path / name)
        saved.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert saved[0] == saved[1]
    assert set(saved[0]) == {"tokenizer.model", "tokenizer.json", "tokenizer_config.json"}


def test_load_gives_the_tokenizer_that_was_saved(small: Tokenizer, tmp_path: Path) -> None:
    small.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.base == small.base
    assert loaded.digest == small.digest != train_tokenizer(TEXTS * 3, 399).digest


def test_too_little_text_says_how_much_vocabulary_it_is_good_for() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.train\.vocab: 5000 .* lower vocab to \d+") as error:
        train_tokenizer(TEXTS, 5000)
    possible = int(str(error.value).rsplit(" ", 1)[1])
    assert len(train_tokenizer(TEXTS, possible).base) == possible


def test_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.train\.vocab: 255"):
        train_tokenizer(TEXTS, 255)


def lines(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"[1, 2]", r"line 1: .* is not 'base64 rank'; .* tokenizer\.json"),
        (b"\x0a\x0e\x0a\x05<unk>\x15\x00", "is not 'base64 rank'"),
        (lines(BYTES[:-1]), "1 of 256 single bytes missing"),
        (lines([*BYTES, b"ab", b"ab"]), "1 tokens twice"),
        (lines(BYTES).replace(b" 7\n", b" 8\n"), "line 8: rank 8 where 7 is expected"),
        (b"", "256 of 256 single bytes missing"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, data: bytes, fault: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ValueError, match=rf"tokenizer\.use: .*{fault}"):
        use_tokenizer(tmp_path / "tokenizer.model")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.use: .*absent\.model cannot be read"):
        use_tokenizer(tmp_path / "absent.model")


def test_sample_follows_the_first_mix_and_leaves_held_out_text_alone(tmp_path: Path) -> None:
    words = {"general": "alpha", "math": "beta", "code": "gamma", "multilingual": "delta"}
    documents = write_documents(
        tmp_path / "curated",
        {
            domain: [
                *({"text": f"{word} {word}ly {number:03} " * 10} for number in range(200)),
                *({"text": f"qqqqzzzz {number:03} " * 10, "split": "held_out"} for number in range(100)),
            ]
            for domain, word in words.items()
        },
    )
    asked = recipe([stage("a", 80)], tokenizer={"train": {"vocab": 320, "sample": "20kB"}})
    facts = make_tokenizer(asked, documents, tmp_path / "tokenizer")
    longest = 10 * len("delta deltaly 000 ")
    for domain, share in {"general": 0.5, "math": 0.25, "code": 0.17, "multilingual": 0.08}.items():
        assert 0 <= facts["sample_bytes"][domain] - share * 20_000 <= longest
        assert facts["bytes_per_token"][domain] > 1
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    assert (facts["vocab"], facts["vocab_size"], facts["digest"]) == (320, 576, tokenizer.digest)
    assert b"alpha" in b"".join(tokenizer.base)
    assert not any(b"qq" in token for token in tokenizer.base)


def test_recipe_can_name_a_tokenizer(small: Tokenizer, tmp_path: Path) -> None:
    small.save(tmp_path / "given")
    documents = write_documents(
        tmp_path / "curated", {domain: [{"text": domain}] for domain in ("general", "math", "code", "multilingual")}
    )
    asked = recipe([stage("a", 80)], tokenizer={"use": str(tmp_path / "given" / "tokenizer.model")})
    facts = make_tokenizer(asked, documents, tmp_path / "tokenizer")
    assert facts["digest"] == small.digest == Tokenizer.load(tmp_path / "tokenizer").digest


def test_facts_say_how_far_each_language_is_broken_up(tmp_path: Path) -> None:
    """With single bytes for tokens every ratio can be counted by hand."""
    Tokenizer(BYTES).save(tmp_path / "given")
    held_out = {
        "general": [{"text": "ab cd", "language": "en"}, {"text": "größe", "language": "de"}],
        "math": [{"text": "1 + 1", "language": "en"}],
        "code": [{"text": "x = 1", "language": "und"}],
        "multilingual": [{"text": "東京", "language": "ja"}, {"text": "...", "language": "xx"}],
    }
    rows = {domain: [{**row, "split": "held_out"} for row in part] for domain, part in held_out.items()}
    rows["general"].append({"text": "seen in training", "language": "fr"})
    documents = write_documents(tmp_path / "curated", rows)
    asked = recipe([stage("a", 80)], tokenizer={"use": str(tmp_path / "given" / "tokenizer.model")})
    facts = make_tokenizer(asked, documents, tmp_path / "tokenizer")
    assert facts["bytes_per_token"] == dict.fromkeys(("general", "math", "code", "multilingual"), 1.0)
    assert facts["characters_per_token"] == {"general": 0.8333, "math": 1.0, "code": 1.0, "multilingual": 0.5556}
    assert facts["characters_per_token_by_language"] == {"en": 1.0, "de": 0.7143, "ja": 0.3333, "xx": 1.0}
    assert facts["tokens_per_word_by_language"] == {"en": 2.5, "de": 7.0, "ja": 3.0, "xx": None}
