"""Compare an engine with the reference model: layer by layer on one mixed step, then whole decoded answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.package import GRAPH, EnginePackage
from clover_trt.errors import EngineError
from clover_trt.graph.contract import hidden_name
from clover_trt.model.block_step import CloverModel
from clover_trt.model.load import load_model
from clover_trt.parity.compare import Check, mixed_steps, relative_error
from clover_trt.parity.torch_session import TorchSession
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.scheduler import build_step
from clover_trt.runtime.sequence import Sequence
from clover_trt.runtime.session import Session

TOLERANCE = {"float32": 1e-5}  # relative error, see docs/numerics.md
DECODED_TOKENS = 64
PROMPT_LENGTHS = (1, 17, 64, 90)


def probe_graph(package: EnginePackage) -> tuple[bytes, tuple[str, ...]]:
    """The package's graph with every layer's hidden states as further outputs."""
    model = onnx.load(str(package.folder / GRAPH), load_external_data=False)
    names = tuple(hidden_name(i) for i in range(package.model.num_hidden_layers + 1))
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return model.SerializeToString(), names


def compare_layers(engine: OrtSession, reference: TorchSession, names: tuple[str, ...], limit: float, vocab: int) -> list[Check]:
    """Hidden states of every layer and the logits, over valid positions, worst of the steps."""
    worst: dict[str, float] = {}
    for step in mixed_steps(vocab, engine.config.block_size):
        found, expected = engine.step(step), reference.step(step)
        valid = np.arange(step.input_ids.shape[1]) < (step.commit_len + step.noisy_len)[:, None]
        pairs = [(name, engine.probed[name][valid], reference.hidden[i][valid]) for i, name in enumerate(names)]
        assert found.logits is not None
        assert expected.logits is not None
        pairs.append(("logits", found.logits, expected.logits))
        for name, a, b in pairs:
            worst[name] = max(worst.get(name, 0.0), relative_error(a, b)) if np.isfinite(a).all() else float("inf")
    return [Check(name, error, limit) for name, error in worst.items()]


def decode(session: Session, sequence: Sequence) -> list[int]:
    """Run one sequence alone on a session and return its tokens."""
    session.reset(0)
    while sequence.finish_reason is None:
        output = session.step(build_step([sequence], sequence.mask))
        sequence.apply(output.candidate_ids[0], output.candidate_logprobs[0])
    return sequence.response


def compare_tokens(engine: Session, reference: Session, package: EnginePackage) -> list[Check]:
    """Greedy answers to random prompts of several lengths, token for token."""
    checks = []
    rng = np.random.default_rng(1)
    settings = package.generation.override(
        {"max_new_tokens": DECODED_TOKENS, "ignore_eos": True, "do_sample": False, "block_size": package.model.block_size}
    )
    known = [token for token in range(package.valid_tokens) if token != package.model.mask_token_id]
    for length in PROMPT_LENGTHS:
        prompt = rng.choice(known, length).tolist()
        answers = [
            decode(s, Sequence(prompt, settings, package.model, s.max_len, package.valid_tokens)) for s in (engine, reference)
        ]
        differing = sum(a != b for a, b in zip(*answers, strict=True))
        checks.append(Check(f"tokens after a prompt of {length}", differing, 0))
    return checks


def check_layers(package: EnginePackage, model: CloverModel) -> list[Check]:
    """Every layer and the logits of `package` against the reference model, on a short fixed input."""
    graph, names = probe_graph(package)
    probed = OrtSession(package, slots=3, graph=graph, probes=names)
    limit = TOLERANCE[package.build.precision]
    return compare_layers(probed, TorchSession(model, slots=3, max_len=256), names, limit, package.valid_tokens)


def verify(package: EnginePackage, checkpoint: Checkpoint, progress: Callable[[str], None] = lambda _: None) -> list[Check]:
    """All comparisons of `package` with the reference model of `checkpoint`.

    Raises:
        EngineError: the engine was built from another checkpoint, or is not one for the CPU.
    """
    if package.build.backend != "onnxruntime":
        raise EngineError(
            f"{package.folder}: built for {package.build.gpu}; a CPU engine is compared with a checkpoint, "
            "this one on its GPU with its own record: leave --checkpoint out"
        )
    built_from, given = package.manifest["source"]["fingerprint"], checkpoint.fingerprint()
    if built_from != given:
        raise EngineError(
            f"{package.folder}: built from a checkpoint with fingerprint {built_from[:12]}…, "
            f"{checkpoint.folder} has {given[:12]}…; "
            "give the checkpoint it was built from"
        )
    progress("loading the reference model")
    model = load_model(checkpoint)
    progress("comparing layers")
    checks = check_layers(package, model)
    if package.model.mask_token_id is not None:
        progress("comparing decoded tokens")
        checks += compare_tokens(OrtSession(package), TorchSession(model, max_len=256), package)
    return checks
