"""Faults in what two processes share: rings of messages, the order of memory, an engine's load; and in looking at it."""

from __future__ import annotations

from tests.mutants.fault import faults_in, guard

#: Where the record lies that was taken last.
_IN_THE_RING = "self._at + AT_RECORDS + ((self._head - _up(LENGTH_NBYTES + nbytes)) & (self._capacity - 1)) + LENGTH_NBYTES"

FAULTS = (
    *faults_in(
        "shmring/core/message_ring.pyx",
        (
            "a record's head is published before the record is copied out",
            """\
        memcpy(to, self._at + AT_RECORDS + (self._head & (self._capacity - 1)) + LENGTH_NBYTES, nbytes)
        self._head += _up(LENGTH_NBYTES + <uint64_t>nbytes)
        store_release_u64(self._at + AT_HEAD, self._head)""",
            """\
        store_release_u64(self._at + AT_HEAD, self._head + _up(LENGTH_NBYTES + <uint64_t>nbytes))
        memcpy(to, self._at + AT_RECORDS + (self._head & (self._capacity - 1)) + LENGTH_NBYTES, nbytes)
        self._head += _up(LENGTH_NBYTES + <uint64_t>nbytes)""",
            "tests/core/test_message_ring.py::test_a_place_is_given_back_after_its_record_was_copied",
        ),
        (
            "no fence between publishing a record and the look whether its reader sleeps",
            "fence_full()  # after the tail",
            "pass  # after the tail",
            "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
        ),
        (
            "no fence between saying that a reader sleeps and its second look",
            "fence_full()  # before the second look: the writer publishes its tail",
            "pass  # before the second look: the writer publishes its tail",
            "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
        ),
        (
            "no fence between saying that a writer waits and its second look",
            "fence_full()  # before the second look: the reader publishes its head",
            "pass  # before the second look: the reader publishes its head",
            "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
        ),
        (
            "a reader falls asleep without a second look",
            "if load_acquire_u64(self._at + AT_TAIL) != self._head",
            "if False",
            "tests/core/test_message_ring.py::TestRingMachine",
        ),
        (
            "a record that ends where the ring does begins at the start instead",
            "if needed > to_end",
            "if needed >= to_end",
            "tests/core/test_message_ring.py::test_a_full_ring_takes_nothing_until_something_was_read",
        ),
        (
            "room for the skip before a record is counted where none is needed",
            "return needed if needed <= to_end else to_end + needed",
            "return needed if needed < to_end else to_end + needed",
            "tests/core/test_message_ring.py::test_a_full_ring_takes_nothing_until_something_was_read",
        ),
        (
            "room for the skip before a record is not counted",
            "return needed if needed <= to_end else to_end + needed",
            "return needed",
            "tests/core/test_message_ring.py::test_a_record_that_would_wrap_begins_at_the_start",
        ),
        (
            "a ring that is full takes eight bytes more",
            "if self._tail + needed - self._head > self._capacity:\n                return NULL",
            "if self._tail + needed - self._head > self._capacity + STEP:\n                return NULL",
            "tests/core/test_message_ring.py::test_a_full_ring_takes_nothing_until_something_was_read",
        ),
        (
            "a reader's count that has passed the tail is believed",
            "head - self._head > self._tail - self._head",
            "False",
            "tests/core/test_message_ring.py::test_a_head_that_cannot_be_true_is_the_readers_fault",
        ),
        (
            "a writer's count is believed whatever the ring holds",
            "published > self._capacity",
            "False",
            "tests/core/test_message_ring.py::test_a_tail_that_cannot_be_true_is_the_writers_fault",
        ),
        (
            "the length of a record is compared with nothing that bounds its copy",
            "length > self._largest_record_nbytes",
            "False",
            "tests/core/test_message_ring.py::test_a_record_longer_than_the_ring_carries_is_the_writers_fault",
        ),
        (
            "a skip with nothing behind it is believed",
            "if to_end >= published",
            "if to_end > published",
            "tests/core/test_message_ring.py::test_skips_with_nothing_behind_them_are_the_writers_fault",
        ),
        (
            "a sleeper's flag is seen, and is not taken: it is rung for each record",
            "not load_relaxed_u32(self._at + AT_READER_SLEEPS) or not exchange_u32(self._at + AT_READER_SLEEPS, 0)",
            "not load_relaxed_u32(self._at + AT_READER_SLEEPS)",
            "tests/core/test_message_ring.py::TestRingMachine",
        ),
        (
            "records overtake those that wait for room",
            "not self.blocked and self._forks == forks()",
            "self._forks == forks()",
            "tests/ring/test_claim.py::test_who_sends_at_once_does_not_overtake_what_waits_for_room",
        ),
        (
            "a frontend that gives up is taken for one that rings",
            "2 if bytes_read[index] == 1 else 4",
            "4",
            "tests/transport/test_link.py::test_a_peer_that_gives_up_while_it_attaches_says_so",
        ),
        guard(
            "the reader of a message ring looks again before it sleeps",
            "        if load_acquire_u64(self._at + AT_TAIL) != self._head:\n            store",
            "        if False:\n            store",
            "tests/core/test_message_ring.py::test_a_reader_that_is_about_to_sleep_looks_again",
        ),
        guard(
            "the writer of a message ring looks again before it waits for room",
            "        if self._tail + self._needed(<uint32_t>nbytes) - self._head <= self._capacity:",
            "        if False:",
            "tests/core/test_message_ring.py::test_a_writer_that_is_about_to_wait_looks_again",
        ),
        guard(
            "a place in a message ring is given back after its record was copied",
            "        memcpy(to, self._at + AT_RECORDS",
            "        store_release_u64(self._at + AT_HEAD, self._head + _up(LENGTH_NBYTES + nbytes))\n"
            "        memcpy(to, self._at + AT_RECORDS",
            "tests/core/test_message_ring.py::test_a_place_is_given_back_after_its_record_was_copied",
        ),
        guard(
            "a record is published after all of it was written",
            "            memcpy(to, source.buf, source.len)\n            self.commit(to + source.len)\n",
            "            self.commit(to + source.len)\n            memcpy(to, source.buf, source.len)\n",
            "tests/core/test_message_ring.py::test_a_record_is_published_after_all_of_it_was_written",
        ),
        guard(
            "a writer fences before it looks whether the reader sleeps",
            "        fence_full()  # after the tail, before the look:",
            "        # after the tail, before the look:",
            "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
        ),
        guard(
            "a reader fences before it looks whether the writer waits",
            "        fence_full()  # after the head, before the look:",
            "        # after the head, before the look:",
            "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
        ),
        guard(
            "a reader fences between saying that it sleeps and looking again",
            "        fence_full()  # before the second look: the writer publishes its tail",
            "        # before the second look: the writer publishes its tail",
            "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
        ),
        guard(
            "a writer fences between saying that it waits and looking again",
            "        fence_full()  # before the second look: the reader publishes its head",
            "        # before the second look: the reader publishes its head",
            "tests/core/test_protocols.py::test_a_function_takes_the_steps_of_its_model",
        ),
    ),
    *faults_in(
        "shmring/core/atomics.h",
        (
            "a release store orders nothing",
            "__atomic_store_n((uint64_t *)at, value, __ATOMIC_RELEASE);",
            "__atomic_store_n((uint64_t *)at, value, __ATOMIC_RELAXED);",
            "tests/core/test_message_ring.py",
            "Matters on ARM only, where test_protocols.py asks the compiler: a store of x86 is a release.",
        ),
        (
            "an acquire load orders nothing",
            "return __atomic_load_n((const uint64_t *)at, __ATOMIC_ACQUIRE);",
            "return __atomic_load_n((const uint64_t *)at, __ATOMIC_RELAXED);",
            "tests/core/test_message_ring.py",
            "Matters on ARM only, where test_protocols.py asks the compiler: a load of x86 is an acquire.",
        ),
        (
            "two threads that take a reference take one",
            "__atomic_fetch_add(count, 1, __ATOMIC_RELAXED);",
            "*(volatile int32_t *)count += 1;",
            "tests/core/test_protocols.py::test_an_operation_is_the_instruction_that_orders_what_it_says",
        ),
        (
            "two threads that drop a reference drop one",
            "return __atomic_sub_fetch(count, 1, __ATOMIC_ACQ_REL);",
            "return *(volatile int32_t *)count -= 1;",
            "tests/core/test_protocols.py::test_an_operation_is_the_instruction_that_orders_what_it_says",
        ),
        (
            "what a dropped reference says is how many there were",
            "return __atomic_sub_fetch(count, 1, __ATOMIC_ACQ_REL);",
            "return __atomic_fetch_sub(count, 1, __ATOMIC_ACQ_REL);",
            "tests/core/test_views.py::test_a_region_drains_until_its_last_view_dies",
        ),
        (
            "who pushes on the stack does not look whether its top has changed",
            "return __atomic_compare_exchange_n(top, seen, item, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);",
            "__atomic_store_n(top, item, __ATOMIC_RELEASE); return 1;",
            "tests/core/test_protocols.py::test_an_operation_is_the_instruction_that_orders_what_it_says",
        ),
        (
            "the stack is taken in two steps",
            "return __atomic_exchange_n(top, instead, __ATOMIC_ACQ_REL);",
            "void *taken = *(void *volatile *)top; __atomic_store_n(top, instead, __ATOMIC_RELEASE); return taken;",
            "tests/core/test_protocols.py::test_an_operation_is_the_instruction_that_orders_what_it_says",
        ),
        (
            "a flag is exchanged in two steps",
            "return __atomic_exchange_n((uint32_t *)at, value, __ATOMIC_ACQ_REL);",
            "uint32_t former = *(volatile uint32_t *)at; *(volatile uint32_t *)at = value; return former;",
            "tests/core/test_protocols.py::test_an_operation_is_the_instruction_that_orders_what_it_says",
        ),
        guard(
            "a fence orders stores before loads",
            "__atomic_thread_fence(__ATOMIC_SEQ_CST)",
            "__atomic_thread_fence(__ATOMIC_ACQ_REL)",
            "tests/core/test_protocols.py::test_an_operation_is_the_instruction_that_orders_what_it_says",
        ),
    ),
    *faults_in(
        "shmring/core/load.pyx",
        (
            "what waits is published as what is in flight",
            "store_relaxed_u64(self._at + _AT_WAITING, waiting)",
            "store_relaxed_u64(self._at + _AT_WAITING, in_flight)",
            "tests/client/test_several_engines.py::test_an_engine_publishes_what_it_has",
        ),
        (
            "a forked child looks into a page that it does not have",
            "return load_relaxed_u64(self._at + _AT_IN_FLIGHT) if self._forks == forks() else 0",
            "return load_relaxed_u64(self._at + _AT_IN_FLIGHT)",
            "tests/transport/test_load.py::test_a_forked_child_has_no_page",
        ),
    ),
    *faults_in(
        "shmring/core/polling.pyx",
        (
            "a link that had its turn comes first again",
            "        link._next = None\n        if self._last is None:\n            self._first = link\n        else:\n"
            "            self._last._next = link\n        self._last = link\n",
            "        link._next = self._first\n        self._first = link\n        self._last = self._last or link\n",
            "tests/transport/test_polling.py::test_links_have_their_turns_in_turn_and_none_is_left_out",
        ),
        (
            "a link that has looked in vain never tries again",
            "if self._vain < _VAIN_VIGILS or not self._vain % _VIGIL_RETRY:",
            "if self._vain < _VAIN_VIGILS:",
            "tests/transport/test_polling.py::test_two_ends_that_both_sleep_find_out_that_they_need_not",
        ),
        (
            "a link that looks in vain again and again looks each time",
            "if self._vain < _VAIN_VIGILS or not self._vain % _VIGIL_RETRY:",
            "if True:",
            "tests/transport/test_polling.py::test_a_link_that_looks_in_vain_sleeps_at_once_and_tries_again_now_and_then",
        ),
        (
            "a link that has found something looks no more after a while",
            "        if now < self._until:\n            self._vain = 0\n",
            "",
            "tests/transport/test_polling.py::test_a_link_that_looks_in_vain_sleeps_at_once_and_tries_again_now_and_then",
        ),
        (
            "a turn takes as long as its links want",
            "                if now > turn_end:\n                    break\n",
            "",
            "tests/transport/test_polling.py::test_a_turn_ends_when_its_time_is_over",
        ),
        (
            "links whose turn has not come wait until somebody wakes one",
            "            if self._first is not None:\n                self.arm()\n",
            "            if had_records:\n                self.arm()\n",
            "tests/transport/test_polling.py::test_a_link_that_falls_asleep_as_the_turn_is_over_leaves_the_others_theirs",
        ),
        (
            "a link that raises in its turn has no further one",
            "            is_awake = True  # also",
            "            is_awake = False  # also",
            "tests/transport/test_polling.py::test_a_link_has_turns_as_long_as_there_is_something_and_one_more",
        ),
        (
            "links poll busily though others want the cores",
            "(now < self._busy_until and not is_crowded)",
            "(now < self._busy_until)",
            "tests/transport/test_polling.py::test_links_sleep_at_once_where_a_yield_costs_more_than_being_woken",
        ),
        (
            "a link that does not poll busily ends the time of those that do",
            "        if seconds:\n            self._busy_until = max(self._busy_until, self.now() + seconds)",
            "        self._busy_until = self.now() + seconds",
            "tests/transport/test_polling.py::test_it_keeps_awake_for_as_long_as_it_says_after_the_last_message",
        ),
        (
            "a turn in vain yields each time",
            "not had_records and (self._found_nothing or self._others_ran)",
            "not had_records",
            "tests/transport/test_polling.py::test_who_finds_nothing_lets_others_run",
        ),
        (
            "what came while others ran waits for the loop's next turn",
            "                if self._has_news():\n                    had_records = self._give_turns()\n",
            "",
            "tests/transport/test_polling.py::test_what_comes_while_others_run_is_found_in_the_same_turn",
        ),
        (
            "what yields have lost is never forgotten",
            "            self._lost_s, self.records = 0.0, 0\n",
            "",
            "tests/transport/test_polling.py::test_what_yields_have_brought_long_ago_does_not_count",
        ),
        (
            "links go to sleep at once though yields lost little for each record",
            "            if self._lost_s > self.records * _WAKE_S:\n",
            "            if True:\n",
            "tests/transport/test_polling.py::test_links_go_on_looking_where_a_yield_brings_more_than_it_costs",
        ),
        (
            "records that were read in a turn ring no bell for who waits for room",
            "            if count:\n                self.wake_writer()\n",
            "",
            "tests/transport/test_link.py::test_a_peer_that_waits_for_room_is_rung_for_when_there_is_some",
        ),
        (
            "who hears a ring between its turns does not ring for the room",
            "        self.wake_writer()\n        return True\n",
            "        return True\n",
            "tests/ring/test_claim.py::test_who_hears_replies_before_its_turn_rings_for_the_room_that_it_makes",
        ),
        (
            "a record that comes between the last look and sleeping is not seen",
            "or not self.fall_asleep():",
            "or self.fall_asleep() > 1:",
            "tests/transport/test_link.py::test_a_link_that_falls_asleep_has_looked_again",
        ),
        (
            "a caller that looks takes more than a turn's budget",
            "if self.is_reading or not self.records_left or not self.has_news():",
            "if self.is_reading or not self.has_news():",
            "tests/transport/test_link.py",
            "Equivalent: of a budget of no records, none is delivered. This saves the attempt.",
        ),
        (
            "a record that is delivered delivers the next ones inside itself",
            "if self.is_reading or not self.records_left or not self.has_news():",
            "if not self.records_left or not self.has_news():",
            "tests/transport/test_link.py::test_looking_within_a_delivery_delivers_nothing_in_between",
        ),
        (
            "a link's last words are read within a turn's budget",
            "            self.records_left = _TURN_RECORDS\n            if not self._read",
            "            if not self._read",
            "tests/transport/test_link.py::test_the_last_words_of_a_process_that_has_died_are_read_at_once",
        ),
        (
            "a reader says for ever that it is reading, after its taker has raised",
            "            kept.is_reading = False",
            "            pass",
            "tests/ring/test_claim.py::test_what_has_come_is_there_without_a_turn_of_the_loop",
        ),
        (
            "the end of a ring is bounded anew whenever it is said",
            "if not self._is_ending:",
            "if True:",
            "tests/core/test_message_ring.py::test_after_its_writers_end_a_ring_is_read_once_and_no_further",
        ),
        guard(
            "links sleep where others want the core",
            "self._crowded_until = now + _CROWDED_S",
            "pass",
            "tests/transport/test_polling.py::test_links_sleep_at_once_where_a_yield_costs_more_than_being_woken",
        ),
        guard(
            "looking for more records delivers no more than a turn does",
            "while is_hot and self.records_left and not self.stopped",
            "while is_hot and not self.stopped",
            "tests/ring/test_claim.py::test_looking_for_requests_takes_in_no_more_than_a_turn_does",
        ),
        guard(
            "a turn of the loop has a budget",
            "            if self._poller.now() > deadline:",
            "            if False:",
            "tests/transport/test_link.py::test_messages_that_take_long_do_not_hold_up_another_link",
        ),
        guard(
            "looking for more records delivers fewer if they are long",
            "1 if nbytes < _LONG_NBYTES else nbytes >> _SHARE_SHIFT",
            "1",
            "tests/ring/test_costly_payloads.py::test_looking_for_requests_takes_in_fewer_that_are_long",
        ),
        guard(
            "a link looks again before it sleeps",
            "not (at_once or self._vigil.is_over(now)) or not self.fall_asleep():",
            "not (at_once or self._vigil.is_over(now)) or (not self.fall_asleep() and False):",
            "tests/transport/test_link.py::test_a_link_that_falls_asleep_has_looked_again",
        ),
        guard(
            "a record is copied out of its ring before it is parsed",
            "                if taker.handle_hot(self._copy, nbytes):",
            f"                if taker.handle_hot({_IN_THE_RING}, nbytes):",
            "tests/core/test_overwritten.py::test_a_submission_that_is_overwritten_while_it_is_checked_is_what_it_was",
        ),
        guard(
            "a record that is delivered between two turns is copied as well",
            "                is_hot = taker.handle_hot(self._copy, nbytes)",
            f"                is_hot = taker.handle_hot({_IN_THE_RING}, nbytes)",
            "tests/core/test_overwritten.py::test_a_submission_that_is_overwritten_while_it_is_checked_is_what_it_was",
        ),
        guard(
            "a record that is not read in C is handed on as it is",
            "                else:\n                    taker.handle_message(",
            "                else:\n                    taker.handle_record(",
            "tests/core/test_message_ring.py::test_a_record_that_is_not_taken_in_c_is_not_read_there_again",
        ),
    ),
    *faults_in(
        "shmring/core/looking.pyx",
        (
            "it is looked until the time begins",
            "return after < self._until",
            "return after > self._until",
            "tests/worker/test_workers.py::test_a_blocking_worker_looks_for_a_moment_before_it_sleeps",
            "Only how long is looked before somebody sleeps, so it is slower and never wrong.",
        ),
        (
            "moments in vain are counted on after one that was not",
            "0 if found else self._vain + 1",
            "self._vain + 1",
            "tests/worker/test_workers.py::test_a_blocking_worker_looks_for_a_moment_before_it_sleeps",
            "Only how long is looked before somebody sleeps, so it is slower and never wrong.",
        ),
        (
            "looking is left out for ever after one time in which others wanted the core",
            "self._left_out -= 1",
            "pass",
            "tests/transport/test_polling.py",
            "Only how long is looked before somebody sleeps, so it is slower and never wrong.",
        ),
        guard(
            "a worker looks for a moment before it sleeps",
            "return _MOMENT_S if self._vain < _VAIN",
            "return 0 if self._vain < _VAIN",
            "tests/worker/test_workers.py::test_a_blocking_worker_looks_for_a_moment_before_it_sleeps",
        ),
    ),
)
