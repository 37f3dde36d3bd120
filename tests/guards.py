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
        "            if tensors[0] > max_tensors:",
        "            if False:",
        "tests/core/test_received.py::test_a_tensor_that_is_named_too_often_is_refused_before_one_is_made",
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
        "what an engine has not heard of counts as its load",
        "shmring/client/routing.py",
        "published + unheard if unheard > 0 else published",
        "published",
        "tests/test_routing.py::test_what_was_sent_since_the_engine_spoke_last_comes_on_top",
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
