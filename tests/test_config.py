from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clover_trt.config import GenerationConfig, ModelConfig
from clover_trt.errors import ConfigError
from tests.small import SMALL


def test_model_config_survives_the_round_trip() -> None:
    assert ModelConfig.from_hf(json.loads(json.dumps(SMALL.to_hf())), "x") == SMALL


def test_text_config_and_default_layer_types_are_read() -> None:
    data = SMALL.to_hf()
    del data["layer_types"]
    assert ModelConfig.from_hf({"model_type": "outer", "text_config": data}, "x") == SMALL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -1}, "hidden_size: .* greater than 0 .found -1."),
        ({"num_experts": None}, "num_experts: Field required"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok = 99 exceeds num_experts = 16"),
        ({"model_type": "llama"}, "model_type must be one of clover_moe"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ({"mask_token_id": 128}, "mask_token_id = 128 is outside the vocabulary of 128"),
        ({"mask_token_id": None}, "mask_token_id is required"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"block_rule": "other"}, "block_rule"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_found(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**SMALL.to_hf(), **changes}, "config.json")


@pytest.mark.parametrize("content", ["", "[1]", "{", '"x"'])
def test_a_broken_json_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"threshold": 0.0}, {"threshold": 1.1}, {"max_new_tokens": 0}, {"temperature": 0.0}, {"top_p": 1.5}, {"thresold": 0.9}],
)
def test_generation_settings_out_of_range_name_field_and_value(changes: dict[str, Any]) -> None:
    ((field, value),) = changes.items()
    with pytest.raises(ConfigError, match=f"{field}.*{value}"):
        GenerationConfig().override(changes)


def test_generation_config_ignores_what_other_programs_need(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "threshold": 0.8, "transformers_version": "5"}')
    read = GenerationConfig.from_folder(tmp_path)
    assert (read.eos_token_id, read.threshold) == ((7,), 0.8)
    assert read.override({"threshold": None}).threshold == 0.8
