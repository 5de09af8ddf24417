"""Train clover-tiny from scratch on the CPU; see docs/clover-tiny.md for the run that made the shipped weights.

python tools/train_tiny.py --out out/tiny            # starts, or resumes what is there
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny.release import write_checkpoint
from tiny.tokenizer import build_tokenizer
from tiny.training import BALANCE_WEIGHT, Balance, RowMaker, losses, new_model, tiny_config

from clover_trt.model.block_step import CloverModel

POOL = 8  # batches sorted together by length


def learning_rate(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def save_state(
    folder: Path, model: CloverModel, optimizer: torch.optim.Optimizer, step: int, settings: dict[str, object]
) -> None:
    """Write weights and optimizer moments as one safetensors file, replaced in one move."""
    tensors = {f"model/{name}": value.contiguous() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"adam/{names[index]}/{key}": value.clone() for key, value in moments.items()}
    save_file(tensors, folder / "state.tmp", metadata={"step": str(step), "settings": json.dumps(settings)})
    os.replace(folder / "state.tmp", folder / "state.safetensors")


def load_state(folder: Path, model: CloverModel, optimizer: torch.optim.Optimizer, settings: dict[str, object]) -> int:
    """Restore what `save_state` wrote; returns the step to go on from (0 when there is nothing)."""
    path = folder / "state.safetensors"
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    if json.loads(metadata["settings"]) != settings:
        raise typer.BadParameter(f"{path} was trained with {metadata['settings']}, not {json.dumps(settings)}; use another --out")
    tensors = load_file(path)
    model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model/")})
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, (name, _) in enumerate(model.named_parameters()):
        prefix = f"adam/{name}/"
        state[index] = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(metadata["step"])


def main(
    out: Annotated[Path, typer.Option(help="Folder of the training state.")] = Path("out/tiny"),
    steps: Annotated[int, typer.Option(min=1)] = 6000,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 32,
    peak: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    seed: int = 1,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    stop_after: Annotated[int, typer.Option(help="Stop after this many steps of this run; 0 = at the end.")] = 0,
) -> None:
    """Train clover-tiny; progress every 50 steps, state saved every 500, the checkpoint written at the end."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    size = tokenizer.get_vocab_size()
    maker = RowMaker(tokenizer, block_size=32)
    balance = Balance()
    model = new_model(tiny_config(-(-size // 64) * 64, maker.mask), size, seed, balance)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters, {2 * count / 1e6:.2f} MB in bfloat16, vocabulary {size}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    settings: dict[str, object] = {"steps": steps, "rows": rows, "peak": peak, "seed": seed}
    first = load_state(out, model, optimizer, settings)
    last = min(steps, first + stop_after) if stop_after else steps
    began, noisy_sum, causal_sum, batches = time.perf_counter(), 0.0, 0.0, []
    for step in range(first, last):
        if step % POOL == 0 or not batches:
            batches = maker.batches(seed, step // POOL, rows, POOL)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        noisy, causal = losses(model, batches[step % POOL], maker.filler)
        (noisy + 0.3 * causal + BALANCE_WEIGHT * balance.take()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        noisy_sum, causal_sum = noisy_sum + noisy.item(), causal_sum + causal.item()
        if (step + 1) % 50 == 0:
            pace = (time.perf_counter() - began) / (step + 1 - first)
            print(
                f"step {step + 1}/{steps}  denoise loss {noisy_sum / 50:.4f}  causal loss {causal_sum / 50:.4f}  "
                f"{pace:.3f} s/step  {(last - step - 1) * pace / 60:.0f} min left",
                flush=True,
            )
            noisy_sum = causal_sum = 0.0
        if (step + 1) % 500 == 0 or step + 1 == last:
            save_state(out, model, optimizer, step + 1, settings)
    write_checkpoint(model, tokenizer, out / "checkpoint")
    print(f"wrote {out / 'checkpoint'}", flush=True)


if __name__ == "__main__":
    typer.run(main)
