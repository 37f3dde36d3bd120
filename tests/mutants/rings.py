"""Faults in what two processes share: rings of messages, the order of memory, an engine's load; and in looking at it."""

from __future__ import annotations

from tests.faulty import faults_in

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
            "a writer waits for room without a second look",
            "if self._tail + self._needed(<uint32_t>nbytes) - self._head <= self._capacity",
            "if False",
            "tests/core/test_message_ring.py::test_a_writer_that_is_about_to_wait_looks_again",
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
            "who hears a ring between its turns does not ring for the room",
            "        self.wake_writer()\n        return True\n",
            "        return True\n",
            "tests/test_claim.py::test_who_hears_replies_before_its_turn_rings_for_the_room_that_it_makes",
        ),
        (
            "a reader says for ever that it is reading, after its taker has raised",
            "            kept.is_reading = False",
            "            pass",
            "tests/test_claim.py::test_what_has_come_is_there_without_a_turn_of_the_loop",
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
            "tests/test_claim.py::test_who_sends_at_once_does_not_overtake_what_waits_for_room",
        ),
        (
            "a frontend that gives up is taken for one that rings",
            "2 if bytes_read[index] == 1 else 4",
            "4",
            "tests/transport/test_link.py::test_a_peer_that_gives_up_while_it_attaches_says_so",
        ),
        (
            "the end of a ring is bounded anew whenever it is said",
            "if not self._is_ending:",
            "if True:",
            "tests/core/test_message_ring.py::test_after_its_writers_end_a_ring_is_read_once_and_no_further",
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
            "the full fence lets loads pass stores",
            "__atomic_thread_fence(__ATOMIC_SEQ_CST);",
            "__atomic_thread_fence(__ATOMIC_ACQ_REL);",
            "tests/core/test_protocols.py::test_an_operation_is_the_instruction_that_orders_what_it_says",
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
    ),
    *faults_in(
        "shmring/core/load.pyx",
        (
            "what waits is published as what is in flight",
            "store_relaxed_u64(self._at + _AT_WAITING, waiting)",
            "store_relaxed_u64(self._at + _AT_WAITING, in_flight)",
            "tests/test_several_engines.py::test_an_engine_publishes_what_it_has",
        ),
        (
            "a forked child looks into a page that it does not have",
            "return load_relaxed_u64(self._at + _AT_IN_FLIGHT) if self._forks == forks() else 0",
            "return load_relaxed_u64(self._at + _AT_IN_FLIGHT)",
            "tests/transport/test_load.py::test_a_forked_child_has_no_page",
        ),
    ),
    *faults_in(
        "shmring/core/looking.pyx",
        (
            "it is looked until the time begins",
            "return after < self._until",
            "return after > self._until",
            "tests/test_workers.py::test_a_blocking_worker_looks_for_a_moment_before_it_sleeps",
            "Only how long is looked before somebody sleeps, so it is slower and never wrong.",
        ),
        (
            "moments in vain are counted on after one that was not",
            "0 if found else self._vain + 1",
            "self._vain + 1",
            "tests/test_workers.py::test_a_blocking_worker_looks_for_a_moment_before_it_sleeps",
            "Only how long is looked before somebody sleeps, so it is slower and never wrong.",
        ),
        (
            "looking is left out for ever after one time in which others wanted the core",
            "self._left_out -= 1",
            "pass",
            "tests/transport/test_polling.py",
            "Only how long is looked before somebody sleeps, so it is slower and never wrong.",
        ),
    ),
)
