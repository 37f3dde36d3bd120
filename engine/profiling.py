"""torch's profiler around the engine's steps, started and stopped from afar."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import profiler

__all__ = ["StepProfiler"]


class StepProfiler:
    """One profile at a time. All methods run on the thread that executes steps: the profiler sees that thread only.

    Args:
        directory: where traces go; None: profiling is off.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._profile: profiler.profile | None = None

    def start(self) -> None:
        """Starts recording.

        Raises:
            RuntimeError: profiling is off, or running.
        """
        if self._directory is None:
            raise RuntimeError("profiling is off; start the engine with --profiler-dir DIRECTORY")
        if self._profile is not None:
            raise RuntimeError("a profile is being recorded; stop it first")
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        profile = profiler.profile(activities=activities)
        profile.start()
        self._profile = profile

    def stop(self) -> str:
        """Stops recording, and writes the trace.

        Returns:
            The trace's path: JSON as ``chrome://tracing`` and Perfetto read it.

        Raises:
            RuntimeError: nothing is being recorded.
            OSError: the trace can't be written.
        """
        if self._profile is None or self._directory is None:
            raise RuntimeError("no profile is being recorded")
        profile, self._profile = self._profile, None
        profile.stop()
        directory = Path(self._directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"engine-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**9:09}.json"
        profile.export_chrome_trace(str(path))
        return str(path)
