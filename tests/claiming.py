"""Requests of tests that claim them."""

from __future__ import annotations

from typing import Any

import shmring


async def claimed(
    ring: shmring.Ring, client: shmring.Client, payload: object, **options: Any
) -> tuple[shmring.Submission, shmring.Claim]:
    """Submits a payload, and claims the ring's next request."""
    submission = await client.submit(payload, **options)
    return submission, await ring.claim()
