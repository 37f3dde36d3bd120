"""Faults in what threads and processes use."""

from __future__ import annotations

from tests.mutants.fault import faults_in, guard

FAULTS = (
    *faults_in(
        "shmring/threads/loop_calls.py",
        (
            "a result that came before its thread was interrupted is not undone",
            "            result, self.result = self.result, None\n            self._undo(result)",
            "            pass",
            "tests/threads/test_threads.py::test_an_exception_that_is_set_from_outside_gives_back_what_was_handed_over",
        ),
        (
            "a call whose thread has left goes on in the loop",
            "            self._end()\n            self.cancel()",
            "            self._end()",
            "tests/threads/test_threads.py::test_an_interrupted_request_is_aborted",
        ),
        (
            "calls that wait are not answered when their end closes",
            "                call.answer(error=self._closed_error())\n                call.cancel()",
            "                call.cancel()",
            "tests/threads/test_threads.py::test_closing_wakes_all_waiting_callers",
        ),
        (
            "calls in the queue are not answered when the loop has ended",
            "            if isinstance(item, LoopCall):\n                item.answer(error=self._closed_error())",
            "            pass",
            "tests/threads/test_threads.py::test_no_call_is_left_in_the_queue_of_a_loop_that_has_ended",
        ),
        (
            "an end that was interrupted while it was opened lives on",
            "        if self._life is not None:\n            self._life.cancel()",
            "        pass",
            "tests/threads/test_threads.py::test_an_interrupted_connect_leaves_no_thread",
        ),
        (
            "a result that nobody takes is not undone",
            "            if error is None:\n                self._undo(result)\n            return",
            "            return",
            "tests/threads/test_loop_calls.py::test_what_comes_of_a_call_that_was_left_is_undone",
        ),
        (
            "a task that was cancelled answers nobody",
            "            self.answer(error=asyncio.CancelledError())",
            "            pass",
            "tests/threads/test_loop_calls.py::test_who_calls_what_is_cancelled_is_told",
        ),
        (
            "an answered question's timer goes off",
            "            self.on_end.append(timer.cancel)\n",
            "            pass\n",
            "tests/threads/test_loop_calls.py::test_a_question_that_was_answered_in_time_is_forgotten",
        ),
        (
            "calls that wait go on when their end closes",
            "                call.answer(error=self._closed_error())\n                call.cancel()",
            "                call.answer(error=self._closed_error())",
            "tests/threads/test_loop_calls.py::test_what_waits_is_cancelled_before_its_end_closes",
        ),
        (
            "a call that came too late is carried out",
            "        if self.home.is_closed:\n            call.answer(error=self._closed_error())\n            return\n",
            "",
            "tests/threads/test_loop_calls.py::test_a_call_that_comes_while_its_end_closes_is_not_carried_out",
        ),
        (
            "calls are listed as running for ever",
            "            call.on_end.append(functools.partial(self._running.pop, call))",
            "            pass",
            "tests/threads/test_threads.py::test_an_exception_that_is_set_from_outside_gives_back_what_was_handed_over",
        ),
        (
            "a caller that raised holds its error's frames",
            "            del error, self  # the",
            "            pass  # the",
            "tests/threads/test_loop_calls.py::test_an_error_is_freed_with_the_last_that_holds_it",
        ),
        (
            "what one thread asked for fails in another",
            "            except Exception as error:  # noqa: BLE001 - it does not concern",
            "            except ZeroDivisionError as error:  # noqa: BLE001 - it does not concern",
            "tests/threads/test_loop_calls.py::test_what_one_thread_posts_fails_in_no_other",
        ),
        guard(
            "no thread waits for a thread that never runs again",
            "if self.home.is_closed or sys.is_finalizing():",
            "if self.home.is_closed:",
            "tests/threads/test_threads.py::test_a_program_that_ends_without_closing_ends_quietly",
        ),
    ),
    *faults_in(
        "shmring/threads/loop_thread.py",
        (
            "a call that races with the end of the loop is left behind",
            "                if not self._is_over:\n                    return\n",
            "                return\n",
            "tests/threads/test_threads.py::test_calls_that_race_with_closing_end",
            "Equivalent on one side of a race that no test can hold still: the loop's thread answers "
            "what is queued when it ends, and a call that is queued after that sees that it is over.",
        ),
        (
            "who closes from its own thread waits for itself",
            "        if threading.get_ident() == self._thread.ident:\n",
            "        if False:\n",
            "tests/threads/test_threads.py::test_callbacks_run_in_the_loops_thread_where_waiting_is_an_error",
        ),
        (
            "a loop whose thread does not start stays open",
            "                self._loop.close()\n                raise",
            "                raise",
            "tests/threads/test_loop_calls.py::test_a_loop_whose_thread_does_not_start_is_closed",
        ),
        (
            "an error of closing is swallowed",
            "        if failure is not None:\n            raise failure",
            "        pass",
            "tests/threads/test_loop_calls.py::test_an_error_of_closing_is_raised_where_it_is_closed",
        ),
    ),
    *faults_in(
        "shmring/threads/callers_loop.py",
        (
            "a ring that is closed in the middle of a call stays open",
            "                self._closes_later = False\n                self._do(self._end)",
            "                self._closes_later = False",
            "tests/threads/test_served_by.py::test_a_signal_handler_may_close_the_ring_that_its_thread_waits_for",
        ),
        (
            "a thread that has the answer to another's call wakes nobody",
            "        self._loop.stop()\n        self._changed.notify_all()",
            "        self._loop.stop()",
            "tests/threads/test_served_by.py::test_who_waits_is_told_by_the_thread_that_answers_it",
            "Equivalent but for a thread switch: the leader is stopped by the same answer, and tells all as it leaves.",
        ),
        (
            "a call that comes while the leader sleeps does not wake it",
            "            self._loop.call_soon_threadsafe(keep, None)",
            "            pass",
            "tests/threads/test_loop_calls.py::test_a_loop_that_sleeps_is_woken_by_what_another_thread_does",
        ),
        (
            "the thread that stands by ends when it has led once",
            "            idle_s = self._do(self._lead_if_idle)",
            "            self._do(self._lead_if_idle)\n            return",
            "tests/threads/test_served_by.py::test_between_calls_a_thread_stands_by_and_lets_go_when_somebody_waits",
        ),
        (
            "tasks are left when a ring is closed",
            "            for task in others:\n                task.cancel()\n",
            "            others = set()\n",
            "tests/threads/test_loop_calls.py::test_tasks_that_nobody_waits_for_end_with_the_loop",
        ),
        guard(
            "a thread that waits in a ring's call lets other threads in while it sleeps",
            "        self._is_asleep, self._insider = True, _NOBODY\n        self._lock.release()\n",
            "        self._is_asleep, self._insider = True, _NOBODY\n        self._lock.release()\n"
            "        self._lock.acquire()\n",
            "tests/threads/test_served_by.py::test_what_is_posted_is_carried_out_while_another_thread_waits",
        ),
        guard(
            "a thread that has answered another thread's call wakes that thread",
            "            self._loop.call_soon_threadsafe(keep, None)\n",
            "            pass\n",
            "tests/threads/test_served_by.py::test_who_waits_is_told_by_the_thread_that_answers_it",
        ),
        guard(
            "a thread that stops running the loop hands it on",
            "            self._turned_s = self._called_s = time.monotonic()\n            self._changed.notify_all()\n",
            "            self._turned_s = self._called_s = time.monotonic()\n",
            "tests/threads/test_served_by.py::test_between_calls_a_thread_stands_by_and_lets_go_when_somebody_waits",
        ),
        guard(
            "a call that is posted while another thread is inside is carried out afterwards",
            "            if self._queue:  # of threads that found the lock taken\n                self._wake()\n",
            "            pass\n",
            "tests/threads/test_served_by.py::test_what_is_posted_while_another_thread_is_inside_is_carried_out_by_it",
        ),
        guard(
            "an interruption while a thread sleeps breaks nothing",
            "            if not self._is_asleep:\n",
            "            if True:\n",
            "tests/threads/test_served_by.py::test_who_is_interrupted_asleep_gives_up_its_call_and_the_ring_goes_on",
        ),
        guard(
            "a ring that was interrupted in the middle of its work is not used further",
            "            self._is_broken = self.home.is_closed = True\n",
            "            pass\n",
            "tests/threads/test_served_by.py::test_a_ring_that_was_interrupted_in_the_middle_of_its_work_says_so_and_can_be_closed",
        ),
        guard(
            "a thread that waits in a ring does not wait there a second time",
            "            if self._leader == me:\n",
            "            if False:\n",
            "tests/threads/test_served_by.py::test_a_signal_handler_may_not_wait_where_its_thread_waits",
        ),
        guard(
            "a ring that its own caller closes meanwhile is closed by that call",
            "            if self._closes_later and self._leader != get_ident():\n",
            "            if False:\n",
            "tests/threads/test_served_by.py::test_a_signal_handler_may_close_the_ring_that_its_thread_waits_for",
        ),
        guard(
            "a thread that stands by lets go when somebody has to wait",
            "        if self._leader == _STANDING:\n            self._loop.stop()\n        self._insider = _NOBODY\n",
            "        self._insider = _NOBODY\n",
            "tests/threads/test_served_by.py::test_between_calls_a_thread_stands_by_and_lets_go_when_somebody_waits",
        ),
        guard(
            "a thread that stands by leaves a ring alone that is called",
            "        if idle_s > 0:\n            return idle_s\n",
            "",
            "tests/threads/test_served_by.py::test_a_thread_that_stands_by_does_nothing_as_long_as_there_are_calls",
        ),
        guard(
            "a forked child takes nothing out of its parent's epoll",
            "    def __del__(self) -> None:\n",
            "    def never(self) -> None:\n",
            "tests/threads/test_served_by.py::test_a_forked_child_can_not_use_it_and_does_its_parent_no_harm",
        ),
        guard(
            "a call has the loop do what is due",
            "        if now_s - self._turned_s > _TURN_S:\n",
            "        if False:\n",
            "tests/threads/test_served_by.py::test_slots_of_shared_claims_go_back_while_others_are_called",
        ),
    ),
    *faults_in(
        "shmring/threads/blocking.py",
        (
            "a stream whose thread is interrupted while it waits goes on",
            "undo=lambda _: _end(stream)):",
            "undo=lambda _: None):",
            "tests/threads/test_threads.py::test_an_exception_that_is_set_from_outside_ends_a_stream_whose_reply_came",
        ),
        (
            "a stream that is left between two replies goes on",
            "                self._thread.post(_end, stream)\n",
            "                pass\n",
            "tests/threads/test_threads.py::test_a_stream_ends_though_the_error_that_left_it_is_kept",
        ),
        (
            "a stream keeps each reply until the next one is asked for",
            "                yield came.pop()  # or",
            "                yield came[0]  # or",
            "tests/threads/test_threads.py::test_a_stream_keeps_no_reply_that_its_reader_has_dropped",
        ),
    ),
    *faults_in(
        "shmring/processes/process.py",
        (
            "a process that could not be started leaves its pipe open",
            "                on_failure.callback(os.close, word_fd)\n",
            "",
            "tests/processes/test_process.py::test_a_program_that_can_not_be_started_or_watched_leaves_nothing",
        ),
        (
            "the child's end of the pipe stays open here",
            "                always.callback(os.close, theirs)\n",
            "",
            "tests/processes/test_process.py::test_a_program_that_can_not_be_started_or_watched_leaves_nothing",
        ),
        (
            "a ready line that comes in pieces is cut",
            'while not word.endswith(b"\\n") and (piece',
            "while not word and (piece",
            "tests/processes/test_process.py::test_what_a_child_says_of_itself_may_be_long",
        ),
        (
            "a process that does not end is waited for, for ever",
            "            self.send(signal.SIGKILL)\n            return self.wait()",
            "            return self.wait()",
            "tests/processes/test_process.py::test_a_child_is_told_to_end_and_else_killed",
        ),
        (
            "who waits for a process to be ready hears of it later as well",
            "            loop.remove_reader(self._word_fd)\n        return self._read_word(kind)",
            "            pass\n        return self._read_word(kind)",
            "tests/processes/test_process.py::test_a_loop_goes_on_until_a_child_is_ready",
        ),
    ),
    *faults_in(
        "shmring/threads/worker.py",
        guard(
            "a thread that closes a worker in the middle of its own call leaves the cleaning up to that call",
            "while self._pidfd >= 0 and not (self.receiving.is_taken or self._sending.is_taken):",
            "while self._pidfd >= 0:",
            "tests/ends/test_ends_inside_calls.py::test_a_signal_handler_may_close_a_worker_whose_thread_waits",
        ),
        guard(
            "the last thread in a closed worker cleans up",
            "        if self.home.is_closed:\n",
            "        if False:\n",
            "tests/ends/test_ends_inside_calls.py::test_a_signal_handler_may_close_a_worker_whose_thread_waits",
        ),
        guard(
            "a call that would wait for itself raises an error",
            "if self._owner == threading.get_ident():",
            "if False:",
            "tests/ends/test_ends_inside_calls.py::test_whoever_would_wait_for_itself_is_told_so",
        ),
        guard(
            "a reply that was not sent in time may be sent again",
            "                self._end.unmark_answered(message)\n",
            "                pass\n",
            "tests/ends/test_ends_inside_calls.py::test_a_reply_that_found_no_room_in_time_may_be_tried_again",
        ),
        guard(
            "half of a reply ends a blocking worker",
            "elif parts:  # nothing else can follow half of a reply",
            "elif False:",
            "tests/ends/test_ends_inside_calls.py::test_an_interruption_in_the_middle_of_a_reply_ends_the_worker_and_convicts_nobody",
        ),
        guard(
            "a failure that could not be sent is sent with the next call",
            "                    self._wait_and_write(records[0], deadline, timeout)\n                    records.popleft()\n",
            "                    self._wait_and_write(records.popleft(), deadline, timeout)\n",
            "tests/ends/test_ends_inside_calls.py::test_a_failure_that_an_interruption_cut_off_is_said_with_the_next_call",
        ),
    ),
    *faults_in(
        "shmring/threads/client.py",
        guard(
            "a blocking client keeps no slot that was left",
            "        held, self._in_loop = self._in_loop, None",
            "        held = self._in_loop",
            "tests/ends/test_held_at_close.py::test_a_slot_of_a_blocking_client_comes_back_when_it_is_left",
        ),
        guard(
            "a thread's request comes after the work that it has queued on its GPU",
            "        slots.follow(mark)\n",
            "        pass\n",
            "tests/memory/test_device_slots.py::test_what_a_thread_sends_comes_behind_what_it_has_queued",
        ),
        guard(
            "a slot on a GPU that a thread leaves waits for the work that the thread has queued",
            "        slot._end.device_slots.use(slot._record, stream)\n",
            "        pass\n",
            "tests/memory/test_device_slots.py::test_a_slot_that_a_thread_leaves_waits_for_what_it_has_queued",
        ),
    ),
    *faults_in(
        "shmring/threads/greenlets.py",
        guard(
            "a blocking ring or client is not opened where threads are greenlets",
            "if kind.__module__ not in _STANDARD:",
            "if False:",
            "tests/threads/test_greenlets.py::test_an_end_that_blocks_is_refused_where_threads_are_greenlets",
        ),
    ),
    *faults_in(
        "shmring/threads/ring.py",
        guard(
            "looking for the next request has the loop deliver it",
            "            self._thread.turn()\n",
            "            pass\n",
            "tests/threads/test_served_by.py::test_a_loop_of_its_users_serves_clients_and_shares_their_claims",
        ),
    ),
)
