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
            "tests/test_threads.py::test_an_exception_that_is_set_from_outside_gives_back_what_was_handed_over",
        ),
        (
            "a call whose thread has left goes on in the loop",
            "            self._end()\n            self.cancel()",
            "            self._end()",
            "tests/test_threads.py::test_an_interrupted_request_is_aborted",
        ),
        (
            "calls that wait are not answered when their end closes",
            "                call.answer(error=self._closed_error())\n                call.cancel()",
            "                call.cancel()",
            "tests/test_threads.py::test_closing_wakes_all_waiting_callers",
        ),
        (
            "calls in the queue are not answered when the loop has ended",
            "            if isinstance(item, LoopCall):\n                item.answer(error=self._closed_error())",
            "            pass",
            "tests/test_threads.py::test_no_call_is_left_in_the_queue_of_a_loop_that_has_ended",
        ),
        (
            "an end that was interrupted while it was opened lives on",
            "        if self._life is not None:\n            self._life.cancel()",
            "        pass",
            "tests/test_threads.py::test_an_interrupted_connect_leaves_no_thread",
        ),
    ),
    *faults_in(
        "shmring/threads/loop_thread.py",
        (
            "a call that races with the end of the loop is left behind",
            "                if not self._is_over:\n                    return\n",
            "                return\n",
            "tests/test_threads.py::test_calls_that_race_with_closing_end",
            "Equivalent on one side of a race that no test can hold still: the loop's thread answers "
            "what is queued when it ends, and a call that is queued after that sees that it is over.",
        ),
        (
            "who closes from its own thread waits for itself",
            "        if threading.get_ident() == self._thread.ident:\n",
            "        if False:\n",
            "tests/test_threads.py::test_callbacks_run_in_the_loops_thread_where_waiting_is_an_error",
        ),
    ),
    *faults_in(
        "shmring/threads/callers_loop.py",
        (
            "an interruption in the middle of the work breaks nothing",
            "            self._is_broken = self._is_closed = True",
            "            pass",
            "tests/test_served_by.py::test_a_ring_that_was_interrupted_in_the_middle_of_its_work_says_so_and_can_be_closed",
        ),
        (
            "a ring that is closed in the middle of a call stays open",
            "                self._closes_later = False\n                self._do(self._end)",
            "                self._closes_later = False",
            "tests/test_served_by.py::test_a_signal_handler_may_close_the_ring_that_its_thread_waits_for",
        ),
        (
            "the thread that stands by leads though there was a call just now",
            "        if idle_s > 0:\n            return idle_s\n",
            "",
            "tests/test_served_by.py::test_a_thread_that_stands_by_does_nothing_as_long_as_there_are_calls",
        ),
    ),
    *faults_in(
        "shmring/threads/blocking.py",
        (
            "a stream whose thread is interrupted while it waits goes on",
            "undo=lambda _: _end(stream)):",
            "undo=lambda _: None):",
            "tests/test_threads.py::test_an_exception_that_is_set_from_outside_ends_a_stream_whose_reply_came",
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
    ),
)
