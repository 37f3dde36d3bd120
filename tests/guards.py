"""Takes the guards away one at a time, and looks whether the test that is named for each notices: ``make guards``.

A test that passes without the guard it is about proves nothing. Each line below says where a guard is, what is put in its
place, and which test must fail then. Works on a copy of the sources, and builds what is compiled there anew; needs the tests'
environment, and a compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shmring.memory.slab import sweep

_ROOT = Path(__file__).parent.parent
_COPIED = ("shmring", "engine", "frontend", "bench", "tests", "setup.py", "build", "pyproject.toml", "README.md")
_TIMEOUT_S = 180


@dataclasses.dataclass(frozen=True)
class Guard:
    """A guard, and who notices when it is gone. ``old`` stands exactly once in the file."""

    name: str
    file: str
    old: str
    new: str
    test: str


#: Where the record lies that was taken last.
_IN_THE_RING = "self._at + AT_RECORDS + ((self._head - _up(LENGTH_NBYTES + nbytes)) & (self._capacity - 1)) + LENGTH_NBYTES"

GUARDS = (
    Guard(
        "a reply of a request that has ended is refused, whatever has run since its caller looked",
        "shmring/core/engine_end.pyx",
        "if claim.ended:  # whatever has run since its caller looked",
        "if False:",
        "tests/test_ends_inside_calls.py::test_an_end_of_a_claim_says_no_more_though_its_caller_does_not_look",
    ),
    Guard(
        "a reply whose code ended its request does not wait for space",
        "shmring/ring/replies.py",
        "claim.check_running()  # the payload's own code may have ended it",
        "pass",
        "tests/test_ends_inside_calls.py::test_a_reply_whose_code_ends_its_request_waits_for_no_space",
    ),
    Guard(
        "a request that is aborted while it is decoded is not handed out",
        "shmring/core/engine_end.pyx",
        "if claim.request.state_number != _RUNNING:  # a hook",
        "if False:  # a hook",
        "tests/test_ends_inside_calls.py::test_a_request_that_is_aborted_while_it_is_decoded_is_not_handed_out",
    ),
    Guard(
        "a worker's end is looked at again after a wait",
        "shmring/core/worker_end.pyx",
        "        cdef bytes record\n        if reader is None:\n",
        "        cdef bytes record\n        if False:\n",
        "tests/core/test_worker_end.py::test_a_signal_handler_may_close_it_in_the_middle_of_a_wait",
    ),
    Guard(
        "who closes a worker from inside does not tidy up",
        "shmring/threads/worker.py",
        "while self._pidfd >= 0 and not (self._receiving.is_taken or self._sending.is_taken):",
        "while self._pidfd >= 0:",
        "tests/test_ends_inside_calls.py::test_a_signal_handler_may_close_a_worker_whose_thread_waits",
    ),
    Guard(
        "who leaves a closed worker last tidies up",
        "shmring/threads/worker.py",
        "        if self._is_closing:\n",
        "        if False:\n",
        "tests/test_ends_inside_calls.py::test_a_signal_handler_may_close_a_worker_whose_thread_waits",
    ),
    Guard(
        "whoever would wait for itself is told so",
        "shmring/threads/worker.py",
        "if self._owner == threading.get_ident():",
        "if False:",
        "tests/test_ends_inside_calls.py::test_whoever_would_wait_for_itself_is_told_so",
    ),
    Guard(
        "a reply that was not sent in time was none",
        "shmring/threads/worker.py",
        "                message.unmark_answered()\n",
        "                pass\n",
        "tests/test_ends_inside_calls.py::test_a_reply_that_found_no_room_in_time_may_be_tried_again",
    ),
    Guard(
        "half of a reply ends a blocking worker",
        "shmring/threads/worker.py",
        "elif parts:  # nothing else can follow half of a reply",
        "elif False:",
        "tests/test_ends_inside_calls.py::test_an_interruption_in_the_middle_of_a_reply_ends_the_worker_and_convicts_nobody",
    ),
    Guard(
        "what could not be said is said with the next call",
        "shmring/threads/worker.py",
        "                    self._wait_and_write(records[0], deadline, timeout)\n                    records.popleft()\n",
        "                    self._wait_and_write(records.popleft(), deadline, timeout)\n",
        "tests/test_ends_inside_calls.py::test_a_failure_that_an_interruption_cut_off_is_said_with_the_next_call",
    ),
    Guard(
        "a reply that was cancelled before it was sent was none",
        "shmring/worker/worker.py",
        "message.unmark_answered()  # nothing was sent",
        "pass",
        "tests/test_ends_inside_calls.py::test_a_reply_that_is_cancelled_before_it_was_sent_was_none",
    ),
    Guard(
        "a long reply that is cancelled in the middle is sent to its end",
        "shmring/worker/worker.py",
        "await asyncio.shield(self._rest)",
        "await self._rest",
        "tests/test_ends_inside_calls.py::test_a_long_reply_that_is_cancelled_in_the_middle_arrives_whole",
    ),
    Guard(
        "a forked child that has the socket keeps nothing back",
        "shmring/core/mapping.pyx",
        "            shutdown(mapped.socket, SHUT_RDWR)",
        "            pass",
        "tests/test_held_at_close.py::test_a_forked_child_keeps_nothing_back",
    ),
    Guard(
        "what is used after a goodbye is quarantined until the socket ends",
        "shmring/client/session.py",
        "self.link.close(self._hand_socket_on if lingers else None)",
        "self.link.close()",
        "tests/test_held_at_close.py::test_a_slot_comes_back_when_it_is_left",
    ),
    Guard(
        "the end of a socket proves something only if the goodbye said so",
        "shmring/ring/frontend.py",
        "self._expect_last_use if any(goodbye.lingers for goodbye in goodbyes) else None",
        "self._expect_last_use",
        "tests/test_held_at_close.py::test_the_end_of_a_socket_proves_nothing_if_the_goodbye_did_not_say_so",
    ),
    Guard(
        "who sends what is no bell after its goodbye is not believed",
        "shmring/ring/frontend.py",
        "if heard == ENDED:",
        "if heard:",
        "tests/test_held_at_close.py::test_bells_before_the_goodbye_and_bytes_behind_it_are_no_end",
    ),
    Guard(
        "a goodbye that finds no room ends the connection",
        "shmring/transport/link.py",
        "if self._heir is not None and not self._backlog:",
        "if self._heir is not None:",
        "tests/test_held_at_close.py::test_a_goodbye_that_finds_no_room_ends_the_connection",
    ),
    Guard(
        "a blocking client's slot is kept by nobody who has left it",
        "shmring/threads/client.py",
        "        slot, self._slot = self._slot, None",
        "        slot = self._slot",
        "tests/test_held_at_close.py::test_a_slot_of_a_blocking_client_comes_back_when_it_is_left",
    ),
    Guard(
        "nobody waits for a thread that never runs again",
        "shmring/threads/loop_thread.py",
        "if self._is_closed or sys.is_finalizing():",
        "if self._is_closed:",
        "tests/test_threads.py::test_a_program_that_ends_without_closing_ends_quietly",
    ),
    Guard(
        "who is taken out of a table of numbers leaves no gap before others",
        "shmring/core/numbered.pyx",
        "                self._entries[gap] = self._entries[place]\n                gap = place\n",
        "                break\n",
        "tests/core/test_numbered.py::test_others_that_had_the_same_place_are_still_found",
    ),
    Guard(
        "links sleep where others want the core",
        "shmring/transport/polling.py",
        "self._crowded_until_s = now + _CROWDED_S",
        "pass",
        "tests/transport/test_polling.py::test_links_sleep_at_once_where_a_yield_costs_more_than_being_woken",
    ),
    Guard(
        "slots that come back soon do not hide that others do not",
        "shmring/core/client_end.pyx",
        "max(turnover_nbytes, self.turnover_nbytes - self.turnover_nbytes // _FADES)",
        "turnover_nbytes",
        "tests/test_cold_slots.py::test_copies_go_past_the_cache_where_other_frontends_wrote_more_than_it_holds",
    ),
    Guard(
        "a large copy goes into the cache only if it fits there beside what was sent since",
        "shmring/core/payload.pyx",
        "turnover_nbytes + self.slot_nbytes > cache_nbytes",
        "turnover_nbytes > cache_nbytes",
        "tests/test_cold_slots.py::test_a_large_slot_that_was_away_for_little_goes_into_the_cache",
    ),
    Guard(
        "a long copy goes past a cache that others have filled",
        "shmring/memory/_copying.c",
        "quickest(&past_cache) * 5 / 4 < quickest(&into_cache)",
        "0",
        "tests/memory/test_copying.py::test_a_long_copy_goes_past_the_cache_while_that_is_a_good_deal_quicker",
    ),
    Guard(
        "helpers of a parent process are not waited for in its children",
        "shmring/memory/copy_helpers.c",
        "return pthread_atfork(NULL, NULL, forget_helpers);",
        "return 0;",
        "tests/memory/test_copying.py::test_a_forked_child_has_helpers_of_its_own",
    ),
    Guard(
        "a slab lies in huge pages where there are any",
        "shmring/memory/slab.py",
        "huge_nbytes = reserve_huge_pages(fd, nbytes)",
        "os.ftruncate(fd, nbytes)\n        huge_nbytes = 0",
        "tests/memory/test_huge_pages.py::test_a_slab_is_mapped_by_huge_pages_at_both_ends",
    ),
    Guard(
        "a slot that is kept for ever is followed no longer",
        "shmring/core/client_end.pyx",
        "if not self._away or self._next_id - self._away_request > self._max_inflight:",
        "if not self._away:",
        "tests/test_cold_slots.py::test_a_slot_that_never_comes_back_does_not_end_the_measuring",
    ),
    Guard(
        "a collector of garbage sees what is in flight",
        "shmring/core/numbered.pyx",
        "(<CollectedType*><PyObject*>Numbered).tp_traverse = <traverseproc><void*>_traverse\n",
        "",
        "tests/core/test_numbered.py::test_cycles_through_it_are_collected",
    ),
    Guard(
        "only a tensor that was made in a slot counts as one that nothing negates",
        "shmring/core/held_slots.pyx",
        "if self._recent[i].tensor == <PyObject*>tensor:",
        "if self._recent[i].tensor != NULL:",
        "tests/test_client.py::test_a_tensor_that_is_negated_by_a_flag_is_not_taken_for_the_one_made_in_its_slot",
    ),
    Guard(
        "a tensor that was made in a slot counts as such while its bytes are there",
        "shmring/core/held_slots.pyx",
        "return address - self._recent[i].address < self._recent[i].nbytes",
        "return True",
        "tests/memory/test_tensors.py::test_a_tensor_of_a_slot_whose_data_a_caller_has_set_is_looked_at_anew",
    ),
    Guard(
        "a request that was dropped warns if somebody missed how it failed",
        "shmring/core/client_end.pyx",
        "return bool(self._replies) or self.error is not None",
        "return bool(self._replies) and self.unread_slots",
        "tests/test_dropped.py::test_a_request_that_is_dropped_says_what_was_missed",
    ),
    Guard(
        "who waits in another loop than the end's is told so",
        "shmring/core/client_end.pyx",
        "self.submission.end.shell.check_loop()",
        "pass",
        "tests/test_other_loops.py::test_a_client_of_a_loop_that_has_ended_says_so",
    ),
    Guard(
        "an end that blocks is not opened where threads are greenlets",
        "shmring/threads/greenlets.py",
        "if kind.__module__ not in _STANDARD:",
        "if False:",
        "tests/test_greenlets.py::test_an_end_that_blocks_is_refused_where_threads_are_greenlets",
    ),
    Guard(
        "a tensor's storage covers its shape",
        "shmring/core/payload.pyx",
        "return needed if needed <= <uint64_t>has_nbytes else 0",
        "return needed",
        "tests/memory/test_tensors.py::test_a_client_sends_nothing_of_a_freed_tensor",
    ),
    Guard(
        "a tensor that has waited to be copied still has its memory",
        "shmring/core/payload.pyx",
        "        if not part.storage_nbytes:\n            return 0\n        inner",
        "        return 0\n        inner",
        "tests/memory/test_tensors.py::test_a_tensor_that_is_freed_while_it_waits_for_space_is_not_sent",
    ),
    Guard(
        "a tensor that holds more than its numbers is not sent as one",
        "shmring/memory/tensors.py",
        "if type(tensor) not in _TENSOR_TYPES:",
        "if False:",
        "tests/memory/test_tensors.py::test_what_is_not_its_own_data_or_has_not_all_of_it_is_refused_with_its_path",
    ),
    Guard(
        "memory is reused only when the pidfd reports the death",
        "shmring/ring/frontend.py",
        "self._ring.carry_out(self._book.disconnect(self.client_id))",
        "self._ring.carry_out(self._book.died(self.client_id))",
        "tests/integration/test_process_death.py::test_a_frontend_that_is_disconnected_but_lives_keeps_its_memory",
    ),
    Guard(
        "the second check, where a pid could have been reused",
        "shmring/transport/liveness.py",
        "if _has_hung_up(peer):",
        "if False:",
        "tests/transport/test_liveness.py::test_without_the_kernels_help_a_peer_that_hung_up_proves_nothing",
    ),
    Guard(
        "generations only grow",
        "shmring/core/engine_book.pyx",
        "slot.generation >> GENERATION_BITS != client.client_id or slot.generation <= last_generation",
        "slot.generation >> GENERATION_BITS != client.client_id",
        "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "a client may use only its own generations",
        "shmring/core/engine_book.pyx",
        "slot.generation >> GENERATION_BITS != client.client_id or slot.generation <= last_generation",
        "slot.generation <= last_generation",
        "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "the slot's header has the generation",
        "shmring/core/engine_end.pyx",
        "            if numbers[0] != slot.generation or numbers[1] != slot.nbytes:",
        "            if numbers[1] != slot.nbytes:",
        "tests/integration/test_forged.py::test_a_header_that_differs_from_its_descriptor_is_stale",
    ),
    Guard(
        "a message has the current epoch",
        "shmring/core/engine_end.pyx",
        "if submit.epoch != self.epoch:",
        "if False:",
        "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "a client may use only its own leases",
        "shmring/core/engine_book.pyx",
        "lease = client.leases.get(slot.lease_id)",
        "lease = {one.lease_id: one for other in self.clients.values() for one in other.leases.values()}.get(slot.lease_id)",
        "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "a slot lies inside its lease",
        "shmring/core/engine_book.pyx",
        "if slot.offset % BLOCK_NBYTES or start < lease.start or start + blocks > lease.start + lease.blocks:",
        "if slot.offset % BLOCK_NBYTES:",
        "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "live slots never overlap",
        "shmring/core/engine_book.pyx",
        "if not lease.live.take(start, blocks):",
        "if not lease.live.take(start, blocks) and False:",
        "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "a request names only content that its client has pinned",
        "shmring/core/engine_book.pyx",
        "if kept is None or slot.generation not in client.pins:",
        "if kept is None:",
        "tests/integration/test_kept_processes.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "a client takes back only pins that it has",
        "shmring/core/engine_book.pyx",
        "if counts[generation] > client.pins.get(generation, 0):",
        "if generation not in client.pins:",
        "tests/integration/test_kept_processes.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "pins of kept content go with a proof of death only",
        "shmring/core/engine_book.pyx",
        "        client.connected = False\n        for lending",
        "        client.connected = False\n        self._drop_pins(client, frozenset())\n        for lending",
        "tests/test_kept.py::test_what_is_kept_outlives_who_gave_it",
    ),
    Guard(
        "a goodbye names what was given to keep and is not answered",
        "shmring/client/kept.py",
        "return [*self._pins, *given]",
        "return [*self._pins]",
        "tests/test_kept.py::test_a_slot_that_is_given_while_its_client_closes_stays_pinned",
    ),
    Guard(
        "a slot that was kept is pinned until its caller has left it",
        "shmring/client/kept.py",
        "if record.held or record.viewed:",
        "if False:",
        "tests/test_kept.py::test_a_slot_that_was_kept_is_pinned_until_it_is_left",
    ),
    Guard(
        "a request pins the kept content that it has",
        "shmring/core/engine_book.pyx",
        "self.kept.pin(kept)\n        record = EngineSlotRecord",
        "kept.pins += 0\n        record = EngineSlotRecord",
        "tests/test_kept.py::test_a_request_keeps_what_it_has_after_everybody_left_it",
    ),
    Guard(
        "a tensor lies inside its slot",
        "shmring/core/wire.pyx",
        "if nbytes and (tensor.offset > region_nbytes or nbytes > region_nbytes - tensor.offset):",
        "if False:",
        "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "looking for more takes no more than a turn",
        "shmring/core/message_ring.pyx",
        "while is_hot and self.records_left and not self.stopped",
        "while is_hot and not self.stopped",
        "tests/test_claim.py::test_looking_for_requests_takes_in_no_more_than_a_turn_does",
    ),
    Guard(
        "what msgspec has encoded is looked at before it is sent",
        "shmring/core/payload.pyx",
        "        out.is_foreign = True\n",
        "        out.is_foreign = False\n",
        "tests/memory/test_codec.py::test_an_extension_that_stands_for_tensors_can_not_be_sent_as_such",
    ),
    Guard(
        "a key that is kept is the key that came",
        "shmring/core/received.pyx",
        "and not memcmp(PyUnicode_DATA(<object>known[0]), data, nbytes):",
        "and True:",
        "tests/memory/test_codec.py::test_keys_that_came_before_are_not_mistaken_for_others",
    ),
    Guard(
        "draining: the engine's views",
        "shmring/core/engine_end.pyx",
        "                viewed[i] = claim.regions.leave(i)\n",
        "                claim.regions.leave(i)\n                viewed[i] = False\n",
        "tests/test_claim.py::test_a_view_keeps_its_slot_after_the_claim_and_its_bytes_stay",
    ),
    Guard(
        "draining: a reply's views",
        "shmring/core/client_end.pyx",
        "                if not is_viewed:\n",
        "                if True:\n",
        "tests/test_claim.py::test_a_view_of_a_reply_is_never_overwritten",
    ),
    Guard(
        "draining: a frontend's slot that threads write to",
        "shmring/core/client_end.pyx",
        "        if slot._drain and leave_region(region):",
        "        if False:",
        "tests/test_slot.py::test_a_slot_that_is_still_viewed_drains_and_is_not_lent_again",
    ),
    Guard(
        "draining: device memory that a GPU may still use",
        "shmring/gpu/device_views.py",
        "            self._watcher.guard(event, [hold])",
        "            pass",
        "tests/memory/test_device_slots.py::test_a_slot_comes_back_when_the_gpu_is_done_and_not_before",
    ),
    Guard(
        "the fence of the producer that wrote to device memory",
        "shmring/gpu/device_claims.py",
        "        self._wait(client_id, submit.content, stream)\n        for slot in slots:",
        "        for slot in slots:",
        "tests/memory/test_device_slots.py::test_the_engine_reads_after_the_producer_has_written",
    ),
    Guard(
        "device memory that somebody may map is not freed",
        "shmring/gpu/device_claims.py",
        "if self._announced_to",
        "if False",
        "tests/memory/test_device_slots.py::test_a_ring_that_closes_first_keeps_the_slab_of_those_who_may_map_it",
    ),
    Guard(
        "posix_fallocate",
        "shmring/memory/slab.py",
        "os.posix_fallocate(fd, 0, nbytes)",
        "os.ftruncate(fd, nbytes)",
        "tests/integration/test_guarantees_processes.py::test_a_shm_that_is_small_or_filled_by_others_is_an_error_and_never_a_crash",
    ),
    Guard(
        "the slab's name is unlinked while the slab lives",
        "shmring/memory/slab.py",
        "            posix_ipc.unlink_shared_memory(path)\n    except",
        "            pass\n    except",
        "tests/memory/test_slab.py::test_a_slab_has_no_name_from_the_start",
    ),
    Guard(
        "a sweep asks for the lock of a slab",
        "shmring/memory/slab.py",
        "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n            path.unlink()",
        "            path.unlink()",
        "tests/memory/test_slab.py::test_a_sweep_leaves_what_a_living_engine_holds",
    ),
    Guard(
        "a sweep calls no living engine dead",
        "shmring/memory/slab.py",
        "            if os.fstat(fd).st_size:",
        "            if True:",
        "tests/memory/test_slab.py::test_a_slab_whose_name_was_swept_in_the_making_is_as_good",
    ),
    Guard(
        "a slab in a memfd is sealed",
        "shmring/memory/slab.py",
        "                _seal(fd, _FIXED_SIZE)",
        "                pass",
        "tests/memory/test_slab.py::test_nobody_can_truncate_a_slab_in_a_memfd",
    ),
    Guard(
        "only the engine can write replies",
        "shmring/memory/slab.py",
        "                _seal(reply_fd, _READ_ONLY)",
        "                _seal(reply_fd, _FIXED_SIZE)",
        "tests/memory/test_slab.py::test_nobody_but_the_engine_can_write_what_replies_are_in",
    ),
    Guard(
        "a frontend takes no replies that others could write",
        "shmring/memory/slab.py",
        "if not _is_sealed(reply_fd, _READ_ONLY):",
        "if False:",
        "tests/memory/test_slab.py::test_a_part_for_replies_that_others_could_write_is_refused",
    ),
    Guard(
        "a cancelled copy waits for its thread",
        "shmring/cancellation.py",
        "        return await asyncio.shield(future)\n    except asyncio.CancelledError:\n        while not future.done():",
        "        return await asyncio.shield(future)\n    except asyncio.CancelledError:\n        while False:",
        "tests/memory/test_copier.py::test_a_cancellation_waits_until_nobody_writes_any_more",
    ),
    Guard(
        "a running request keeps its slots until its step ends",
        "engine/core.py",
        "        if self._scheduler.withdraw(request):\n            request.leave()",
        "        self._scheduler.withdraw(request)\n        request.leave()",
        "tests/engine/test_core.py::test_a_request_aborted_in_its_step_keeps_its_slot_until_the_step_ends",
    ),
    Guard(
        "a forked child may not use its parent's client",
        "shmring/client/session.py",
        "if self._origin.forked:",
        "if False:",
        "tests/integration/test_process_exit.py::test_a_forked_child_can_use_neither_end",
    ),
    Guard(
        "a forked child may not use its parent's ring",
        "shmring/core/fan_out_end.pyx",
        "if not self.is_open or self._forks != forks():",
        "if not self.is_open:",
        "tests/test_forked_children.py::test_a_forked_child_is_refused",
    ),
    Guard(
        "a forked child reads no worker's page",
        "shmring/core/fan_out_book.pyx",
        "        if self._forks != forks():\n            return True\n",
        "",
        "tests/core/test_fan_out_book_machine.py::test_a_forked_child_believes_no_page_and_asks_nobody",
    ),
    Guard(
        "the uid of a peer that connects is checked",
        "shmring/transport/endpoint.py",
        "if uid not in allowed_uids:",
        "if False:",
        "tests/transport/test_endpoint.py::test_a_uid_that_is_not_allowed_is_refused_and_told",
    ),
    Guard(
        "nobody else can write to the directory of the socket",
        "shmring/transport/endpoint.py",
        "if status.st_mode & 0o022:",
        "if False:",
        "tests/transport/test_endpoint.py::test_a_directory_that_others_can_write_to_is_refused_by_both_ends",
    ),
    Guard(
        "a link in the place of the socket is refused",
        "shmring/transport/endpoint.py",
        '    if not stat.S_ISSOCK(mode):\n        raise PermissionError(f"{path} is in the place of the socket and is none (',
        '    if False:\n        raise PermissionError(f"{path} is in the place of the socket and is none (',
        "tests/transport/test_endpoint.py::test_what_is_in_the_place_of_the_socket_is_refused_and_not_touched",
    ),
    Guard(
        "message rings are sealed by who makes them",
        "shmring/transport/rings.py",
        "        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)",
        "        pass",
        "tests/transport/test_rings.py::test_nobody_can_truncate_what_both_ends_have_mapped",
    ),
    Guard(
        "a frontend takes no message ring that could be truncated",
        "shmring/transport/rings.py",
        "    if seals & _SEALS != _SEALS:",
        "    if False:",
        "tests/transport/test_rings.py::test_memory_that_could_be_truncated_is_refused",
    ),
    Guard(
        "only an engine can write its load",
        "shmring/transport/load.py",
        "fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL",
        "fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL",
        "tests/transport/test_load.py::test_nobody_but_its_engine_can_write_it",
    ),
    Guard(
        "a frontend takes no load page that others could write",
        "shmring/transport/load.py",
        "if seals & _SEALS != _SEALS:",
        "if False:",
        "tests/transport/test_load.py::test_a_page_that_others_could_write_is_refused",
    ),
    Guard(
        "what has been answered in part is not sent again",
        "shmring/client/routing_client.py",
        "if not retry or submission.has_replied:",
        "if not retry:",
        "tests/test_routing_client.py::test_what_has_been_answered_in_part_is_not_sent_again",
    ),
    Guard(
        "a payload lies in slots of one engine",
        "shmring/client/routing_client.py",
        "if holds and holder is not None:",
        "if False:",
        "tests/test_routing_client.py::test_a_slot_and_its_request_can_not_be_at_two_engines",
    ),
    Guard(
        "an engine that does not respond gets nothing new",
        "shmring/client/routing.py",
        "responds = self._unread_since is None or now - self._unread_since <= _PATIENCE_S",
        "responds = True",
        "tests/integration/test_engines.py::test_an_engine_that_is_stopped_gets_nothing_new_until_it_goes_on",
    ),
    Guard(
        "only bells come over the socket",
        "shmring/transport/link.py",
        "            if heard & FOREIGN:",
        "            if False:",
        "tests/integration/test_forged.py::test_what_is_no_bell_ends_its_connection",
    ),
    Guard(
        "a turn of the loop has a budget",
        "shmring/core/message_ring.pyx",
        "            if <double>clock() > deadline:",
        "            if False:",
        "tests/transport/test_link.py::test_messages_that_take_long_do_not_hold_up_another_link",
    ),
    Guard(
        "the tensors in a message are bounded",
        "shmring/core/engine_end.pyx",
        "        if content.inline_nbytes > self._inline_nbytes:",
        "        if False:",
        "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "a payload names no more tensors than were agreed upon",
        "shmring/core/wire.pyx",
        "            if found.tensors > bounds.tensors:",
        "            if False:",
        "tests/core/test_received.py::test_a_tensor_that_is_named_too_often_is_refused_before_one_is_made",
    ),
    Guard(
        "the values of a payload are counted",
        "shmring/core/wire.pyx",
        "        if values > bounds.values:",
        "        if False:",
        "tests/core/test_wire.py::test_what_values_count",
    ),
    Guard(
        "keys whose hashes can be chosen count more",
        "shmring/core/wire.pyx",
        "            values += key_counts[depth]",
        "            pass",
        "tests/core/test_wire.py::test_what_values_count",
    ),
    Guard(
        "what is sent counts no more than was agreed upon",
        "shmring/core/payload.pyx",
        "            if found.values > self._bounds.values:",
        "            if False:",
        "tests/memory/test_payload.py::test_a_payload_that_counts_more_than_agreed_upon_is_an_error_that_says_so",
    ),
    Guard(
        "the collector of garbage is paused while much is decoded",
        "shmring/core/received.pyx",
        "    return value_count > _PAUSING_COUNT and PyGC_Disable()",
        "    return False",
        "tests/core/test_received.py::test_the_collector_is_paused_while_much_is_decoded",
    ),
    Guard(
        "what is claimed in a turn of the loop is bounded",
        "shmring/core/engine_end.pyx",
        "        if self._turn_left <= 0:",
        "        if False:",
        "tests/test_costly_payloads.py::test_quick_requests_do_not_wait_for_costly_ones",
    ),
    Guard(
        "costly requests wait apart",
        "shmring/core/engine_end.pyx",
        "content.value_count > _LIGHT_COUNT or content.payload_nbytes > _LIGHT_NBYTES",
        "False",
        "tests/test_costly_payloads.py::test_quick_requests_do_not_wait_for_costly_ones",
    ),
    Guard(
        "frontends with costly requests take turns",
        "shmring/core/engine_end.pyx",
        "        self._costly.append(frontend)\n        return",
        "        self._costly.insert(0, frontend)\n        return",
        "tests/test_costly_payloads.py::test_frontends_with_costly_requests_take_turns",
    ),
    Guard(
        "quick requests do not overtake a costly one for ever",
        "shmring/core/engine_end.pyx",
        " and self._overtaken < _OVERTAKING:",
        ":",
        "tests/test_costly_payloads.py::test_a_costly_request_is_overtaken_so_often_and_no_more",
    ),
    Guard(
        "looking for more takes fewer that are long",
        "shmring/core/message_ring.pyx",
        "1 if nbytes < _LONG_NBYTES else nbytes >> _SHARE_SHIFT",
        "1",
        "tests/test_costly_payloads.py::test_looking_for_requests_takes_in_fewer_that_are_long",
    ),
    Guard(
        "connections that have gone keep nobody out",
        "shmring/ring/handshakes.py",
        "sum(frontend.connected for frontend in self._frontends.values())",
        "len(self._frontends)",
        "tests/test_ring.py::test_connections_that_have_gone_count_for_their_process_alone",
    ),
    Guard(
        "connections of one process that have gone are bounded",
        "shmring/ring/handshakes.py",
        "        if gone < _MAX_GONE:",
        "        if True:",
        "tests/test_ring.py::test_connections_that_have_gone_count_for_their_process_alone",
    ),
    Guard(
        "a payload in a slot proves nothing against its frontend",
        "shmring/core/engine_end.pyx",
        "breaks_rules=not is_payload_shared)",
        "breaks_rules=True)",
        "tests/integration/test_forged.py::test_a_payload_in_a_slot_that_is_none_fails_its_request_and_nothing_else",
    ),
    Guard(
        "what a peer had published before its end is read",
        "shmring/transport/link.py",
        "            self._expect_the_end()\n            self._unblock()",
        "            self._end()\n            return",
        "tests/transport/test_link.py::test_the_last_words_of_a_peer_that_has_gone_are_read",
    ),
    Guard(
        "a link that sleeps has looked again",
        "shmring/transport/link.py",
        "not (at_once or self._vigil.is_over(now_s)) or not self.reader.sleep():",
        "not (at_once or self._vigil.is_over(now_s)) or (not self.reader.sleep() and False):",
        "tests/transport/test_link.py::test_a_link_that_falls_asleep_has_looked_again",
    ),
    Guard(
        "who reads a message ring looks again before it sleeps",
        "shmring/core/message_ring.pyx",
        "        if load_acquire_u64(self._at + AT_TAIL) != self._head:\n            store",
        "        if False:\n            store",
        "tests/core/test_message_ring.py::test_a_reader_that_is_about_to_sleep_looks_again",
    ),
    Guard(
        "who waits for room in a message ring has looked again",
        "shmring/core/message_ring.pyx",
        "        if self._tail + self._needed(<uint32_t>nbytes) - self._head <= self._capacity:",
        "        if False:",
        "tests/core/test_message_ring.py::test_a_writer_that_is_about_to_wait_looks_again",
    ),
    Guard(
        "a record is copied out of its ring before it is parsed",
        "shmring/core/message_ring.pyx",
        "                if taker.take_hot(self._copy, nbytes):",
        f"                if taker.take_hot({_IN_THE_RING}, nbytes):",
        "tests/core/test_overwritten.py::test_a_submission_that_is_overwritten_while_it_is_checked_is_what_it_was",
    ),
    Guard(
        "a record that is taken between two turns is copied as well",
        "shmring/core/message_ring.pyx",
        "                is_hot = taker.take_hot(self._copy, nbytes)",
        f"                is_hot = taker.take_hot({_IN_THE_RING}, nbytes)",
        "tests/core/test_overwritten.py::test_a_submission_that_is_overwritten_while_it_is_checked_is_what_it_was",
    ),
    Guard(
        "a place in a message ring is given back after its record was copied",
        "shmring/core/message_ring.pyx",
        "        memcpy(to, self._at + AT_RECORDS",
        "        store_release_u64(self._at + AT_HEAD, self._head + _up(LENGTH_NBYTES + nbytes))\n"
        "        memcpy(to, self._at + AT_RECORDS",
        "tests/core/test_message_ring.py::test_a_place_is_given_back_after_its_record_was_copied",
    ),
    Guard(
        "a record is published after all of it was written",
        "shmring/core/message_ring.pyx",
        "        if source.shape[0]:\n            memcpy(to, &source[0], source.shape[0])\n        self.commit()\n",
        "        self.commit()\n        if source.shape[0]:\n            memcpy(to, &source[0], source.shape[0])\n",
        "tests/core/test_message_ring.py::test_a_record_is_published_after_all_of_it_was_written",
    ),
    Guard(
        "a writer fences before it looks whether the reader sleeps",
        "shmring/core/message_ring.pyx",
        "        fence_full()  # after the tail, before the look:",
        "        # after the tail, before the look:",
        "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
    ),
    Guard(
        "a reader fences before it looks whether the writer waits",
        "shmring/core/message_ring.pyx",
        "        fence_full()  # after the head, before the look:",
        "        # after the head, before the look:",
        "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
    ),
    Guard(
        "a reader fences between saying that it sleeps and looking again",
        "shmring/core/message_ring.pyx",
        "        fence_full()  # before the second look: the writer publishes its tail",
        "        # before the second look: the writer publishes its tail",
        "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
    ),
    Guard(
        "a writer fences between saying that it waits and looking again",
        "shmring/core/message_ring.pyx",
        "        fence_full()  # before the second look: the reader publishes its head",
        "        # before the second look: the reader publishes its head",
        "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
    ),
    Guard(
        "a worker fences before it looks what its engine waits for",
        "shmring/core/worker_end.pyx",
        "        fence_full()  # before the look: the engine",
        "        # before the look: the engine",
        "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
    ),
    Guard(
        "an engine fences between saying what it waits for and looking again",
        "shmring/core/fan_out_book.pyx",
        "        fence_full()  # before the look: a worker",
        "        # before the look: a worker",
        "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
    ),
    Guard(
        "a fence orders stores before loads",
        "shmring/core/atomics.h",
        "__atomic_thread_fence(__ATOMIC_SEQ_CST)",
        "__atomic_thread_fence(__ATOMIC_ACQ_REL)",
        "tests/core/test_protocols.py::test_an_operation_is_the_instruction_that_orders_what_it_says",
    ),
    Guard(
        "a region says that its owner is told before the owner's reference goes",
        "shmring/core/views.pyx",
        "    region.is_told = True\n    if drop_reference(&region.references):\n        return True\n",
        "    if drop_reference(&region.references):\n        region.is_told = True\n        return True\n",
        "tests/core/test_views.py::test_a_last_view_may_die_at_any_moment_while_its_region_is_left",
    ),
    Guard(
        "the bell of dying views is cleared before they are collected",
        "shmring/core/views.pyx",
        "take_stack(&self._departures.top, NULL)\n",
        "take_stack(&self._departures.top, NULL)\n        read(self._departures.bell, &rings, sizeof(rings))\n",
        "tests/core/test_views.py::test_a_last_view_may_die_at_any_moment_while_others_are_collected",
    ),
    Guard(
        "a decoder that decodes another payload meanwhile goes on with its own",
        "shmring/core/received.pyx",
        "            self._content_regions, self._place = outer, outer_place\n",
        "            self._content_regions, self._place = None, None\n",
        "tests/core/test_received.py::test_while_a_payload_is_decoded_its_decoder_may_decode_another_one",
    ),
    Guard(
        "a slot is held only while its session lives",
        "shmring/core/client_end.pyx",
        "        if not self.is_usable():\n            return None\n        record = self.book.acquire_slot(nbytes, True)\n",
        "        record = self.book.acquire_slot(nbytes, True)\n",
        "tests/test_slot.py::test_an_end_whose_session_has_ended_holds_no_slot",
    ),
    Guard(
        "who has heard looks whether this end may still be used",
        "shmring/core/client_end.pyx",
        "        return self.is_usable()\n\n    cpdef PayloadDecoder decoder_of",
        "        return True\n\n    cpdef PayloadDecoder decoder_of",
        "tests/test_inside_calls.py::test_a_call_that_hears_of_the_end_says_so",
    ),
    Guard(
        "memory that is not mapped any more is not written",
        "shmring/core/mapping.pyx",
        "    if not mapped.nbytes:\n        raise",
        "    if False:\n        raise",
        "tests/core/test_mapping.py::test_memory_that_is_not_mapped_is_no_place",
    ),
    Guard(
        "who has encoded a payload looks whether this end may still be used",
        "shmring/core/client_end.pyx",
        "return packed if self.is_usable() else None",
        "return packed",
        "tests/test_inside_calls.py::test_code_that_runs_while_a_payload_is_encoded_may_end_the_session",
    ),
    Guard(
        "a shape is read before its slot is looked at",
        "shmring/core/client_end.pyx",
        "if self._region == NULL or not end.is_usable() or self._take",
        "if self._take",
        "tests/test_inside_calls.py::test_a_shape_may_leave_its_slot_or_end_the_session",
    ),
    Guard(
        "who has encoded a message to workers looks at its claims again",
        "shmring/core/fan_out_end.pyx",
        "                if claim.regions is None:\n                    raise",
        "                if False:\n                    raise",
        "tests/test_inside_calls.py::test_code_that_runs_while_a_message_is_encoded_may_leave_the_claim_that_is_shared",
    ),
    Guard(
        "who has encoded a message to workers looks whether the ring is still open",
        "shmring/core/fan_out_end.pyx",
        "        self._check_open()  # code of the caller",
        "        pass  # code of the caller",
        "tests/test_inside_calls.py::test_code_that_runs_while_a_message_is_encoded_may_close_the_ring",
    ),
    Guard(
        "a message to workers that can't be copied gives its memory back",
        "shmring/core/fan_out_end.pyx",
        "        except BaseException:\n            self.discard(parcel)\n            raise\n",
        "        except BaseException:\n            raise\n",
        "tests/test_inside_calls.py::test_a_message_that_can_not_be_copied_gives_its_memory_back",
    ),
    Guard(
        "a slot that a payload lies in is looked at again when it is sent",
        "shmring/core/client_end.pyx",
        "            if not record.is_submittable():\n",
        "            if False:\n",
        "tests/test_slot.py::test_a_slot_that_changed_hands_since_its_payload_was_packed_is_not_sent",
    ),
    Guard(
        "who waits for room leaves the bell to who sleeps for a message",
        "shmring/core/worker_end.pyx",
        "if descriptors[0].revents and not self._is_receiving:",
        "if descriptors[0].revents:",
        "tests/core/test_worker_end.py::test_who_waits_for_other_things_reads_nothing_at_any_moment_while_another_receives",
    ),
    Guard(
        "where all that may be kept is pinned nothing more is kept",
        "shmring/core/kept_book.pyx",
        "len(self.unpinned)) >= self.max_kept:",
        "len(self.unpinned)) > self.max_kept:",
        "tests/core/test_kept_book.py::test_where_as_many_are_pinned_as_may_be_kept_another_one_is_not_kept",
    ),
    Guard(
        "content that ends where a window begins stays",
        "shmring/core/lending.pyx",
        "            first -= before.start + before.blocks > start\n",
        "            first -= before.start + before.blocks >= start\n",
        "tests/core/test_kept_book.py::test_what_is_kept_beside_a_range_that_somebody_waits_for_stays",
    ),
    Guard(
        "content that begins where a window ends stays",
        "shmring/core/lending.pyx",
        "last = self._place_of(start + blocks)\n",
        "last = self._place_of(start + blocks + 1)\n",
        "tests/core/test_kept_book.py::test_what_is_kept_beside_a_range_that_somebody_waits_for_stays",
    ),
    Guard(
        "a request that leaves the line is between nobody any more",
        "shmring/core/engine_end.pyx",
        "            after._before = <PyObject*>before\n",
        "            pass\n",
        "tests/test_claim.py::test_aborts_in_a_line_of_waiting_requests_leave_the_others_in_order",
    ),
    Guard(
        "a worker looks for a moment before it sleeps",
        "shmring/core/looking.pyx",
        "return _MOMENT_S if self._vain < _VAIN",
        "return 0 if self._vain < _VAIN",
        "tests/test_workers.py::test_a_blocking_worker_looks_for_a_moment_before_it_sleeps",
    ),
    Guard(
        "nobody rings a descriptor that was closed",
        "shmring/transport/link.py",
        "        self.writer.mute()\n        self.reader.mute()",
        "        pass",
        "tests/transport/test_link.py::test_nobody_rings_a_descriptor_that_may_be_another_files",
    ),
    Guard(
        "a sweep leaves the locks of other programs",
        "shmring/transport/endpoint.py",
        "    if mark != _LOCK_MARK:",
        "    if False:",
        "tests/transport/test_endpoint.py::test_a_sweep_leaves_what_is_not_ours",
    ),
    Guard(
        "the backlog of a peer that does not read is bounded",
        "shmring/transport/link.py",
        "        if self._backlog_nbytes > self._max_backlog_nbytes:",
        "        if False:",
        "tests/integration/test_forged.py::test_a_frontend_that_never_reads_is_disconnected",
    ),
    Guard(
        "a slot is kept until its copy to a GPU is over",
        "shmring/gpu/upload.py",
        "        lane.watcher.guard(event, upload.sources)",
        "        upload.sources.clear()",
        "tests/memory/test_claim_to.py::test_no_slot_is_reused_before_its_copy",
    ),
    Guard(
        "staging memory is kept until the GPU is done with it",
        "shmring/gpu/staging.py",
        "            if over:",
        "            if True:",
        "tests/memory/test_staging.py::test_a_part_is_lent_until_the_gpu_is_done_with_it",
    ),
    Guard(
        "registered memory stays mapped",
        "shmring/gpu/pinned.py",
        "        pinned._mapping = slab.bytes_at(0, slab.nbytes)",
        "        pass",
        "tests/memory/test_pinned.py::test_registered_memory_stays_mapped_though_nobody_closes_anything",
    ),
    Guard(
        "a worker's stamp counts only for the message that it names",
        "shmring/core/fan_out_book.pyx",
        "if load_acquire_u64(worker._at + AT_STAMPS + 8 * stamp) == message.sequence \\",
        "if load_acquire_u64(worker._at + AT_STAMPS + 8 * stamp) \\",
        "tests/test_workers.py::test_noise_in_its_page_frees_nothing_of_others_and_only_its_own",
    ),
    Guard(
        "what is sent to a worker that has closed comes back",
        "shmring/core/fan_out_book.pyx",
        "or (not worker.is_member and self._has_closed_before(worker, message.sequence)):",
        "or False:",
        "tests/test_workers.py::test_what_is_sent_to_a_worker_that_has_closed_comes_back_though_its_process_lives",
    ),
    Guard(
        "a sender that is cancelled may have left the line already",
        "shmring/ring/workers.py",
        "elif future in self._line:",
        "else:",
        "tests/test_workers.py::test_two_who_are_cancelled_in_one_turn_are_both_cancelled",
    ),
    Guard(
        "who waits for space leaves its turn to others",
        "shmring/client/sending.py",
        """        flight.leave()
        slot = await self._host_slots.acquire(nbytes, held=False)
""",
        """        slot = await self._host_slots.acquire(nbytes, held=False)
        flight.leave()
""",
        "tests/test_client.py::test_who_waits_for_space_leaves_its_turn_to_others",
    ),
    Guard(
        "who is cancelled when it has space gives it back",
        "shmring/client/sending.py",
        """        except BaseException:
            self._host_slots.give_up(slot)
            raise
        return slot
""",
        """        except BaseException:
            raise
        return slot
""",
        "tests/test_client.py::test_who_is_cancelled_when_it_has_space_and_waits_for_its_turn_gives_it_back",
    ),
    Guard(
        "a message that is given up while it is copied keeps no tensor",
        "shmring/core/fan_out_end.pyx",
        "            parcel.packed.parts = []",
        "            pass",
        "tests/test_workers.py::test_a_broadcast_whose_time_is_over_while_it_is_copied_keeps_no_tensor",
    ),
    Guard(
        "a message that is given up keeps nothing",
        "shmring/core/fan_out_end.pyx",
        "        parcel.drop()",
        "        pass",
        "tests/test_workers.py::test_a_share_whose_time_is_over_keeps_no_view_of_its_claim",
    ),
    Guard(
        "a claim in hand is shared in place, also when its request has ended",
        "shmring/core/fan_out_end.pyx",
        "self._slots.look_in(shared)",
        "self._slots.look_in(None)",
        "tests/test_workers.py::test_a_claim_whose_frontend_gave_it_up_is_shared_in_place_as_well",
    ),
    Guard(
        "a sender that waits for room learns which worker it waits for",
        "shmring/core/fan_out_end.pyx",
        "return self.blocks != 0 and not self.had_memory",
        "return self.blocks != 0 and self.start < 0",
        "tests/test_workers.py::test_who_has_memory_and_waits_for_place_is_told_whom_it_waits_for",
    ),
    Guard(
        "a message is kept until the last worker has left it",
        "shmring/core/fan_out_book.pyx",
        "        if not message.pending:\n            self._free(stamp)",
        "        if message.sequence:\n            self._free(stamp)",
        "tests/simulation/test_fan_out.py::test_every_state_of_a_small_scenario_with_workers_is_sound",
    ),
    Guard(
        "a worker that was dropped keeps what it reads",
        "shmring/ring/workers.py",
        "            self.book.part(record)\n        self.end.lost(record, how)",
        "            self.book.died(record)\n        self.end.lost(record, how)",
        "tests/test_workers.py::test_a_dropped_worker_is_told_and_keeps_what_it_reads",
    ),
    Guard(
        "what a dead worker had comes back",
        "shmring/ring/workers.py",
        "        self.book.died(worker.record)\n        self.end.lost(",
        "        self.book.part(worker.record)\n        self.end.lost(",
        "tests/integration/test_workers.py::test_a_killed_worker_is_struck_off_and_what_it_had_comes_back",
    ),
    Guard(
        "an engine that waits for workers has looked again",
        "shmring/core/fan_out_book.pyx",
        "return self.sweep() > 0",
        "return False",
        "tests/core/test_fan_out_book_machine.py::test_who_waits_looks_again_after_it_has_said_so",
    ),
    Guard(
        "a second sender that waits does not take the first one's bell",
        "shmring/core/fan_out_book.pyx",
        "store_release_u64(at, min(earlier, wanted[place]) if earlier else wanted[place])",
        "store_release_u64(at, wanted[place])",
        "tests/core/test_fan_out_book_machine.py::test_of_two_who_wait_neither_takes_the_others_bell",
    ),
    Guard(
        "a worker that leaves a message rings who waits for it",
        "shmring/core/worker_end.pyx",
        "if wanted and left.sequence >= wanted and exchange_u64",
        "if False and exchange_u64",
        "tests/test_workers.py::test_memory_that_is_read_is_waited_for",
    ),
    Guard(
        "slots of claims are asked for again after each bell",
        "shmring/ring/workers.py",
        "        if self.book.holds_slots():\n            self.slots_are_kept()",
        "        if False:\n            self.slots_are_kept()",
        "tests/test_workers.py::test_slots_of_claims_go_back_one_by_one_though_nobody_here_waits_for_them",
    ),
    Guard(
        "a message goes to all workers or to none",
        "shmring/core/fan_out_end.pyx",
        "        self._publish(self._mask(parcel), parcel)",
        "        self._publish(self.book.members(), parcel)",
        "tests/test_workers.py::test_who_breaks_the_rules_while_a_gather_waits_fails_it",
    ),
    Guard(
        "a message keeps the slots that it shows",
        "shmring/core/fan_out_end.pyx",
        "parcel.regions, slots)\n        parcel.sequence, parcel.start = sequence, -1\n        parcel.regions,",
        "NULL, 0)\n        parcel.sequence, parcel.start = sequence, -1\n        if not mask: parcel.regions,",
        "tests/fuzz/test_targets.py::test_a_target_keeps_its_promise",
    ),
    Guard(
        "memory is taken for a message that somebody gets",
        "shmring/core/fan_out_end.pyx",
        "        if not mask:\n            return True\n        if not self.take_memory(parcel):",
        "        if not self.take_memory(parcel):",
        "tests/test_workers.py::test_memory_that_was_taken_for_a_worker_that_breaks_the_rules_comes_back",
    ),
    Guard(
        "a worker that is gone is not named",
        "shmring/core/fan_out_end.pyx",
        "        if self.future.done():\n            return  # in",
        "        if False:\n            return  # in",
        "tests/test_workers.py::test_a_gather_whose_time_is_over_as_a_worker_dies_fails_once",
    ),
    Guard(
        "a worker replies once",
        "shmring/core/fan_out_end.pyx",
        "            if gathering is not None:\n                raise RemoteProtocolError(",
        "            if False:\n                raise RemoteProtocolError(",
        "tests/test_workers.py::test_a_second_reply_ends_its_worker",
    ),
    Guard(
        "a worker's reply has no slots",
        "shmring/core/fan_out_end.pyx",
        "        if content.slot_count:",
        "        if False:",
        "tests/test_workers.py::test_a_reply_that_names_a_slot_ends_its_worker",
    ),
    Guard(
        "a reply in parts is bounded",
        "shmring/ring/workers.py",
        "        if self.parts_nbytes > _MOST_ANSWERS * int(self._workers.ring.config.max_payload_nbytes):",
        "        if False:",
        "tests/test_workers.py::test_parts_without_end_are_bounded",
    ),
    Guard(
        "a worker's backlog is bounded",
        "shmring/core/fan_out_book.pyx",
        ".unacknowledged >= self.backlog:\n                return False",
        ".unacknowledged >= self.backlog and False:\n                return False",
        "tests/test_workers.py::test_who_is_behind_holds_up_others_at_the_bound_and_is_named",
    ),
    Guard(
        "a worker's descriptor of the slab is for reading",
        "shmring/ring/workers.py",
        "os.O_RDONLY | os.O_CLOEXEC)",
        "os.O_RDWR | os.O_CLOEXEC)",
        "tests/integration/test_workers.py::test_the_kernel_refuses_a_worker_to_write",
    ),
    Guard(
        "a view of a message keeps it unacknowledged",
        "shmring/core/worker_end.pyx",
        "        regions.owner = &message._acknowledgement.owner",
        "        pass",
        "tests/test_workers.py::test_a_message_is_kept_until_it_was_left_and_its_last_view_has_died",
    ),
    Guard(
        "kept content is where it was kept",
        "shmring/core/engine_book.pyx",
        "if slot.offset != kept.start * BLOCK_NBYTES or slot.nbytes != kept.nbytes:",
        "if False:",
        "tests/integration/test_kept_processes.py::test_a_forged_message_ends_its_connection_and_nothing_else",
    ),
    Guard(
        "of two contents with one key the first stays",
        "shmring/core/engine_book.pyx",
        "        if reason is not None or kept is not None:",
        "        if reason is not None:",
        "tests/test_kept.py::test_of_two_with_one_key_the_first_is_kept_and_both_have_it",
    ),
    Guard(
        "a client's pins are bounded",
        "shmring/core/engine_book.pyx",
        "        if client.pin_count >= self._max_pins:\n            return [Answered",
        "        if False:\n            return [Answered",
        "tests/test_kept.py::test_too_many_pins_are_an_error",
    ),
    Guard(
        "nothing is kept where somebody waits for the memory",
        "shmring/core/engine_book.pyx",
        "if self.host.is_wanted(slot.start, slot.blocks) or not self.kept.may_take(slot.blocks):",
        "if not self.kept.may_take(slot.blocks):",
        "tests/test_kept.py::test_a_window_waits_for_what_is_pinned_and_for_nothing_else",
    ),
    Guard(
        "a request goes to the engine of its slots",
        "shmring/client/routing_client.py",
        "client = client or self._pick(key, engine) or await",
        "client = self._pick(key, engine) or await",
        "tests/test_routing_client.py::test_a_request_goes_to_the_engine_of_its_slot_whatever_else_is_said",
    ),
    Guard(
        "a request that was dropped in flight gives its replies back",
        "shmring/core/numbered.pyx",
        "_references(self._entries[place].item) == 1:",
        "_references(self._entries[place].item) == 0:",
        "tests/test_dropped.py::test_a_request_that_is_dropped_in_flight_ends",
    ),
    Guard(
        "a request that somebody may read is not taken for dropped",
        "shmring/core/numbered.pyx",
        "_references(self._entries[place].item) == 1:",
        "_references(self._entries[place].item) >= 1:",
        "tests/test_dropped.py::test_a_request_that_is_read_late_is_not_taken_for_dropped",
    ),
    Guard(
        "what lay on a GPU is not sent again",
        "shmring/client/routing_client.py",
        "return await client.submit(payload, request_id=request_id), not on_gpu",
        "return await client.submit(payload, request_id=request_id), True",
        "tests/test_routing_client.py::test_what_lay_on_a_gpu_of_the_engine_is_not_sent_again",
    ),
    Guard(
        "whoever hears before a copy looks whether the session goes on",
        "shmring/core/client_end.pyx",
        "if packed.slot_nbytes and not self.hear():",
        "if packed.slot_nbytes and not (self.hear() or True):",
        "tests/simulation/test_midst.py::test_what_a_call_hears_may_end_its_session",
    ),
    Guard(
        "whoever hears of slots looks whether the session goes on",
        "shmring/core/client_end.pyx",
        "if record is None and self.hear():",
        "if record is None and (self.hear() or True):",
        "tests/simulation/test_midst.py::test_slots_may_go_as_their_caller_looks_for_one",
    ),
    Guard(
        "whoever has read a shape looks whether the slot is there",
        "shmring/core/client_end.pyx",
        "if self._region == NULL or not end.is_usable() or self._take(nbytes, &offset):",
        "if self._take(nbytes, &offset):",
        "tests/simulation/test_midst.py::test_code_of_a_shape_may_leave_the_slot",
    ),
    Guard(
        "whoever has packed a message to workers looks whether its claims are there",
        "shmring/core/fan_out_end.pyx",
        "                if claim.regions is None:\n                    raise",
        "                if False:\n                    raise",
        "tests/simulation/test_midst.py::test_code_of_a_message_to_workers_may_leave_the_claim",
    ),
    Guard(
        "what an engine has not heard of counts as its load",
        "shmring/client/routing.py",
        "published + unheard if unheard > 0 else published",
        "published",
        "tests/test_routing.py::test_what_was_sent_since_the_engine_spoke_last_comes_on_top",
    ),
    Guard(
        "a lease lies in what is leased out, and not where replies do",
        "shmring/core/client_book.pyx",
        "grant.offset + grant.nbytes > self.lease_end_nbytes",
        "grant.offset + grant.nbytes > self.lease_end_nbytes + 16 * BLOCK_NBYTES",
        "tests/test_session.py::test_an_engine_that_breaks_the_protocol_is_as_good_as_dead",
    ),
    Guard(
        "no memory is lent twice",
        "shmring/core/client_book.pyx",
        "if grant.lease_id in self.leases or self.has(start, blocks):",
        "if False:",
        "tests/test_session.py::test_an_engine_that_breaks_the_protocol_is_as_good_as_dead",
    ),
    Guard(
        "a reply lies where replies do",
        "shmring/core/client_end.pyx",
        "or slot.offset < self.book.lease_end_nbytes",
        "",
        "tests/test_session.py::test_an_engine_that_breaks_the_protocol_is_as_good_as_dead",
    ),
    Guard(
        "what an engine has found lies where nothing of its frontend does",
        "shmring/client/kept.py",
        "return is_leasable and not is_ours",
        "return is_leasable",
        "tests/test_session.py::test_an_engine_that_answers_what_can_not_be_is_as_good_as_dead",
    ),
    Guard(
        "an engine gives reasons that its question can have",
        "shmring/client/kept.py",
        "(_NOT_FOUND if record is None else _NOT_KEPT)",
        "(*_NOT_FOUND, *_NOT_KEPT)",
        "tests/test_session.py::test_an_engine_that_answers_what_can_not_be_is_as_good_as_dead",
    ),
    Guard(
        "what an engine says of itself is looked at before it is mapped",
        "shmring/client/session.py",
        "            check_welcome(welcome)\n",
        "",
        "tests/fuzz/test_targets.py::test_a_target_keeps_its_promise",
    ),
    Guard(
        "a worker leaves an engine that sends what no worker is sent",
        "shmring/worker/worker.py",
        "            self.protocol_violated(error)\n            raise\n",
        "            raise\n",
        "tests/test_workers.py::test_an_engine_that_sends_what_no_worker_is_sent_is_left",
    ),
    Guard(
        "what a frontend says of itself is printed in a log, and not carried out",
        "shmring/ring/frontend.py",
        "self.name = printable(peer.hello.name)",
        "self.name = peer.hello.name",
        "tests/integration/test_forged.py::test_what_a_frontend_says_of_itself_can_be_printed",
    ),
)


def main() -> None:
    """Tries all guards, or those whose names contain an argument."""
    chosen = [guard for guard in GUARDS if not sys.argv[1:] or any(text in guard.name for text in sys.argv[1:])]
    for guard in chosen:
        check_place(guard, _ROOT)
    unnoticed = []
    with tempfile.TemporaryDirectory() as directory:
        for name in _COPIED:
            source, target = _ROOT / name, Path(directory, name)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        for guard in chosen:
            verdict = _try(guard, Path(directory))
            print(f"{verdict:9}  {guard.name}: {guard.test}", flush=True)
            if verdict != "noticed":
                unnoticed.append(guard)
    if unnoticed:
        sys.exit(
            f"{len(unnoticed)} of {len(chosen)} guards can be taken away without the test noticing, or it fails in any case"
        )


def _try(guard: Guard, copy: Path) -> str:
    file = copy / guard.file
    source = check_place(guard, copy)
    try:
        if not _passes_with_all(guard.test, copy):
            return "FAILS"
        file.write_text(source.replace(guard.old, guard.new))
        return "UNNOTICED" if _passes(guard.test, copy) else "noticed"
    finally:
        file.write_text(source)
        sweep()  # without a guard, a test may leave a segment, which others would take for their own


def check_place(guard: Guard, root: Path) -> str:
    """Returns the source that has a guard; ends the program where it does not have it, before half an hour is spent."""
    source = (root / guard.file).read_text()
    if source.count(guard.old) != 1:
        sys.exit(
            f"{guard.name}: its code stands {source.count(guard.old)} times in {guard.file}; tests/guards.py is out of date"
        )
    test, _, name = guard.test.partition("::")
    if f"def {name}(" not in (root / test).read_text():
        sys.exit(f"{guard.name}: there is no {guard.test}; tests/guards.py is out of date")
    return source


def _build(copy: Path) -> None:
    """Builds what is compiled and was changed since the last time; without optimising, which takes half of the time."""
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    flags = {"CFLAGS": "-O0 -fwrapv -DNDEBUG -w"}
    result = subprocess.run(build, cwd=copy, env={**os.environ, **flags}, capture_output=True, check=False)
    if result.returncode:
        sys.exit(f"the core can't be built:\n{result.stderr.decode()}")


@functools.cache
def _passes_with_all(test: str, copy: Path) -> bool:
    """Whether a test passes as things are; several guards have the same. What it says if not is printed."""
    return _passes(test, copy, says_why=True)


def _passes(test: str, copy: Path, *, says_why: bool = False) -> bool:
    _build(copy)
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=60", test]
    try:
        run = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    if run.returncode not in (0, 1, -7, -11):  # 1: a test failed; SIGBUS, SIGSEGV: a guard kept memory where it was
        sys.exit(f"{test} could not be run:\n{run.stdout.decode()}{run.stderr.decode()}")
    if says_why and run.returncode:
        print(run.stdout.decode())
    return run.returncode == 0


if __name__ == "__main__":
    main()
