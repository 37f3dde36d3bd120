"""The media that come with the package."""

from __future__ import annotations

from importlib import resources

__all__ = ["sample_files"]


def sample_files(suffix: str) -> list[bytes]:
    """Returns the sample files with a suffix, by name."""
    directory = resources.files("frontend") / "samples"
    return [path.read_bytes() for path in sorted(directory.iterdir(), key=lambda path: path.name) if path.name.endswith(suffix)]
