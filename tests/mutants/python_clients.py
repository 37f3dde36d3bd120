"""Faults in the Python of a client: what happens for each connection, each wait and each failure."""

from __future__ import annotations

from tests.mutants.fault import faults_in, guard

FAULTS = (
    *faults_in(
        "shmring/client/sending.py",
        (
            "a payload that has space already waits behind those that have none",
            "line = self._again if self._again.is_waited_in else self._turns",
            "line = self._turns if self._turns.is_waited_in else self._again",
            "tests/client/test_client.py::test_who_has_space_has_the_next_turn",
        ),
        (
            "a payload that waits for space keeps its turn",
            "            return slot\n        flight.end()\n",
            "            return slot\n",
            "tests/client/test_client.py::test_who_waits_for_space_leaves_its_turn_to_others",
        ),
        (
            "a payload that is cancelled in its turn counts as in flight for ever",
            "        except BaseException:\n            flight.end()\n            raise",
            "        except BaseException:\n            raise",
            "tests/client/test_client.py::test_who_is_cancelled_in_its_turn_is_not_in_flight",
        ),
        (
            "a turn that came as its waiter was cancelled is lost",
            "wait(lambda _: self.end.end_flight())",
            "wait(lambda _: None)",
            "tests/client/test_client.py::test_a_turn_that_came_as_its_request_was_cancelled_goes_to_the_next",
        ),
        (
            "a thread's payload that fails without an Exception counts as in flight for ever",
            "            return submission\n        except BaseException:\n            "
            "self.end.end_flight()\n            raise\n\n    def _begin_nowait",
            "            return submission\n        except Exception:\n            "
            "self.end.end_flight()\n            raise\n\n    def _begin_nowait",
            "tests/client/test_client.py::test_who_is_cancelled_in_its_turn_is_not_in_flight",
        ),
        (
            "a payload that may not be written now counts as in flight for ever",
            "        if not self._link.can_write:\n            self.end.end_flight()\n",
            "        if not self._link.can_write:\n",
            "tests/client/test_client.py::test_what_the_engine_is_too_slow_for_is_not_in_flight",
        ),
        (
            "the slot of a payload that is not sent is lost",
            "            if slot is not None and submission is None:\n                self._host_slots.give_up(slot)",
            "            pass",
            "tests/ends/test_cancellation.py::test_cancelled_one_step_later_each_time",
        ),
        (
            "a payload goes out of a slot that changed hands while it waited",
            "while submission is None and all(record.is_submittable() for record in packed.slots):",
            "while submission is None:",
            "tests/client/test_slot.py::test_a_slot_that_is_left_before_its_request_has_space_is_copied",
        ),
        (
            "others need no longer wait for their turn though some do",
            "self.end.crowded = self._again.is_waited_in or self._turns.is_waited_in",
            "self.end.crowded = self._turns.is_waited_in",
            "tests/client/test_client.py",
            "Equivalent: as long as anybody waits for a turn, as many are in flight as may be, so nobody begins at once.",
        ),
        (
            "a copy that is over is remembered",
            "            del self.copies[copying]\n",
            "            pass\n",
            "tests/client/test_client.py::test_what_is_being_copied_when_a_client_closes_goes_back_when_that_is_over",
        ),
        guard(
            "a request that waits for space leaves its turn to others",
            """        flight.end()
        slot = await self._host_slots.acquire(nbytes, held=False)
""",
            """        slot = await self._host_slots.acquire(nbytes, held=False)
        flight.end()
""",
            "tests/client/test_client.py::test_who_waits_for_space_leaves_its_turn_to_others",
        ),
        guard(
            "a request that is cancelled when it has space gives the space back",
            """        except BaseException:
            self._host_slots.give_up(slot)
            raise
        return slot
""",
            """        except BaseException:
            raise
        return slot
""",
            "tests/client/test_client.py::test_who_is_cancelled_when_it_has_space_and_waits_for_its_turn_gives_it_back",
        ),
    ),
    *faults_in(
        "shmring/client/kept.py",
        (
            "a place among those who ask is lost if its caller has left",
            "        self._asking.release()\n        if not future.done():\n            future.set_result(result)",
            "        if not future.done():\n            self._asking.release()\n            future.set_result(result)",
            "tests/client/test_kept.py::test_who_has_left_before_the_answer_keeps_nobody_from_asking",
        ),
        (
            "a slot that was not handed over is not taken back",
            "                if record is not None:\n"
            "                    self.end.take_back((record.generation,))\n                raise",
            "                raise",
            "tests/client/test_kept.py::test_what_can_not_be_sent_leaves_nothing_behind",
        ),
        (
            "the slot of a copy that is not kept is lost",
            "            if copied is not None and copied.state is "
            "ClientSlot.WRITING:\n                self._host_slots.give_up(copied)\n",
            "",
            "tests/client/test_kept.py::test_who_is_cancelled_before_it_may_ask_holds_nothing",
        ),
        (
            "content is unpinned once, however often it was found",
            "[pin.found.generation] * pin.count",
            "[pin.found.generation]",
            "tests/client/test_kept.py::test_one_pin_serves_all_callers_of_a_client",
        ),
        (
            "content that is pinned here is asked for again",
            "        if pin is not None:\n            self.life.check_alive()\n            pin.users += 1\n        else:",
            "        if False:\n            pass\n        else:",
            "tests/client/test_kept.py::test_one_pin_serves_all_callers_of_a_client",
        ),
        (
            "content is unpinned though views of it live",
            "        if pin.users or pin.views:\n            return",
            "        if pin.users:\n            return",
            "tests/client/test_kept.py::test_views_that_outlive_the_block_keep_the_pin",
        ),
        (
            "content that came when its caller had left stays pinned",
            "        elif isinstance(result, _Pin):  # its caller stopped waiting\n            self.leave(result, None)",
            "",
            "tests/client/test_kept.py::test_cancelling_at_any_moment_leaves_nothing_pinned",
        ),
        (
            "whoever waits to ask is not let in when the session ends",
            "        for _ in self._answers:\n            self._asking.release()\n",
            "",
            "tests/client/test_kept.py::test_who_waits_to_ask_hears_of_the_end",
        ),
        guard(
            "a goodbye names content that was given to keep and is not answered yet",
            "return [*self._pins, *given]",
            "return [*self._pins]",
            "tests/client/test_kept.py::test_a_slot_that_is_given_while_its_client_closes_stays_pinned",
        ),
        guard(
            "a slot that was kept is pinned until its caller has left it",
            "if record.held or record.viewed:",
            "if False:",
            "tests/client/test_kept.py::test_a_slot_that_was_kept_is_pinned_until_it_is_left",
        ),
        guard(
            "content that an engine has found overlaps no lease of its frontend",
            "return is_leasable and not is_ours",
            "return is_leasable",
            "tests/client/test_session.py::test_an_engine_with_an_impossible_answer_counts_as_dead",
        ),
        guard(
            "an engine's reason fits the question",
            "(_NOT_FOUND if record is None else _NOT_KEPT)",
            "(*_NOT_FOUND, *_NOT_KEPT)",
            "tests/client/test_session.py::test_an_engine_with_an_impossible_answer_counts_as_dead",
        ),
    ),
    *faults_in(
        "shmring/client/client.py",
        (
            "a stream is sent again as often as engines die",
            "                        retry -= 1\n                        break",
            "                        break",
            "tests/client/test_several_engines.py::test_retries_are_as_many_as_were_allowed",
        ),
        guard(
            "a request that had a reply is not sent again",
            "if not retry or submission.has_replied or submission._on_gpu:",
            "if not retry or submission._on_gpu:",
            "tests/client/test_several_engines.py::test_what_has_been_answered_in_part_is_not_sent_again",
        ),
        guard(
            "a request goes to the engine of its slots",
            "attachment = holder or await self._engines.pick_in_time(key, engine)",
            "attachment = await self._engines.pick_in_time(key, engine)",
            "tests/client/test_several_engines.py::test_a_request_goes_to_the_engine_of_its_slot_whatever_else_is_said",
        ),
        guard(
            "tensors on a GPU are not sent again",
            "if not retry or submission.has_replied or submission._on_gpu:",
            "if not retry or submission.has_replied:",
            "tests/memory/test_device_slots.py::test_what_lay_on_a_gpu_of_the_engine_is_not_sent_again",
        ),
    ),
    *faults_in(
        "shmring/client/deadlines.py",
        (
            "an earlier deadline does not set the timer anew",
            "if self._timer is None or until_s < self._timer_s:",
            "if self._timer is None:",
            "tests/ends/test_deadlines.py::test_all_have_one_timer_which_goes_off_for_the_earliest",
        ),
        (
            "each deadline has a timer of its own",
            "if self._timer is None or until_s < self._timer_s:",
            "if True:",
            "tests/ends/test_deadlines.py::test_all_have_one_timer_which_goes_off_for_the_earliest",
        ),
        (
            "the timer is not set for what is left",
            "            if self._heap:\n                self._set_timer(self._heap[0][0])",
            "            pass",
            "tests/ends/test_deadlines.py::test_the_inner_of_two_does_not_end_the_outer",
        ),
        (
            "the timer that is replaced goes off as well",
            "            self._timer.cancel()\n",
            "            pass\n",
            "tests/ends/test_deadlines.py::test_all_have_one_timer_which_goes_off_for_the_earliest",
        ),
        (
            "what is over counts twice when it is taken out",
            "                self._over -= 1\n",
            "                pass\n",
            "tests/ends/test_deadlines.py::test_what_is_over_is_counted_until_it_has_gone",
        ),
        (
            "what is over is kept until its time",
            "if self._over > _FEW and self._over > len(self._heap) // 2:",
            "if False:",
            "tests/ends/test_deadlines.py::test_what_is_over_is_not_kept_until_its_time",
        ),
        (
            "what is over still counts when it has gone",
            "            heapq.heapify(self._heap)\n            self._over = 0\n",
            "            heapq.heapify(self._heap)\n",
            "tests/ends/test_deadlines.py::test_what_is_over_is_counted_until_it_has_gone",
        ),
        (
            "a cancellation from outside becomes a timeout",
            "task.uncancel() <= self._cancelling and",
            "task.uncancel() >= 0 and",
            "tests/ends/test_deadlines.py::test_a_cancellation_that_comes_with_the_end_of_the_time_stays_one",
        ),
        (
            "what a deadline waited for is kept with its entry",
            "        self.waits_for = _nothing  # the heap",
            "        # the heap",
            "tests/ends/test_deadlines.py::test_an_entry_that_is_over_keeps_nothing_of_its_caller",
        ),
        (
            "a timer that goes off early expires nothing",
            "self._heap[0][0] <= now_s + _EARLY_S",
            "self._heap[0][0] < now_s - _EARLY_S",
            "tests/ends/test_deadlines.py::test_a_timer_that_goes_off_a_little_early_is_in_time",
        ),
    ),
    *faults_in(
        "shmring/client/calls.py",
        (
            "a call that was not sent keeps its place",
            "        except BaseException:\n            self._free.release()\n            raise",
            "        except BaseException:\n            raise",
            "tests/ring/test_ring.py::test_a_call_that_can_not_be_sent_takes_no_turn",
        ),
        (
            "the answer to a call whose caller has left keeps its place",
            "        self._free.release()\n        if future.done():\n            return  # its caller stopped waiting\n",
            "        if future.done():\n            return  # its caller stopped waiting\n        self._free.release()\n",
            "tests/ends/test_cancellation.py::test_cancelled_one_step_later_each_time",
        ),
        (
            "calls that wait for their turn are not told that the engine has gone",
            "        for _ in waiting:\n            self._free.release()\n",
            "",
            "tests/client/test_reconnect.py::test_calls_that_wait_for_their_turn_fail_too",
        ),
    ),
    *faults_in(
        "shmring/client/routing.py",
        (
            "equals do not take turns",
            "self._next = (self._names.index(chosen) + 1) % len(self._names)",
            "self._next = self._names.index(chosen)",
            "tests/client/test_routing.py::test_equals_take_turns",
        ),
        (
            "an engine that does not respond gets requests",
            "weight = (not load.responds, load.in_flight, load.waiting)",
            "weight = (load.in_flight, load.waiting, not load.responds)",
            "tests/client/test_routing.py::test_an_engine_that_does_not_respond_gets_nothing_while_another_one_does",
        ),
        (
            "a key moves with the place of its engine in the list",
            "            return hashed.digest(), name",
            "            return bytes(1), name",
            "tests/client/test_routing.py::test_keys_are_spread_evenly",
        ),
        (
            "an engine that does not respond has its turn",
            "else (not load.responds,)",
            "else (False,)",
            "tests/client/test_routing.py::test_an_engine_that_does_not_respond_gets_nothing_while_another_one_does",
        ),
        guard(
            "an engine that does not respond gets nothing new",
            "responds = self._unread_since is None or now - self._unread_since <= self._patience_s",
            "responds = True",
            "tests/integration/test_engines.py::test_an_engine_that_is_stopped_gets_nothing_new_until_it_goes_on",
        ),
        guard(
            "requests that an engine has not read yet count as its load",
            "published + unheard if unheard > 0 else published",
            "published",
            "tests/client/test_routing.py::test_what_was_sent_since_the_engine_spoke_last_comes_on_top",
        ),
    ),
    *faults_in(
        "shmring/client/attachment.py",
        (
            "pauses between two attempts have no bound",
            "pause = min(2 * pause, pauses.LONGEST_S)",
            "pause = 2 * pause",
            "tests/client/test_reconnect.py::test_pauses_between_attempts_are_each_twice_as_long_up_to_a_second",
        ),
        (
            "pauses between two attempts do not grow",
            "pause = min(2 * pause, pauses.LONGEST_S)",
            "pass",
            "tests/client/test_reconnect.py::test_pauses_between_attempts_are_each_twice_as_long_up_to_a_second",
        ),
        (
            "who waits for an engine does not learn that there will be none",
            "        self._attached.set()  # tasks",
            "        # tasks",
            "tests/client/test_reconnect.py::test_a_client_that_waits_for_an_engine_can_be_closed",
        ),
        (
            "a session that ended while it opened is used",
            "        session.check_alive()  # the session",
            "        # the session",
            "tests/client/test_reconnect.py::test_a_session_that_ends_while_it_opens_is_none",
        ),
        (
            "the end of an older session ends the new one",
            "        if session is not self.session:\n            return\n",
            "",
            "tests/client/test_reconnect.py::test_a_session_that_ends_late_is_not_taken_for_the_one_that_came_after_it",
        ),
        (
            "a client that has lost its engine is still said to be attached",
            "        self._attached.clear()\n",
            "",
            "tests/client/test_reconnect.py::test_closing_after_a_reconnection_is_an_end_even_if_it_is_cancelled",
        ),
        (
            "a closed client attaches to the next engine",
            "        if self._reconnect and not self.home.is_closed:\n",
            "        if self._reconnect:\n",
            "tests/client/test_reconnect.py::test_a_client_that_closes_waits_for_no_engine",
        ),
        (
            "counts of former lives are forgotten",
            "        self.counters = self.counters.with_those_of(session.end)\n",
            "",
            "tests/client/test_reconnect.py::test_a_client_attaches_to_the_next_engine",
        ),
        guard(
            "a client keeps no search for an engine that it cancelled",
            "self._reattaching = None  # it holds",
            "pass  # it holds",
            "tests/ends/test_raised_errors.py::test_a_client_that_was_closed_while_it_looked_for_an_engine_keeps_none",
        ),
    ),
    *faults_in(
        "shmring/client/engines.py",
        (
            "requests are refused when all engines drain",
            "if not each[1].load.draining] or reached",
            "if not each[1].load.draining]",
            "tests/client/test_several_engines.py::test_where_all_engines_drain_they_are_used",
        ),
        (
            "what was seen of an engine's former life counts for the next",
            "        if self._sessions.get(name) is not session:",
            "        if name not in self._sessions:",
            "tests/client/test_several_engines.py::test_what_was_seen_of_an_engine_is_void_in_its_next_life",
        ),
        (
            "who waits for one of several engines is not told that the client closes",
            "        self._some_attached.set()  # whoever",
            "        # whoever",
            "tests/client/test_several_engines.py::test_who_waits_for_any_engine_hears_that_the_client_closes",
        ),
        (
            "a request goes to an engine that was not named",
            "if holder is not None and engine is not None and holder is not self.given(engine):",
            "if False:",
            "tests/client/test_several_engines.py::test_a_slot_and_its_request_can_not_be_at_two_engines",
        ),
        (
            "a request to an engine that has died is not tried at another one",
            "                if self.leaves_no_other(engine):\n                    raise",
            "                raise",
            "tests/client/test_several_engines.py::test_a_slot_that_is_waited_for_at_an_engine_that_dies_comes_from_another_one",
        ),
        (
            "kept content is looked for at the most loaded engine first",
            "(not loads[name].responds, loads[name].in_flight)",
            "(not loads[name].responds, -loads[name].in_flight)",
            "tests/client/test_several_engines.py::test_kept_content_is_looked_for_at_the_least_loaded_engine_first",
        ),
        guard(
            "a payload lies in slots of one engine",
            "            if holder is not None:\n                raise LocalProtocolError(",
            "            if False:\n                raise LocalProtocolError(",
            "tests/client/test_several_engines.py::test_a_slot_and_its_request_can_not_be_at_two_engines",
        ),
        guard(
            "an engine that drains gets nothing new",
            "return [each for each in reached if not each[1].load.draining] or reached",
            "return reached",
            "tests/client/test_several_engines.py::test_an_engine_that_drains_gets_what_is_bound_to_it_and_nothing_else",
        ),
        guard(
            "what waits at an engine that has stopped goes to another",
            "return work if is_given or self.only is not None else self._while_it_responds(session, work)",
            "return work",
            "tests/integration/test_engines.py::test_what_is_not_sent_to_an_engine_that_stops_goes_to_another",
        ),
    ),
    *faults_in(
        "shmring/client/life.py",
        (
            "replies that are here can not be read when the engine has gone",
            "        if not self.is_usable and (self.home.forked or not isinstance(self.error, EngineDeadError)):\n"
            "            self.check_alive()",
            "        self.check_alive()",
            "tests/ring/test_batches.py::test_a_reply_that_came_in_a_message_can_be_read_when_its_engine_has_gone",
        ),
    ),
    *faults_in(
        "shmring/client/session.py",
        guard(
            "a client that closes waits for its task that maps pages",
            "                    await self.prefaulted()\n",
            "                    pass\n",
            "tests/ends/test_raised_errors.py::test_a_client_that_has_closed_leaves_no_task",
        ),
        guard(
            "memory that is used after a goodbye is quarantined until the socket ends",
            "self.link.close(self._hand_socket_on if lingers else None)",
            "self.link.close()",
            "tests/ends/test_held_at_close.py::test_a_slot_comes_back_when_it_is_left",
        ),
        guard(
            "an engine's Welcome is checked before anything is mapped",
            "            check_welcome(welcome)\n",
            "",
            "tests/client/test_session.py::test_an_engine_that_says_what_can_not_be_is_not_joined",
        ),
    ),
    *faults_in(
        "shmring/core/welcome.py",
        guard(
            "an engine that answers has the name that was meant",
            "    if said != meant:",
            "    if False:",
            "tests/client/test_names.py::test_who_finds_another_engine_is_told_both_names",
        ),
    ),
)
