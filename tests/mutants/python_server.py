"""Faults in the server: the engine core, and the Python of frontends."""

from __future__ import annotations

from tests.faulty import faults_in

FAULTS = (
    *faults_in(
        "engine/scheduler.py",
        (
            "an owner with many requests has all turns",
            "            self.queues.move_to_end(owner)\n",
            "            pass\n",
            "tests/engine/test_scheduler.py::test_owners_take_turns",
        ),
        (
            "a step admits one request more than may be",
            "if self._num_seqs < self.config.max_num_seqs:\n            return math.inf",
            "if self._num_seqs <= self.config.max_num_seqs:\n            return math.inf",
            "tests/engine/test_scheduler.py::test_what_runs_counts_toward_max_num_seqs_until_it_is_finished",
        ),
        (
            "media are not counted in a step",
            "            nbytes += request.nbytes\n",
            "",
            "tests/engine/test_scheduler.py::test_a_step_admits_nothing_more_once_it_has_max_batch_nbytes",
        ),
        (
            "answers of a request that has ended take places for ever",
            "        self._count_open(request, -answers.open)\n",
            "        self._count_open(request, -1)\n",
            "tests/engine/test_scheduler.py::test_a_request_alone_has_all_answers_at_once_and_gives_back_all_places_when_it_ends",
        ),
        (
            "an answer that has ended twice frees two places",
            "        if answers.open:\n",
            "        if True:\n",
            "tests/engine/test_scheduler.py::test_the_answers_of_a_request_take_places_one_by_one_and_let_others_pass",
        ),
        (
            "the line has room for any number",
            "        if self.waiting >= self.config.max_waiting:",
            "        if False:",
            "tests/engine/test_scheduler.py::test_a_full_line_refuses_and_is_not_changed",
        ),
        (
            "who fills the line keeps all others out",
            "        if self._waiting[owner] + 1 >= count:\n",
            "        if True:\n",
            "tests/engine/test_scheduler.py::test_of_a_full_line_whoever_has_most_loses_the_last_to_an_owner_who_has_fewer",
        ),
        (
            "lines of priorities that are empty are kept",
            "        if not self._lines[priority].queues:\n            del self._lines[priority]",
            "        pass",
            "tests/engine/test_scheduler.py::test_a_line_that_is_empty_is_not_kept",
        ),
        (
            "who has the highest number is sooner",
            "self._most_open(), sorted(self._lines)",
            "self._most_open(), sorted(self._lines, reverse=True)",
            "tests/engine/test_scheduler.py::test_more_urgent_requests_go_first_whoever_sent_them",
        ),
        (
            "the less urgent wait for ever",
            "self._admissions % _LESS_URGENT == _LESS_URGENT - 1",
            "False",
            "tests/engine/test_scheduler.py::test_the_less_urgent_do_not_wait_for_ever",
        ),
        (
            "a request that has ended begins another answer",
            "        self._count_open(request, -answers.open)\n        self._leave_line(request)\n",
            "        self._count_open(request, -answers.open)\n",
            "tests/engine/test_scheduler.py::TestSchedulerMachine",
        ),
        (
            "what an owner has used counts for nothing in the line",
            "(self._open[owner], self.accounts.used(owner), priority, owner)",
            "(self._open[owner], 0.0, priority, owner)",
            "tests/engine/test_scheduler.py::test_who_has_used_least_comes_first_in_the_line_and_in_the_step",
        ),
        (
            "what an owner has used counts for nothing in the step",
            "        owners = sorted(by_owner, key=self.accounts.used)\n",
            "        owners = list(by_owner)\n",
            "tests/engine/test_scheduler.py::test_who_has_used_least_comes_first_in_the_line_and_in_the_step",
        ),
        (
            "who had no seat waits for ever",
            "            self._running.move_to_end(request, last=False)\n",
            "            pass\n",
            "tests/engine/test_scheduler.py::test_seats_are_given_out_in_turn_where_requests_can_be_paused",
        ),
        (
            "any number of requests is begun beyond the seats",
            "or self._num_seqs >= 2 * self.config.max_num_seqs:",
            "or False:",
            "tests/engine/test_scheduler.py::test_requests_that_are_paused_are_bounded_however_many_owners_there_are",
        ),
    ),
    *faults_in(
        "engine/accounts.py",
        (
            "a newcomer comes behind all who were there",
            "self._least() - _CREDIT_S)",
            "self._least() + _CREDIT_S)",
            "tests/engine/test_accounts.py::test_a_newcomer_begins_a_little_below_the_least_and_saves_up_nothing",
        ),
        (
            "who stays away saves up time",
            "max(self._used.get(owner, 0.0), self._least() - _CREDIT_S)",
            "self._used.get(owner, 0.0)",
            "tests/engine/test_accounts.py::test_a_newcomer_begins_a_little_below_the_least_and_saves_up_nothing",
        ),
        (
            "debts are forgotten by leaving",
            "max(self._used.get(owner, 0.0), self._least() - _CREDIT_S)",
            "self._least() - _CREDIT_S",
            "tests/engine/test_accounts.py::test_who_leaves_in_debt_finds_it_again_as_long_as_others_have_less",
        ),
        (
            "debts are kept of any number of owners",
            "        if is_new and len(self._used) > len(self._requests) + _MAX_DEBTORS:\n",
            "        if False:\n",
            "tests/engine/test_accounts.py::test_debts_are_bounded_however_many_owners_come_and_go",
        ),
    ),
    *faults_in(
        "engine/core.py",
        (
            "what a request is told to have taken is not charged",
            "used[request.owner] = used.get(request.owner, 0.0) + taken",
            "used[request.owner] = used.get(request.owner, 0.0) + share",
            "tests/engine/test_core.py::test_what_requests_took_of_steps_is_charged_to_their_owners",
        ),
    ),
    *faults_in(
        "engine/executors/encoding.py",
        (
            "large requests of all owners are mixed",
            "        return requests[number].owner != owner, self._progress",
            "        return False, self._progress",
            "tests/engine/test_encoding.py::test_of_large_requests_those_of_the_first_ones_owner_go_on_and_their_time_is_told",
        ),
        (
            "small requests go in order of arrival",
            "for number in requests if number in self._progress]",
            "for number in self._progress if number in requests]",
            "tests/engine/test_encoding.py::test_small_requests_go_in_the_order_of_the_step",
        ),
    ),
    *faults_in(
        "engine/executors/transformers.py",
        (
            "all tokens of prompts are for the shortest",
            "((prompts, left // 2), (shortest_first, 0))",
            "((shortest_first, 0),)",
            "tests/engine/test_transformers.py::test_a_short_prompt_waits_for_no_long_one_and_a_long_one_for_no_stream_of_short_ones",
        ),
        (
            "all tokens of prompts are for the first",
            "((prompts, left // 2), (shortest_first, 0))",
            "((prompts, 0),)",
            "tests/engine/test_transformers.py::test_a_short_prompt_waits_for_no_long_one_and_a_long_one_for_no_stream_of_short_ones",
        ),
        (
            "of answers that are read alone, the same two have all turns",
            "            answer.turn = next(self._turns)\n        return chosen\n",
            "            pass\n        return chosen\n",
            "tests/engine/test_transformers.py::test_of_answers_that_are_read_alone_two_are_in_a_step_the_first_and_the_others_in_turn",
        ),
        (
            "one owner's dear answers are all in a step that others are in",
            "            if left[answer.owner] > 0:\n",
            "            if True:\n",
            "tests/engine/test_transformers.py::test_choosing_the_tokens_of_one_owner_takes_so_much_of_a_step_that_others_are_in",
        ),
        (
            "the same dear answers have all turns",
            "                answer.turn = next(self._turns)\n                chosen.add(answer)\n",
            "                chosen.add(answer)\n",
            "tests/engine/test_transformers.py::test_choosing_the_tokens_of_one_owner_takes_so_much_of_a_step_that_others_are_in",
        ),
        (
            "a short prompt waits for the idle share of a long one",
            "                left = min(left, _PIECE_TOKENS)\n",
            "                pass\n",
            "tests/engine/test_transformers.py::"
            "test_while_no_answer_is_written_short_prompts_are_read_whole_and_long_ones_do_not_hold_them_up",
        ),
    ),
    *faults_in(
        "engine/executors/shared_threads.py",
        (
            "an owner has several jobs at a time",
            "[owner for owner in self._waiting if owner not in self._busy]",
            "[owner for owner in self._waiting]",
            "tests/engine/test_shared_threads.py::test_an_owner_has_one_job_at_a_time_and_others_come_between",
        ),
        (
            "it does not matter who has used how much",
            "min(free, key=self._accounts.used, default=None)",
            "min(free, default=None)",
            "tests/engine/test_shared_threads.py::test_who_has_used_least_is_next",
        ),
    ),
    *faults_in(
        "engine/executors/grammars.py",
        (
            "known forms wait behind new ones",
            'SharedThreads(_COMPILING, "shmring-grammars")',
            "self._trials._threads",
            "tests/engine/test_grammars.py::test_what_is_tried_and_compiled_for_others_keeps_no_known_form_waiting",
        ),
        (
            "what may be next is found out in the step",
            "            self.future = self._masking(self._find_next)\n",
            "            self._find_next()\n",
            "tests/engine/test_grammars.py::test_an_answer_waits_alone_for_its_next_tokens",
        ),
        (
            "a request that is refused has not paid for its trial",
            "            if seconds := trial.take_seconds(owner):",
            "            if (seconds := trial.take_seconds(owner)) < 0:",
            "tests/engine/test_grammars.py::test_a_request_that_fails_has_paid_for_its_trial",
        ),
        (
            "a lexer that is used up ends the answer",
            "        if self.future.done() and self._error and len(self._taken) >= self._fresh_until:",
            "        if False:",
            "tests/engine/test_grammars.py::test_a_lexer_that_is_used_up_is_made_anew",
        ),
    ),
    *faults_in(
        "engine/executors/callers_texts.py",
        (
            "messages are laid out within a step, however many they are",
            "_OF_MESSAGE = 80",
            "_OF_MESSAGE = 0",
            "tests/engine/test_transformers.py::test_what_is_dear_to_lay_out_is_laid_out_beside_steps",
        ),
        (
            "more messages than the model reads tokens are laid out",
            "        fewest_tokens = self.message_tokens * len(request.messages)\n",
            "        fewest_tokens = 1\n",
            "tests/engine/test_transformers.py::test_more_messages_than_tokens_that_the_model_reads_are_refused_before_they_are_laid_out",
        ),
    ),
    *faults_in(
        "engine/request.py",
        (
            "the timer of a request that has ended goes off",
            "        if self.timer is not None:\n            self.timer.cancel()\n",
            "",
            "tests/engine/test_core.py::test_a_callers_timeout_is_the_engines_deadline",
        ),
        (
            "a request that has ended stays in line for reply space",
            "            self._flushing.cancel()  # it may",
            "            pass  # it may",
            "tests/engine/test_core.py::test_the_deadline_of_an_answer_that_waits_for_its_reader_ends_it_and_frees_its_place_in_line",
        ),
        (
            "a piece that is being sent is joined to",
            "            del self._open[reply.index]\n",
            "            pass\n",
            "tests/engine/test_request.py::test_pieces_for_a_slow_reader_become_one_in_order",
        ),
        (
            "pieces are joined in the executor's own list",
            "piece.token_ids = piece.token_ids + reply.token_ids",
            "piece.token_ids += reply.token_ids",
            "tests/engine/test_request.py::test_of_an_answer_that_is_not_streamed_the_first_piece_comes_at_once_and_the_rest_at_its_end",
        ),
        (
            "a request ends before what it kept was sent",
            "        if self._complete and not self.ended:",
            "        if not self.ended:",
            "tests/engine/test_request.py::test_pieces_for_a_slow_reader_become_one_in_order",
        ),
        (
            "a second piece of an answer that is not streamed is sent at once",
            "if now < self._send_at and (reply.index in self._begun or not self.nbytes):",
            "if now > self._send_at and (reply.index in self._begun or not self.nbytes):",
            "tests/engine/test_request.py::test_of_an_answer_that_is_not_streamed_the_first_piece_comes_at_once_and_the_rest_at_its_end",
        ),
        (
            "pieces are joined without a bound",
            "return max(length, len(piece.token_ids)) < _PIECE_LENGTH and",
            "return",
            "tests/engine/test_request.py::test_pieces_are_joined_up_to_what_a_message_can_hold",
        ),
        (
            "embeddings that are missing are not noticed",
            "or (output.finished and self._encoded < self._inputs)",
            "",
            "tests/engine/test_core.py::test_too_many_or_too_few_embeddings_fail_their_request",
        ),
        (
            "a step goes on with a request that is over",
            "return self.ended or self.expired or self.revoked is not None or self.claim.aborted",
            "return self.ended or self.claim.aborted",
            "tests/engine/test_core.py::test_a_running_requests_deadline_ends_it_between_two_steps",
        ),
    ),
    *faults_in(
        "engine/core.py",
        (
            "a waiting request that is aborted keeps its slots",
            "            request.leave()\n        self._work.set()",
            "            pass\n        self._work.set()",
            "tests/engine/test_core.py::test_a_request_aborted_before_its_step_is_gone_at_once",
        ),
        (
            "an abort of a running request waits for other work",
            "        self._work.set()  # a running one",
            "        # a running one",
            "tests/engine/test_core.py::test_a_stream_that_is_left_ends_at_the_next_step_and_is_forgotten",
            "Equivalent: as long as anything runs, the engine is in a step, and looks for ended requests after it.",
        ),
        (
            "work that comes while a step is prepared is waited for",
            "        self._work.clear()  # what comes from here on is waited for no longer\n        self._dismiss()",
            "        self._dismiss()\n        self._work.clear()",
            "tests/engine/test_core.py::test_requests_that_wait_share_a_step",
            "Equivalent: no other code runs between the two.",
        ),
        (
            "executors are not told of requests that have ended",
            "            self._scheduler.finish(request)\n            "
            "self._to_forget[request.number] = request.claim.name\n\n    async def _step",
            "            self._scheduler.finish(request)\n\n    async def _step",
            "tests/engine/test_core.py::test_a_stream_that_is_left_ends_at_the_next_step_and_is_forgotten",
        ),
        (
            "executors are not told of requests that they have answered",
            "            self._scheduler.finish(request)\n            "
            "self._to_forget[request.number] = request.claim.name\n\n    def _send",
            "            self._scheduler.finish(request)\n\n    def _send",
            "tests/engine/test_core.py::test_an_answer_streams_and_its_slot_is_released_after_its_first_step",
        ),
        (
            "inputs that an executor has read are kept until the request ends",
            "        if not output.keep_inputs and not request.claim.released:\n            request.claim.release()\n",
            "",
            "tests/engine/test_core.py::test_an_answer_streams_and_its_slot_is_released_after_its_first_step",
        ),
        (
            "aborts and calls wait while there are steps",
            "            await asyncio.sleep(0)  # aborts",
            "            pass  # aborts",
            "tests/engine/test_core.py::test_a_call_waits_for_the_running_step",
            "Equivalent but for the order: the loop runs during a step. This lets what came at its end go before the next.",
        ),
        (
            "who waits for a pause is not told when it ends",
            "        self._work.set()\n        await self._tell_of_boundary()",
            "        self._work.set()",
            "tests/engine/test_core.py::test_a_pause_that_is_taken_back_ends_for_its_caller",
        ),
        (
            "who waits for a pause is not told when nothing runs",
            "        if self._paused:\n            await self._tell_of_boundary()",
            "        pass",
            "tests/engine/test_core.py::test_paused_it_lets_what_runs_finish_and_what_comes_wait",
        ),
        (
            "a paused engine begins no further answers of what runs",
            "            self._scheduler.admit_answers()  # or",
            "            pass  # or",
            "tests/engine/test_core.py::test_the_answers_of_a_request_take_places_as_they_become_free",
        ),
        (
            "an executor that takes too long is well",
            "            if age_s > self._step_timeout_s:",
            "            if age_s < 0:",
            "tests/engine/test_core.py::test_a_step_that_takes_too_long_is_ill_health",
        ),
        (
            "one request of a step that fails fails all of it",
            "    return [output for part, name in zip(batch, names, "
            "strict=True) for output in _execute_batch(executor, [part], [name])]",
            "    return [RuntimeError()] * len(batch)",
            "tests/engine/test_core.py::test_of_a_step_that_raises_only_the_requests_at_fault_fail",
        ),
        (
            "a request that an operator has ended while it runs ends in its step",
            "            if self._scheduler.withdraw(request):\n                "
            "request.fail(error)\n            else:\n                request.revoked = error",
            "            if True:\n                request.fail(error)\n"
            "            else:\n                request.revoked = error",
            "tests/frontend/test_admin.py",
        ),
        (
            "a refused request is not counted",
            "            self.metrics.refused_requests += 1\n            claim.fail(error)",
            "            claim.fail(error)",
            "tests/engine/test_core.py::test_a_full_line_refuses_at_once",
        ),
    ),
    *faults_in(
        "frontend/places.py",
        (
            "who has waited in vain still counts as waiting",
            "            else:\n                self._leave(who, granted)",
            "            else:\n                pass",
            "tests/frontend/test_admission.py::test_whoever_has_waited_in_vain_waits_no_longer",
        ),
        (
            "any number of requests waits",
            "if not self._free and self._count >= self._max_waiting and len",
            "if False and len",
            "tests/frontend/test_admission.py::test_too_many_that_wait_are_a_503_at_once",
        ),
        (
            "places are given in order of arrival, whoever has them",
            "key=lambda caller: (self._taken[caller], self._last_turn.get(caller, 0))",
            "key=lambda caller: 0",
            "tests/frontend/test_admission.py::test_callers_share_the_places_and_not_their_requests",
        ),
        (
            "a full line grows",
            "            self._refuse_last(self._most()[0])\n",
            "            pass\n",
            "tests/frontend/test_admission.py::test_whoever_fills_the_line_keeps_no_other_caller_out",
        ),
    ),
    *faults_in(
        "frontend/admission.py",
        (
            "a request that is over keeps its place",
            "        finally:\n            self._places.give_back(admitted.caller)",
            "        finally:\n            pass",
            "tests/frontend/test_admission.py::test_hanging_up_ends_what_waits_for_a_place",
        ),
        (
            "a turn is given back twice",
            "            self.has_turn = False\n            self._turns.give_back(self.caller)",
            "            self._turns.give_back(self.caller)",
            "tests/frontend/test_admission.py::test_a_turn_and_the_memory_of_a_body_are_given_back_once",
        ),
        (
            "a request that is over keeps its share of the memory for bodies",
            "        self.body_share.release()\n        if self.has_turn",
            "        if self.has_turn",
            "tests/frontend/test_admission.py::test_a_turn_and_the_memory_of_a_body_are_given_back_once",
        ),
        (
            "a cancellation by the server is taken for its caller's hanging up",
            "if isinstance(error, asyncio.CancelledError) and self.task.uncancel():\n            return None",
            "if False:\n            return None",
            "tests/frontend/test_admission.py::test_the_server_s_end_passes_what_an_operator_has_ended",
        ),
        (
            "who has large media waits for a turn twice",
            "        if not self.has_turn:\n            await",
            "        if True:\n            await",
            "tests/frontend/test_admission.py::test_a_turn_and_the_memory_of_a_body_are_given_back_once",
        ),
        (
            "an operator ends requests that the engine has",
            "if request.name in names and not request.is_prepared]",
            "if request.name in names]",
            "tests/frontend/test_admin.py::test_requests_are_ended_by_name_whoever_has_sent_them",
        ),
    ),
    *faults_in(
        "frontend/bodies.py",
        (
            "a body takes memory before those that wait for it",
            "if (not self._waiters or share.overdraws) and self._try_take(share, nbytes):",
            "if self._try_take(share, nbytes):",
            "tests/frontend/test_bodies.py",
            "Equivalent: as long as anybody waits, there is no room, and one body overdraws.",
        ),
        (
            "two bodies overdraw",
            "            if self.overdrawing not in (None, share):\n                return False\n",
            "",
            "tests/frontend/test_bodies.py::test_while_memory_is_full_one_body_goes_on_and_the_others_wait_in_order",
        ),
        (
            "only the first of those that wait for memory goes on",
            "                granted.set_result(None)\n            self._waiters.popleft()",
            "                granted.set_result(None)\n                self._waiters.popleft()\n"
            "                return\n            self._waiters.popleft()",
            "tests/frontend/test_bodies.py::test_while_memory_is_full_one_body_goes_on_and_the_others_wait_in_order",
        ),
        (
            "who was cancelled while it waited for memory gets it",
            "            if not granted.cancelled():\n                if not self",
            "            if True:\n                if not self",
            "tests/frontend/test_bodies.py::test_who_was_cancelled_just_now_is_passed_over",
        ),
        (
            "who was cancelled while it waited for memory stays in the line",
            "            if granted.cancelled():\n",
            "            if False:\n",
            "tests/frontend/test_bodies.py::test_while_memory_is_full_one_body_goes_on_and_the_others_wait_in_order",
            "Equivalent but for its place: the next body that is over passes over it.",
        ),
        (
            "no further body may overdraw after one has",
            "        if self.overdrawing is share:\n            self.overdrawing = None\n",
            "",
            "tests/frontend/test_bodies.py::test_while_memory_is_full_one_body_goes_on_and_the_others_wait_in_order",
        ),
        (
            "the time that a body waits for memory counts as its sender's",
            "        self._started_at += self._now() - before",
            "        pass",
            "tests/frontend/test_bodies.py::test_the_time_that_a_body_waits_for_memory_is_not_its_senders",
        ),
        (
            "a body that overdraws may be slow",
            "        if overdraws and self._overdrawing_since is not None:",
            "        if False:",
            "tests/frontend/test_bodies.py::test_who_overdraws_must_be_quick_and_who_waits_for_memory_need_not",
        ),
        (
            "a body may stand still",
            "            self._last_at + _IDLE_S,\n",
            "",
            "tests/frontend/test_bodies.py::test_a_body_that_stands_still_is_a_408",
        ),
    ),
    *faults_in(
        "frontend/media/reuse.py",
        (
            "media that are prepared in another way are taken for the same",
            "kind, spec, limits, io_kwargs]",
            "kind, spec, limits]",
            "tests/frontend/test_intake.py::test_how_it_is_prepared_and_its_limits_are_part_of_what_is_found",
        ),
        (
            "who prepares a medium is never done for those who wait",
            "            flight.ended.set()\n",
            "            pass\n",
            "tests/frontend/media/test_reuse.py::test_who_waits_goes_on_when_all_that_it_waits_for_was_prepared",
        ),
        (
            "who waits for a medium still counts as waiting",
            "        finally:\n            self.waiting -= 1",
            "        finally:\n            pass",
            "tests/frontend/media/test_reuse.py::test_who_is_cancelled_while_it_waits_waits_no_more",
        ),
        (
            "what others have begun to wait for is not kept",
            "keeps_all or key in worth or key in self._flights[key].wanted]",
            "keeps_all or key in worth]",
            "tests/frontend/test_intake.py::test_there_as_well_two_requests_with_the_same_new_picture_have_it_decoded_once",
        ),
        (
            "a medium is kept for another way of preparing it",
            "    digest.update(preparation)\n",
            "",
            "tests/frontend/media/test_reuse.py::test_a_key_is_of_a_file_and_of_how_it_is_prepared",
        ),
        (
            "media that a request has left stay viewed",
            "        self.media.clear()\n        return",
            "        return",
            "tests/frontend/test_intake.py::test_more_pictures_than_the_slab_holds_are_answered_one_after_the_other",
        ),
        (
            "a request that may pin no more fails",
            "            except shmring.WouldBlock:  # too much is pinned: as if it were not there\n                continue",
            "            except ZeroDivisionError:\n                continue",
            "tests/frontend/media/test_reuse.py::test_what_can_not_be_pinned_is_as_if_it_were_not_there",
        ),
    ),
    *faults_in(
        "frontend/media/keeping.py",
        (
            "what is remembered has no bound in bytes",
            "(self._recent_nbytes > self._kept_nbytes // 2 and len(self._recent) > 1)",
            "False",
            "tests/frontend/media/test_keeping.py::test_of_more_media_in_turn_than_can_be_kept_some_are_found",
        ),
        (
            "a round never ends",
            "        if self._prepared_nbytes > self._kept_nbytes:\n            self._end_round()",
            "        pass",
            "tests/frontend/media/test_keeping.py::test_of_more_media_in_turn_than_can_be_kept_some_are_found",
        ),
        (
            "selective rounds never end",
            "            self._selective_rounds -= 1\n",
            "            pass\n",
            "tests/frontend/media/test_keeping.py::test_after_some_rounds_everything_is_tried_again",
        ),
        (
            "a medium that is prepared again counts twice",
            "            self._recent_nbytes -= self._recent.pop(key)\n",
            "            self._recent.pop(key)\n",
            "tests/frontend/media/test_keeping.py::test_what_is_prepared_again_is_remembered_once",
        ),
        (
            "what was found in a round counts in the next",
            "        self._found = self._prepared = self._prepared_nbytes = 0\n",
            "        self._prepared = self._prepared_nbytes = 0\n",
            "tests/frontend/media/test_keeping.py::test_of_more_media_in_turn_than_can_be_kept_some_are_found",
        ),
    ),
    *faults_in(
        "shmring/engine/core.py",
        (
            "an executor's error keeps the payloads of its step",
            "            batch.clear()  # if an",
            "            pass  # if an",
            "tests/engine/test_core.py::test_an_executor_that_dies_ends_the_engine_and_all_requests_get_the_reason",
        ),
        (
            "requests that wait are not failed as the engine ends",
            "(*self._scheduler, *self._scheduler.withdraw_all())",
            "(*self._scheduler,)",
            "tests/engine/test_core.py::test_cancelling_it_waits_for_the_step_and_fails_what_runs",
        ),
    ),
    *faults_in(
        "shmring/frontend/bodies.py",
        (
            "a body that was refused midway keeps its memory while its rest is read",
            "                share.release()\n                await self._drop",
            "                await self._drop",
            "tests/frontend/test_bodies.py::test_a_body_that_is_refused_midway_takes_no_memory_while_its_rest_is_read",
        ),
    ),
)
