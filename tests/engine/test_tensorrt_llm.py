"""The package reads as an engine folder of TensorRT-LLM 1.2, see docs/tensorrt-llm.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.build import build

# What `EngineConfig.from_json_file` of TensorRT-LLM 1.2 takes out of config.json: without these fields it raises.
PRETRAINED = {
    "architecture": str,
    "dtype": str,
    "hidden_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
}
# Fields that it gives a meaning when they are there.
PRETRAINED_OPTIONAL = {
    "vocab_size": int,
    "hidden_act": str,
    "logits_dtype": str,
    "norm_epsilon": float,
    "position_embedding_type": str,
    "max_position_embeddings": int,
    "num_key_value_heads": int,
    "head_size": int,
    "mapping": dict,
    "quantization": dict,
}
BUILD = {
    "max_input_len": int,
    "max_seq_len": int,
    "max_batch_size": int,
    "max_beam_width": int,
    "max_num_tokens": int,
    "opt_num_tokens": int,
}
DTYPES = {"float32", "float16", "bfloat16"}
QUANT_ALGOS = {None, "FP8", "FP8_BLOCK_SCALES", "NVFP4", "MIXED_PRECISION"}


@pytest.mark.parametrize(("gpu", "precision"), [("cpu", "float32"), ("h200", "bfloat16"), ("gb300", "fp8")])
def test_config_json_has_the_fields_of_an_engine_folder(small_folder: Path, tmp_path: Path, gpu: str, precision: str) -> None:
    build(Checkpoint(small_folder), tmp_path / "engine", gpu=gpu, precision=precision)
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert set(config) == {"version", "pretrained_config", "build_config"}
    assert isinstance(config["version"], str)
    for fields, part in ((PRETRAINED | PRETRAINED_OPTIONAL, "pretrained_config"), (BUILD, "build_config")):
        found = {name: type(config[part].get(name)) for name in fields}
        assert found == fields
    pretrained, settings = config["pretrained_config"], config["build_config"]
    assert pretrained["dtype"] in DTYPES
    assert pretrained["quantization"]["quant_algo"] in QUANT_ALGOS
    assert (pretrained["quantization"]["quant_algo"] is None) == (precision != "fp8")
    assert pretrained["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert settings["max_input_len"] < settings["max_seq_len"]
    assert settings["max_num_tokens"] >= settings["opt_num_tokens"]
    assert "kv_cache_type" not in settings, "it is read only beside plugin_config, which belongs to TensorRT-LLM's own plugins"
    assert "plugin_config" not in settings
