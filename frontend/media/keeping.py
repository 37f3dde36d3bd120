"""Which prepared media are worth keeping, where callers send more in turn than can be kept.

Keeping a medium costs messages, and memory that is in no processor's cache: a slot that is not kept is used for the next one.
That pays if the medium is sent again before it has gone. If callers send more media in turn than can be kept, or hardly any
medium twice, each new one pushes out another in vain, and none is ever found. Then it is better to keep the old ones: new media
cost no messages, and old ones that are sent again are found.

Theory of operation. A *round* is over when this frontend has prepared more than the engine may keep: to keep all of it would
have pushed something out. If fewer were found in a round than a sixteenth of what was prepared, keeping was in vain, and the
next eight rounds are *selective*: a medium is kept if it is prepared again soon, which means before other media of half of what
the engine may keep. So one that everybody begins to ask about is prepared twice by the same frontend, and found from then on.
After those rounds, everything is kept for a round, to see whether that pays now.

A frontend does not know what others prepare and find. It need not: under the same load, each comes to the same conclusion.

Invariant: the remembered keys are bounded, in number and in bytes of their media.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Keeping"]

# Decoding takes ten times the CPU of keeping, and more: where one is found for 16 that are kept, that about pays.
_PREPARED_FOR_ONE_FOUND = 16
_SELECTIVE_ROUNDS = 8  # so at most one round in nine is spent on trying
_MAX_REMEMBERED = 4096  # keys of small media; half a megabyte
_LEAST_NBYTES = 4096  # what the smallest medium takes of the slab


class Keeping:
    """Decides for one frontend, and one life of an engine, which of the media that it has prepared are kept.

    Args:
        kept_nbytes: how much the engine keeps at most.
    """

    def __init__(self, kept_nbytes: int) -> None:
        self._kept_nbytes = kept_nbytes
        self._selective_rounds = 0  # that are left
        self._found = self._prepared = self._prepared_nbytes = 0  # in this round
        self._recent: OrderedDict[bytes, int] = OrderedDict()  # bytes by key of what was prepared, the latest last
        self._recent_nbytes = 0

    @property
    def is_selective(self) -> bool:
        """Whether only what is prepared again soon is worth keeping."""
        return self._selective_rounds > 0

    def found(self, count: int) -> None:
        """So many media of a request were there already."""
        self._found += count

    def prepared(self, key: bytes, nbytes: int) -> bool:
        """Counts a medium that was prepared just now; returns whether it is worth keeping."""
        nbytes = max(nbytes, _LEAST_NBYTES)
        is_worth_it = self._remember(key, nbytes) or not self.is_selective
        self._prepared += 1
        self._prepared_nbytes += nbytes
        if self._prepared_nbytes > self._kept_nbytes:
            self._end_round()
        return is_worth_it

    def _remember(self, key: bytes, nbytes: int) -> bool:
        """Returns whether a medium was prepared shortly before."""
        is_known = key in self._recent
        if is_known:
            self._recent_nbytes -= self._recent.pop(key)
        self._recent[key] = nbytes
        self._recent_nbytes += nbytes
        while len(self._recent) > _MAX_REMEMBERED or (self._recent_nbytes > self._kept_nbytes // 2 and len(self._recent) > 1):
            self._recent_nbytes -= self._recent.popitem(last=False)[1]
        return is_known

    def _end_round(self) -> None:
        if self._selective_rounds:
            self._selective_rounds -= 1
        elif self._found * _PREPARED_FOR_ONE_FOUND < self._prepared:
            self._selective_rounds = _SELECTIVE_ROUNDS
        self._found = self._prepared = self._prepared_nbytes = 0
