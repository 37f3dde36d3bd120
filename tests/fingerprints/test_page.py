"""What docs/fingerprints.md says is what is measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.fingerprints.scores import Kind, Score, score
from tests.fingerprints.scoring import measure

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fingerprints.md"

# Other versions of codecs, and other processors, move scores a little.
SCORE_TOLERANCE = 0.03
FOUND_TOLERANCE = 1


def numbers_of(row: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", row)]


def test_a_copy_is_found_if_no_other_original_is_nearer() -> None:
    originals = [torch.tensor([1.0, 0.0]), torch.tensor([0.6, 0.8])]
    copies = {"same": originals, "swapped": originals[::-1], "leant": [torch.tensor([0.8, 0.6]), torch.tensor([0.0, 1.0])]}
    kind = score("Things", originals, copies)
    assert (kind.originals, kind.name) == (2, "Things")
    assert kind.highest_between == pytest.approx(0.6)
    assert kind.mean_between == pytest.approx(0.6)
    assert [(row.alteration, row.found, row.copies) for row in kind.scores] == [
        ("same", 2, 2),
        ("swapped", 0, 2),
        ("leant", 1, 2),
    ]
    assert [row.lowest for row in kind.scores] == pytest.approx([1.0, 0.6, 0.8])


def test_a_table_has_a_line_for_each_alteration() -> None:
    scores = [Score("grey", 0.9, 0.95, 3, 3), Score("bent", 0.5, 0.75, 2, 3), Score("red", 0.99, 0.99, 2, 3)]
    table = Kind("Things", 3, 0.514, 0.2, scores[:2]).markdown()
    assert "3 originals. Two different ones: at most **0.51**, 0.20 on average. All copies found" in table
    assert "with a score of 0.9 or more: grey." in table
    assert table.endswith("---|\n| bent | 0.50 | 0.75 | 2 of 3 |")
    assert [row.is_clear for row in scores] == [True, False, False], "one copy was not found"


@pytest.mark.slow  # a thousand copies are made, and described
def test_the_page_says_what_is_measured() -> None:
    page = PAGE.read_text()
    for kind in measure():
        table = page.partition(f"### {kind.name}\n")[2].partition("\n#")[0]
        [between] = re.findall(r"at most \*\*(.*?)\*\*", table)
        assert float(between) == pytest.approx(kind.highest_between, abs=SCORE_TOLERANCE), kind.name
        rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE))
        clear = table.partition(" or more: ")[2].partition(".\n")[0].split("; ")
        for measured in kind.scores:
            if measured.alteration in clear:
                assert measured.is_clear or measured.lowest >= 0.9 - SCORE_TOLERANCE, measured.alteration
                continue
            lowest, mean, found, copies = numbers_of(rows[measured.alteration])
            place = f"{kind.name}: {measured.alteration}"
            assert lowest == pytest.approx(measured.lowest, abs=SCORE_TOLERANCE), place
            assert mean == pytest.approx(measured.mean, abs=SCORE_TOLERANCE), place
            assert found == pytest.approx(measured.found, abs=FOUND_TOLERANCE), place
            assert copies == measured.copies
