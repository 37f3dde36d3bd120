"""Faults in the books: who holds which part of the slab, who waits for it, and what those who have gone leave behind."""

from __future__ import annotations

from tests.mutants.fault import faults_in, guard

FAULTS = (
    *faults_in(
        "shmring/core/blocks.pyx",
        (
            "a run that is taken whole leaves an empty one behind",
            "if run_length > length",
            "if run_length >= length",
            "tests/core/test_blocks.py::test_a_full_range_has_no_run",
        ),
        (
            "a run that comes back does not join the one behind it",
            "has_after and after >> HALF == end",
            "False",
            "tests/core/test_blocks.py::test_a_freed_run_merges_with_its_neighbours",
        ),
        (
            "a run at the end of a free one can't be carved out",
            "if start + length > run_start + run_length",
            "if start + length >= run_start + run_length",
            "tests/core/test_blocks.py::test_the_shortest_run_that_fits_is_taken",
        ),
        (
            "what comes back may lie over what is free behind it",
            "(has_after and end > after >> HALF)",
            "False",
            "tests/core/test_blocks.py::test_a_bad_free_changes_nothing",
        ),
        (
            "slots that touch count as slots that overlap",
            "after >> HALF < start + length",
            "after >> HALF <= start + length",
            "tests/core/test_blocks.py::test_taken_runs_may_touch_and_not_overlap",
        ),
        (
            "what is carved out still counts as free",
            """\
        if run_start + run_length > start + length:
            self._add(start + length, run_start + run_length - start - length)
        self.free_units -= length
""",
            """\
        if run_start + run_length > start + length:
            self._add(start + length, run_start + run_length - start - length)
""",
            "tests/core/test_blocks.py::test_free_space_in_pieces_does_not_fit_a_whole",
        ),
        (
            "the rest of a run is noted where the run began",
            "_key(start + length, run_length - length)",
            "_key(start, run_length - length)",
            "tests/core/test_blocks.py::test_the_shortest_run_that_fits_is_taken",
        ),
    ),
    *faults_in(
        "shmring/core/sorted_keys.pyx",
        (
            "a key that is as high as the first of a new chunk goes into that",
            "if key > memory[0]",
            "if key >= memory[0]",
            "tests/core/test_blocks.py",
            "Equivalent: no key is there twice.",
        ),
        (
            "chunks are joined that are larger than one",
            "chunk.count + self.chunks[place + 1].count <= CHUNK_KEYS // 2",
            "chunk.count + self.chunks[place + 1].count <= 2 * CHUNK_KEYS",
            "tests/core/test_blocks.py",
        ),
        (
            "a key is exchanged in its chunk for one that belongs into the next",
            "place + 1 == self.count",
            "True",
            "tests/core/test_blocks.py::test_ten_thousand_live_runs_lie_where_the_models_lie",
        ),
        (
            "what is below the first key of a chunk is not found",
            "place = self._chunk_of(key - 1)",
            "place = self._chunk_of(key)",
            "tests/core/test_blocks.py",
            "Equivalent: nobody asks with a key that is there: the keys of runs have a length, and slots a header before them.",
        ),
        (
            "the place in a chunk is kept for the next one",
            "place, at = place + 1, 0",
            "place, at = place + 1, at - 1",
            "tests/core/test_blocks.py::test_ten_thousand_live_runs_lie_where_the_models_lie",
        ),
    ),
    *faults_in(
        "shmring/core/numbered.pyx",
        (
            "an entry whose own place is the gap stays behind it",
            "((place - (self._entries[place].number * _GOLDEN >> self._shift)) & self._mask) >= ((place - gap) & self._mask)",
            "((place - (self._entries[place].number * _GOLDEN >> self._shift)) & self._mask) > ((place - gap) & self._mask)",
            "tests/core/test_numbered.py::test_others_that_had_the_same_place_are_still_found",
        ),
        (
            "a table grows when nothing more fits, and then none is empty",
            "if 2 * (self.count + 1) > self._mask",
            "if self.count > self._mask",
            "tests/core/test_numbered.py::test_what_a_table_does_not_have_is_looked_for_up_to_an_empty_entry",
        ),
        (
            "a table that has grown is gone through as the small one was",
            "self._shift -= 1",
            "pass",
            "tests/core/test_numbered.py",
            "Only where entries are: they lie closer, so it is slower and never wrong.",
        ),
        (
            "who looks for a number does not go on at the beginning of the table",
            """\
            if self._entries[place].number == number:
                return self._entries[place].item
            place = (place + 1) & self._mask
""",
            """\
            if self._entries[place].number == number:
                return self._entries[place].item
            place = place + 1
""",
            "tests/core/test_numbered.py::test_others_that_had_the_same_place_are_still_found",
        ),
        (
            "what is taken out still counts",
            "self.count -= 1",
            "pass",
            "tests/core/test_numbered.py::test_it_is_a_dict",
        ),
        (
            "what is taken out is dropped before its new owner has it",
            "        item = <object>found\n        drop_object(found)",
            "        drop_object(found)\n        item = <object>found",
            "tests/core/test_numbered.py::test_numbers_that_count_up_come_and_go",
        ),
        guard(
            "removing an object from a table of numbers leaves no gap before others",
            "                self._entries[gap] = self._entries[place]\n                gap = place\n",
            "                break\n",
            "tests/core/test_numbered.py::test_others_that_had_the_same_place_are_still_found",
        ),
        guard(
            "the garbage collector sees the objects in flight",
            "(<CollectedType*><PyObject*>Numbered).tp_traverse = <traverseproc><void*>_traverse\n",
            "",
            "tests/core/test_numbered.py::test_cycles_through_it_are_collected",
        ),
        guard(
            "a request that was dropped in flight gives its replies back",
            "references_of(self._entries[place].item) == 1:",
            "references_of(self._entries[place].item) == 0:",
            "tests/ends/test_dropped.py::test_a_request_that_is_dropped_in_flight_ends",
        ),
        guard(
            "a request that a task may still read does not count as dropped",
            "references_of(self._entries[place].item) == 1:",
            "references_of(self._entries[place].item) >= 1:",
            "tests/ends/test_dropped.py::test_a_request_that_is_read_late_is_not_taken_for_dropped",
        ),
    ),
    *faults_in(
        "shmring/core/client_book.pyx",
        (
            "a lease that begins in the slab may end behind it",
            "grant.offset + grant.nbytes > self.lease_end_nbytes",
            "grant.offset > self.lease_end_nbytes",
            "tests/core/test_client_book.py::test_a_grant_outside_the_leasable_memory_is_refused",
        ),
        (
            "a recall is not counted",
            "self._recalls += 1",
            "pass",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "slots are put into leases that the engine wants back",
            "if lease.recalled:\n            return False",
            "if False:\n            return False",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "who waits keeps leases that are empty",
            "lease.is_empty() and (lease.recalled or first is not None)",
            "lease.is_empty() and lease.recalled",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "two requests for leases have one number",
            "self._token += 1",
            "pass",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "a slot that its caller holds is free when the engine releases it",
            "if slot.held:\n            self._here.put",
            "if False:\n            self._here.put",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "a slot that is viewed is free when it is left",
            "DISCARD_VIEWED if slot.viewed else DISCARD",
            "DISCARD",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "a lease counts as empty since it was granted",
            "        if slot.lease.is_empty():\n            slot.lease.empty_since = now\n",
            "        pass\n",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "a lease that has been empty for exactly as long as it may be stays",
            "lease.empty_since <= deadline",
            "lease.empty_since < deadline",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "a slot that was split still counts",
            "self._slots_in[WRITING] -= 1",
            "pass",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "a lease all of which is kept is not given back",
            "if lease.kept_blocks == lease.slots.length:",
            "if False:",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "who does not wait overtakes those who do",
            "return None if self._waiters else self.find_slot(nbytes, held)",
            "return self.find_slot(nbytes, held)",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "a turn is over before its moments have passed",
            "if is_awaited and first.vain_moments == first.patience:",
            "if is_awaited:",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "who has waited for long alone lets nobody pass",
            "first.vain_moments += first.vain_moments < first.patience",
            "first.vain_moments += 1",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "who waits before larger ones gives its turn up",
            "            if blocks >= least:\n                continue\n            if first is not None:",
            "            if first is not None:",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "a turn is as long as the last one",
            "first.patience, 0, 2 * first.patience",
            "first.patience, 0, first.patience",
            "tests/core/test_client_book.py::test_a_stream_of_small_ones_does_not_overtake_a_large_one_for_ever",
        ),
        (
            "moments of an earlier turn count",
            "first.patience, 0, 2 * first.patience",
            "first.patience, first.patience, 2 * first.patience",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "who lets others pass never has its turn again",
            "waiter.rest_moments -= 1",
            "pass",
            "tests/core/test_client_book.py::test_a_stream_of_small_ones_does_not_overtake_a_large_one_for_ever",
        ),
        (
            "time goes on for those behind who has the turn",
            "                is_awaited = True\n                break\n",
            "                is_awaited = True\n                waiter.rest_moments -= waiter.rest_moments > 0\n",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "who lets others pass gets nothing meanwhile",
            "slot = self.find_slot(waiter.nbytes, waiter.held)",
            "slot = None if waiter.rest_moments else self.find_slot(waiter.nbytes, waiter.held)",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "whoever is behind one that rests passes it, however much it wants",
            "            elif waiter.rest_moments:\n                least = blocks\n",
            "            elif waiter.rest_moments:\n                pass\n",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "nobody asks for who lets others pass",
            "if first is None and self._waiters:",
            "if False:",
            "tests/core/test_client_book.py::test_stories",
        ),
        (
            "the first turn is over with the moment in which it began",
            "nbytes, held, FIRST_PATIENCE",
            "nbytes, held, 1",
            "tests/core/test_client_book.py::test_stories",
        ),
        guard(
            "a caller whose memory does not come keeps no others of its client waiting",
            "if is_awaited and first.vain_moments == first.patience:",
            "if False:",
            "tests/core/test_client_book.py::test_stories",
        ),
        guard(
            "a lease lies in the leasable memory, and not in the reply reserve",
            "grant.offset + grant.nbytes > self.lease_end_nbytes",
            "grant.offset + grant.nbytes > self.lease_end_nbytes + 16 * BLOCK_NBYTES",
            "tests/client/test_session.py::test_an_engine_that_breaks_the_protocol_counts_as_dead",
        ),
        guard(
            "no memory is lent twice",
            "if grant.lease_id in self.leases or self.has(start, blocks):",
            "if False:",
            "tests/client/test_session.py::test_an_engine_that_breaks_the_protocol_counts_as_dead",
        ),
    ),
    *faults_in(
        "shmring/core/engine_book.pyx",
        (
            "slots of a submission that is refused stay taken",
            "                    slot.lease.live.give(slot.start, slot.blocks)\n",
            "                    pass\n",
            "tests/core/test_engine_book.py::test_a_forged_slot_is_refused_and_nothing_is_changed",
        ),
        (
            "content of a submission that is refused stays pinned",
            "self.kept.unpin(slot.kept)  # whose client has it pinned",
            "pass  # whose client has it pinned",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "one request more than max_inflight is taken",
            "client.requests.count >= self._max_inflight",
            "client.requests.count > self._max_inflight",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "a client's memory is free with its death, whoever views it",
            "lease.live.units == lease.kept_blocks and (client.dead or lease.given_up)",
            "(client.dead or lease.given_up)",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "reply space that came back counts against its client",
            "client.reply_blocks -= <uint64_t>slot.blocks",
            "pass",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "a client releases a reply that the engine still writes",
            "is_known = generation not in client.unsent_replies",
            "is_known = True",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "nobody is served when content is unpinned",
            "self._owes_service = self.host.waiting_lease_requests != 0",
            "pass",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "a client's replies stay in more of the reserve than they leave free",
            "client.reply_blocks + want.blocks <= left:",
            "client.reply_blocks <= left:",
            "tests/core/test_engine_book.py::test_a_client_holds_as_much_as_it_leaves_free_and_copies_half_of_that_out",
        ),
        (
            "a client that is silent gets all of the reserve for replies that it never copies out",
            "client.passing_blocks + want.blocks <= left)",
            "True)",
            "tests/core/test_engine_book.py::test_a_client_holds_as_much_as_it_leaves_free_and_copies_half_of_that_out",
        ),
        (
            "one more reply is copied out before a caller has read one",
            "request.unread_replies >= UNREAD_REPLIES",
            "request.unread_replies > UNREAD_REPLIES",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "a reply that was not sent counts as unread",
            "if request is not None and slot.is_copied_out and request.unread_replies:",
            "if False:",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "a large reply waits as long as its client has small ones",
            "return way != WAITS or other.client_id == want.client_id",
            "return way != WAITS",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "nobody passes a reply that finds no room, though it was said",
            "if self._may_overtake or way == UNREAD:",
            "if way == UNREAD:",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "small replies overtake the first that needs space",
            "break  # the first that needs space",
            "continue  # the first that needs space",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "an abort releases slots that their claim has released",
            "if slot.state_number == RELEASED:\n                continue",
            "if False:\n                continue",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "all slots of a request are left as the first one is",
            "viewed != NULL and viewed[place]",
            "viewed != NULL and viewed[0]",
            "tests/ring/test_claim.py::test_each_slot_of_a_claim_drains_for_its_own_views",
        ),
        (
            "a lease whose first slot has come is still new",
            "                slot.lease.new_moments = 0\n",
            "",
            "tests/core/test_leases_as_stories.py::test_leases",
        ),
        (
            "a client that has gone still waits for a lease",
            "lending.forget(client)",
            "pass",
            "tests/core/test_leases_as_stories.py::test_leases",
        ),
        (
            "a client that has gone still waits for replies",
            """\
        self._drop_reply_wants(client)
        for lease in client.leases.values():
            self._lending(lease).change(lease, DISCONNECT)
""",
            """\
        for lease in client.leases.values():
            self._lending(lease).change(lease, DISCONNECT)
""",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "a pin more than the client has is counted down below nothing",
            "client.pin_count -= count",
            "client.pin_count -= 1",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "content has room when the oldest of it has gone, however large it is",
            "        while self.kept.must_give(record.blocks):\n",
            "        if self.kept.must_give(record.blocks):\n",
            "tests/core/test_engine_book.py::test_stories",
        ),
        guard(
            "generations only grow",
            "slot.generation >> GENERATION_BITS != client.client_id or slot.generation <= last_generation",
            "slot.generation >> GENERATION_BITS != client.client_id",
            "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
        ),
        guard(
            "a client may use only its own generations",
            "slot.generation >> GENERATION_BITS != client.client_id or slot.generation <= last_generation",
            "slot.generation <= last_generation",
            "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
        ),
        guard(
            "a client may use only its own leases",
            "lease = client.leases.get(slot.lease_id)",
            "lease = {one.lease_id: one for other in self.clients.values() for one in other.leases.values()}"
            ".get(slot.lease_id)",
            "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
        ),
        guard(
            "a slot lies inside its lease",
            "if slot.offset % BLOCK_NBYTES or start < lease.start or start + blocks > lease.start + lease.blocks:",
            "if slot.offset % BLOCK_NBYTES:",
            "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
        ),
        guard(
            "live slots never overlap",
            "if not lease.live.take(start, blocks):",
            "if not lease.live.take(start, blocks) and False:",
            "tests/integration/test_forged.py::test_a_forged_message_ends_its_connection_and_nothing_else",
        ),
        guard(
            "a request names only content that its client has pinned",
            "if kept is None or slot.generation not in client.pins:",
            "if kept is None:",
            "tests/integration/test_kept_processes.py::test_a_forged_message_ends_its_connection_and_nothing_else",
        ),
        guard(
            "a client takes back only pins that it has",
            "if counts[generation] > client.pins.get(generation, 0):",
            "if generation not in client.pins:",
            "tests/integration/test_kept_processes.py::test_a_forged_message_ends_its_connection_and_nothing_else",
        ),
        guard(
            "pins of kept content go with a proof of death only",
            "        client.connected = False\n        for lending",
            "        client.connected = False\n        self._drop_pins(client, frozenset())\n        for lending",
            "tests/client/test_kept.py::test_what_is_kept_outlives_who_gave_it",
        ),
        guard(
            "a dead client's pins of kept content go",
            "self._drop_pins(client, frozenset())",
            "pass",
            "tests/integration/test_kept_processes.py::test_a_killed_frontend_leaves_what_it_kept_and_no_pins",
        ),
        guard(
            "a request pins the kept content that it has",
            "self.kept.pin(kept)\n        record.generation",
            "kept.pins += 0\n        record.generation",
            "tests/client/test_kept.py::test_a_request_keeps_what_it_has_after_everybody_left_it",
        ),
        guard(
            "kept content is where it was kept",
            "if slot.offset != kept.start * BLOCK_NBYTES or slot.nbytes != kept.nbytes:",
            "if False:",
            "tests/integration/test_kept_processes.py::test_a_forged_message_ends_its_connection_and_nothing_else",
        ),
        guard(
            "of two contents with one key the first stays",
            "        if reason is not None or kept is not None:",
            "        if reason is not None:",
            "tests/client/test_kept.py::test_of_two_with_one_key_the_first_is_kept_and_both_have_it",
        ),
        guard(
            "a client's pins are bounded",
            "        if client.pin_count >= self._max_pins:\n            return [Answered",
            "        if False:\n            return [Answered",
            "tests/client/test_kept.py::test_too_many_pins_are_an_error",
        ),
        guard(
            "no content is kept in memory for which a frontend waits",
            "if self.host.is_wanted(slot.start, slot.blocks) or not self.kept.may_keep(slot.blocks):",
            "if not self.kept.may_keep(slot.blocks):",
            "tests/client/test_kept.py::test_a_window_waits_for_what_is_pinned_and_for_nothing_else",
        ),
    ),
    *faults_in(
        "shmring/core/kept_book.pyx",
        (
            "content that is pinned counts as content that may go",
            "            del self.unpinned[record.generation]\n            self.unpinned_blocks -= record.blocks",
            "            del self.unpinned[record.generation]",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "content is kept until there is too much, and not before",
            "self.blocks + blocks > self.max_blocks",
            "self.blocks > self.max_blocks",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "the content that goes is the one that was used last",
            "            self.unpinned[record.generation] = record\n",
            """\
            self.unpinned[record.generation] = record
            self.unpinned.move_to_end(record.generation, last=False)
""",
            "tests/core/test_engine_book.py::test_stories",
        ),
        guard(
            "if the pinned content reaches the limit, no more content is kept",
            "len(self.unpinned)) >= self.max_kept:",
            "len(self.unpinned)) > self.max_kept:",
            "tests/core/test_engine_book.py::test_stories",
        ),
    ),
    *faults_in(
        "shmring/core/lending.pyx",
        (
            "content that begins where a window ends is wanted for it",
            "start < self._window.start + self._window.blocks",
            "start <= self._window.start + self._window.blocks",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "what a client has pinned does not count as what it holds",
            "held += client.pinned_blocks",
            "pass",
            "tests/client/test_kept.py::test_what_a_client_pins_counts_as_if_it_held_it",
        ),
        (
            "a client gets one lease more than max_leases",
            "client.leases_in[self.memory] >= self._max_leases",
            "client.leases_in[self.memory] > self._max_leases",
            "tests/core/test_lending.py::test_stories",
        ),
        (
            "a lease is recalled again for everybody who waits",
            "                    lease.recalled = True\n",
            "",
            "tests/core/test_lending.py::test_stories",
        ),
        (
            "what lies behind the window when a lease comes back is lost",
            "self._give(inside_end, end - inside_end)",
            "pass",
            "tests/core/test_lending.py::test_stories",
        ),
        (
            "what was set apart is counted after it was put back",
            "        self._apart.clear()\n        self._apart_blocks = 0",
            "        self._apart.clear()",
            "tests/core/test_lending.py::test_stories",
        ),
        (
            "a lease that came back still counts",
            "client.leases_in[self.memory] -= 1",
            "pass",
            "tests/core/test_lending.py::test_stories",
        ),
        (
            "the last range that would fit is not looked at",
            "while start <= last_start",
            "while start < last_start",
            "tests/core/test_leases_as_stories.py::test_leases",
        ),
        (
            "who comes new gets what somebody waits for",
            "if self.is_awaited():\n            return None",
            "if False:\n            return None",
            "tests/core/test_leases_as_stories.py::test_leases",
        ),
        (
            "a quarantined lease is as good as one that is leased",
            "if lease.state_number == QUARANTINED:",
            "if False:",
            "tests/core/test_leases_as_stories.py::test_leases",
        ),
        *(
            (name, old, new, "tests/core/test_leases_as_stories.py::test_leases")
            for name, old, new in (
                (
                    "a lease in use is as good as one that lies idle",
                    "        return IN_USE\n",
                    "        return LIES_IDLE\n",
                ),
                (
                    "a lease that was granted just now is as good as one that lies idle",
                    "return GRANTED_NOW if lease.new_moments else LIES_IDLE",
                    "return LIES_IDLE",
                ),
                (
                    "a lease that was recalled in vain is as good as one that was recalled just now",
                    "return RECALLED if lease.silent_moments < SILENT_AFTER else NO_ANSWER",
                    "return RECALLED",
                ),
                (
                    "a window follows what is lent",
                    "    if lease.lease_id >= next_lease_id:\n        return LENT_SINCE\n",
                    "",
                ),
                (
                    "a moment passes for leases in use as for others",
                    "lease.recalled and not is_in_use and lease.silent_moments",
                    "lease.recalled and lease.silent_moments",
                ),
                (
                    "the window is not chosen again",
                    "if self._move_window(effects) | self._wake():",
                    "if self._wake():",
                ),
                (
                    "when the window has moved, nobody gets what it leaves",
                    "self._wake():\n            self.serve(effects)",
                    "self._wake():\n            pass",
                ),
                (
                    "a window is kept for what does not come",
                    "if window.vain_moments < want.patience:",
                    "if True:",
                ),
                (
                    "a window over memory in use is never in vain",
                    "            window.vain_moments += 1\n",
                    "            window.vain_moments += worst <= NO_ANSWER\n",
                ),
                (
                    "a window is in vain however much comes back",
                    "            self._window.vain_moments = 0\n",
                    "            pass\n",
                ),
                (
                    "who has given up memory in use does not rest",
                    "NO_ANSWER if want.rest_moments == 1 else IN_USE",
                    "NO_ANSWER",
                ),
                (
                    "who waits for memory in use rests until it lies idle",
                    "NO_ANSWER if want.rest_moments == 1 else IN_USE",
                    "IN_USE",
                ),
                (
                    "who has given a window up gets one again at once",
                    "if self._window is None and want.waits and not want.rest_moments:",
                    "if self._window is None and want.waits:",
                ),
                (
                    "who has given a window up rests for ever",
                    "want.rest_moments, any_woken = 0, True",
                    "pass",
                ),
                (
                    "nothing is recalled for who comes behind the first",
                    "is want and (waits or self._window is None):",
                    "is want and (not waits and self._window is None):",
                ),
                (
                    "nothing is recalled for who is behind the first when a moment has passed",
                    "            if want.waits and want.blocks < too_many:",
                    "            if False:",
                ),
                (
                    "leases are recalled for who may have no more",
                    "        if self._is_over_quota(client, want.blocks):\n            return True\n",
                    "",
                ),
                (
                    "what is recalled for who is behind may lie in the window",
                    "closed_start, closed_end = self._window.start, self._window.start + self._window.blocks",
                    "pass",
                ),
                (
                    "a range that begins where a window ends is not looked at",
                    "if start < closed_end < behind:",
                    "if False:",
                ),
                (
                    "a window closes when anybody goes",
                    "if piece.lease is not None and piece.lease.client_id == client.client_id:",
                    "if True:",
                ),
                (
                    "a lease that was granted stays new for ever",
                    "lease.new_moments -= lease.new_moments > 0",
                    "pass",
                ),
            )
        ),
        (
            "a slot's header takes no room",
            "nbytes % BLOCK_NBYTES + SLOT_HEADER_NBYTES + BLOCK_NBYTES - 1",
            "nbytes % BLOCK_NBYTES + BLOCK_NBYTES - 1",
            "tests/core/test_client_book.py::test_a_slot_has_room_for_its_header",
        ),
        (
            "a lease of nothing has no block",
            "return nbytes // BLOCK_NBYTES + (nbytes % BLOCK_NBYTES != 0 or nbytes == 0)",
            "return nbytes // BLOCK_NBYTES + (nbytes % BLOCK_NBYTES != 0)",
            "tests/core/test_engine_book.py::test_stories",
        ),
        guard(
            "content that ends where a window begins stays",
            "            first -= before.start + before.blocks > start\n",
            "            first -= before.start + before.blocks >= start\n",
            "tests/core/test_engine_book.py::test_stories",
        ),
        guard(
            "content that begins where a window ends stays",
            "last = self._place_of(start + blocks)\n",
            "last = self._place_of(start + blocks + 1)\n",
            "tests/core/test_engine_book.py::test_stories",
        ),
    ),
    *faults_in(
        "shmring/core/records.pyx",
        (
            "a client's first request is its second",
            "self.last_request_id = -1",
            "self.last_request_id = 0",
            "tests/core/test_leases_as_stories.py::test_leases",
        ),
        (
            "leases are counted in the other memory",
            "return tuple(self.leases_in)",
            "return tuple(reversed(self.leases_in))",
            "tests/core/test_leases_as_stories.py::test_leases",
        ),
    ),
    *faults_in(
        "shmring/core/transitions.pyx",
        (
            "what no table allows leads to the first state",
            "self._next[state][event] = NOT_ALLOWED",
            "self._next[state][event] = 0",
            "tests/core/test_engine_book.py::test_stories",
        ),
        (
            "who watches is told the state behind a transition",
            "_watcher(self.name, self._states[state], self._events[event])",
            "_watcher(self.name, self._states[following], self._events[event])",
            "tests/core/test_states.py::test_who_watches_is_told_of_a_transition_before_it_is_made",
        ),
    ),
    *faults_in(
        "shmring/core/fan_out_book.pyx",
        (
            "the one before a message that has gone is still behind it",
            "            self._messages[message.newer].older = message.older\n",
            "            pass\n",
            "tests/core/test_fan_out_book_machine.py",
        ),
        (
            "no fence between saying what is wanted and the second look",
            "fence_full()  # before the look: a worker stores its stamp",
            "pass  # before the look: a worker stores its stamp",
            "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
        ),
        (
            "a stamp that is larger than a message's number stands for it, too",
            "load_acquire_u64(worker._at + AT_STAMPS + 8 * stamp) == message.sequence",
            "load_acquire_u64(worker._at + AT_STAMPS + 8 * stamp) >= message.sequence",
            "tests/worker/test_workers.py::test_noise_in_its_page_frees_nothing_of_others_and_only_its_own",
        ),
        (
            "the bytes of messages that were left still count",
            "worker.unacknowledged_nbytes -= message.nbytes",
            "pass",
            "tests/core/test_fan_out_book_machine.py::TestFanOutBook",
        ),
        (
            "a worker that has closed keeps the first message that was sent after that",
            "return closed != 0 and closed <= sequence",
            "return closed != 0 and closed < sequence",
            "tests/worker/test_workers.py::test_what_is_sent_to_a_worker_that_has_closed_comes_back_though_its_process_lives",
        ),
        (
            "a message goes to workers that have parted",
            "self._member_mask &= ~(<uint64_t>1 << worker.place)",
            "pass",
            "tests/worker/test_workers.py::test_a_message_to_all_goes_to_no_worker_that_has_parted",
        ),
        (
            "the slots of a message that has gone are dropped when their book is",
            "        for i in range(count):\n            drop_region(regions[i])\n",
            "",
            "tests/worker/test_workers.py::test_a_claim_is_shared_in_place_and_its_slot_waits_for_the_last_worker",
        ),
        guard(
            "a forked child reads no worker's page",
            "        if self._forks != forks():\n            return True\n",
            "",
            "tests/core/test_fan_out_book_machine.py::test_a_forked_child_believes_no_page_and_asks_nobody",
        ),
        guard(
            "an engine fences between writing for which message it waits and looking again",
            "        fence_full()  # before the look: a worker",
            "        # before the look: a worker",
            "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
        ),
        guard(
            "a worker's stamp counts only for the message that it names",
            "if load_acquire_u64(worker._at + AT_STAMPS + 8 * stamp) == message.sequence \\",
            "if load_acquire_u64(worker._at + AT_STAMPS + 8 * stamp) \\",
            "tests/worker/test_workers.py::test_noise_in_its_page_frees_nothing_of_others_and_only_its_own",
        ),
        guard(
            "messages that are sent to a worker that has closed come back",
            "or (not worker.is_member and self._has_closed_before(worker, message.sequence)):",
            "or False:",
            "tests/worker/test_workers.py::test_what_is_sent_to_a_worker_that_has_closed_comes_back_though_its_process_lives",
        ),
        guard(
            "a message is kept until the last worker has left it",
            "        if not message.pending:\n            self._free(stamp)",
            "        if message.sequence:\n            self._free(stamp)",
            "tests/simulation/test_fan_out.py::test_every_state_of_a_small_scenario_with_workers_is_sound",
        ),
        guard(
            "an engine looks again before it waits for workers",
            "return self.sweep() > 0",
            "return False",
            "tests/core/test_fan_out_book_machine.py::test_who_waits_looks_again_after_it_has_said_so",
        ),
        guard(
            "a second sender that waits does not take the first one's bell",
            "store_release_u64(at, min(earlier, wanted[place]) if earlier else wanted[place])",
            "store_release_u64(at, wanted[place])",
            "tests/core/test_fan_out_book_machine.py::test_of_two_who_wait_neither_takes_the_others_bell",
        ),
        guard(
            "a worker's backlog is bounded",
            ".unacknowledged >= self.backlog:\n                return False",
            ".unacknowledged >= self.backlog and False:\n                return False",
            "tests/worker/test_workers.py::test_who_is_behind_holds_up_others_at_the_bound_and_is_named",
        ),
    ),
)
