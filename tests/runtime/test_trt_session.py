"""The TensorRT session over a stand-in for the two libraries whose plan ONNX Runtime computes: same tokens as the CPU engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tiny.tokenizer import build_tokenizer, save_tokenizer

from clover_trt.checkpoint.pack import pack
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.build import build_settings
from clover_trt.engine.package import BOUND, PLAN, EnginePackage
from clover_trt.engine.plugins import LIBRARY
from clover_trt.engine.profiles import read_profile
from clover_trt.errors import EngineError
from clover_trt.graph.bodies_tensorrt import function_bodies
from clover_trt.graph.export import attach_functions, attach_weights, trace
from clover_trt.graph.tensorrt import bind_large_weights, drop_logits, fix_cache_length
from clover_trt.parity.verify import decode, verify
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.request import Request
from clover_trt.runtime.scheduler import Scheduler
from clover_trt.runtime.sequence import Sequence
from clover_trt.runtime.session import Snapshot, StepInput, no_controls
from clover_trt.runtime.text import TextCodec
from clover_trt.runtime.trt_session import Shape, TrtSession, choose_profile
from tests.runtime.fake_gpu import FakeGpu
from tests.small import SMALL

LENGTH = 400


@pytest.fixture(scope="module")
def made(
    small_engine: EnginePackage, small_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EnginePackage, bytes]:
    """A package as for an H200, and the float32 graph that stands for its plan."""
    checkpoint, folder = Checkpoint(small_folder), tmp_path_factory.mktemp("trt")
    build = build_settings(read_profile("h200"), SMALL, "bfloat16", LENGTH)
    assert build.cache_len is not None
    model = trace(SMALL, SMALL.vocab_size)  # float32: ONNX Runtime's CPU provider has no bfloat16 kernels
    fix_cache_length(model, build.cache_len)
    drop_logits(model)
    bound = bind_large_weights(model, checkpoint, limit=4 * SMALL.vocab_size * SMALL.hidden_size)
    attach_weights(model, checkpoint)
    attach_functions(model, function_bodies(SMALL, onnx.TensorProto.FLOAT))
    pack(bound, folder / BOUND)
    assert {"clover.model.embed_tokens.weight", "clover.lm_head.weight"} <= set(bound), "bound like the experts"
    (folder / PLAN).write_bytes(b"a plan")
    manifest = {**small_engine.manifest, "tools": {"tensorrt": FakeGpu.version}}
    package = dataclasses.replace(small_engine, folder=folder, build=build, manifest=manifest)
    return package, ir.serde.serialize_model(model).SerializeToString()


def sequence(seed: int, package: EnginePackage, **settings: object) -> Sequence:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(6, 100, int(rng.choice([1, 15, 16, 17, 40, 130]))).tolist()
    wanted = {"max_new_tokens": 40, "threshold": 0.2, "repetition_penalty": 1.2, "frequency_penalty": 0.1, **settings}
    return Sequence(prompt, package.generation.override(wanted), SMALL, LENGTH, SMALL.vocab_size, prefill_chunk=48)


@pytest.mark.parametrize(("candidates", "eager"), [(1, None), (1, 0), (5, 1)])
def test_tokens_equal_those_of_the_cpu_engine(
    made: tuple[EnginePackage, bytes], small_engine: EnginePackage, candidates: int, eager: int | None
) -> None:
    package, model = made
    gpu = FakeGpu(model, eager=eager)
    session, reference = TrtSession(package, gpu=gpu), OrtSession(small_engine)
    sampling = {"do_sample": True, "top_k": candidates} if candidates > 1 else {}
    for seed in range(6):
        found, expected = (decode(s, sequence(seed, package, **sampling)) for s in (session, reference))
        assert found == expected
        assert len(found) > 10
    assert gpu.plugins == package.folder / LIBRARY, "TensorRT needs the plugins before the plan"
    assert gpu.captured > 3
    assert gpu.launched > gpu.captured


def test_requests_in_flight_share_passes(made: tuple[EnginePackage, bytes], small_engine: EnginePackage, tmp_path: Path) -> None:
    package, model = made
    save_tokenizer(build_tokenizer(), tmp_path)
    codec = TextCodec(tmp_path)
    answers = []
    for session in (TrtSession(package, slots=3, gpu=FakeGpu(model)), OrtSession(small_engine, slots=3)):
        scheduler = Scheduler(session)
        requests = [Request(sequence(seed, package), codec) for seed in range(8)]
        for request in requests:
            scheduler.add(request)
        while not scheduler.idle:
            scheduler.step()
        answers.append([request.result().token_ids for request in requests])
    assert answers[0] == answers[1]


def test_a_plan_for_another_gpu_or_library_is_refused(made: tuple[EnginePackage, bytes]) -> None:
    package, model = made
    gpu = FakeGpu(model)
    gpu.compute_capability = "10.3"
    with pytest.raises(EngineError, match=r"built for compute capability 9\.0, this GPU has 10\.3"):
        TrtSession(package, gpu=gpu)
    gpu = FakeGpu(model)
    gpu.version = "11.0.0"
    with pytest.raises(EngineError, match=r"built with tensorrt 10\.14\.1, this machine has 11\.0\.0"):
        TrtSession(package, gpu=gpu)
    with pytest.raises(EngineError, match="slots = 65: the engine was built for 1 to 64 rows"):
        TrtSession(package, slots=65, gpu=FakeGpu(model))
    with pytest.raises(EngineError, match=r"caches of 4 slots of 400 tokens take .* at most 3 slots fit"):
        TrtSession(package, slots=4, cache_budget=3 * (TrtSession(package, gpu=FakeGpu(model)).cache_bytes()), gpu=FakeGpu(model))
    with pytest.raises(EngineError, match="out of memory"):
        TrtSession(package, gpu=FakeGpu(model, memory=1 << 20))


def test_a_plan_and_weights_that_do_not_fit_each_other_are_refused(made: tuple[EnginePackage, bytes], tmp_path: Path) -> None:
    package, model = made
    (tmp_path / PLAN).write_bytes(b"a plan")
    changed = onnx.ModelProto.FromString(model)
    (bank,) = [value for value in changed.graph.input if value.name == "experts.1.down"]
    bank.type.tensor_type.shape.dim[0].dim_value = 8
    with pytest.raises(EngineError, match=r"experts\.1\.down is F32 \[16, 48, 24\], the plan takes .*8, 48, 24"):
        TrtSession(package, gpu=FakeGpu(changed.SerializeToString()))
    (tmp_path / PLAN).write_bytes(b"something else")
    with pytest.raises(EngineError, match="cannot load the plan: magic tag"):
        TrtSession(dataclasses.replace(package, folder=tmp_path), gpu=FakeGpu(model))


def test_steps_that_no_profile_takes_are_refused(made: tuple[EnginePackage, bytes]) -> None:
    package, model = made
    session = TrtSession(package, slots=2, gpu=FakeGpu(model))
    B, T = 2, 40  # two rows of a prefill chunk
    ids, none = np.full((B, T), 7, np.int64), np.zeros(B, np.int32)
    step = StepInput(ids, none + T, none, np.zeros((B, 1), np.int64), np.ones(B, np.float32), no_controls(B, 1))
    with pytest.raises(EngineError, match=r"no optimization profile takes batch 2, tokens 40, .*prefill: batch 1-1"):
        session.step(step)
    with pytest.raises(EngineError, match="candidates only"):
        session.step(dataclasses.replace(step, want_logits=True))
    assert session.prefix_len.tolist() == [0, 0]
    names = [profile.name for profile in package.build.optimization_profiles]
    shape = Shape(0, 1, 16, 16, 1, 1, 1)
    for tokens, name in ((1, "denoise"), (16, "denoise"), (17, "fused"), (32, "fused"), (33, "prefill")):
        assert names[choose_profile(package.build.optimization_profiles, shape._replace(tokens=tokens))] == name


@pytest.mark.parametrize("eager", [None, 0, 1])
def test_a_saved_state_can_be_loaded_into_another_slot(made: tuple[EnginePackage, bytes], eager: int | None) -> None:
    package, model = made
    session = TrtSession(package, slots=2, gpu=FakeGpu(model, eager=eager))
    rng, ends = np.random.default_rng(0), (30, 45)
    chain: list[Snapshot] = []
    for count in (30, 15):
        ids = rng.integers(6, 100, (1, count)).astype(np.int64)
        commit, none = np.array([count], np.int32), np.zeros(1, np.int32)
        session.step(StepInput(ids, commit, none, np.zeros((1, 1), np.int64), np.ones(1, np.float32), no_controls(1, 1)))
        chain.append(session.save(0, chain[-1].end if chain else 0))
    assert tuple(part.end for part in chain) == ends
    session.load(1, chain)
    assert session.prefix_len.tolist() == [45, 45]
    answers = []
    for slot in (0, 1):
        block = np.full((1, 16), 120, np.int64)
        none, noisy, index = np.zeros(1, np.int32), np.array([16], np.int32), np.arange(16)[None]
        step = StepInput(block, none, noisy, index, np.ones(1, np.float32), no_controls(1, 16), first_slot=slot)
        answers.append(session.step(step))
    assert np.array_equal(answers[0].candidate_ids, answers[1].candidate_ids)
    assert np.array_equal(answers[0].candidate_logprobs, answers[1].candidate_logprobs)


def test_commands_that_run_on_the_cpu_refuse_an_engine_for_a_gpu(made: tuple[EnginePackage, bytes], small_folder: Path) -> None:
    package, _ = made
    with pytest.raises(EngineError, match="built for h200; expected a CPU engine"):
        OrtSession(package)
    with pytest.raises(EngineError, match=r"built for h200; .*leave --checkpoint out"):
        verify(package, Checkpoint(small_folder))
