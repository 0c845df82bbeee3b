"""Hugging Face folders against transformers itself: what we write it loads, what it writes we load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import herd.llama3.model.files
from herd.llama3.export.hf import HuggingFaceModel, read_hugging_face_config, write_hugging_face
from herd.llama3.model.files import StoredModel, open_model, save_model
from herd.llama3.recipe.sections import Model
from tests.llama3.export.export_samples import SCALED, difference, herd_folder, same, shape, state, tokenizer, tokens

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied_embeddings": True},
    "scaled": {"rope_scaling": {"original": 256}, "max_seq_len": 2048},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 10_000.0, "norm_eps": 1e-6},
}
PUBLISHED = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
"""The configuration of the published 8B of Llama 3.1."""


@pytest.fixture(scope="module")
def transformers() -> Any:
    library = pytest.importorskip("transformers", reason="package transformers is not installed")
    library.logging.disable_progress_bar()
    return library


def stored(folder: Path, config: Model) -> StoredModel:
    herd_folder(folder / "source", config)
    return open_model(folder / "source")


@pytest.mark.parametrize("limit", [10**9, 30_000])
@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_we_write(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, limit: int
) -> None:
    monkeypatch.setattr(herd.llama3.model.files, "SHARD_BYTES", limit)
    made = herd_folder(tmp_path / "ours", shape(**CASES[case]))
    write_hugging_face(tmp_path / "hf", open_model(tmp_path / "ours"))
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (limit == 30_000)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values())
    assert type(loaded).__name__ == "LlamaForCausalLM"
    tokens_BS = tokens(made.vocab_size)
    with torch.no_grad():
        assert difference(loaded(tokens_BS).logits, made(tokens_BS, None)) < 1e-5


@pytest.mark.parametrize("cut", ["1GB", "30KB"])
@pytest.mark.parametrize("case", CASES)
def test_we_load_what_transformers_writes(transformers: Any, tmp_path: Path, case: str, cut: str) -> None:
    made = herd_folder(tmp_path / "ours", shape(**CASES[case]))
    write_hugging_face(tmp_path / "hf", open_model(tmp_path / "ours"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size=cut)
    assert "rope_parameters" in json.loads((tmp_path / "theirs" / "config.json").read_text())
    found = HuggingFaceModel(tmp_path / "theirs")
    assert (found.config, found.vocab_size) == (made.config, made.vocab_size)
    assert same(state(found), dict(made.state_dict()))


def test_from_theirs_to_ours_and_back_keeps_every_byte(transformers: Any, tmp_path: Path) -> None:
    write_hugging_face(tmp_path / "one", stored(tmp_path, shape()), dtype=torch.bfloat16)
    source = HuggingFaceModel(tmp_path / "one")
    save_model(tmp_path / "ours", source.config, source.vocab_size, state(source))
    write_hugging_face(tmp_path / "two", open_model(tmp_path / "ours"))
    files = [tmp_path / name / "model.safetensors" for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {value.dtype for value in load_file(files[0]).values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "two" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two").dtype == torch.bfloat16


def test_the_tokenizer_goes_with_it(transformers: Any, tmp_path: Path) -> None:
    coder = tokenizer()
    herd_folder(tmp_path / "ours", shape(), coder=coder)
    write_hugging_face(tmp_path / "hf", open_model(tmp_path / "ours"), coder)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the lazy fox, 2345 times à la mer\n\n  一二"
    assert theirs(text)["input_ids"] == [coder.begin, *coder.encode(text)]
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (config.bos_token_id, config.eos_token_id) == (coder.begin, coder.end)
    assert (generation.bos_token_id, generation.eos_token_id) == (coder.begin, [coder.end, coder.vocab_size - 256 + 9])
    assert len(theirs) == config.vocab_size == coder.vocab_size


def test_a_published_configuration_is_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED))
    config, vocab_size = read_hugging_face_config(path)
    assert vocab_size == 128_256
    assert config.model_copy(update={"preset": "8b"}) == Model(preset="8b", rope_scaling={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral' where a Llama 3 has 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' where a Llama 3 has 'silu'"),
        ({"attention_bias": True}, "attention_bias is True where a Llama 3 has False"),
        ({"mlp_bias": True}, "mlp_bias is True where a Llama 3 has False"),
        ({"head_dim": 64}, "head_dim is 64 where a Llama 3 has 128"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1 where a Llama 3 has 0.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 where a Llama 3 has 1.0"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config is \{'bits': 4\} where a Llama 3 has None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; we know default, linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "does not describe a Llama .*factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "does not describe a Llama .*low_freq_factor"),
        ({"hidden_size": None}, "does not describe a Llama .*hidden_size"),
        ({"num_key_value_heads": 5}, "heads 32 must be a multiple of kv_heads 5"),
    ],
)
def test_what_is_no_llama_3_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**PUBLISHED, **change}))
    with pytest.raises(ValueError, match=message):
        read_hugging_face_config(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1000000000', r"do not fit config.json in model.layers.10\."),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1e400', "does not describe a Llama .*layers"),
        ('"num_attention_heads": 8', '"num_attention_heads": 0', "does not describe a Llama .*ZeroDivisionError"),
        ('"vocab_size": 83', '"vocab_size": ' + "9" * 5000, "config.json: cannot be read as JSON .*digits"),
        ('"vocab_size": 83', '"vocab_size": 1000000000000', "do not fit config.json in model.embed_tokens.weight"),
        ('"vocab_size": 83', '"vocab_size": "many"', r"config.json: vocab_size is 'many'"),
        ('"rms_norm_eps": 1e-05', '"rms_norm_eps": NaN', r"cannot be read as JSON \(holds NaN\)"),
        ('"rope_theta": 500000.0', '"rope_theta": 1e400', "does not describe a Llama .*rope_theta: inf"),
        ('"rms_norm_eps": 1e-05', '"rms_norm_eps": -1', "does not describe a Llama .*norm_eps: -1"),
        ("{", "[" * 200_000, r"cannot be read as JSON \(is nested too deeply\)"),
        ("{", "{\udcff", "cannot be read as JSON"),
    ],
)
def test_a_hostile_configuration_is_refused_in_a_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_hugging_face(tmp_path, herd_model(tmp_path / "ours"))
    text = (tmp_path / "config.json").read_text()
    assert old in text
    (tmp_path / "config.json").write_text(text.replace(old, new, 1), errors="surrogateescape")
    with pytest.raises(ValueError, match=message) as refused:
        HuggingFaceModel(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_pipes_folders_and_devices_among_the_files_are_refused(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    write_hugging_face(tmp_path, herd_model(tmp_path / "ours"))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ValueError, match=r"cannot be read as JSON \(is not a file\)|has neither model.safetensors"):
        HuggingFaceModel(tmp_path)


def test_a_pipe_that_the_index_names_is_refused(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, herd_model(tmp_path / "ours"))
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "part")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "part"}}')
    with pytest.raises(ValueError, match=r"part: is not a file; copy the folder again"):
        HuggingFaceModel(tmp_path)


def herd_model(folder: Path) -> StoredModel:
    herd_folder(folder, shape())
    return StoredModel(folder)


def test_what_a_configuration_leaves_out_is_as_transformers_has_it(transformers: Any, tmp_path: Path) -> None:
    kept = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: PUBLISHED[key] for key in kept}))
    config, _ = read_hugging_face_config(path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters == {"rope_theta": config.rope_theta, "rope_type": "default"}
    assert (theirs.num_key_value_heads, theirs.rms_norm_eps) == (config.kv_heads, config.norm_eps)
    assert (theirs.tie_word_embeddings, theirs.max_position_embeddings) == (config.tied_embeddings, config.max_seq_len)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, stored(tmp_path, shape(**SCALED)))
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"

    save_file({**weights, "model.layers.1.self_attn.k_proj.bias": torch.zeros(16)}, path)
    with pytest.raises(ValueError, match=r"do not fit config.json in model.layers.1.self_attn.k_proj.bias"):
        HuggingFaceModel(tmp_path)
    save_file({key: value for key, value in weights.items() if key != name}, path)
    with pytest.raises(ValueError, match=rf"do not fit config.json in {name}"):
        HuggingFaceModel(tmp_path)
    save_file({**weights, name: weights[name][:8].clone()}, path)
    with pytest.raises(ValueError, match=rf"do not fit config.json in {name}"):
        HuggingFaceModel(tmp_path)


def test_old_tables_and_a_repeated_tied_embedding_do_not_count(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, stored(tmp_path, shape(tied_embeddings=True)))
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
    }
    save_file({**weights, **more}, path)
    assert same(state(HuggingFaceModel(tmp_path)), state(open_model(tmp_path / "source")))


@pytest.mark.fault("F18")
def test_a_pickle_is_refused(tmp_path: Path) -> None:
    write_hugging_face(tmp_path, stored(tmp_path, shape()))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: is a pickle.*save_pretrained"):
        HuggingFaceModel(tmp_path)
