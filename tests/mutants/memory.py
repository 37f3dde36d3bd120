"""Faults in memory: mapping it, views of it, and copying to it."""

from __future__ import annotations

from tests.faulty import faults_in

FAULTS = (
    *faults_in(
        "shmring/core/mapping.pyx",
        (
            "sizes may overflow",
            "if head + tail < head or size < last",
            "if False",
            "tests/core/test_mapping.py",
        ),
        (
            "a forked child unmaps what it does not have",
            "mapped.forks == forks()",
            "mapped.forks <= forks()",
            "tests/core/test_mapping.py",
        ),
        (
            "addresses behind a mapping stay reserved",
            "if start != reserved + _HUGE_NBYTES",
            "if False",
            "tests/core/test_mapping.py",
        ),
        (
            "a range may begin in a mapping and end behind it",
            "nbytes > self.mapped.nbytes - offset",
            "False",
            "tests/core/test_mapping.py",
        ),
        (
            "what could not be mapped beside the rest is not unmapped",
            "self.mapped.nbytes = size  # from here on",
            "pass  # from here on",
            "tests/core/test_mapping.py",
        ),
        (
            "a mapping begins anywhere in a huge page",
            "start = (reserved + _HUGE_NBYTES - 1) & ~<uint64_t>(_HUGE_NBYTES - 1)",
            "start = reserved",
            "tests/core/test_mapping.py",
        ),
    ),
    *faults_in(
        "shmring/core/views.pyx",
        (
            "a region is to be told of after its reference went",
            "    region.is_told = True\n    if drop_reference(&region.references):\n        return True\n",
            "    if drop_reference(&region.references):\n        region.is_told = True\n        return True\n",
            "tests/core/test_views.py -k thread",
        ),
        (
            "the bell is read after the stack was taken",
            """\
        if self._departures.forks == forks():  # else the bell is the parent's
            read(self._departures.bell, &rings, sizeof(rings))  # before the stack is taken: a later push rings again
        top = <Lent*>take_stack(&self._departures.top, NULL)
""",
            """\
        top = <Lent*>take_stack(&self._departures.top, NULL)
        if self._departures.forks == forks():
            read(self._departures.bell, &rings, sizeof(rings))
""",
            "tests/core/test_views.py -k thread",
        ),
        (
            "a forked child rings its parent's bell",
            "if seen == NULL and departures.forks == forks()",
            "if seen == NULL",
            "tests/core/test_views.py",
        ),
        (
            "the bell of regions that have gone stays open",
            "    if departures != NULL:\n        _leave_departures(departures)  # the region's own",
            "    pass  # the region's own",
            "tests/core/test_views.py",
        ),
        (
            "of those that drain, the one behind remembers the one that has gone",
            "    if region.after != NULL:\n        region.after.before = region.before\n",
            "",
            "tests/core/test_views.py",
        ),
        (
            "a region whose last view dies as it is left stays among those that drain",
            "_unlink(departures, region)  # the last view",
            "pass  # the last view",
            "tests/core/test_views.py -k thread",
        ),
        (
            "a tensor may begin in its region and end behind it",
            "nbytes > region.nbytes - offset",
            "False",
            "tests/core/test_views.py",
        ),
        (
            "a tensor has no reference to its region",
            "        view.is_gone = &is_gone\n        take_reference(&region.references)\n",
            "        view.is_gone = &is_gone\n",
            "tests/core/test_views.py",
        ),
        (
            "regions are still collected by who has closed",
            "top = <Lent*>take_stack(&departures.top, CLOSED)",
            "top = <Lent*>take_stack(&departures.top, NULL)",
            "tests/core/test_views.py",
        ),
        (
            "a copy begins anywhere in a line",
            "<char*>((<uintptr_t>(region + 1) + CACHE_LINE - 1) & ~<uintptr_t>(CACHE_LINE - 1))",
            "<char*>(region + 1)",
            "tests/core/test_views.py",
        ),
        (
            "a view is freed before its region is dropped",
            "    drop_region(view.region)\n    free(view)\n",
            "    free(view)\n    drop_region(view.region)\n",
            "tests/core/test_views.py",
        ),
        (
            "extents may be negative",
            "shape[index] < 0 or multiply_overflows(items, <uint64_t>shape[index], &items)",
            "multiply_overflows(items, <uint64_t>shape[index], &items)",
            "tests/core/test_views.py",
        ),
    ),
    *faults_in(
        "shmring/memory/_copying.c",
        (
            "a copy past the cache ends behind its target",
            "head + (nbytes - head) / LINE * LINE",
            "head + (nbytes + LINE - 1 - head) / LINE * LINE",
            "tests/memory/test_copying.py",
        ),
        (
            "what is copied past the cache is not fenced",
            "_mm_sfence();",
            "(void)0;",
            "tests/memory/test_copying.py",
        ),
        (
            "the last bytes are not copied past the cache",
            "memcpy(to + end, from + end, nbytes - end);",
            "(void)0;",
            "tests/memory/test_copying.py",
        ),
        (
            "a copy past the cache begins at the next line",
            "memcpy(to, from, head);",
            "(void)0;",
            "tests/memory/test_copying.py",
        ),
        (
            "the wrong way of copying is the quicker one",
            "streams != tries_other ? &past_cache : &into_cache",
            "streams == tries_other ? &past_cache : &into_cache",
            "tests/memory/test_copying.py",
        ),
        (
            "a negative length is a very large one",
            "nbytes < 0",
            "0",
            "tests/memory/test_copying.py",
        ),
    ),
    *faults_in(
        "shmring/memory/copy_helpers.c",
        (
            "a helper looks whether a copy is open before it is inside",
            """\
        atomic_fetch_add(&shared.inside, 1);
        if (atomic_load(&shared.is_open))
            atomic_fetch_add_explicit(&shared.helped, copy_pieces(), memory_order_relaxed);""",
            """\
        unsigned is_open = atomic_load(&shared.is_open);
        atomic_fetch_add(&shared.inside, 1);
        if (is_open)
            atomic_fetch_add_explicit(&shared.helped, copy_pieces(), memory_order_relaxed);""",
            "tests/memory/test_copying.py",
        ),
        (
            "a copy is over while helpers are at its last pieces",
            "(inside = atomic_load(&shared.inside)) != 0",
            "(inside = 0) != 0",
            "tests/memory/test_copying.py",
        ),
        (
            "the last piece is as long as the others",
            "left < PIECE ? left : PIECE",
            "PIECE",
            "tests/memory/test_copying.py",
        ),
        (
            "who has had the helpers keeps them",
            """\
if (helping)
        copy_shared(how, to, from, nbytes, helping);
    else
        how(to, from, nbytes);
    leave_helpers();""",
            """\
if (helping)
        copy_shared(how, to, from, nbytes, helping);
    else
        how(to, from, nbytes);""",
            "tests/memory/test_copying.py",
        ),
        (
            "helpers that have come in time once count as late",
            "atomic_load_explicit(&shared.helped, memory_order_relaxed) == helped ? in_vain + 1 : 0",
            "atomic_load_explicit(&shared.helped, memory_order_relaxed) == helped ? in_vain + 1 : in_vain",
            "tests/memory/test_copying.py",
        ),
        (
            "signals stay blocked in a thread that has started helpers",
            "sigprocmask(SIG_SETMASK, &before, NULL);",
            "(void)0;",
            "tests/memory/test_copying.py",
        ),
        (
            "a piece is copied by two",
            "atomic_fetch_add_explicit(&shared.next, PIECE, memory_order_relaxed)",
            "(atomic_store(&shared.next, atomic_load(&shared.next) + PIECE), atomic_load(&shared.next) - PIECE)",
            "tests/memory/test_copying.py",
        ),
    ),
)
