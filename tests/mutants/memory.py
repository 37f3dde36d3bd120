"""Faults in memory: mapping it, views of it, and copying to it."""

from __future__ import annotations

from tests.mutants.fault import faults_in, guard

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
        guard(
            "a forked child that has the socket keeps nothing back",
            "            shutdown(mapped.socket, SHUT_RDWR)",
            "            pass",
            "tests/ends/test_held_at_close.py::test_a_forked_child_keeps_nothing_back",
        ),
        guard(
            "memory that is not mapped any more is not written",
            "    if not mapped.nbytes:\n        raise",
            "    if False:\n        raise",
            "tests/core/test_mapping.py::test_memory_that_is_not_mapped_is_no_place",
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
        guard(
            "a slot is kept until its copy to a GPU is over",
            "            if code:  # also",
            "            if False:  # also",
            "tests/memory/test_claim_to.py::test_no_slot_is_reused_before_its_copy",
        ),
        guard(
            "a slot is kept for good if the driver can't say when its copy is over",
            "                self._lost += 1\n",
            "                self._lost += 1\n                self.gpu.point_came(point)\n",
            "tests/memory/test_upload.py::test_slots_of_which_cuda_can_say_nothing_are_kept_for_good",
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
        guard(
            "a slot is kept until its large copy to a GPU is over",
            "            else:\n                self._watch.guard(point)\n        if",
            "            else:\n                self._gpu.give_point(point)\n        if",
            "tests/memory/test_upload.py::test_a_large_copy_never_goes_on_the_consumers_stream",
        ),
        guard(
            "no copy crosses the boundary between two registrations with CUDA",
            "part_end = self._end_of_part(at, end)",
            "part_end = end",
            "tests/memory/test_upload.py::test_copies_do_not_cross_what_was_registered_in_one_call",
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
        guard(
            "a region notes that its owner wants to hear of the last view before the owner's reference goes",
            "    region.is_told = True\n    if drop_reference(&region.references):\n        return True\n",
            "    if drop_reference(&region.references):\n        region.is_told = True\n        return True\n",
            "tests/core/test_views.py::test_a_last_view_may_die_at_any_moment_while_its_region_is_left",
        ),
        guard(
            "the bell of dying views is cleared before they are collected",
            "take_stack(&self._departures.top, NULL)\n",
            "take_stack(&self._departures.top, NULL)\n        read(self._departures.bell, &rings, sizeof(rings))\n",
            "tests/core/test_views.py::test_a_last_view_may_die_at_any_moment_while_others_are_collected",
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
        guard(
            "a long copy goes past a cache that others have filled",
            "quickest(&past_cache) * 5 / 4 < quickest(&into_cache)",
            "0",
            "tests/memory/test_copying.py::test_a_long_copy_goes_past_the_cache_while_that_is_a_good_deal_quicker",
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
        guard(
            "helpers of a parent process are not waited for in its children",
            "return pthread_atfork(NULL, NULL, forget_helpers);",
            "return 0;",
            "tests/memory/test_copying.py::test_a_forked_child_has_helpers_of_its_own",
        ),
    ),
    *faults_in(
        "shmring/memory/slab.py",
        guard(
            "a slab lies in huge pages where there are any",
            "huge_nbytes = reserve_huge_pages(fd, nbytes)",
            "os.ftruncate(fd, nbytes)\n        huge_nbytes = 0",
            "tests/memory/test_huge_pages.py::test_a_slab_is_mapped_by_huge_pages_at_both_ends",
        ),
        guard(
            "posix_fallocate",
            "os.posix_fallocate(fd, 0, nbytes)",
            "os.ftruncate(fd, nbytes)",
            "tests/integration/test_guarantees_processes.py::test_a_shm_that_is_small_or_filled_by_others_is_an_error_and_never_a_crash",
        ),
        guard(
            "the slab's name is unlinked while the slab lives",
            "            posix_ipc.unlink_shared_memory(path)\n    except",
            "            pass\n    except",
            "tests/memory/test_slab.py::test_a_slab_has_no_name_from_the_start",
        ),
        guard(
            "a sweep tries to lock a slab before it removes the name",
            "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n            path.unlink()",
            "            path.unlink()",
            "tests/memory/test_slab.py::test_a_sweep_leaves_what_a_living_engine_holds",
        ),
        guard(
            "a sweep does not report a living engine as dead",
            "            if os.fstat(fd).st_size:",
            "            if True:",
            "tests/memory/test_slab.py::test_a_slab_works_if_its_name_was_swept_before_its_lock",
        ),
        guard(
            "a slab in a memfd is sealed",
            "                _seal(fd, _FIXED_SIZE)",
            "                pass",
            "tests/memory/test_slab.py::test_nobody_can_truncate_a_slab_in_a_memfd",
        ),
        guard(
            "only the engine can write replies",
            "                _seal(reply_fd, _READ_ONLY)",
            "                _seal(reply_fd, _FIXED_SIZE)",
            "tests/memory/test_slab.py::test_nobody_but_the_engine_can_write_what_replies_are_in",
        ),
        guard(
            "a frontend takes no replies that others could write",
            "if not _is_sealed(reply_fd, _READ_ONLY):",
            "if False:",
            "tests/memory/test_slab.py::test_a_part_for_replies_that_others_could_write_is_refused",
        ),
    ),
    *faults_in(
        "shmring/memory/tensors.py",
        guard(
            "a tensor that holds more than its numbers is not sent as one",
            "if type(tensor) not in _TENSOR_TYPES:",
            "if False:",
            "tests/memory/test_tensors.py::test_what_is_not_its_own_data_or_has_not_all_of_it_is_refused_with_its_path",
        ),
    ),
    *faults_in(
        "shmring/gpu/device_views.py",
        guard(
            "draining: device memory that a GPU may still use",
            "            is_over = self._watcher.watch.follow(self._regions, key, streams)",
            "            is_over = True",
            "tests/memory/test_device_slots.py::test_a_slot_comes_back_when_the_gpu_is_done_and_not_before",
        ),
    ),
    *faults_in(
        "shmring/gpu/device_claims.py",
        guard(
            "the fence of the producer that wrote to device memory",
            "        self._wait(client_id, submit.content.fence, stream)\n",
            "",
            "tests/memory/test_device_slots.py::test_the_engine_reads_after_the_producer_has_written",
        ),
        guard(
            "device memory that a frontend may have mapped is not freed",
            "if self._announced_to",
            "if False",
            "tests/memory/test_device_slots.py::test_a_ring_that_closes_first_keeps_the_slab_of_those_who_may_map_it",
        ),
        guard(
            "a place in a device slab is used again after vLLM's model has read it",
            "            self._views.use(key, consumer)\n",
            "            pass\n",
            "tests/vllm/test_on_gpu.py::test_its_slot_is_used_again_after_the_model_has_read_it",
        ),
    ),
    *faults_in(
        "shmring/gpu/device_slots.py",
        guard(
            "a submission carries an event unless the GPU has finished its writes",
            "None if self._gpu.is_idle(stream) else self._fences.record(stream)",
            "self._fences.record(stream)",
            "tests/memory/test_device_slots.py::test_what_was_written_before_it_is_sent_needs_no_event",
        ),
    ),
    *faults_in(
        "shmring/gpu/upload.py",
        guard(
            "memory whose last copy failed half way is used again after the other half",
            "stream = part.stream = consumer if",
            "stream = consumer if",
            "tests/memory/test_upload.py::test_a_copy_that_failed_half_way_keeps_its_memory_until_the_other_half_is_over",
        ),
        guard(
            "a stream uses memory on a GPU behind its last owner",
            "is_there and lane.staging.is_used_on(consumer)",
            "is_there",
            "tests/memory/test_upload.py::test_a_stream_uses_the_memory_first_behind_whoever_had_it_before",
        ),
    ),
    *faults_in(
        "shmring/gpu/staging.py",
        guard(
            "staging memory is kept until the GPU is done with it",
            "            if has_come:",
            "            if True:",
            "tests/memory/test_staging.py::test_a_part_is_lent_until_the_gpu_is_done_with_it",
        ),
    ),
    *faults_in(
        "shmring/gpu/pinned.py",
        guard(
            "registered memory stays mapped",
            "        pinned._mapping = slab.bytes_at(0, slab.nbytes)",
            "        pass",
            "tests/memory/test_pinned.py::test_registered_memory_stays_mapped_though_nobody_closes_anything",
        ),
    ),
)
