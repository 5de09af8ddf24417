"""Oracle 1: commit-only logits equal transformers' own model, from a checkpoint its save_pretrained wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.model.load import load_model
from clover_trt.parity.torch_session import TorchSession
from clover_trt.runtime.scoring import commit_logits

TOKENS = 150
CHUNKINGS = (1, 7, 32, 64, TOKENS)


def hf_model(dtype: torch.dtype) -> Qwen3_5MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    )
    model = Qwen3_5MoeForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
            parameter.data.normal_(std=0.1 if "norm" in name else 0.7 * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, None)])
def test_commit_logits_equal_transformers(dtype: torch.dtype, bound: float | None, tmp_path: Path) -> None:
    reference = hf_model(dtype)
    reference.save_pretrained(tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").exists(), "the test wants several shards"
    ids = torch.randint(0, 200, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids).logits[0].float()
        exact = reference.float()(ids).logits[0]
    model = load_model(Checkpoint(tmp_path), dtype)
    for chunk in CHUNKINGS:
        found = torch.from_numpy(commit_logits(TorchSession(model, max_len=TOKENS), ids[0].tolist(), chunk))
        if bound is not None:
            assert (found - expected).abs().max() < bound, chunk
        else:
            # Two bfloat16 runs differ by rounding: ours may be no further from float32 than transformers' own is.
            error, theirs = (found - exact).norm() / exact.norm(), (expected - exact).norm() / exact.norm()
            assert error < 1.2 * theirs + 1e-3, (chunk, error, theirs)


def test_a_plain_checkpoint_has_neutral_block_tensors(tmp_path: Path) -> None:
    hf_model(torch.float32).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.neutral
    assert not checkpoint.load("model.layers.0.linear_attn.right_conv1d.weight").any()
    assert checkpoint.config.rope_theta == 1e7
