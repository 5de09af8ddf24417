"""Which positions of a row are committed, noisy or padding.

Shapes in this package: B rows (slots), T tokens of this call, L positions that get logits, H hidden,
V vocabulary, E experts, K experts per token, C channels under the convolution, M cache length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Lengths(NamedTuple):
    """Row lengths, each `[B]` int32: tokens in the caches, tokens to append to them, noisy tokens after those."""

    prefix_len: Tensor
    commit_len: Tensor
    noisy_len: Tensor

    def masks(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Masks over the T tokens of each row.

        Returns:
            committed, noisy: `[B, T]` bool; a token in neither is padding.
        """
        index = torch.arange(tokens, device=self.commit_len.device)[None]  # [1, T]
        committed = index < self.commit_len[:, None]
        noisy = (index >= self.commit_len[:, None]) & (index < (self.commit_len + self.noisy_len)[:, None])
        return committed, noisy
