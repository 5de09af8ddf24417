"""Training of clover-tiny: rows of prefix and one noisy block, with a causal loss on committed answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jinja2 import Template
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from clover_trt.config import ModelConfig
from clover_trt.model.block_step import REFERENCE_OPS, CloverModel, new_caches
from clover_trt.model.lengths import Lengths
from clover_trt.model.moe import route, shared_expert
from tiny.tasks import Example, examples
from tiny.tokenizer import CHAT_TEMPLATE

IGNORE = -100
CAUSAL_SHARE = 0.2  # of the rows: the whole answer committed, no noisy block
FULLY_MASKED_SHARE = 0.4  # of the noisy blocks: as the first pass sees them
FILLER_WEIGHT = 0.1  # loss weight of the tokens after the end of the turn
BALANCE_WEIGHT = 0.01  # load-balancing loss, https://arxiv.org/abs/2101.03961


def tiny_config(vocab_size: int, mask_token_id: int) -> ModelConfig:
    """Geometry of clover-tiny: the full Clover block at small size."""
    layers = 8
    return ModelConfig(
        model_type="clover_moe",
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        partial_rotary_factor=0.5,
        max_position_embeddings=4096,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=64,
        layer_types=tuple("full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)),
        block_size=32,
        mask_token_id=mask_token_id,
        linear_right_conv_kernel_dim=3,
    )


def prompt_text(example: Example) -> str:
    """The prompt as the chat template renders it."""
    messages = [{"role": "user", "content": example.prompt}]
    thinking = example.thinking is not None
    return Template(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True, enable_thinking=thinking)


def answer_text(example: Example) -> str:
    """What the model is to write after the prompt, the end of the turn aside."""
    head = f"{example.thinking}\n</think>\n\n" if example.thinking is not None else ""
    return head + example.answer


@dataclass(frozen=True)
class Row:
    """One training row: ids as the model sees them, targets (`IGNORE` where none) and the two lengths."""

    ids: list[int]
    targets: list[int]
    commit_len: int
    noisy_len: int


@dataclass(frozen=True)
class Batch:
    """Stacked rows: ids and targets `[B, T]` int64, lengths `[B]`."""

    ids: Tensor
    targets: Tensor
    lengths: Lengths


class RowMaker:
    """Turns examples into rows: a random block of the answer is noisy, everything before it committed."""

    def __init__(self, tokenizer: Tokenizer, block_size: int) -> None:
        self.tokenizer, self.block = tokenizer, block_size
        names = ("<|im_end|>", "<|endoftext|>", "<|mask|>")
        self.end, self.filler, self.mask = (tokenizer.token_to_id(name) for name in names)

    def row(self, example: Example, rng: random.Random) -> Row:
        """A causal row, or one noisy block with part of its tokens masked."""
        prompt = self.tokenizer.encode(prompt_text(example), add_special_tokens=False).ids
        answer = [*self.tokenizer.encode(answer_text(example), add_special_tokens=False).ids, self.end]
        if rng.random() < CAUSAL_SHARE:
            targets = [IGNORE] * (len(prompt) - 1) + answer + [IGNORE]
            return Row(prompt + answer, targets, len(prompt) + len(answer), 0)
        start = rng.randrange((len(answer) + self.block - 1) // self.block) * self.block
        committed = prompt + answer[:start]
        block = answer[start : start + self.block]
        block += [self.filler] * (self.block - len(block))
        share = 1.0 if rng.random() < FULLY_MASKED_SHARE else rng.random()
        hidden = [rng.random() < share for _ in block]
        hidden[rng.randrange(self.block)] = True
        noisy = [self.mask if h else token for token, h in zip(block, hidden, strict=True)]
        causal = [IGNORE] * (len(prompt) - 1) + answer[:start] + [IGNORE]
        targets = (causal if start else [IGNORE] * len(committed)) + [
            t if h else IGNORE for t, h in zip(block, hidden, strict=True)
        ]
        return Row(committed + noisy, targets, len(committed), self.block)

    def batches(self, seed: int, pool: int, rows: int, count: int) -> list[Batch]:
        """`count` batches of `rows` rows from pool number `pool`, rows of like length together.

        A pool depends on (seed, pool) alone, so that training resumes exactly.
        """
        rng = random.Random(f"rows {seed} {pool}")
        source: Iterator[Example] = examples(f"train {seed} {pool}", "train")
        made = sorted((self.row(next(source), rng) for _ in range(rows * count)), key=lambda row: len(row.ids))
        batches = [self._stack(made[i * rows : (i + 1) * rows]) for i in range(count)]
        rng.shuffle(batches)
        return batches

    def _stack(self, rows: list[Row]) -> Batch:
        width = max(len(row.ids) for row in rows)
        ids = torch.tensor([row.ids + [self.filler] * (width - len(row.ids)) for row in rows])
        targets = torch.tensor([row.targets + [IGNORE] * (width - len(row.targets)) for row in rows])
        commit = torch.tensor([row.commit_len for row in rows], dtype=torch.int32)
        noisy = torch.tensor([row.noisy_len for row in rows], dtype=torch.int32)
        return Batch(ids, targets, Lengths(torch.zeros_like(commit), commit, noisy))


class Balance:
    """The mixture as one dense product over all experts, quick to differentiate at this size; collects the
    load-balancing loss of the layers that ran since it was last taken."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def expert_subset_moe(
        self,
        x: Tensor,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        shared: tuple[Tensor, ...],
        lengths: Lengths,
        mass: Tensor,
        top_k: int,
    ) -> tuple[Tensor, Tensor]:
        """Equals `clover_trt.model.moe.expert_subset_moe`; distinct experts are not counted."""
        logits = F.linear(x, router)
        weights, index = route(logits, lengths, mass, top_k)
        E, _, H = gate_up.shape
        dense = torch.zeros_like(logits).scatter(2, index, weights).flatten(0, 1)  # [N, E]
        flat = x.flatten(0, 1)
        gate, up = (flat @ gate_up.flatten(0, 1).T).view(len(flat), E, -1).chunk(2, dim=-1)
        hidden = F.silu(gate) * up * dense[..., None]
        out = hidden.flatten(1) @ down.transpose(1, 2).reshape(-1, H)
        load = (dense > 0).float().mean(0) / top_k
        self.losses.append(E * (load * torch.softmax(logits.flatten(0, 1), -1).mean(0)).sum())
        return (out + shared_expert(flat, *shared)).view_as(x), torch.zeros(1, dtype=torch.int64)

    def take(self) -> Tensor:
        """Mean of the collected losses."""
        total = torch.stack(self.losses).mean()
        self.losses.clear()
        return total


def new_model(config: ModelConfig, valid_tokens: int, seed: int, balance: Balance) -> CloverModel:
    """A freshly initialised model; the decay starts slow, as in https://arxiv.org/abs/2405.21060."""
    torch.manual_seed(seed)
    ops = replace(REFERENCE_OPS, expert_subset_moe=balance.expert_subset_moe)
    model = CloverModel(config, valid_tokens, ops)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.exp(torch.empty_like(parameter).uniform_(-6.9, -2.3))
            parameter.data = step + torch.log(-torch.expm1(-step))
        elif name.endswith("block_temperature"):
            torch.nn.init.constant_(parameter, 2.0)
        elif name.endswith("memory_bias"):
            torch.nn.init.constant_(parameter, 4.0)  # about as much as the 32 entries of the block together
        elif name.endswith("memory_slope"):
            torch.nn.init.constant_(parameter, 0.25)
        elif ".experts." in name:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def losses(model: CloverModel, batch: Batch, filler: int) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the masked tokens of noisy blocks, and of the next token of committed answers."""
    rows, width = batch.ids.shape
    states, _, _ = model.hidden(batch.ids, batch.lengths, torch.ones(rows), new_caches(model.config, rows, width))
    logits = model.lm_head(model.model.norm(states[-1])) + model.vocab_mask
    each = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="none")
    each = each.view(rows, width) * torch.where(batch.targets == filler, FILLER_WEIGHT, 1.0)
    used = (batch.targets != IGNORE) * torch.where(batch.targets == filler, FILLER_WEIGHT, 1.0)
    committed, noisy = batch.lengths.masks(width)
    return tuple((each * mask).sum() / (used * mask).sum().clamp(min=1) for mask in (noisy, committed))  # type: ignore[return-value]
