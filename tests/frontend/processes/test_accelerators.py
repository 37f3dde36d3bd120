"""Which GPUs each of several engines sees."""

from __future__ import annotations

from pathlib import Path

from shmring.frontend.processes.accelerators import count_gpus, environment_of
from tests.tables import for_each


@for_each(
    ("visible", "gpus", "engines", "expected"),
    [
        (None, 0, 2, [None, None]),
        (None, 8, 1, [None]),
        ("3,5", 8, 1, [None]),
        (None, 2, 2, ["0", "1"]),
        (None, 8, 2, ["0,1,2,3", "4,5,6,7"]),
        (None, 5, 2, ["0,1", "2,3"]),
        (None, 1, 2, ["0", "0"]),
        (None, 2, 3, ["0", "1", "0"]),
        ("5,3", 8, 2, ["5", "3"]),
        ("GPU-8f6a,MIG-2b", 8, 2, ["GPU-8f6a", "MIG-2b"]),
        ("", 8, 2, [None, None]),
    ],
)
def test_each_engine_has_its_part(visible: str | None, gpus: int, engines: int, expected: list[str | None]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    parts = [environment_of(rank, engines, environment, gpus) for rank in range(engines)]
    assert [part.get("CUDA_VISIBLE_DEVICES") for part in parts] == expected
    assert all(set(part) <= {"CUDA_VISIBLE_DEVICES"} for part in parts)


def test_gpus_are_counted_by_the_driver_s_files(tmp_path: Path) -> None:
    assert count_gpus(tmp_path / "none") == 0
    for name in ("0000:65:00.0", "0000:ca:00.0"):
        (tmp_path / name).mkdir()
    assert count_gpus(tmp_path) == 2
