"""Scores of altered copies against their originals, beside those of originals against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources

import msgspec
import torch

_CLEAR = 0.9  # more than two different originals of any kind ever have


class Score(msgspec.Struct, frozen=True):
    """What became of one alteration: cosines of all copies and their originals, and how many are nearest to their own."""

    alteration: str
    lowest: float
    mean: float
    found: int
    copies: int

    @property
    def is_clear(self) -> bool:
        """Whether all copies were found, and none of them was near the limit: then a table need not show it."""
        return self.found == self.copies and self.lowest >= _CLEAR


class Kind(msgspec.Struct, frozen=True):
    """What is measured of one kind of thing; ``between`` are cosines of two different originals."""

    name: str
    originals: int
    highest_between: float
    mean_between: float
    scores: Sequence[Score]

    def markdown(self) -> str:
        """Returns a heading, the alterations that change little, and a table of the others."""
        between = f"at most **{self.highest_between:.2f}**, {self.mean_between:.2f} on average"
        clear = [row.alteration for row in self.scores if row.is_clear]
        lines = [
            f"### {self.name}",
            "",
            f"{self.originals} originals. Two different ones: {between}. All copies found, with a score of {_CLEAR} or more: "
            f"{'; '.join(clear) or 'none'}.",
            "",
            "| alteration | lowest score | mean | found |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {row.alteration} | {row.lowest:.2f} | {row.mean:.2f} | {row.found} of {row.copies} |"
            for row in self.scores
            if not row.is_clear
        ]
        return "\n".join(lines)


def score(name: str, originals: Sequence[torch.Tensor], copies: Mapping[str, Sequence[torch.Tensor]]) -> Kind:
    """Compares fingerprints.

    Args:
        name: of the kind.
        originals: one fingerprint each.
        copies: for each alteration, a fingerprint for each original, in the same order.
    """
    originals_side = torch.stack(list(originals))
    between = (originals_side @ originals_side.T)[~torch.eye(len(originals), dtype=torch.bool)]
    scores = []
    for alteration, altered in copies.items():
        cosines = torch.stack(list(altered)) @ originals_side.T
        own = cosines.diagonal()
        found = int((own >= cosines.amax(1)).sum())
        scores.append(Score(alteration, float(own.min()), float(own.mean()), found, len(own)))
    return Kind(name, len(originals), float(between.max()), float(between.mean()), scores)


def sample_files(suffix: str) -> list[bytes]:
    """Returns the sample files with a suffix, by name."""
    directory = resources.files("frontend") / "samples"
    return [path.read_bytes() for path in sorted(directory.iterdir(), key=lambda path: path.name) if path.name.endswith(suffix)]
