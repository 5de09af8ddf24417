"""Tokens that may not come next in a response: repeated n-grams and bad words, as `transformers`' NoRepeatNGramLogitsProcessor
and NoBadWordsLogitsProcessor rule them out of a sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class TokenBans:
    """Knows the n-grams and the end of a response that grows by one token at a time.

    Args:
        ngram_size: n of the n-grams that may not come again; 0 for none.
        words: token sequences that the response may not have.
    """

    def __init__(self, ngram_size: int = 0, words: Sequence[Sequence[int]] = ()) -> None:
        self._size = ngram_size
        self.always = frozenset(word[0] for word in words if len(word) == 1)
        self._words = [tuple(word) for word in words if len(word) > 1]
        self._longest = max([ngram_size, *map(len, self._words)]) - 1
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        self._tail: tuple[int, ...] = ()  # the last tokens, as many as matter

    @property
    def ordered(self) -> bool:
        """Whether what is banned depends on the tokens before, so that a block must fill from left to right."""
        return bool(self._size or self._words)

    def _before(self, count: int) -> tuple[int, ...]:
        return self._tail[len(self._tail) - count :]

    def banned(self) -> set[int]:
        """Tokens that may not come next."""
        found = set(self.always)
        if self._size and len(self._tail) >= self._size - 1:
            found |= self._followers.get(self._before(self._size - 1), set())
        for word in self._words:
            if len(self._tail) >= len(word) - 1 and self._before(len(word) - 1) == word[:-1]:
                found.add(word[-1])
        return found

    def add(self, token: int) -> None:
        """The next token of the response."""
        if not self.ordered:
            return
        if self._size and len(self._tail) >= self._size - 1:
            self._followers[self._before(self._size - 1)].add(token)
        self._tail = (*self._tail, token)[-self._longest :] if self._longest > 0 else ()
