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
            "tests/core/test_mapping.py::test_a_tail_that_can_not_be_mapped_leaves_nothing_mapped",
        ),
        (
            "a forked child unmaps what it does not have",
            "mapped.forks == forks()",
            "mapped.forks <= forks()",
            "tests/core/test_mapping.py::test_a_forked_child_unmaps_nothing",
        ),
        (
            "addresses behind a mapping stay reserved",
            "if start != reserved + _HUGE_NBYTES",
            "if False",
            "tests/memory/test_huge_pages.py::test_mapping_reserves_no_address_space_that_it_does_not_return",
        ),
        (
            "a range may begin in a mapping and end behind it",
            "nbytes > self.mapped.nbytes - offset",
            "False",
            "tests/core/test_mapping.py::test_advice_and_protection_are_for_ranges_of_its_own",
        ),
        (
            "what could not be mapped beside the rest is not unmapped",
            "self.mapped.nbytes = size  # from here on",
            "pass  # from here on",
            "tests/core/test_mapping.py::test_it_is_the_memory_behind_the_descriptor",
        ),
        (
            "a mapping begins anywhere in a huge page",
            "start = (reserved + _HUGE_NBYTES - 1) & ~<uint64_t>(_HUGE_NBYTES - 1)",
            "start = reserved",
            "tests/memory/test_huge_pages.py::test_what_is_reserved_is_there_and_is_empty",
        ),
    ),
    *faults_in(
        "shmring/core/gpu.pyx",
        (
            "what a GPU may be at is let go of before its event",
            "code = self.gpu.calls.cuEventSynchronize(point.event)",
            "code = 0",
            "tests/memory/test_watcher.py::test_what_is_guarded_lives_until_its_event",
        ),
    ),
    *faults_in(
        "shmring/core/copies.pyx",
        (
            "a consumer's stream waits for no copy",
            "wait_code = self._gpu.calls.cuStreamWaitEvent(consuming, point.event, 0)",
            "wait_code = 0",
            "tests/memory/test_upload.py::test_the_consumers_stream_waits_for_the_copy",
        ),
    ),
    *faults_in(
        "shmring/core/placement.pyx",
        (
            "a tensor on a GPU loses its alignment",
            "run.start -= run.start % CACHE_LINE",
            "run.start -= 0",
            "tests/memory/test_layout.py::test_alignment_survives",
        ),
        (
            "all tensors are where the first bytes were copied to",
            "while high - low > 1:  # the last",
            "while False:  # the last",
            "tests/memory/test_upload.py::test_every_tensor_arrives",
        ),
    ),
    *faults_in(
        "shmring/core/views.pyx",
        (
            "a region is to be told of after its reference went",
            "    region.is_told = True\n    if drop_reference(&region.references):\n        return True\n",
            "    if drop_reference(&region.references):\n        region.is_told = True\n        return True\n",
            "tests/core/test_views.py::test_a_last_view_may_die_at_any_moment_while_its_region_is_left",
        ),
        (
            "the bell is read after the stack was taken",
            """\
        if self._departures.forks == forks():  # otherwise the bell is the parent's
            read(self._departures.bell, &rings, sizeof(rings))  # before the stack is taken: a later push rings again
        top = <Lent*>take_stack(&self._departures.top, NULL)
""",
            """\
        top = <Lent*>take_stack(&self._departures.top, NULL)
        if self._departures.forks == forks():
            read(self._departures.bell, &rings, sizeof(rings))
""",
            "tests/core/test_views.py::test_a_last_view_may_die_at_any_moment_while_others_are_collected",
        ),
        (
            "a forked child rings its parent's bell",
            "if seen == NULL and departures.forks == forks()",
            "if seen == NULL",
            "tests/core/test_views.py::test_a_death_in_a_forked_child_is_none_in_its_parent",
        ),
        (
            "the bell of regions that have gone stays open",
            "    if departures != NULL:\n        _drop_departures(departures)  # the region's own",
            "    pass  # the region's own",
            "tests/core/test_views.py::test_views_outlive_whatever_they_came_from",
        ),
        (
            "of those that drain, the one behind remembers the one that has gone",
            "    if region.after != NULL:\n        region.after.before = region.before\n",
            "",
            "tests/core/test_views.py::test_many_threads_drop_views_while_the_owner_leaves_and_collects",
        ),
        (
            "a region whose last view dies as it is left stays among those that drain",
            "_unlink(departures, region)  # the last view",
            "pass  # the last view",
            "tests/core/test_views.py::test_a_last_view_may_die_at_any_moment_while_its_region_is_left",
        ),
        (
            "a tensor may begin in its region and end behind it",
            "nbytes > region.nbytes - offset",
            "False",
            "tests/core/test_views.py::test_a_tensor_lies_in_its_region",
        ),
        (
            "a tensor has no reference to its region",
            "        view.is_gone = &is_gone\n        take_reference(&region.references)\n",
            "        view.is_gone = &is_gone\n",
            "tests/core/test_views.py::test_a_region_drains_until_its_last_view_dies",
        ),
        (
            "regions are still collected by who has closed",
            "top = <Lent*>take_stack(&departures.top, CLOSED)",
            "top = <Lent*>take_stack(&departures.top, NULL)",
            "tests/core/test_views.py::test_what_drains_when_its_owner_ends_is_unmapped_with_its_last_view",
        ),
        (
            "a copy begins anywhere in a line",
            "<char*>((<uintptr_t>(region + 1) + CACHE_LINE - 1) & ~<uintptr_t>(CACHE_LINE - 1))",
            "<char*>(region + 1)",
            "tests/core/test_views.py::test_copies_of_any_size_begin_with_a_line_of_the_cache",
        ),
        (
            "a view is freed before its region is dropped",
            "    drop_region(view.region)\n    free(view)\n",
            "    free(view)\n    drop_region(view.region)\n",
            "tests/core/test_views.py::test_views_may_live_until_the_interpreter_has_ended",
        ),
        (
            "extents may be negative",
            "shape[index] < 0 or multiply_overflows(items, <uint64_t>shape[index], &items)",
            "multiply_overflows(items, <uint64_t>shape[index], &items)",
            "tests/core/test_views.py::test_a_tensor_lies_in_its_region",
        ),
    ),
    *faults_in(
        "shmring/memory/_copying.c",
        (
            "a copy past the cache ends behind its target",
            "head + (nbytes - head) / LINE * LINE",
            "head + (nbytes + LINE - 1 - head) / LINE * LINE",
            "tests/memory/test_copying.py::test_what_is_copied_past_the_cache_is_the_same_and_nothing_beside_it_changes",
        ),
        (
            "what is copied past the cache is not fenced",
            "_mm_sfence();",
            "(void)0;",
            "tests/memory/test_copying.py",
            "Equivalent: who has copied takes the interpreter's lock, and that instruction waits for the stores as well.",
        ),
        (
            "the last bytes are not copied past the cache",
            "memcpy(to + end, from + end, nbytes - end);",
            "(void)0;",
            "tests/memory/test_copying.py::test_what_is_copied_past_the_cache_is_the_same_and_nothing_beside_it_changes",
        ),
        (
            "a copy past the cache begins at the next line",
            "memcpy(to, from, head);",
            "(void)0;",
            "tests/memory/test_copying.py::test_what_is_copied_past_the_cache_is_the_same_and_nothing_beside_it_changes",
        ),
        (
            "the wrong way of copying is the quicker one",
            "streams != tries_other ? &past_cache : &into_cache",
            "streams == tries_other ? &past_cache : &into_cache",
            "tests/memory/test_copying.py::test_a_long_copy_goes_past_the_cache_while_that_is_a_good_deal_quicker",
        ),
        (
            "a negative length is a very large one",
            "nbytes < 0",
            "0",
            "tests/memory/test_copying.py::test_what_is_no_copy_is_refused",
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
            "A window of a few instructions in another thread, which no test holds open.",
        ),
        (
            "a copy is over while helpers are at its last pieces",
            "(inside = atomic_load(&shared.inside)) != 0",
            "(inside = 0) != 0",
            "tests/memory/test_copying.py::test_nobody_writes_any_more_when_a_long_copy_returns",
        ),
        (
            "the last piece is as long as the others",
            "left < PIECE ? left : PIECE",
            "PIECE",
            "tests/memory/test_copying.py::test_a_long_copy_is_whole_when_it_returns_whoever_made_it",
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
            "tests/memory/test_copying.py::test_nobody_writes_any_more_when_a_long_copy_returns",
        ),
        (
            "helpers that have come in time once count as late",
            "atomic_load_explicit(&shared.helped, memory_order_relaxed) == helped ? in_vain + 1 : 0",
            "atomic_load_explicit(&shared.helped, memory_order_relaxed) == helped ? in_vain + 1 : in_vain",
            "tests/memory/test_copying.py",
            "Only how often helpers are woken, so it is slower and never wrong.",
        ),
        (
            "signals stay blocked in a thread that has started helpers",
            "sigprocmask(SIG_SETMASK, &before, NULL);",
            "(void)0;",
            "tests/memory/test_copying.py::test_helpers_take_no_signals",
        ),
    ),
)
