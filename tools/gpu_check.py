"""The kernels on a GPU: right against double precision, then timed alone and in a whole block step of the real size.

python tools/gpu_check.py --out gpu_check.json       # one H200: under 8 minutes
python tools/gpu_check.py --dry-run                  # no GPU: the same code over kernels that run on the CPU, at small sizes

Needs PyTorch, nvcc, CMake, Ninja and this repository; no TensorRT, no checkpoint (weights are random, made on the GPU).
Exit code 1 when a result is wrong; a missed target is reported and is no failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from clover_trt.engine.plugins import build_library  # noqa: E402
from clover_trt.errors import EngineError  # noqa: E402
from clover_trt.model.block_step import REFERENCE_OPS, CloverModel, new_caches, no_controls  # noqa: E402
from clover_trt.model.gdn import GdnCache, GdnWeights  # noqa: E402
from clover_trt.model.head import HeadOutput, vocabulary_mask  # noqa: E402
from clover_trt.model.lengths import Lengths  # noqa: E402
from clover_trt.model.moe import route, shared_expert  # noqa: E402
from clover_trt.model.ops import BlockOps  # noqa: E402
from clover_trt.parity.kernel_ops import Kernels  # noqa: E402

TPF = (3, 4, 5)
KEPT = ("A_log", "dt_bias", "block_temperature", "memory_bias", "memory_slope")  # float32 in every engine
PREFIX = 1000


def sizes(**values: Any) -> SimpleNamespace:
    """A geometry with the fields of `clover_trt.config.ModelConfig` that the model reads."""
    found = SimpleNamespace(**values)
    found.key_dim = found.linear_num_key_heads * found.linear_key_head_dim
    found.value_dim = found.linear_num_value_heads * found.linear_value_head_dim
    found.conv_dim = 2 * found.key_dim + found.value_dim
    found.rotary_dim = int(found.head_dim * found.partial_rotary_factor)
    found.layer_types = tuple("full_attention" if i % 4 == 3 else "linear_attention" for i in range(found.num_hidden_layers))
    return found


COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "linear_conv_kernel_dim": 4, "linear_right_conv_kernel_dim": 3}
REAL = sizes(
    vocab_size=248_320, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
    rope_theta=10_000_000.0, partial_rotary_factor=0.25, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, block_size=32, mask_token_id=248_319, **COMMON,
)  # fmt: skip
DRY = sizes(
    vocab_size=512, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    rope_theta=10_000.0, partial_rotary_factor=0.25, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=128,
    shared_expert_intermediate_size=32, block_size=16, mask_token_id=511, **COMMON,
)  # fmt: skip


class Gpu:
    """Times work as a CUDA graph with cold caches."""

    dry, device, rows, repeats, copy_bytes = False, torch.device("cuda"), (1, 4, 16), 20, 4 << 30
    config = REAL

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        self.name = torch.cuda.get_device_name()
        self.preset = {9: "h200", 10: "gb300"}.get(major, "portable")
        self.architecture = f"sm_{major}{minor}"
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)  # several times the second-level cache

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Median time of a call, replayed as a graph after the caches were overwritten."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        found = []
        for _ in range(self.repeats):
            self._flush.zero_()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            found.append(began.elapsed_time(ended))
        del graph
        return statistics.median(found)


class Host:
    """Runs work once on the CPU; its times say nothing about a GPU."""

    dry, device, rows, repeats, copy_bytes = True, torch.device("cpu"), (1, 2), 1, 1 << 20
    config, name, preset, architecture = DRY, "CPU harness (dry run)", "host", "host"

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Time of one call."""
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)


Machine = Gpu | Host


def run_cases(machine: Machine, folder: Path) -> list[dict[str, Any]]:
    """The table of cases against double precision, by the test programs."""
    found = []
    for operation in ("gdn", "moe", "head"):
        table = ROOT / "plugins" / "tests" / "cases.txt"
        if machine.dry:  # the whole table on the harness is what ctest runs; here its first case of each kernel
            lines = [line for line in table.read_text().splitlines() if line.startswith(operation)]
            table = folder / f"{operation}.cases.txt"
            table.write_text(lines[0] + "\n")
        done = subprocess.run([folder / f"test_{operation}", table], capture_output=True, text=True, check=False)
        output = (done.stdout + done.stderr).strip().splitlines()
        found.append({"kernel": operation, "passed": done.returncode == 0, "output": output[-30:]})
    return found


def copy_bandwidth(machine: Machine) -> float:
    """Bytes read and written a second by a plain copy, in GB/s."""
    source = torch.zeros(machine.copy_bytes, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * machine.copy_bytes / machine.milliseconds(lambda: target.copy_(source)) / 1e6


def lengths_of(machine: Machine, rows: int, tokens: int) -> Lengths:
    """A denoising pass when the tokens are one block, a fused pass when they are two."""
    block = machine.config.block_size
    values = (PREFIX, tokens - block, block)
    return Lengths(*(torch.full((rows,), value, dtype=torch.int32, device=machine.device) for value in values))


def nbytes(*tensors: Tensor) -> int:
    """Bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def time_gdn(machine: Machine, kernels: Kernels, rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    """The GDN kernel: the recurrent state is what it must move."""
    c, draw = machine.config, drawing(machine)
    qkv, a, b = (
        draw(rows, tokens, c.conv_dim),
        draw(rows, tokens, c.linear_num_value_heads),
        draw(rows, tokens, c.linear_num_value_heads),
    )
    heads = c.linear_num_value_heads
    weights = GdnWeights(
        draw(c.conv_dim, 1, 4), draw(c.conv_dim, 1, 3), *(draw(heads, dtype=torch.float32) for _ in range(5))
    )  # fmt: skip
    conv = draw(rows, c.conv_dim, 3)
    memory = draw(rows, heads, c.linear_key_head_dim, c.linear_value_head_dim, dtype=torch.float32)
    lengths = lengths_of(machine, rows, tokens)
    moved = nbytes(qkv, a, b, *weights, conv, memory) + rows * tokens * c.value_dim * 2
    moved += nbytes(conv, memory) if tokens > c.block_size else 0
    yield timed(
        machine,
        "gdn_block_scan",
        "bf16",
        rows,
        tokens,
        moved,
        lambda: kernels.gdn_block_scan(qkv, a, b, weights, conv, memory, lengths),
    )


def time_moe(machine: Machine, kernels: Kernels, rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    """The MoE kernel: every touched expert once."""
    c, draw = machine.config, drawing(machine)
    E, H, S = c.num_experts, c.hidden_size, c.shared_expert_intermediate_size
    x, router = draw(rows, tokens, H), draw(E, H, spread=1.5 * H**-0.5)
    shared = tuple(draw(*shape, spread=shape[-1] ** -0.5) for shape in ((S, H), (S, H), (H, S), (1, H)))
    mass, lengths = torch.ones(rows, device=machine.device), lengths_of(machine, rows, tokens)
    for precision in ("bf16", "e4m3", "e2m1"):
        banks, scales = expert_banks(machine, draw, precision)
        call = lambda banks=banks, scales=scales: kernels.expert_subset_moe(  # noqa: E731
            x, router, *banks, shared, lengths, mass, c.num_experts_per_tok, scales
        )
        distinct = int(call()[1].item())
        moved = nbytes(x, x, router, *shared) + distinct * nbytes(*(bank[0] for bank in (*banks, *scales)))
        yield {**timed(machine, "expert_subset_moe", precision, rows, tokens, moved, call), "distinct_experts": distinct}


def expert_banks(machine: Machine, draw: Callable[..., Tensor], precision: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Random expert banks and their scales."""
    c = machine.config
    E, H, width = c.num_experts, c.hidden_size, c.moe_intermediate_size
    shapes = ((2 * width, H), (H, width))
    full = lambda value, dtype, *shape: torch.full((E, *shape), value, device=machine.device).to(dtype)  # noqa: E731
    if precision == "bf16":
        return tuple(draw(E, *shape, spread=shape[1] ** -0.5) for shape in shapes), ()
    if precision == "e4m3":
        banks = tuple(draw(E, *shape).to(torch.float8_e4m3fn) for shape in shapes)
        return banks, tuple(full(0.02, torch.bfloat16, rows // 128, columns // 128) for rows, columns in shapes)
    draws = (torch.randint(-128, 128, (E, rows, columns // 2), device=machine.device) for rows, columns in shapes)
    groups = (full(1.0, torch.float8_e4m3fn, rows, columns // 16) for rows, columns in shapes)
    return tuple(each.to(torch.int8) for each in draws), (*groups, *(full(0.01, torch.float32, n) for n in (2, 1)))


def time_head(machine: Machine, kernels: Kernels, rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    """The head: its weights once, whatever the positions; a pass asks for one block of positions a row."""
    c, draw = machine.config, drawing(machine)
    if tokens != c.block_size:
        return
    hidden, weight = draw(rows, tokens, c.hidden_size), draw(c.vocab_size, c.hidden_size, spread=c.hidden_size**-0.5)
    mask, controls = torch.zeros(c.vocab_size, device=machine.device), on_device(machine, no_controls(rows, tokens))
    moved = nbytes(hidden, weight, mask)
    yield timed(
        machine,
        "confidence_head",
        "bf16",
        rows,
        tokens,
        moved,
        lambda: kernels.confidence_head(hidden, weight, mask, controls, 1),
    )


def timed(
    machine: Machine, kernel: str, precision: str, rows: int, tokens: int, moved: int, call: Callable[[], object]
) -> dict[str, Any]:
    """One line of the kernels' table."""
    ms = machine.milliseconds(call)
    return {"kernel": kernel, "precision": precision, "rows": rows, "tokens": tokens, "bytes": moved, "ms": ms}


def drawing(machine: Machine, seed: int = 0) -> Callable[..., Tensor]:
    """Random tensors on the device."""
    generator = torch.Generator(machine.device).manual_seed(seed)

    def draw(*shape: int, spread: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=machine.device)
        return tensor.normal_(0.0, spread, generator=generator)

    return draw


def on_device(machine: Machine, values: Any) -> Any:
    """A named tuple of tensors, on the device."""
    return type(values)(*(tensor.to(machine.device) for tensor in values))


def kernel_step_ops(kernels: Kernels) -> BlockOps:
    """The step on the kernels, as an engine runs it: states advanced in place, no logits in memory."""

    def gdn(qkv: Tensor, a: Tensor, b: Tensor, weights: GdnWeights, cache: GdnCache, lengths: Lengths) -> tuple[Tensor, GdnCache]:
        out = kernels.gdn_block_scan(qkv.contiguous(), a.contiguous(), b.contiguous(), weights, *cache, lengths)
        return out, cache

    def moe(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return kernels.expert_subset_moe(x.contiguous(), *others)

    def head(hidden: Tensor, *others: Any) -> HeadOutput:
        return kernels.confidence_head(hidden.contiguous(), *others)

    return dataclasses.replace(REFERENCE_OPS, gdn_block_scan=gdn, expert_subset_moe=moe, confidence_head=head)


def eager_moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: tuple[Tensor, ...],
    lengths: Lengths,
    mass: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """The mixture in PyTorch without a step back to the host, as a graph needs: tokens by expert, grouped GEMM."""
    weights, index = route(F.linear(x, router), lengths, mass, top_k)
    flat, chosen = x.flatten(0, 1), index.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(router.shape[0], dtype=torch.int32, device=x.device).index_add_(
        0, chosen, torch.ones_like(chosen, dtype=torch.int32)
    )
    offsets = counts.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(flat[order // top_k], gate_up.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    parts = F.grouped_mm((F.silu(gate) * up).contiguous(), down.transpose(1, 2), offs=offsets)
    out = torch.zeros_like(flat).index_add_(0, order // top_k, parts * weights.flatten()[order, None].to(x.dtype))
    return (out + shared_expert(flat, *shared)).view_as(x), (counts > 0).sum()[None]


def random_model(machine: Machine, ops: BlockOps) -> CloverModel:
    """The model of the real geometry with random weights, made on the device."""
    c: Any = machine.config
    with torch.device("meta"):
        model = CloverModel(c, None, ops)
    generator = torch.Generator(machine.device).manual_seed(1)
    state = {}
    for name, parameter in model.named_parameters():
        wide = name.endswith(KEPT)
        tensor = torch.empty(parameter.shape, dtype=torch.float32 if wide else torch.bfloat16, device=machine.device)
        spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 and "conv" not in name else 0.3
        state[name] = tensor.normal_(0.0, spread * (2.0 if name.endswith("mlp.gate.weight") else 1.0), generator=generator)
    model.load_state_dict(state, assign=True)
    model.vocab_mask = vocabulary_mask(c, c.vocab_size).to(machine.device)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def time_steps(machine: Machine, kernels: Kernels) -> dict[str, Any]:
    """A whole denoising and a fused pass: on the kernels, and one row in PyTorch alone with the same weights."""
    c: Any = machine.config
    model = random_model(machine, kernel_step_ops(kernels))
    with torch.device("meta"):
        plain = CloverModel(c, None, dataclasses.replace(REFERENCE_OPS, expert_subset_moe=eager_moe))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.vocab_mask = model.vocab_mask
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    others = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name and "embed_tokens" not in name)
    each = experts // c.num_hidden_layers // c.num_experts
    rows_found, agreement, failures = [], {}, []
    for rows in machine.rows:
        for tokens in (c.block_size, 2 * c.block_size):
            lengths, mass = lengths_of(machine, rows, tokens), torch.ones(rows, device=machine.device)
            ids = torch.randint(0, c.vocab_size, (rows, tokens), device=machine.device)
            index = torch.arange(tokens - c.block_size, tokens, device=machine.device)[None].expand(rows, -1).contiguous()
            caches = [
                type(cache)(*(t.to(machine.device) for t in cache))
                for cache in new_caches(c, rows, PREFIX + 2 * tokens, torch.bfloat16)
            ]
            states = sum(nbytes(*cache) for cache in caches if isinstance(cache, GdnCache)) * (2 if tokens > c.block_size else 1)
            held = sum(nbytes(*cache) for cache in caches if not isinstance(cache, GdnCache)) * PREFIX // (PREFIX + 2 * tokens)
            controls = on_device(machine, no_controls(rows, c.block_size))

            def step(
                which: CloverModel, ids=ids, lengths=lengths, index=index, mass=mass, controls=controls, caches=caches
            ) -> Any:  # type: ignore[no-untyped-def]
                return which(ids, lengths, index, mass, controls, caches)

            first = rows == machine.rows[0]
            if first and tokens == c.block_size:
                # Rounding moves tokens near a tie of two experts to the other one, so only the usual token of the first layer
                # is judged; what 40 layers make of it is told.
                pairs = list(zip(*(step(which).hidden for which in (model, plain)), strict=True))
                apart = [((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)) for a, b in (pairs[1], pairs[-1])]
                agreement = {"first_layer_median": float(apart[0].median()), "last_layer_median": float(apart[1].median())}
            for share in (1.0, 0.9, 0.7) if first else (1.0,):
                mass.fill_(share)
                distinct = step(model).distinct_experts.tolist()
                moved = others + states + held + each * sum(distinct)
                row = {
                    "rows": rows,
                    "tokens": tokens,
                    "expert_mass": share,
                    "distinct_experts": statistics.mean(distinct),
                    "bytes": moved,
                }
                rows_found.append({**row, "program": "kernels", "ms": machine.milliseconds(lambda: step(model))})
                if first:
                    try:
                        rows_found.append({**row, "program": "eager PyTorch", "ms": machine.milliseconds(lambda: step(plain))})
                    except RuntimeError as error:  # an operator of PyTorch that this version can't put into a graph
                        failures.append(f"eager PyTorch, {tokens} tokens, mass {share}: {error}")
    return {"weights_gb": (experts + others) / 1e9, "against_eager": agreement, "passes": rows_found, "failures": failures}


def rated(row: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """A line with what its bytes take at the measured bandwidth (GB/s), and the share of the bandwidth it reached."""
    floor = row["bytes"] / bandwidth / 1e6
    return {**row, "floor_ms": floor, "fraction": floor / row["ms"]}


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What the kernels are to reach on an H200, and what was found; a dry run judges nothing."""
    found: list[tuple[str, float, float]] = []
    for row in report["kernels"]:
        if row["rows"] == 1 and row["kernel"] != "confidence_head":
            name = f"{row['kernel']} {row['precision']}, {row['tokens']} tokens: share of the copy bandwidth"
            found.append((name, row["fraction"], 0.8))
    passes = {(r["program"], r["tokens"]): r for r in report["step"]["passes"] if (r["rows"], r["expert_mass"]) == (1, 1.0)}
    for (program, tokens), row in passes.items():
        if program == "kernels":
            found.append((f"whole pass, {tokens} tokens: floor over time", row["fraction"], 1 / 1.25))
            eager = passes.get(("eager PyTorch", tokens))
            if eager is not None:
                found.append((f"whole pass, {tokens} tokens: times the passes of eager PyTorch", eager["ms"] / row["ms"], 1.5))
    judged = not report["dry_run"]
    return [
        {"target": name, "wanted": wanted, "found": value, "met": value >= wanted if judged else None}
        for name, value, wanted in found
    ]


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    print(f"\n{report['machine']}, copy {report['copy_gb_s']:,.0f} GB/s (read and written)\n")
    print(f"{'kernel':<20}{'type':<6}{'rows':>5}{'tokens':>7}{'MB':>10}{'ms':>10}{'floor ms':>10}{'share':>8}")
    for r in report["kernels"]:
        print(
            f"{r['kernel']:<20}{r['precision']:<6}{r['rows']:>5}{r['tokens']:>7}{r['bytes'] / 1e6:>10,.1f}{r['ms']:>10.3f}"
            f"{r['floor_ms']:>10.3f}{r['fraction']:>8.0%}"
        )
    heads = "".join(f"{'tok/s TPF ' + str(tpf):>13}" for tpf in TPF)
    print(f"\n{'pass':<15}{'rows':>5}{'tokens':>7}{'mass':>6}{'experts':>9}{'GB':>8}{'ms':>9}{'floor':>8}{'over':>7}{heads}")
    for r in report["step"]["passes"]:
        rates = "".join(f"{rate:>13,.0f}" for rate in r["tokens_per_second"].values())
        print(
            f"{r['program']:<15}{r['rows']:>5}{r['tokens']:>7}{r['expert_mass']:>6.1f}{r['distinct_experts']:>9.1f}"
            f"{r['bytes'] / 1e9:>8.2f}{r['ms']:>9.2f}{r['floor_ms']:>8.2f}{r['ms'] / r['floor_ms']:>7.2f}{rates}"
        )
    for each in report["targets"]:
        verdict = {True: "met", False: "MISSED", None: "not judged"}[each["met"]]
        print(f"{verdict:<11}{each['target']}: {each['found']:.2f}, target {each['wanted']}")
    for each in report["step"]["failures"]:
        print(f"not measured: {each}")
    if report["dry_run"]:
        print("\ndry run: every time above is of a thread-by-thread simulation on the CPU and says nothing about a GPU")


def save(report: dict[str, Any], out: Path | None) -> None:
    """Write what there is so far, so that a run cut short leaves its results."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU harness at small sizes")
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("error: no CUDA device that PyTorch can use; --dry-run needs none")
    torch.manual_seed(0)
    began = time.monotonic()
    machine: Machine = Host() if options.dry_run else Gpu()
    try:
        folder = build_library(machine.preset, print, everything=True, adapters=False).parent
        kernels = Kernels(next(folder.glob("libclover_*.so")))
    except EngineError as failure:
        sys.exit(f"error: {failure}")
    report: dict[str, Any] = {"machine": machine.name, "architecture": machine.architecture, "dry_run": machine.dry}
    report |= {"torch": torch.__version__, "copy_gb_s": copy_bandwidth(machine), "cases": run_cases(machine, folder)}
    save(report, options.out)
    for case in report["cases"]:
        print(f"{case['kernel']}: {'ok' if case['passed'] else 'WRONG'}")
        if not case["passed"]:
            print("\n".join(case["output"]))
    lines = []
    block = machine.config.block_size
    for measure in (time_gdn, time_moe, time_head):
        for rows in machine.rows:
            for tokens in (block, 2 * block):
                lines += [rated(row, report["copy_gb_s"]) for row in measure(machine, kernels, rows, tokens)]
                print(f"timed {measure.__name__.removeprefix('time_')}, {rows} rows of {tokens}", flush=True)
    report["kernels"] = lines
    save(report, options.out)
    report["step"] = time_steps(machine, kernels)
    passes = [rated(row, report["copy_gb_s"]) for row in report["step"]["passes"]]
    for row in passes:
        row["tokens_per_second"] = {f"{tpf}": row["rows"] * tpf / row["ms"] * 1e3 for tpf in TPF}
    report["step"]["passes"] = passes
    report["targets"] = targets(report)
    report["seconds"] = time.monotonic() - began
    show(report)
    save(report, options.out)
    right = all(case["passed"] for case in report["cases"]) and report["step"]["against_eager"]["first_layer_median"] < 0.02
    print(f"\n{'results are right' if right else 'RESULTS ARE WRONG'}; {report['seconds']:.0f} s")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
