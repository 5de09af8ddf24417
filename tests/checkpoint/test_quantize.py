"""FP8 checkpoints: the rounding, the layout on disk, and going on after a kill."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from clover_trt.checkpoint import fp8, nvfp4
from clover_trt.checkpoint import quantize as module
from clover_trt.checkpoint.quantize import quantize_checkpoint
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.errors import CheckpointError
from tests.small import SMALL, random_state, write_checkpoint


def every_e4m3() -> torch.Tensor:
    """All finite values of the format, from its definition: sign, 4 exponent bits (bias 7), 3 mantissa bits."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            continue  # NaN
        values.append(sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)))
    return torch.tensor(sorted(set(values)), dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 1000), scale=st.floats(-30, 30))
def test_each_value_is_the_nearest_of_the_format_and_none_saturates(rows: int, columns: int, seed: int, scale: float) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10.0**scale
    q, s = fp8.quantize(weight)
    assert s.shape == fp8.scale_shape((rows, columns))
    assert torch.isfinite(q.float()).all()
    block = weight[:128, :128].double()
    s0 = float(s[0, 0])
    assert block.abs().max() / 448 <= s0 <= block.abs().max() / 448 * 1.01
    grid = every_e4m3()
    exact = block / s0
    nearest = (exact[..., None] - grid).abs().amin(-1)
    found = (exact - q[:128, :128].double()).abs()
    assert (found <= nearest * (1 + 1e-5) + 1e-7).all()


def test_every_code_widens_to_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.FP8)
    finite = torch.isfinite(codes.float())
    assert torch.equal(fp8.widen(codes)[finite], codes.float()[finite])
    assert sorted(set(fp8.widen(codes)[finite].double().tolist())) == every_e4m3().tolist()


def test_edges_of_the_format() -> None:
    zeros, scale = fp8.quantize(torch.zeros(3, 200))
    assert zeros.float().count_nonzero() == 0
    assert torch.equal(scale, torch.ones(1, 2, dtype=torch.bfloat16))
    tiny, scale = fp8.quantize(torch.full((2, 2), 1e-42))
    assert torch.isfinite(tiny.float()).all()
    assert scale.min() > 0
    for bad in (math.nan, math.inf, -math.inf):
        weight = torch.ones(130, 5)
        weight[129, 4] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            fp8.quantize(weight)


def test_banks_are_quantized_by_half() -> None:
    bank = random_state()["model.layers.0.mlp.experts.gate_up_proj"]
    bank[:, : SMALL.moe_intermediate_size] *= 100.0
    q, scale = fp8.quantize_bank(bank)
    assert scale.shape == fp8.bank_scale_shape("gate_up_proj", SMALL)
    gate, _ = fp8.quantize(bank[3, : SMALL.moe_intermediate_size])
    assert torch.equal(q[3, : SMALL.moe_intermediate_size].view(torch.uint8), gate.view(torch.uint8))
    error = (fp8.dequantize_bank(q, scale).float() - bank).norm() / bank.norm()
    assert error < 0.04


@pytest.fixture(scope="module")
def quantized(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("fp8") / "checkpoint"
    quantize_checkpoint(Checkpoint(small_folder), target)
    return target


def test_the_layout_is_that_of_published_fp8_checkpoints(quantized: Path, small_folder: Path) -> None:
    config = json.loads((quantized / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]
    }  # fmt: skip
    index = json.loads((quantized / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for path in sorted(quantized.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    for name in ("self_attn.q_proj.weight", "mlp.experts.7.up_proj.weight", "mlp.shared_expert.down_proj.weight"):
        assert tensors[f"model.layers.3.{name}"].dtype == torch.float8_e4m3fn
        assert tensors[f"model.layers.3.{name}_scale_inv"].dtype == torch.bfloat16
    for name in ("mlp.gate.weight", "input_layernorm.weight", "mlp.shared_expert_gate.weight"):
        assert tensors[f"model.layers.3.{name}"].dtype == torch.float32
    assert tensors["lm_head.weight"].dtype == torch.float32
    assert (quantized / "LICENSE").read_text() == (small_folder / "LICENSE").read_text()


def test_reading_it_back_gives_the_weights_it_stands_for(quantized: Path, small_folder: Path) -> None:
    source, copy = Checkpoint(small_folder), Checkpoint(quantized)
    assert copy.quantized
    for name in source.expected:
        if fp8.is_quantized(name):
            found, expected = copy.load_quantized(name), source.load_quantized(name)
            assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8)), name
            assert torch.equal(found[1], expected[1]), name
            assert copy.load(name).dtype == torch.bfloat16
            back = fp8.dequantize_bank if name.endswith("gate_up_proj") else fp8.dequantize
            assert torch.equal(copy.load(name), back(*expected)), name
        else:
            assert torch.equal(copy.load(name), source.load(name))


def test_a_report_is_right(quantized: Path, small_folder: Path) -> None:
    report = json.loads((quantized / "quantization_report.json").read_text())
    each = {item["name"]: item for item in report["matrices"]}
    name = "model.layers.0.linear_attn.out_proj.weight"
    weight, back = (
        Checkpoint(small_folder).load(name).double(),
        fp8.dequantize(*Checkpoint(small_folder).load_quantized(name), torch.float64),
    )
    assert each[name]["relative_error"] == pytest.approx(float((back - weight).norm() / weight.norm()), rel=1e-3)
    channel = ((back - weight).norm(dim=1) / weight.norm(dim=1)).max()
    assert each[name]["worst_channel_error"] == pytest.approx(float(channel), rel=1e-3)
    assert sum(part["matrices"] for part in report["summary"].values()) == len(each)


def test_stacked_and_single_experts_quantize_to_the_same(quantized: Path, tmp_path: Path) -> None:
    state = random_state()
    for name in [name for name in state if ".mlp.experts." in name]:
        bank = name.rpartition(".")[0]
        for e, matrix in enumerate(state.pop(name)):
            if name.endswith("gate_up_proj"):
                state[f"{bank}.{e}.gate_proj.weight"], state[f"{bank}.{e}.up_proj.weight"] = matrix.chunk(2)
            else:
                state[f"{bank}.{e}.down_proj.weight"] = matrix
    quantize_checkpoint(Checkpoint(write_checkpoint(tmp_path / "single", state)), tmp_path / "fp8")
    for path in quantized.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "fp8" / path.name).read_bytes(), path.name


def test_killed_work_goes_on_and_gives_the_same(quantized: Path, small_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "fp8"
    code = (
        "import os, sys, pathlib\n"
        "from clover_trt.checkpoint import quantize as m\n"
        "from clover_trt.checkpoint.reader import Checkpoint\n"
        "write, done = m.write_shard, []\n"
        "def dying(*a):\n"
        "    done.append(1)\n"
        "    os._exit(9) if len(done) == 4 else None\n"
        "    return write(*a)\n"
        "m.write_shard = dying\n"
        "m.quantize_checkpoint(Checkpoint(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(small_folder), str(target)], capture_output=True, check=False)
    assert done.returncode == 9
    assert not target.exists()
    lines: list[str] = []
    quantize_checkpoint(Checkpoint(small_folder), target, lines.append)
    assert [line for line in lines if line.startswith("quantizing")] == [f"quantizing shard {i}/6" for i in (4, 5, 6)]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in quantized.iterdir()
    }


def test_what_cannot_be_quantized_is_refused(
    quantized: Path, small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="FP8 weights already"):
        quantize_checkpoint(Checkpoint(quantized), tmp_path / "a")
    with pytest.raises(CheckpointError, match="exists; choose another"):
        quantize_checkpoint(Checkpoint(small_folder), tmp_path)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage(1000))
    with pytest.raises(CheckpointError, match=r"GB to write, 0\.0 GB free"):
        quantize_checkpoint(Checkpoint(small_folder), tmp_path / "b")
    monkeypatch.undo()
    state = random_state()
    state["model.layers.2.mlp.experts.down_proj"][5, 3, 1] = math.nan
    with pytest.raises(CheckpointError, match=r"not finite .*: model\.layers\.2\.mlp\.experts\.5\.down_proj\.weight"):
        quantize_checkpoint(Checkpoint(write_checkpoint(tmp_path / "nan", state)), tmp_path / "c")
    with pytest.raises(CheckpointError, match="unfinished work on another checkpoint"):
        quantize_checkpoint(Checkpoint(small_folder), tmp_path / "c")


def test_fp8_checkpoints_with_missing_or_wrong_scales_are_refused(quantized: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(quantized, tmp_path / "copy"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = "model.layers.0.linear_attn.out_proj.weight_scale_inv"
    for change, message in ((None, f"1 missing: {name}"), (torch.ones(3, 1), "wrong shape: .*expected .*found")):
        changed = {key: value for key, value in tensors.items() if key != name} | ({name: change} if change is not None else {})
        save_file(changed, shard)
        index = json.loads((quantized / "model.safetensors.index.json").read_text())
        index["weight_map"] = {key: value for key, value in index["weight_map"].items() if key != name or change is not None}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(folder)


def e2m1_grid() -> list[tuple[float, int]]:
    """All values of e2m1 with their codes, from its definition: sign, 2 exponent bits (bias 1), 1 mantissa bit."""
    grid = []
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        grid.append(((-1) ** (code >> 3) * size, code))
    return grid


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 20), groups=st.integers(1, 9), seed=st.integers(0, 1000), scale=st.floats(-20, 20))
def test_nvfp4_rounds_to_the_nearest_value(rows: int, groups: int, seed: int, scale: float) -> None:
    weight = torch.randn(rows, 16 * groups, generator=torch.Generator().manual_seed(seed)) * 10.0**scale
    weight[0, :16] = 0.0
    packed, s, whole = nvfp4.quantize(weight)
    assert (packed.shape, s.shape, whole.shape) == ((rows, 8 * groups), (rows, groups), ())
    step = (s.double() * whole.double())[..., None].expand(-1, -1, 16).flatten(1)
    found = nvfp4.dequantize(packed, s, whole, torch.float64)
    grid = torch.tensor(sorted({value for value, _ in e2m1_grid()}), dtype=torch.float64)
    used = step > 0
    exact = (weight.double() / step.clamp(min=1e-300)).clamp(-6, 6)[used]
    nearest = (exact[..., None] - grid).abs().amin(-1)
    assert ((exact - (found / step.clamp(min=1e-300))[used]).abs() <= nearest + 1e-5).all()
    assert found[0, :16].count_nonzero() == 0
    assert (weight[~used].abs() <= float(whole) * 6 * 2**-9).all(), "only what the smallest scale cannot hold is lost"


def test_nvfp4_codes_ties_and_byte_order() -> None:
    values = torch.tensor([[6.0, -6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]])
    packed, scale, whole = nvfp4.quantize(values)
    assert float(scale.float() * whole) == 1.0
    codes = [int(byte) >> shift & 15 for byte in packed[0] for shift in (0, 4)]
    by_code = {code: value for value, code in e2m1_grid()}
    # A tie goes to the neighbour whose mantissa bit is 0: 0.25 to 0, 0.75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to 2, 3.5 to 4, 5 to 4.
    assert [by_code[code] for code in codes] == [6, -6, 0, 1, 1, 2, 2, 4, 4, -2, 0.5, 1, 1.5, 2, 3, 4]
    with pytest.raises(ValueError, match="NaN or infinity"):
        nvfp4.quantize(torch.full((1, 16), math.nan))


def test_a_checkpoint_with_nvfp4_experts_reads_back(small_folder: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(Checkpoint(small_folder), tmp_path / "fp4", experts="nvfp4")
    source, copy = Checkpoint(small_folder), Checkpoint(tmp_path / "fp4")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weight = source.load(name)
    gate = weight[3, : SMALL.moe_intermediate_size]
    assert torch.equal(copy.load(name)[3, : SMALL.moe_intermediate_size], nvfp4.dequantize(*nvfp4.quantize(gate)))
    assert 0.05 < float((copy.load(name).float() - weight).norm() / weight.norm()) < 0.15
    down = "model.layers.1.mlp.experts.down_proj"  # 24 columns are no multiple of 16
    assert torch.equal(copy.load(down), fp8.dequantize(*source.load_quantized(down)))
    errors = {each.name: each.relative_error for each in report}
    assert errors["model.layers.1.mlp.experts.3.gate_proj.weight"] > errors["model.layers.1.mlp.experts.3.down_proj.weight"]
    with pytest.raises(CheckpointError, match="is NVFP4"):
        copy.load_quantized(name)
    stored, made = copy.load_nvfp4(name), source.load_nvfp4(name)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(stored, made, strict=True))
    for expert in range(SMALL.num_experts):
        restored = nvfp4.dequantize_bank(*(part[expert] for part in stored))
        assert torch.equal(restored, copy.load(name)[expert])
    with pytest.raises(CheckpointError, match="has 24 columns, expected a multiple of 16"):
        source.load_nvfp4(down)
    quantize_checkpoint(source, tmp_path / "fp8")
    with pytest.raises(CheckpointError, match="is FP8; build nvfp4 from the bfloat16 checkpoint"):
        Checkpoint(tmp_path / "fp8").load_nvfp4(name)


def test_static_activation_scales_of_other_checkpoints_are_passed_over(small_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_folder, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    for part in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"model.layers.0.mlp.experts.0.{part}.input_scale"] = torch.tensor(0.1)
    save_file(tensors, folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(Checkpoint(folder).load(name), Checkpoint(small_folder).load(name))


def test_interleaved_values_are_those_of_the_matrix_in_the_order_that_kernels_take() -> None:
    """0 2 4 6 1 3 5 7 from the lowest four bits of each four bytes on."""
    codes = torch.randint(0, 16, (5, 3, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    words = nvfp4.interleave(packed).numpy().view("<u4")
    for place, number in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        assert (words >> 4 * place & 15 == codes[..., number::8].numpy()).all()
