from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from clover_trt.checkpoint.inspect import describe_checkpoint
from clover_trt.checkpoint.names import canonical, expected_tensors
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.errors import CheckpointError, CloverError
from clover_trt.model.load import load_model
from tests.small import SMALL, random_state, write_checkpoint

ADDED = "model.layers.1.linear_attn.memory_bias"


def per_expert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layout that save_pretrained writes."""
    out = {}
    for name, tensor in state.items():
        bank, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                out[f"{bank}.{e}.gate_proj.weight"], out[f"{bank}.{e}.up_proj.weight"] = gate, up
        elif kind == "down_proj" and bank.endswith("experts"):
            out |= {f"{bank}.{e}.down_proj.weight": t for e, t in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def shard(folder: Path, state: dict[str, torch.Tensor], count: int = 3) -> None:
    names = sorted(state)
    weight_map = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: state[n].contiguous() for n in names if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("split", [False, True])
def test_both_expert_layouts_and_the_prefix_are_taken(tmp_path: Path, prefix: str, split: bool) -> None:
    state = random_state()
    stored = {
        (prefix + name.removeprefix("model.") if name.startswith("model.") else name): tensor
        for name, tensor in (per_expert(state) if split else state).items()
    }
    stored["mtp.layers.0.weight"] = stored["model.visual.patch.weight"] = torch.zeros(3)
    write_checkpoint(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    shard(tmp_path, stored)
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in checkpoint.tensors():
        assert torch.equal(tensor, state[name]), name


def test_one_error_lists_missing_unexpected_and_wrong_tensors(tmp_path: Path) -> None:
    state = random_state()
    del state["model.norm.weight"]
    state["model.layers.0.mlp.gate.weight"] = torch.zeros(16, 47)
    state["model.extra"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(write_checkpoint(tmp_path, state))
    message = str(caught.value)
    assert "model.norm.weight [48]" in message
    assert "model.extra [2]" in message
    assert "model.layers.0.mlp.gate.weight (expected [16, 48], found [16, 47])" in message


def test_values_that_are_not_finite_are_listed_by_name(tmp_path: Path) -> None:
    state = random_state()
    state["model.norm.weight"][3] = torch.nan
    state["lm_head.weight"][0, 0] = torch.inf
    with pytest.raises(CheckpointError, match=r"not finite.*2 tensors.*model.norm.weight \[48\] \(1 values\)"):
        load_model(Checkpoint(write_checkpoint(tmp_path, state)))


def test_a_missing_added_tensor_points_to_the_tensor_map(tmp_path: Path) -> None:
    state = random_state()
    theirs = {
        f"model.layers.{i}.linear_attn.recall_offset": state.pop(f"model.layers.{i}.linear_attn.memory_bias") for i in range(3)
    }
    folder = write_checkpoint(tmp_path / "c", {**state, **theirs})
    with pytest.raises(CheckpointError, match="--tensor-map"):
        Checkpoint(folder)
    mapping = tmp_path / "map.json"
    mapping.write_text(json.dumps({"model.layers.N.linear_attn.memory_bias": "model.layers.N.linear_attn.recall_offset"}))
    found = Checkpoint(folder, mapping)
    assert torch.equal(found.load(ADDED), theirs["model.layers.1.linear_attn.recall_offset"])


@pytest.mark.parametrize("content", ['{"model.layers.N.linear_attn.conv1d.weight": "x.N.y"}', '{"a": 1}', "[]", "{"])
def test_a_wrong_tensor_map_is_refused(tmp_path: Path, content: str) -> None:
    mapping = tmp_path / "map.json"
    mapping.write_text(content)
    folder = write_checkpoint(tmp_path / "c", random_state())
    with pytest.raises(CloverError, match=r"map\.json"):
        Checkpoint(folder, mapping)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 0.999))
def test_a_truncated_file_is_named(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("cut"), random_state())
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: (truncated|corrupt)"):
        Checkpoint(folder)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1500), st.integers(1, 255))
def test_a_changed_header_byte_is_an_error_or_harmless(tmp_path_factory: pytest.TempPathFactory, at: int, flip: int) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("flip"), random_state())
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= flip
    path.write_bytes(data)
    named = True
    try:
        Checkpoint(folder)
    except CloverError as error:
        named = str(folder) in str(error)
    assert named


def test_missing_shard_and_missing_name_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    shard(tmp_path, random_state())
    index = tmp_path / "model.safetensors.index.json"
    promised = json.loads(index.read_text())
    promised["weight_map"]["model.nowhere"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(promised))
    with pytest.raises(CheckpointError, match=r"model\.nowhere listed in .*index\.json but not in the file"):
        Checkpoint(tmp_path)
    del promised["weight_map"]["model.nowhere"]
    index.write_text(json.dumps(promised))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: not found"):
        Checkpoint(tmp_path)


def test_pickle_is_never_opened(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: pickle files are never opened"):
        Checkpoint(tmp_path)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="must not contain a folder"):
        Checkpoint(tmp_path)


def test_the_fingerprint_follows_the_values_not_the_files(tmp_path: Path) -> None:
    state = random_state()
    single = Checkpoint(write_checkpoint(tmp_path / "one", state)).fingerprint()
    write_checkpoint(tmp_path / "three", {})
    (tmp_path / "three" / "model.safetensors").unlink()
    shard(tmp_path / "three", state)
    assert Checkpoint(tmp_path / "three").fingerprint() == single
    state["lm_head.weight"][0, 0] += 1
    assert Checkpoint(write_checkpoint(tmp_path / "two", state)).fingerprint() != single


def test_inspect_counts_parameters(small_folder: Path) -> None:
    facts = describe_checkpoint(small_folder)
    total = sum(torch.Size(shape).numel() for shape in expected_tensors(SMALL).values())
    assert facts["checkpoint"]["parameters"] == sum(facts["parameters by part"].values()) == total
    assert facts["checkpoint"]["bytes"] == 4 * total


def test_canonical_names() -> None:
    assert canonical("language_model.lm_head.weight") == "lm_head.weight"
    assert canonical("language_model.layers.0.x") == "model.layers.0.x"
    assert canonical("mtp.fc.weight") is None
