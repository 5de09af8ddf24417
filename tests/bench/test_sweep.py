from __future__ import annotations

import json
from pathlib import Path

import pytest

from clover_trt.bench.sweep import Point, Prompt, area_under, read_prompts, sweep, write_report
from clover_trt.engine.package import EnginePackage
from clover_trt.errors import RequestError
from clover_trt.runtime.generate import Generator


def point(tpf: float, exact_match: float) -> Point:
    return Point("low_confidence", 0.9, 1.0, exact_match, tpf, 5.0)


def test_the_area_under_accuracy_against_tpf() -> None:
    assert area_under([point(4.0, 0.5)]) == pytest.approx(2.0)
    assert area_under([point(2.0, 1.0), point(4.0, 0.5)]) == pytest.approx(2.0 * 1.0 + 2.0 * 0.5)
    assert area_under([point(2.0, 0.5), point(4.0, 1.0)]) == pytest.approx(4.0), "a point that is worse in both adds nothing"
    assert area_under([point(4.0, 0.5), point(2.0, 1.0)]) == area_under([point(2.0, 1.0), point(4.0, 0.5)])


def test_a_lower_threshold_is_faster_and_a_smaller_mass_uses_fewer_experts(tiny_engine: EnginePackage, tmp_path: Path) -> None:
    prompts = [Prompt('Reverse "stone".', "enots"), Prompt('Sort the letters of "lamp".', "almp"), Prompt("What is 7 + 8?", "15")]
    points = sweep(Generator(tiny_engine), prompts, ["low_confidence"], [0.3, 0.999], [0.5, 1.0], max_new_tokens=32)
    by = {(each.expert_subset_mass, each.threshold): each for each in points}
    assert by[1.0, 0.3].tpf > by[1.0, 0.999].tpf
    assert by[0.5, 0.999].distinct_experts < by[1.0, 0.999].distinct_experts
    assert by[1.0, 0.999].exact_match >= 2 / 3
    areas = write_report(points, tmp_path / "report")
    assert set(areas) == {"low_confidence, mass 0.5", "low_confidence, mass 1"}
    assert json.loads((tmp_path / "report" / "sweep.json").read_text())["aup"] == areas
    assert (tmp_path / "report" / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_prompt_file_that_is_wrong_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for text, message in (
        ('{"prompt": "a", "answer": "b"}\n{"prompt": 1', "line 2: expected"),
        ('{"prompt": "a"}', "line 1: expected .*answer"),
        ("\n", "holds no prompts"),
    ):
        path.write_text(text)
        with pytest.raises(RequestError, match=message):
            read_prompts(path)
    with pytest.raises(RequestError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
