"""What peers say, made fit to be printed."""

from __future__ import annotations

import pytest

from shmring.core.printable import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("worker 3, größe 5 µm", "worker 3, größe 5 µm"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("one\r\n\ttwo\x00", "one\\r\\n\\ttwo\\x00"),
        ("\u202etxt.exe", "\\u202etxt.exe"),  # which turns what follows around
        ("\ud800", "\\ud800"),
        ("", ""),
    ],
)
def test_a_text_is_one_line_without_what_a_terminal_carries_out(text: str, printed: str) -> None:
    assert printable(text) == printed


def test_a_text_is_bounded() -> None:
    assert len(printable("x" * 10_000)) == 4096


def test_lines_stay_lines() -> None:
    assert printable_lines("one\n\ttwo\x1b\n") == "one\n\ttwo\\x1b\n"
