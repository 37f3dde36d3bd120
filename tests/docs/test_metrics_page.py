"""docs/reference.md lists every number that the code reports, and no others. The unit of each is the one that its name says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import prometheus_client.parser
import pytest

import shmring
from shmring.engine.metrics import EngineMetrics, EngineTimes
from shmring.frontend.callers.key_usage import KeyStatistics
from shmring.frontend.intake import IntakeStatistics
from shmring.frontend.media.decoder_pool import DecoderStatistics
from shmring.frontend.operator.metrics import (
    AnswerStatistics,
    EngineNumbers,
    FrontendMetrics,
    HttpStatistics,
    ProcessStatistics,
)
from tests.pages import load_maker
from tests.tables import for_each

TIMES = {"fetch", "preparation", "slot_wait"}
NAMED_AS_VLLM_S = {"waiting_requests", "running_requests", "prompt_tokens", "generated_tokens"}
ROOT = Path(__file__).resolve().parents[2]
SECTIONS = (ROOT / "docs" / "reference.md").read_text().split("\n### ")[1:]


def rows(heading: str) -> dict[str, list[str]]:
    """The rows of a section's table: the name in the first column, and the cells of the other columns."""
    [section] = [section for section in SECTIONS if section.splitlines()[0].endswith(heading)]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| `")]
    names = [row[0].strip("`") for row in cells]
    assert len(set(names)) == len(names)
    return {name: row[1:] for name, row in zip(names, cells, strict=True)}


def names_of(record: type) -> set[str]:
    properties = {name for name, member in vars(record).items() if isinstance(member, property)}
    return {field.name for field in dataclasses.fields(record)} | properties


RECORDS: list[tuple[str, type]] = [
    ("`GET /health`", DecoderStatistics),
    ("`EngineClient.statistics()`", EngineMetrics),
    ("`ring.statistics()`", shmring.RingStatistics),
    ("`client.statistics()`", shmring.ClientStatistics),
    ("`ring.statistics().workers`", shmring.WorkerStatistics),
]


@for_each(("heading", "record"), RECORDS, ids=[record.__name__ for _, record in RECORDS])
def test_every_number_of_a_record_is_in_its_table(heading: str, record: type) -> None:
    assert rows(heading).keys() == names_of(record), "run docs/make_reference.py"


@for_each("record", [shmring.RingStatistics, shmring.ClientStatistics, shmring.WorkerStatistics])
def test_every_number_is_in_the_dictionary(record: Any) -> None:
    counts = record(**{field.name: 1 for field in dataclasses.fields(record)}).as_dict()
    assert counts.keys() == names_of(record)
    assert counts.pop("slots_in_use", 3) >= 3
    assert set(counts.values()) == {1}


def test_every_record_of_numbers_has_a_table() -> None:
    """Classes called Statistics or Metrics hold numbers. ``GET /metrics`` shows those that have no table of their own."""
    pattern = re.compile(r"^class (\w+(?:Statistics|Metrics))\b", re.MULTILINE)
    sources = [path for package in ("shmring", "engine", "frontend") for path in (ROOT / package).rglob("*.py")]
    records = {name for path in sources for name in pattern.findall(path.read_text())}
    shown = (AnswerStatistics, FrontendMetrics, HttpStatistics, IntakeStatistics, KeyStatistics, ProcessStatistics)
    assert records == {record.__name__ for _, record in RECORDS} | {record.__name__ for record in shown}


def test_every_number_of_the_decoders_and_of_decoded_media_is_a_metric() -> None:
    metrics = FrontendMetrics(["test"])
    decoders = DecoderStatistics(total=2, free=3, waiting=4, waiting_s=5.0)
    metrics.take_over_own(IntakeStatistics(decoders, decoded_nbytes=6, decoded_waiting=7, decoded=8, passed_over=9))
    values = {sample.value for family in metrics.registry.collect() for sample in family.samples}
    expected = (*dataclasses.astuple(decoders), 6, 7, 8, 9)
    assert len(expected) == len(names_of(DecoderStatistics)) + len(names_of(IntakeStatistics) - {"decoders", *TIMES})
    assert values.issuperset(expected)


def test_a_row_that_was_written_by_hand_is_refused_and_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reference = load_maker("make_reference")
    page = make_reference.PAGE.read_text()
    row = "| `shmring_http_in_flight` |"
    assert row in page
    (tmp_path / "reference.md").write_text(page.replace(row, f"| `shmring_http_naps_total` | counter | naps | taken |\n{row}"))
    monkeypatch.setattr(make_reference, "PAGE", tmp_path / "reference.md")
    with pytest.raises(LookupError, match=r"no number is called shmring_http_naps_total\..* \(shmring/service/numbers\.py"):
        make_reference.make_page()


def test_the_dashboard_and_the_alerts_are_what_the_code_says() -> None:
    make_monitoring = load_maker("make_monitoring")
    make_monitoring.check_names()
    said = "run: python docs/make_monitoring.py"
    assert make_monitoring.DASHBOARD.read_text() == make_monitoring.make_dashboard(), said
    assert make_monitoring.ALERTS.read_text() == make_monitoring.make_alerts(), said


def test_a_name_that_no_number_has_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    make_monitoring = load_maker("make_monitoring")
    monkeypatch.setattr(make_monitoring, "RULES", [("", "shmring_http_request_total > 0", "", "", "")])
    with pytest.raises(LookupError, match="shmring_http_request_total"):
        make_monitoring.check_names()


async def test_every_metric_is_in_a_table_with_its_type(serve: Any) -> None:
    ring = await serve()
    labelled = {"spent_seconds:choosing": 1.0, "caller_seconds:alice": 1.0}
    numbers = EngineNumbers(EngineMetrics().collect(ring.statistics()) | labelled, EngineTimes().as_dict())
    text = (await FrontendMetrics(["test"], ["alice"]).render({"test": numbers})).decode()
    families = prometheus_client.parser.text_string_to_metric_families(text)
    exposed = {family.name + "_total" * (family.type == "counter"): family.type for family in families}
    exposed = {name: kind for name, kind in exposed.items() if not name.endswith("_created")}
    listed = {name: columns[0] for name, columns in rows("`GET /metrics`").items()}
    for heading, prefix in (("`EngineClient.statistics()`", ""), ("`ring.statistics()`", "ring_")):
        for name, (kind, *_) in rows(heading).items():
            if kind != "identity" and name not in NAMED_AS_VLLM_S:
                listed[f"shmring_engine_{prefix}{name}{'_total' * (kind == 'counter')}"] = kind
    assert exposed == listed


@for_each("heading", ["`GET /metrics`", *(heading for heading, _ in RECORDS)])
def test_units_are_those_that_the_names_say(heading: str) -> None:
    for name, columns in rows(heading).items():
        unit = columns[-2]
        assert unit
        assert columns[-1]
        assert (unit == "bytes") == bool(re.search(r"bytes", name)), name
        assert (unit == "s") == ("seconds" in name or name.endswith("_s")), name
