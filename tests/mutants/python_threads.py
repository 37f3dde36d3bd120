"""Faults in what threads and processes use."""

from __future__ import annotations

from tests.faulty import faults_in

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
            "        if self._is_closed:\n            call.answer(error=self._closed_error())\n            return\n",
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
            "an interruption in the middle of the work breaks nothing",
            "            self._is_broken = self._is_closed = True",
            "            pass",
            "tests/threads/test_served_by.py::test_a_ring_that_was_interrupted_in_the_middle_of_its_work_says_so_and_can_be_closed",
        ),
        (
            "a ring that is closed in the middle of a call stays open",
            "                self._closes_later = False\n                self._do(self._end)",
            "                self._closes_later = False",
            "tests/threads/test_served_by.py::test_a_signal_handler_may_close_the_ring_that_its_thread_waits_for",
        ),
        (
            "the thread that stands by leads though there was a call just now",
            "        if idle_s > 0:\n            return idle_s\n",
            "",
            "tests/threads/test_served_by.py::test_a_thread_that_stands_by_does_nothing_as_long_as_there_are_calls",
        ),
        (
            "a thread that has the answer to another's call wakes nobody",
            "        self._loop.stop()\n        self._changed.notify_all()",
            "        self._loop.stop()",
            "tests/threads/test_served_by.py::test_who_waits_is_told_by_the_thread_that_answers_it",
            "Equivalent but for a thread switch: the leader is stopped by the same answer, and tells all as it leaves.",
        ),
        (
            "a leader that leaves tells nobody",
            "            self._turned_s = self._called_s = time.monotonic()\n            self._changed.notify_all()",
            "            self._turned_s = self._called_s = time.monotonic()",
            "tests/threads/test_served_by.py::test_between_calls_a_thread_stands_by_and_lets_go_when_somebody_waits",
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
)
