"""Faults in the Python of a ring and of a worker."""

from __future__ import annotations

from tests.faulty import faults_in

FAULTS = (
    *faults_in(
        "shmring/ring/replies.py",
        (
            "a reply that waited for space is still called when its request ends",
            "            self._end.forget_on_end(claim, give_up)\n",
            "",
            "tests/ring/test_claim.py::test_many_waits_of_one_claim_leave_nothing_behind",
        ),
        (
            "a reply that waits for space is not told that its request has ended",
            "        self._end.call_on_end(claim, give_up)\n",
            "",
            "tests/ring/test_claim.py::test_a_reply_that_waits_for_space_when_the_claim_ends_does_not_wait_any_longer",
        ),
        (
            "reply space that is granted to a reply that was cancelled is lost",
            "return [] if give(place, slot) else self._discarded(slot)",
            "give(place, slot)\n        return []",
            "tests/ring/test_claim.py::test_space_that_comes_to_a_reply_that_was_cancelled_just_now_is_free",
        ),
        (
            "a reply that leaves the line for space stays in the book",
            "        self._carry_out(self._book.cancel_reply(place))",
            "        pass",
            "tests/ring/test_claim.py::test_an_abort_wakes_a_reply_that_waits_for_space_and_keeps_nothing",
        ),
    ),
    *faults_in(
        "shmring/ring/workers.py",
        (
            "the pidfd of a worker that is gone stays open",
            "            worker = self._workers.pop(record)\n            worker.watch.close()",
            "            worker = self._workers.pop(record)",
            "tests/worker/test_workers.py::test_workers_that_have_gone_leave_no_descriptors",
        ),
        (
            "messages of a worker that was dropped are looked for once",
            "        if has_departed and self.book.outstanding and self._looking is None:",
            "        if False:",
            "tests/worker/test_workers.py::test_what_a_dropped_worker_reads_comes_back_though_it_rings_no_more",
        ),
        (
            "who waits for workers is not told that the ring closes",
            "        self._joined.give_all(None)\n        self._changes",
            "        self._changes",
            "tests/worker/test_workers.py::test_a_ring_that_closes_tells_its_workers_and_frees_whoever_waits",
        ),
        (
            "senders that wait for their turn are not told that the ring closes",
            "        self._line.give_all(None)\n",
            "",
            "tests/worker/test_workers.py::test_a_ring_that_closes_tells_its_workers_and_frees_whoever_waits",
            "Equivalent: who has the turn is told, and passes it on.",
        ),
        (
            "a sender that waits for workers is not told that the ring closes",
            "        self._changes.give_all(None)\n        if self._looking",
            "        if self._looking",
            "tests/worker/test_workers.py::test_a_ring_that_closes_tells_its_workers_and_frees_whoever_waits",
            "Equivalent: the ends of the workers' connections wake it as well, in the next turn of the loop.",
        ),
        (
            "a turn to send that came as its sender was cancelled is lost",
            "lambda _: self._pass_turn(parcel), lambda _",
            "lambda _: None, lambda _",
            "tests/worker/test_workers.py::test_a_turn_that_came_as_its_sender_was_cancelled_goes_to_the_next",
        ),
        (
            "a sender overtakes those that wait",
            "(*self._sending, *self._line.values())",
            "(*self._sending,)",
            "tests/worker/test_workers.py::test_who_sends_to_others_stands_in_line_behind_who_sends_to_all",
        ),
        (
            "a sender that leaves the line keeps those behind it waiting",
            "lambda _: self._give_turns())",
            "lambda _: None)",
            "tests/worker/test_workers.py::test_who_sends_to_others_stands_in_line_behind_who_sends_to_all",
        ),
        (
            "who waits for workers is not told that one has joined",
            '        self._joined.give_all(None)\n        logger.info("%s has joined", worker)',
            '        logger.info("%s has joined", worker)',
            "tests/integration/test_workers.py::test_processes_get_the_same_in_the_same_order_and_reply",
        ),
        (
            "a message that is not sent keeps its memory",
            "        finally:\n            self.end.discard(parcel)",
            "        finally:\n            pass",
            "tests/worker/test_workers.py::test_who_has_memory_and_waits_for_place_is_told_whom_it_waits_for",
        ),
        (
            "the descriptors of a worker's memory stay open",
            "            for fd in fds:\n                os.close(fd)",
            "            pass",
            "tests/worker/test_workers.py::test_workers_that_have_gone_leave_no_descriptors",
        ),
        (
            "memory for broadcasts that could not be reserved is never tried again",
            "        self._reserving = None  # it holds",
            "        # it holds",
            "tests/ends/test_raised_errors.py::test_an_engine_keeps_none_of_a_memory_that_it_could_not_reserve",
        ),
        (
            "a worker may say in parts as much as it likes",
            "if self.parts_nbytes > _MOST_ANSWERS *",
            "if self.parts_nbytes < -_MOST_ANSWERS *",
            "tests/worker/test_workers.py::test_parts_without_end_are_bounded",
        ),
        (
            "last words of a worker that has died are not read",
            "        worker.link.read_last_words()\n",
            "",
            "tests/worker/test_workers.py::test_what_a_worker_has_replied_counts_though_it_has_died",
        ),
        (
            "a worker that dies while it is admitted is a worker for ever",
            "            if dead.is_set():\n",
            "            if False:\n",
            "tests/worker/test_workers.py::test_who_dies_while_it_is_let_in_is_no_worker_though_another_process_has_its_socket",
        ),
    ),
    *faults_in(
        "shmring/ring/handling.py",
        (
            "a batch is kept until the next one has come",
            "            claims = claim = reply = None  # type",
            "            # type",
            "tests/ring/test_batches.py::test_a_batch_that_was_answered_is_forgotten_before_the_next_one_comes",
        ),
        (
            "claims of a batch whose handler failed are not failed",
            "        for claim in claims:\n            claim.fail(error)\n",
            "",
            "tests/ring/test_batches.py::test_a_handler_that_raises_fails_its_batch_and_nothing_else",
        ),
        (
            "a claim whose handler was cancelled before its first step is never left",
            "        if not claim.released:  # cancelled",
            "        if False:  # cancelled",
            "tests/ring/test_batches.py::test_a_reply_that_was_not_begun_when_the_loop_ends_fails_its_request",
        ),
        (
            "an abort does not cancel its handler",
            "            claim.on_abort(task.cancel)\n",
            "",
            "tests/ring/test_ring.py::test_a_handler_whose_request_is_aborted_is_cancelled",
        ),
        (
            "a handler that was cancelled, and not aborted, counts as ended",
            "        if not claim.aborted:\n            raise",
            "        pass",
            "tests/ring/test_ring.py::test_cancelling_run_fails_what_it_was_handling",
            "Equivalent: its claim has failed already, and nobody looks at how its task has ended.",
        ),
    ),
    *faults_in(
        "shmring/ring/handshakes.py",
        (
            "a peer that was refused keeps its pidfd open",
            "            os.close(peer.pidfd)\n            refuse(peer.socket, reason)",
            "            refuse(peer.socket, reason)",
            "tests/ring/test_ring.py::test_who_was_refused_leaves_no_descriptor",
        ),
        (
            "who has left its place is remembered",
            "                self._pids.pop(waiting, None)\n",
            "                pass\n",
            "tests/ring/test_ring.py::test_who_has_said_hello_counts_no_more_as_one_who_says_nothing",
        ),
        (
            "a connection that was refused stays open",
            "            self.refused += 1\n            connected.close()\n",
            "            self.refused += 1\n",
            "tests/ring/test_ring.py::test_more_clients_than_may_connect_are_refused_until_one_goes",
        ),
        (
            "connections that have gone count for all processes",
            "sum(not frontend.connected and frontend.pid == peer.pid for",
            "sum(not frontend.connected for",
            "tests/ring/test_ring.py::test_connections_that_have_gone_count_for_their_process_alone",
        ),
        (
            "the descriptors of a frontend's rings stay open",
            "            for fd in ring_fds:\n                os.close(fd)",
            "            pass",
            "tests/ring/test_ring.py::test_a_frontend_that_cannot_be_admitted_leaks_nothing_and_another_can",
        ),
    ),
    *faults_in(
        "shmring/worker/worker.py",
        (
            "a receiver that was cancelled as a record came wakes nobody",
            "await self._receivers.wait(lambda _: self._wake())",
            "await self._receivers.wait(lambda _: None)",
            "tests/worker/test_workers.py::test_a_message_that_came_to_a_receiver_just_cancelled_goes_to_the_next",
        ),
        (
            "a message is received out of turn",
            "return None if self._receivers else self.next()",
            "return self.next()",
            "tests/worker/test_workers.py::test_who_does_not_wait_takes_nothing_from_those_who_do",
        ),
        (
            "a reply that found no room may not be sent again",
            "            self._end.unmark_answered(message)  # nothing",
            "            # nothing",
            "tests/ends/test_ends_inside_calls.py::test_a_reply_that_is_cancelled_before_it_was_sent_was_none",
        ),
        (
            "receivers are woken one by one when no more will come",
            "len(self._receivers) if self._reason is not None else len(self._records)",
            "len(self._records)",
            "tests/worker/test_workers.py::test_all_who_wait_for_a_message_hear_of_the_end",
        ),
        (
            "why a worker has ended is what came last",
            "        if self._reason is None:\n            self._reason = reason",
            "        self._reason = reason",
            "tests/worker/test_workers.py::test_a_dropped_worker_is_told_and_keeps_what_it_reads",
        ),
        (
            "messages that a closing worker has not opened are kept",
            "                self._end.leave_unread(self._records.popleft())",
            "                self._records.popleft()",
            "tests/worker/test_workers.py::test_a_worker_closes_whatever_it_was_sent_and_has_not_received",
            "Equivalent: the page of a worker that has closed says that all messages behind the last opened one were left.",
        ),
        (
            "after half a reply, others follow",
            "                self._is_over(self._half_answered())\n                self._link.close()",
            "                pass",
            "tests/worker/test_workers.py::test_after_half_a_reply_a_worker_says_nothing_more",
        ),
        (
            "a replier that was cancelled keeps its turn",
            "                self._answering.release()\n                raise\n",
            "                raise\n",
            "tests/worker/test_workers.py::test_a_reply_that_was_cancelled_while_it_waited_can_be_sent_again",
        ),
        (
            "a message whose reply was not sent counts as replied to",
            "            self._end.unmark_answered(message)  # nothing was sent\n",
            "",
            "tests/worker/test_workers.py::test_a_reply_that_was_cancelled_while_it_waited_can_be_sent_again",
        ),
    ),
)
