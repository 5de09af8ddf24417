"""Reuse of earlier turns: snapshots of a slot at commit points, found again by the tokens that led there.

Snapshots form a tree. Each holds the key and value rows of its own tokens only and the recurrent states after them, so a
conversation that grows turn by turn stores every row once. A snapshot's key is a hash over its parent's key and its tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clover_trt.runtime.session import Session, Snapshot

ROOT = b""


@dataclass
class _Node:
    parent: bytes
    snapshot: Snapshot
    children: Counter[int]  # how many children have a segment of that length


@dataclass
class PrefixStatistics:
    """What a prefix cache has done, and what it holds now."""

    lookups: int = 0
    hits: int = 0
    reused_tokens: int = 0
    evictions: int = 0
    bytes: int = 0
    snapshots: int = 0


class PrefixCache:
    """Snapshots within a budget of host memory; the one not used for longest goes first, leaves before what they stand on.

    Args:
        budget_bytes: memory that snapshots may take together.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.statistics = PrefixStatistics()
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()  # the least recently used first
        self._root: Counter[int] = Counter()

    def match(self, tokens: Sequence[int]) -> list[Snapshot]:
        """The longest stored chain of snapshots whose tokens `tokens` begins with; empty when there is none."""
        self.statistics.lookups += 1
        chain = self._walk(tokens)
        if chain:
            self.statistics.hits += 1
            self.statistics.reused_tokens += self._nodes[chain[-1]].snapshot.end
        return [self._nodes[key].snapshot for key in chain]

    def store(self, tokens: Sequence[int], session: Session, slot: int) -> None:
        """Keep the state of a slot whose caches hold exactly `tokens`."""
        assert len(tokens) == int(session.prefix_len[slot])
        chain = self._walk(tokens)
        begin = self._nodes[chain[-1]].snapshot.end if chain else 0
        if begin == len(tokens):
            return
        parent = chain[-1] if chain else ROOT
        snapshot = session.save(slot, begin)
        self._nodes[_key(parent, tokens[begin:])] = _Node(parent, snapshot, Counter())
        self._children(parent)[len(tokens) - begin] += 1
        self.statistics.bytes += snapshot.nbytes
        self._evict()
        self.statistics.snapshots = len(self._nodes)

    def _children(self, key: bytes) -> Counter[int]:
        return self._nodes[key].children if key != ROOT else self._root

    def _walk(self, tokens: Sequence[int]) -> list[bytes]:
        """Keys of the longest chain, each marked as used just now, the ones that others stand on last."""
        best: list[bytes] = []
        at, key, chain = 0, ROOT, []
        while True:
            lengths = sorted((n for n in self._children(key) if at + n <= len(tokens)), reverse=True)
            found = next((k for n in lengths if (k := _key(key, tokens[at : at + n])) in self._nodes), None)
            if found is None:
                break
            key = found
            chain.append(key)
            at = self._nodes[key].snapshot.end
            best = chain
        for each in reversed(best):
            self._nodes.move_to_end(each)
        return best

    def _evict(self) -> None:
        while self.statistics.bytes > self.budget_bytes and self._nodes:
            key = next(key for key, node in self._nodes.items() if not node.children)
            node = self._nodes.pop(key)
            siblings = self._children(node.parent)
            size = node.snapshot.end - node.snapshot.begin
            siblings[size] -= 1
            if not siblings[size]:
                del siblings[size]
            self.statistics.bytes -= node.snapshot.nbytes
            self.statistics.evictions += 1


def _key(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(parent + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()
