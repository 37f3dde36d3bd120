"""docs/metrics.md names every number that the code gives, and no other; with the unit that its name says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import prometheus_client.parser
import pytest

import shmring
from engine.metrics import EngineMetrics
from frontend.metrics import FrontendMetrics

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = (ROOT / "docs" / "metrics.md").read_text().split("\n## ")[1:]


def rows(heading: str) -> dict[str, list[str]]:
    """The other columns of a section's table, by the first one's name."""
    [section] = [section for section in SECTIONS if section.splitlines()[0].endswith(heading)]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| `")]
    names = [row[0].strip("`") for row in cells]
    assert len(set(names)) == len(names)
    return {name: row[1:] for name, row in zip(names, cells, strict=True)}


def names_of(record: type) -> set[str]:
    properties = {name for name, member in vars(record).items() if isinstance(member, property)}
    return {field.name for field in dataclasses.fields(record)} | properties


RECORDS = [
    ("`EngineClient.statistics()`", EngineMetrics),
    ("`ring.statistics()`", shmring.RingStatistics),
    ("`client.statistics()`", shmring.ClientStatistics),
]


@pytest.mark.parametrize(("heading", "record"), RECORDS, ids=[record.__name__ for _, record in RECORDS])
def test_every_number_of_a_record_is_in_its_table(heading: str, record: type) -> None:
    assert rows(heading).keys() == names_of(record)


async def test_every_metric_is_in_the_table_with_its_type() -> None:
    families = prometheus_client.parser.text_string_to_metric_families((await FrontendMetrics().render({})).decode())
    exposed = {family.name + "_total" * (family.type == "counter"): family.type for family in families}
    exposed = {name: kind for name, kind in exposed.items() if not name.endswith("_created")}
    assert {name: columns[0] for name, columns in rows("`GET /metrics`").items()} == exposed


@pytest.mark.parametrize("heading", ["`GET /metrics`", *(heading for heading, _ in RECORDS)])
def test_units_are_those_that_the_names_say(heading: str) -> None:
    for name, columns in rows(heading).items():
        unit = columns[-2]
        assert unit
        assert columns[-1]
        assert (unit == "bytes") == bool(re.search(r"bytes", name)), name
        assert (unit == "s") == ("seconds" in name), name
