from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from clover_trt.engine.build import with_changes
from clover_trt.engine.profiles import check_precision, profile_names, profiles_folder, read_profile
from clover_trt.errors import ConfigError, EngineError


def test_the_shipped_profiles_are_valid_and_say_where_their_figures_come_from() -> None:
    assert profile_names() == ["cpu", "gb300", "h200", "rtx"]
    for name in profile_names():
        profile = read_profile(name)
        assert profile.name == name
        if profile.backend != "onnxruntime":
            assert profile.sources
            assert set(profile.peak_tflops) == set(profile.precisions)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    target = tmp_path / "mine.yaml"
    target.write_text((profiles_folder() / "rtx.yaml").read_text())
    return target


def change(path: Path, **fields: object) -> str:
    data = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({name: value for name, value in {**data, **fields}.items() if value is not None}))
    return str(path)


def test_a_file_of_the_users_is_read(own: Path) -> None:
    assert read_profile(change(own, name="mine", memory_gb=32)).memory_gb == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_gb": -1}, "memory_gb: .*greater than 0.*found -1"),
        ({"memory_gb": None}, "tensorrt-rtx profile needs memory_gb"),
        ({"compute_capability": "sm90"}, "compute_capability: .*found 'sm90'"),
        ({"precisions": ["int8"]}, r"precisions\.0: .*'bfloat16'.*found 'int8'"),
        ({"rows": {"min": 4, "opt": 2, "max": 8}}, "min <= opt <= max, found 4, 2, 8"),
        ({"cuda_graph_rows": [1, 16]}, "go to 16, rows.max is 8"),
        ({"operations": "plugins"}, "plugins needs backend tensorrt"),
        ({"prefill_chunk": 100}, "prefill_chunk: .*multiple of 32"),
        ({"bandwith_gb_s": 1}, "bandwith_gb_s: Extra inputs are not permitted"),
    ],
)
def test_every_field_is_validated(own: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_profile(change(own, **fields))


def test_profiles_that_are_not_there_or_not_yaml_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="h2oo: unknown target; expected one of cpu, gb300, h200, rtx"):
        read_profile("h2oo")
    with pytest.raises(EngineError, match="no such file"):
        read_profile(str(tmp_path / "none.yaml"))
    bad = tmp_path / "bad.yaml"
    for text, message in (("a: [", "not a readable YAML"), ("- 1", "found list")):
        bad.write_text(text)
        with pytest.raises(EngineError, match=message):
            read_profile(str(bad))


def test_precisions_and_changes_that_a_profile_cannot_have_are_refused() -> None:
    cpu, rtx = read_profile("cpu"), read_profile("rtx")
    assert check_precision(rtx, None) == "bfloat16"
    assert check_precision(rtx, "fp8") == "fp8"
    with pytest.raises(EngineError, match="no bfloat16"):
        check_precision(cpu, "bfloat16")
    with pytest.raises(EngineError, match="expected bfloat16, fp8"):
        check_precision(rtx, "nvfp4")
    assert with_changes(rtx, "12.0", None).compute_capability == "12.0"
    with pytest.raises(EngineError, match="for engines that run on a GPU"):
        with_changes(cpu, "9.0", None)
    with pytest.raises(ConfigError, match=r"compute_capability: .*found 'fast'"):
        with_changes(rtx, "fast", None)
    with pytest.raises(ConfigError, match=r"operations: .*found 'kernels'"):
        with_changes(rtx, None, "kernels")
