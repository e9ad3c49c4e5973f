"""Decodes a response while it grows, for streaming."""

from __future__ import annotations

from penstock_rollout.text.tokenization import Tokenization

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoding yields this in place of a character whose last bytes have not arrived yet."""


class StreamedText:
    """The text of one response, up to the first stop text.

    Text is held back while it may turn out to be part of a stop text or of an incomplete character."""

    def __init__(self, tokenization: Tokenization, stop: tuple[str, ...]) -> None:
        self.tokenization = tokenization
        self.stop = stop
        self.is_stopped = False
        """Whether a stop text was found. The response ends before it."""
        self._token_ids: list[int] = []
        self._num_sent = 0

    def add(self, token_ids: tuple[int, ...], is_last: bool) -> str:
        """Add tokens, and return the new text that can be sent. With `is_last` nothing more is held back."""
        self._token_ids += token_ids
        text = self.tokenization.text(self._token_ids)
        found = [place for place in (text.find(stop, self._num_sent) for stop in self.stop) if place >= 0]
        if found:
            self.is_stopped, end = True, min(found)
        elif is_last:
            end = len(text)
        else:
            end = len(text.rstrip(INCOMPLETE)) - self._num_held_back(text)
        sent, self._num_sent = text[self._num_sent : end], max(self._num_sent, end)
        return sent

    def _num_held_back(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop text."""
        lengths = [n for one in self.stop for n in range(1, len(one)) if text.endswith(one[:n])]
        return max(lengths, default=0)
