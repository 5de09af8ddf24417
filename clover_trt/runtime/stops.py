"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Passes text on up to the first stop string; a tail that may yet become one waits.

    Args:
        stops: non-empty strings. The one that is complete first wins (of two complete at once, the longer), so that
            the answer does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str, *, final: bool = False) -> str:
        """Text that is safe to show after `piece`; empty once a stop string was found.

        Args:
            final: whether no more text follows; what was held comes out.
        """
        if self.found:
            return ""
        text = self._held + piece
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self.found, self._held = True, ""
            return text[: min(hits)[1]]
        keep = 0 if final else self._tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _tail(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
