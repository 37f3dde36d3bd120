"""What a run must show: memory flat, descriptors flat, the slab empty whenever nothing happens, and no failure.

Flat is judged by comparing like with like: each process in each kind of phase, the median of the first quarter of the cycles
with that of the last. The first cycle is not judged: that is when pools and caches fill.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from tests.soak.driver import ENGINE, Observations, ProcessSample, Sample
from tests.soak.plan import Phase

#: What a process's private memory may grow by between the first and the last quarter of the run. Below it is what malloc
#: does: freed memory stays in the arena of the thread that had it, and how much depends on which sizes met there. A leak of
#: 100 bytes a request, one small object, is more after 84,000 requests: after a minute and a half of small requests.
MEMORY_LIMIT_NBYTES = 8 << 20

#: A leaked descriptor never comes back, so none is too many. They are counted while nothing is under way.
DESCRIPTOR_LIMIT = 0

_QUARTERS = 4
_SHOWN_FAILURES = 3
MIB = 1 << 20


class Check(msgspec.Struct, frozen=True):
    """One thing that was judged.

    Attributes:
        what: it is.
        found: in words.
        limit: in words.
        passed: whether it is within the limit.
        is_memory: whether it is about what a process holds.
    """

    what: str
    found: str
    limit: str
    passed: bool
    is_memory: bool = False


def judge(seen: Observations) -> list[Check]:
    """Returns everything that was judged.

    Args:
        seen: at least two cycles of all phases beside the first.
    """
    first, last = _quarters(seen.samples)
    checks = [_memory(process, first, last) for process in first[0].processes]
    checks += [_descriptors(process, first, last) for process in first[0].processes]
    checks.append(_slab(seen))
    checks.append(_failures(seen.samples))
    return checks


def _quarters(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The samples of the first and of the last quarter of the cycles, the very first cycle left out."""
    cycles = sorted({sample.cycle for sample in samples})[1:]
    if len(cycles) < 2:
        raise ValueError(f"a verdict needs three cycles, one to warm up and two to compare, not {len(cycles) + 1}")
    count = max(1, len(cycles) // _QUARTERS)
    first, last = set(cycles[:count]), set(cycles[-count:])
    return [sample for sample in samples if sample.cycle in first], [sample for sample in samples if sample.cycle in last]


def _medians(samples: Sequence[Sample], process: str, measure: Callable[[ProcessSample], float]) -> dict[Phase, float]:
    return {
        phase: statistics.median(measure(sample.processes[process]) for sample in samples if sample.phase is phase)
        for phase in Phase
        if any(sample.phase is phase for sample in samples)
    }


def _memory(process: str, first: Sequence[Sample], last: Sequence[Sample]) -> Check:
    before, after = (_medians(samples, process, lambda sample: sample.footprint.private_nbytes) for samples in (first, last))
    growths = {phase: after[phase] - before[phase] for phase in before if phase in after}
    worst = max(growths, key=lambda phase: growths[phase])
    requests = _requests(last) - _requests(first)
    measured = f"{growths[worst] / MIB:+.1f} MiB, of {before[worst] / MIB:.0f}, in {worst.value}"
    if requests > 0:
        measured += f"; {growths[worst] / requests:+.1f} bytes a request"
    return Check(
        f"{process}: private memory, last quarter against first",
        measured,
        f"<= {MEMORY_LIMIT_NBYTES / MIB:g} MiB",
        growths[worst] <= MEMORY_LIMIT_NBYTES,
        is_memory=True,
    )


def _requests(samples: Sequence[Sample]) -> float:
    """Requests so far, at the middle of these samples."""
    return statistics.median(
        sum(process.seen.requests for title, process in sample.processes.items() if title != ENGINE) for sample in samples
    )


def _descriptors(process: str, first: Sequence[Sample], last: Sequence[Sample]) -> Check:
    before, after = (
        _medians(samples, process, lambda sample: sample.footprint.descriptors)[Phase.IDLE] for samples in (first, last)
    )
    return Check(
        f"{process}: descriptors while idle, last quarter against first",
        f"{after - before:+g}, of {before:g}",
        f"<= {DESCRIPTOR_LIMIT}",
        after - before <= DESCRIPTOR_LIMIT,
    )


def _slab(seen: Observations) -> Check:
    left = [look for look in seen.idle_looks if not look.is_empty]
    measured = f"{len(seen.idle_looks) - len(left)} of {len(seen.idle_looks)} times"
    if left:
        look = left[0]
        measured += (
            f"; first in cycle {look.cycle + 1}: {look.slots} slots, {look.requests} requests, {look.reply_nbytes} bytes of "
            f"replies, {look.extra_leased_nbytes} leased, {look.quarantined_nbytes} quarantined"
        )
    return Check("the slab is empty after an idle phase", measured, "always", bool(seen.idle_looks) and not left)


def _failures(samples: Sequence[Sample]) -> Check:
    failures = [failure for process in samples[-1].processes.values() for failure in process.seen.failures]
    shown = "; ".join(failures[:_SHOWN_FAILURES]) or "none"
    return Check("failures", shown, "none", not failures)
