"""Decodes a response while it grows, for streaming."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoding yields this in place of a character whose last bytes have not arrived yet."""


class StreamedText:
    """The text of one response, up to the first stop text.

    Text is held back while it may turn out to be part of a stop text or of an incomplete character."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...]) -> None:
        self.decode = decode
        self.stop = stop
        self.found_stop = ""
        """The stop text that was found. The response ends before it."""
        self._token_ids: list[int] = []
        self._num_sent = 0

    def add(self, token_ids: tuple[int, ...], is_last: bool) -> str:
        """Add tokens, and return the new text that can be sent. With `is_last` nothing more is held back."""
        self._token_ids += token_ids
        text = self.decode(self._token_ids)
        places = ((text.find(stop, self._num_sent), stop) for stop in self.stop)
        found = [(place, stop) for place, stop in places if place >= 0]
        if found:
            end, self.found_stop = min(found)
        elif is_last:
            end = len(text)
        else:
            end = len(text.rstrip(INCOMPLETE)) - self._num_held_back(text)
        sent, self._num_sent = text[self._num_sent : end], max(self._num_sent, end)
        return sent

    @property
    def is_stopped(self) -> bool:
        return bool(self.found_stop)

    def _num_held_back(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop text."""
        lengths = [n for one in self.stop for n in range(1, len(one)) if text.endswith(one[:n])]
        return max(lengths, default=0)
