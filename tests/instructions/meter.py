"""What the measured process asks of ``meter.c``, which is preloaded there."""

from __future__ import annotations

import ctypes
import os

_METER = ctypes.CDLL(os.environ["METER"])

start = _METER.meter_start
write = _METER.meter_write
stop = _METER.meter_stop
keep_clock = _METER.meter_keep_clock


def let_pass(seconds: float) -> None:
    """Advances the clock: timers that are due by then are carried out in the loop's next turn."""
    _METER.meter_let_pass(ctypes.c_int64(round(seconds * 1e9)))
