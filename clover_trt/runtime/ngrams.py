"""The no-repeat n-gram ban over a response, as `transformers`' NoRepeatNGramLogitsProcessor does it over a sequence."""

from __future__ import annotations

from collections import defaultdict


class NgramBan:
    """Knows every n-gram of a response that grows by one token at a time.

    Args:
        size: n; 0 bans nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        self._tail: tuple[int, ...] = ()  # the last n - 1 tokens

    def banned(self) -> set[int]:
        """Tokens that would repeat an n-gram if they came next."""
        if not self.size or len(self._tail) < self.size - 1:
            return set()
        return self._followers.get(self._tail, set())

    def add(self, token: int) -> None:
        """The next token of the response."""
        if not self.size:
            return
        if len(self._tail) == self.size - 1:
            self._followers[self._tail].add(token)
        self._tail = (*self._tail, token)[1 - self.size :] if self.size > 1 else ()
