"""What must hold of clients that wait, of a compiled book and of its model alike: after each event, and after a moment.

It does not say how a book chooses. It says what nobody may wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shmring.core.messages import DEVICE_MEMORY
from shmring.core.states import Lease

_SILENT_AFTER = 2


def check_granted(lending: Any) -> None:
    """Asserts that nobody waits for memory that is free or only kept, and that all is done to empty the window.

    Args:
        lending: of an engine's book.
    """
    window = lending._window
    reserved = set() if window is None else set(range(window.start, window.end))
    unpinned = [] if lending.contents is None else [*lending.contents.unpinned.values()]
    kept = set(_blocks((content.start, content.blocks) for content in unpinned))
    free = kept | set(_blocks([*lending._free.runs(), *getattr(lending, "_apart", ())]))
    wants = {c: want for c, want in lending._wants.items() if not _is_over_quota(lending, lending.clients[c], want.blocks)}
    waiting = [client_id for client_id, want in wants.items() if want.waits and not want.rest_moments]
    assert not kept & reserved, "what is only kept is in a window"
    if waiting:  # else a window may be left of one who was alone until just now
        assert window is not None, "the first who can't be served has no window"
        assert window.client_id in waiting
    for client_id, want in wants.items():
        is_owner = window is not None and window.client_id == client_id
        assert not is_owner or window.blocks == want.blocks
        assert _longest_run(free if is_owner else free - reserved) < want.blocks, f"client {client_id} waits in vain"
    for lease in _leases(lending):
        is_in_window = reserved & set(_in_leases([lease])) and window.client_id != lease.client_id
        assert lease.recalled or lease.state is not Lease.LEASED or not is_in_window, "a lease in the window was not recalled"


def check_waiting(lending: Any) -> None:
    """Asserts that nobody waits for memory that does not come, while others would give enough back at once.

    Args:
        lending: of an engine's book.
    """
    window = lending._window
    waiting = {client_id: want for client_id, want in lending._wants.items() if want.waits}
    free = set(_blocks([*lending._free.runs(), *getattr(lending, "_apart", ())]))
    for client_id, want in waiting.items():
        if _is_over_quota(lending, lending.clients[client_id], want.blocks):
            continue
        assert window is not None or want.rest_moments, "the first who can't be served has no window"
        idle = [
            lease
            for lease in _leases(lending)
            if lease.state is Lease.LEASED and lease.client_id not in waiting  # who waits gives its own back by itself
            if not (lease.recalled or lease.new_moments or lease.live.units != lease.kept_blocks)
        ]
        if window is None or window.client_id != client_id:
            reserved = set() if window is None else set(range(window.start, window.end))
            usable = (free | set(_in_leases(idle))) - reserved
            assert _longest_run(usable) < want.blocks, "idle memory that would do was not recalled"
        elif any(_does_not_come(lease) and window.start < lease.end and lease.start < window.end for lease in _leases(lending)):
            usable = free | set(_in_leases(lease for lease in idle if lease.lease_id < window.next_lease_id))
            assert _longest_run(usable) < want.blocks, "a request waits for what does not come, beside idle memory"


def _leases(lending: Any) -> Iterator[Any]:
    for client in lending.clients.values():
        yield from (lease for lease in client.leases.values() if lease.memory == lending.memory)


def _does_not_come(lease: Any) -> bool:
    """Whether it is in use, or its holder is gone or does not answer."""
    is_in_use = lease.live.units != lease.kept_blocks
    return lease.state is not Lease.LEASED or is_in_use or lease.silent_moments >= _SILENT_AFTER


def _is_over_quota(lending: Any, client: Any, blocks: int) -> bool:
    leases = [lease for lease in client.leases.values() if lease.memory == lending.memory]
    held = sum(lease.blocks - lease.kept_blocks for lease in leases)
    quota = lending.limits.device_quota_blocks
    if lending.memory != DEVICE_MEMORY:
        quota = lending.limits.quota_blocks
        held += sum(lending.contents.by_generation[generation].blocks for generation in client.pins) if held else 0
    others = any(other is not client and (other.connected or other.leases) for other in lending.clients.values())
    return len(leases) >= lending.limits.max_leases or bool(others and held and held + blocks > quota)


def _in_leases(leases: Iterable[Any]) -> Iterator[int]:
    """Blocks of leases that nothing is kept in; of the others it would have to be known where that is."""
    return _blocks((lease.start, lease.blocks) for lease in leases if not lease.kept_blocks)


def _blocks(runs: Iterable[tuple[int, int]]) -> Iterator[int]:
    for start, length in runs:
        yield from range(start, start + length)


def _longest_run(blocks: set[int]) -> int:
    longest = length = 0
    last = -2
    for block in sorted(blocks):
        length = length + 1 if block == last + 1 else 1
        longest, last = max(longest, length), block
    return longest
