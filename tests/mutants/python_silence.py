"""Faults in what keeps one peer's silence from all, and in what makes things right at the door."""

from __future__ import annotations

from tests.mutants.fault import faults_in, guard

FAULTS = (
    *faults_in(
        "shmring/ring/moments.py",
        (
            "moments pass though nobody waits for a lease",
            "if self._timer is None and self._book.is_awaited():",
            "if self._timer is None:",
            "tests/client/test_backpressure.py::test_an_engine_for_whose_memory_nobody_waits_has_no_timer",
        ),
        (
            "one moment passes and no other",
            "        self._timer = loop.call_later(max(_MOMENT_S, _PAUSES * (loop.time() - began_s)), self._moment_passed)\n",
            "",
            "tests/client/test_backpressure.py::test_moments_pass_as_long_as_somebody_waits",
        ),
        (
            "what a moment brings is not carried out",
            "        self._carry_out(effects)",
            "        pass",
            "tests/client/test_backpressure.py::test_who_writes_for_long_is_passed_over",
        ),
        (
            "moments that take long leave the loop no time",
            "max(_MOMENT_S, _PAUSES * (loop.time() - began_s))",
            "_MOMENT_S",
            "tests/client/test_backpressure.py::test_looks_at_many_leases_leave_the_loop_to_others",
        ),
        (
            "a moment lasts ten times as long",
            "_MOMENT_S = 0.025",
            "_MOMENT_S = 0.25",
            "tests/client/test_backpressure.py::test_a_moment_lasts_25_ms",
        ),
    ),
    *faults_in(
        "shmring/ring/places.py",
        (
            "who comes takes a place before who returns",
            "(self._returning if returns else self._new)",
            "self._new",
            "tests/client/test_unread.py::test_those_that_return_take_a_place_before_those_that_come",
        ),
        (
            "a place that came to a handler just cancelled is lost",
            "lambda _: self.give_back())",
            "lambda _: None)",
            "tests/client/test_unread.py::test_a_place_that_comes_to_a_handler_that_was_cancelled_just_now_is_another_ones",
        ),
        (
            "a place is given up twice",
            "        if self.is_held:\n            self.is_held = False\n",
            "        if True:\n            self.is_held = False\n",
            "tests/client/test_unread.py::test_those_that_return_take_a_place_before_those_that_come",
        ),
        (
            "each task of a handler takes a place",
            "            if self._is_taking:  # by",
            "            if False:  # by",
            "tests/client/test_unread.py::test_two_tasks_of_a_handler_have_one_place_together",
        ),
        (
            "a task of a handler waits for ever when another one has taken the place",
            "            self._others.give_all(None)",
            "            pass",
            "tests/client/test_unread.py::test_two_tasks_of_a_handler_have_one_place_together",
        ),
        (
            "a handler that has ended keeps the place that came late",
            "        if self._is_over:\n            self._places.give_back()",
            "        if False:\n            self._places.give_back()",
            "tests/client/test_unread.py::test_a_place_that_comes_when_its_handler_has_ended_is_another_ones",
        ),
    ),
    *faults_in(
        "shmring/ring/waits.py",
        (
            "a handler keeps its place while it waits for its frontend",
            "            place.give_up()\n",
            "",
            "tests/client/test_unread.py::test_handlers_that_wait_for_a_slow_reader_keep_no_place_from_others",
        ),
        (
            "who has waited goes on without a place",
            "            await place.take_again()",
            "            pass",
            "tests/client/test_unread.py::test_handlers_that_wait_for_a_slow_reader_keep_no_place_from_others",
        ),
        (
            "nobody looks at replies that wait",
            "        if self._timer is None:\n            self._timer = self._life.loop.call_later(_LOOK_S, self._look)\n",
            "",
            "tests/client/test_unread.py::test_the_log_says_which_client_takes_no_replies_and_not_all_the_time",
        ),
        (
            "the timer runs though no reply waits",
            "            self._timer.cancel()\n        self._timer = None",
            "            pass",
            "tests/client/test_unread.py::test_the_log_says_which_client_takes_no_replies_and_not_all_the_time",
        ),
        (
            "the log says it each second",
            "            self._say_at_s[client_id] = now_s + _SAID_AGAIN_S",
            "            pass",
            "tests/client/test_unread.py::test_the_log_says_which_client_takes_no_replies_and_not_all_the_time",
        ),
        (
            "a large reply lets others pass for ever",
            "self._let_overtake(self._looks % _LOOKS_IN_ROUND != 0)",
            "self._let_overtake(True)",
            "tests/client/test_unread.py::test_a_reply_that_waits_lets_others_pass_but_for_a_moment_now_and_then",
        ),
        (
            "a large reply keeps others waiting ten times as long",
            "_LOOK_S = 0.05",
            "_LOOK_S = 0.5",
            "tests/client/test_unread.py::test_a_reply_that_waits_lets_others_pass_but_for_a_moment_now_and_then",
        ),
        (
            "the log is silent about a silent client for ten times as long",
            "_SILENCE_S = 5.0",
            "_SILENCE_S = 50.0",
            "tests/client/test_unread.py::test_who_takes_no_reply_for_5_s_is_named_and_then_once_a_minute",
        ),
        (
            "when no reply waits any more, others may still pass the next large one",
            "            self._let_overtake(False)\n",
            "            pass\n",
            "tests/client/test_unread.py::test_a_reply_that_waits_comes_first_again_after_a_rest",
        ),
    ),
    *faults_in(
        "shmring/transport/listener.py",
        (
            "an engine does not look whether its lock is there",
            "is_locked, is_bound = _is_same_file(self._lock_fd, lock), self._is_bound()",
            "is_locked, is_bound = True, self._is_bound()",
            "tests/transport/test_listener.py::test_what_somebody_removes_is_there_again_and_the_name_is_nobody_elses",
        ),
        (
            "a socket that somebody has replaced is taken for the engine's own",
            "            return os.path.samestat(self._bound, self.path.lstat())",
            "            return bool(self.path.lstat())",
            "tests/transport/test_listener.py::test_what_somebody_removes_is_there_again_and_the_name_is_nobody_elses",
        ),
        (
            "the lock that went stays open",
            "            os.close(self._lock_fd)\n            self._lock_fd = fd",
            "            self._lock_fd = fd",
            "tests/transport/test_listener.py::test_what_somebody_removes_is_there_again_and_the_name_is_nobody_elses",
        ),
        (
            "processes that ask who has a name keep others from asking",
            "        _drop_probes(self._name_holder)\n",
            "",
            "tests/transport/test_listener.py::test_whoever_asks_often_who_has_a_name_is_told_each_time",
        ),
        (
            "the name in the kernel is held after the engine has closed",
            "        self._lock_fd = -1\n        self._name_holder.close()",
            "        self._lock_fd = -1",
            "tests/transport/test_listener.py::test_a_name_is_free_again_when_its_listener_is_closed",
        ),
        (
            "the name is one in all directories",
            'f"{mounts} {path.parent.resolve()}"',
            'f"{mounts}"',
            "tests/transport/test_listener.py::test_engines_in_two_directories_have_one_name_each",
        ),
        guard(
            "a name is its engine's own while that lives, also if its directory is removed",
            "            if uid == os.getuid():\n",
            "            if False:\n",
            "tests/transport/test_listener.py::test_what_somebody_removes_is_there_again_and_the_name_is_nobody_elses",
        ),
        guard(
            "what is in the place of a directory that was removed is checked",
            "        make_directory(self.path.parent, self._others_may_connect)\n        if not is_locked",
            "        self.path.parent.mkdir(parents=True, exist_ok=True)\n        if not is_locked",
            "tests/ring/test_ring.py::test_what_comes_back_in_the_place_of_the_directory_is_checked_and_named_once",
        ),
        guard(
            "nobody else can write to the directory of the socket",
            "if status.st_mode & 0o022:",
            "if False:",
            "tests/transport/test_listener.py::test_a_directory_that_others_can_write_to_is_refused_by_both_ends",
        ),
        guard(
            "a sweep leaves the locks of other programs",
            "    if mark != _LOCK_MARK:",
            "    if False:",
            "tests/transport/test_listener.py::test_a_sweep_leaves_what_is_not_ours",
        ),
    ),
    *faults_in(
        "shmring/door.py",
        (
            "a bool is a number of seconds",
            "    if isinstance(value, bool) or not isinstance(value, numbers.Real",
            "    if not isinstance(value, numbers.Real",
            "tests/ends/test_door.py::test_what_is_no_timeout_is_refused",
        ),
        (
            "NaN is a time",
            "    if math.isnan(number):\n",
            "    if False:\n",
            "tests/ends/test_door.py::test_nan_is_no_timeout",
        ),
        (
            "a time that is over is negative",
            "    return seconds if seconds > 0 else 0.0",
            "    return seconds",
            "tests/ends/test_door.py::test_a_timeout_is_seconds_or_none",
        ),
        (
            "a number that is too large for a float is an OverflowError",
            "    except OverflowError:  # an int",
            "    except ZeroDivisionError:  # an int",
            "tests/ends/test_door.py::test_a_timeout_is_seconds_or_none",
        ),
        (
            "an error's text shows a wrong value in full length",
            "return text if len(text) <= _SHOWN_CHARACTERS else",
            "return text if True else",
            "tests/ends/test_door.py::test_a_wrong_value_is_shown_in_one_line_and_cut",
        ),
        (
            "half of a surrogate pair can be a name",
            '        except UnicodeEncodeError:\n            raise ValueError(f"{what} is text',
            '        except ZeroDivisionError:\n            raise ValueError(f"{what} is text',
            "tests/ends/test_door.py::test_each_argument_is_right_or_refused_by_name",
        ),
        (
            "a name may be of any length",
            "    if len(name) > MAX_NAME_CHARACTERS:\n",
            "    if False:\n",
            "tests/ends/test_door.py::test_each_argument_is_right_or_refused_by_name",
        ),
    ),
    *faults_in(
        "shmring/core/loggers.py",
        (
            "an error of the program's own filter reaches who logs",
            "        except Exception:  # noqa: BLE001 - of a filter",
            "        except ZeroDivisionError:  # noqa: BLE001 - of a filter",
            "tests/core/test_loggers.py::test_an_error_of_a_filter_or_handler_is_shown_and_goes_nowhere",
        ),
        (
            "a line that can't be written is lost without a word",
            '            _SHOWING.handleError(logging.makeLogRecord({"msg": msg, "args": args}))',
            "            pass",
            "tests/core/test_loggers.py::test_an_error_of_a_filter_or_handler_is_shown_and_goes_nowhere",
        ),
        (
            "a line of the log names the wrong place in the code",
            "stacklevel=stacklevel + 1, **options)",
            "stacklevel=stacklevel, **options)",
            "tests/core/test_loggers.py::test_what_is_logged_is_as_by_pythons_own_logger",
        ),
    ),
)
