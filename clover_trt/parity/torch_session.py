"""The reference model behind the session protocol: slow, plain, and what every engine is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from clover_trt.graph.contract import cache_names
from clover_trt.model.attention import AttentionCache
from clover_trt.model.block_step import CloverModel, new_caches
from clover_trt.model.gdn import GdnCache
from clover_trt.model.head import Controls
from clover_trt.model.lengths import Lengths
from clover_trt.runtime.session import ControlInput, Snapshot, StepInput, StepOutput, check_step, is_row_cache


class TorchSession:
    """`CloverModel` with caches for `slots` rows of up to `max_len` tokens.

    After each step `hidden` holds the hidden states `[B, T, H]` after the embedding and after each layer.
    """

    def __init__(self, model: CloverModel, *, slots: int = 1, max_len: int = 1024) -> None:
        self.model, self.config, self.slots = model, model.config, slots
        self.max_len = max_len
        self.prefix_len: NDArray[np.int32] = np.zeros(slots, np.int32)
        dtype = model.lm_head.weight.dtype
        self._caches = new_caches(self.config, slots, max_len, dtype)
        self.hidden: list[NDArray[np.float32]] = []

    def reset(self, slot: int) -> None:
        """Empty a slot."""
        self.prefix_len[slot] = 0
        for cache in self._caches:
            for tensor in cache:
                tensor[slot] = 0

    def _named(self) -> dict[str, torch.Tensor]:
        names = (name for pair in cache_names(self.config) for name in pair)
        return dict(zip(names, (tensor for cache in self._caches for tensor in cache), strict=True))

    def save(self, slot: int, begin: int) -> Snapshot:
        """Copy the state of a slot, with the key and value rows of its tokens from `begin` on; float32 models only."""
        end, caches = int(self.prefix_len[slot]), self._named()
        rows = {name: cache[slot, :, begin:end].numpy().copy() for name, cache in caches.items() if is_row_cache(name)}
        states = {name: cache[slot].numpy().copy() for name, cache in caches.items() if not is_row_cache(name)}
        return Snapshot(begin, end, rows, states)

    def load(self, slot: int, chain: Sequence[Snapshot]) -> None:
        """Put a slot into the state of the last snapshot."""
        caches = self._named()
        for part in chain:
            for name, rows in part.rows.items():
                caches[name][slot, :, part.begin : part.end] = torch.from_numpy(rows)
        for name, state in chain[-1].states.items():
            caches[name][slot] = torch.from_numpy(state)
        self.prefix_len[slot] = chain[-1].end

    def cache_bytes(self) -> int:
        """Bytes of the caches of all slots."""
        return sum(tensor.nbytes for cache in self._caches for tensor in cache)

    @torch.no_grad()
    def step(self, step: StepInput) -> StepOutput:
        """Run one block step over B neighbouring slots."""
        check_step(self, step)
        slots = step.slots
        lengths = Lengths(*(torch.from_numpy(x.copy()) for x in (self.prefix_len[slots], step.commit_len, step.noisy_len)))
        rows = [type(cache)(*(tensor[slots] for tensor in cache)) for cache in self._caches]
        mass = torch.from_numpy(step.expert_mass)
        ids, index = torch.from_numpy(step.input_ids), torch.from_numpy(step.logit_index)
        out = self.model(ids, lengths, index, mass, control_tensors(step.controls), rows, step.candidates)
        for cache, fresh in zip(self._caches, out.caches, strict=True):
            _write(cache, fresh, slots)
        self.hidden = [state.float().numpy() for state in out.hidden]
        self.prefix_len[slots] += step.commit_len
        logits = out.head.logits.numpy() if step.want_logits else None
        return StepOutput(
            out.head.candidate_ids.numpy(), out.head.candidate_logprobs.numpy(), out.distinct_experts.numpy(), logits
        )


def control_tensors(controls: ControlInput) -> Controls:
    """Controls of a session's step as the model takes them."""
    return Controls(*(torch.from_numpy(getattr(controls, name)) for name in Controls._fields))


def _write(cache: AttentionCache | GdnCache, fresh: AttentionCache | GdnCache, slots: slice) -> None:
    for target, source in zip(cache, fresh, strict=True):
        target[slots] = source
