"""What a forked child does in a test."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def in_child(run: Callable[[], object]) -> None:
    """Runs a function in a forked child, which ends then without more ado, and fails if the function did."""
    child = os.fork()
    if not child:
        status = 1
        try:
            run()
            status = 0
        except BaseException:  # noqa: BLE001 - no frame of its parent's may go on here
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"what runs in a forked child failed there ({status})"
