"""The four operations that targets implement in their own way.

The reference, the exporter and the training program each pass their own `BlockOps` to the model, so that
the layers around the operations exist once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BlockOps:
    """Implementations of the operations, with the signatures of the reference functions named beside them."""

    block_attention: Callable[..., Any]  # attention.block_attention
    gdn_block_scan: Callable[..., Any]  # gdn.gdn_block_scan
    expert_subset_moe: Callable[..., Any]  # moe.expert_subset_moe
    confidence_head: Callable[..., Any]  # head.confidence_head
