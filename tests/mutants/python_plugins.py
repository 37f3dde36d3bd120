"""Faults in the plug-ins, where they can be tested without the servers that they are for."""

from __future__ import annotations

from tests.mutants.fault import faults_in, guard

FAULTS = (
    *faults_in(
        "shmring/integrations/environment.py",
        (
            "a variable with a wrong name is passed over",
            'if variable.startswith(f"{prefix}_") and variable.removeprefix',
            "if False and variable.removeprefix",
            "tests/plug_ins/test_settings.py::test_an_unknown_setting_is_a_typing_error",
        ),
        (
            "an empty variable is a value",
            "        if not text:\n            return default\n",
            "",
            "tests/plug_ins/test_settings.py::test_each_is_read",
        ),
        (
            "seconds may be no number",
            "        if not least <= seconds <= most:",
            "        if seconds < least or seconds > most:",
            "tests/plug_ins/test_settings.py::test_a_wrong_value_is_refused_by_its_name",
        ),
        (
            "a process that was started by another gives its rings a name of its own",
            "    if variable in environment:\n        return False\n",
            "",
            "tests/plug_ins/test_settings.py::test_the_first_process_names_the_rings_and_its_children_inherit_that",
        ),
        (
            "two servers of one process id have one name",
            'f"{server}-{os.getpid()}-{secrets.token_hex(3)}"',
            'f"{server}-{os.getpid()}"',
            "tests/plug_ins/test_settings.py::test_the_first_process_names_the_rings_and_its_children_inherit_that",
        ),
        (
            "a name leaves no room for the number of a ring",
            'return validate_name(f"{text}-1234567")[:-8]',
            "return validate_name(text)",
            "tests/plug_ins/test_settings.py::test_a_wrong_value_is_refused_by_its_name",
        ),
    ),
    *faults_in(
        "shmring/integrations/traffic.py",
        (
            "a full slab counts as an engine that has gone",
            'return "space"',
            'return "engine"',
            "tests/ends/test_plug_ins.py::test_why_a_tensor_goes_inline",
        ),
        (
            "what should not be is not in the log",
            '    logger.error("shmring: a tensor goes inline, and this should not be: %r", error, exc_info=error)\n',
            "",
            "tests/ends/test_plug_ins.py::test_why_a_tensor_goes_inline",
        ),
    ),
    *faults_in(
        "shmring/integrations/promises.py",
        (
            "a check that raises finds nothing",
            "            findings.append(f\"{check.__name__.strip('_')}: {type(error).__name__}: {error}\")",
            "            pass",
            "tests/ends/test_plug_ins.py::test_each_check_of_a_server_says_what_it_finds_also_if_it_raises",
        ),
        (
            "names that inner functions use are not seen",
            "            names |= _names_in(constant)\n",
            "            pass\n",
            "tests/ends/test_plug_ins.py::test_names_are_those_of_functions_inside_as_well",
        ),
        (
            "further parameters before the known ones are not seen",
            "if parameters[: len(names)] != [*names]:",
            "if not {*names} <= {*parameters}:",
            "tests/ends/test_plug_ins.py::test_each_check_of_a_server_says_what_it_finds_also_if_it_raises",
        ),
    ),
    *faults_in(
        "shmring/integrations/vllm/peers.py",
        (
            "a zombie counts as living",
            'if state in ("", "Z", "X"):',
            'if state in ("", "X"):',
            "tests/vllm/test_peers.py::test_whoever_has_died_is_found_before_it_is_reaped",
        ),
        (
            "a process that goes on was stopped since it was stopped first",
            "        self._stopped_since_s, self._looked_s = {}, now_s\n",
            "        self._looked_s = now_s\n",
            "tests/vllm/test_peers.py::test_whoever_goes_on_and_is_stopped_anew_is_stopped_since_then",
        ),
        guard(
            "a server of vLLM that was stopped as a whole goes on",
            "if now_s - self._looked_s < _FORGOTTEN_S else {}",
            "",
            "tests/vllm/test_peers.py::test_a_server_that_was_stopped_as_a_whole_goes_on",
        ),
    ),
    *faults_in(
        "shmring/integrations/vllm/parcels.py",
        (
            "small tensors are not aligned",
            "            small.extend(bytes(-len(small) % _ALIGNMENT))\n",
            "",
            "tests/vllm/test_parcels.py::test_what_comes_is_what_was_sent",
        ),
        (
            "what is as large as the bound is small",
            "        if raw.nbytes >= LARGE_NBYTES:",
            "        if raw.nbytes > LARGE_NBYTES:",
            "tests/vllm/test_parcels.py::test_what_comes_is_what_was_sent",
        ),
        (
            "an array keeps no hold of what pickle was given",
            "        kept.append(buffer)\n",
            "",
            "tests/vllm/test_parcels.py::test_what_comes_is_what_was_sent",
            "Equivalent with the pickle of today: it remembers the tuple that has the buffer until all is packed.",
        ),
        (
            "the head of a parcel comes before its tensors",
            "for part in (self.small, *self.large, self.head):",
            "for part in (self.head, self.small, *self.large):",
            "tests/vllm/test_parcels.py::test_what_comes_is_what_was_sent",
        ),
    ),
    *faults_in(
        "shmring/integrations/vllm/cancellation.py",
        (
            "a cancellation that is held back is lost",
            "            task.add_done_callback(lambda _, cancel=cancel: loop.call_soon(cancel))",
            "            ...",
            "tests/vllm/test_exchange.py::test_a_cancelled_caller_is_cancelled_after_its_request_was_sent",
        ),
        (
            "a cancellation that is held back counts twice",
            "            caller.uncancel()\n",
            "",
            "tests/vllm/test_exchange.py::test_a_timeout_that_comes_while_work_is_done_is_a_timeout",
        ),
    ),
    *faults_in(
        "shmring/integrations/ray/flight.py",
        (
            "a request overtakes those that wait",
            "if not self._line.is_waited_in and self._fits(nbytes):",
            "if self._fits(nbytes):",
            "tests/ray/test_flight.py::test_bytes_are_bounded_in_order",
        ),
        (
            "a turn that came as its request was cancelled is lost",
            "self._line.enter(nbytes), self.end, lambda _: self._serve())",
            "self._line.enter(nbytes), int, lambda _: self._serve())",
            "tests/ray/test_flight.py::test_who_is_cancelled_just_when_its_turn_comes_passes_it_on",
        ),
        (
            "a request that leaves the line keeps those behind it waiting",
            "self._line.enter(nbytes), self.end, lambda _: self._serve())",
            "self._line.enter(nbytes), self.end)",
            "tests/ray/test_flight.py::test_a_cancelled_waiter_delays_nobody",
        ),
        (
            "a request that is larger than all never begins",
            "(not self.nbytes or self.nbytes + nbytes <= self._max_nbytes)",
            "self.nbytes + nbytes <= self._max_nbytes",
            "tests/ray/test_flight.py::test_one_that_is_larger_than_the_bound_goes_alone",
        ),
        (
            "a request that fits overtakes one that does not",
            "            if not self._fits(nbytes):\n                break",
            "            if not self._fits(nbytes):\n                continue",
            "tests/ray/test_flight.py::test_what_fits_does_not_overtake_what_does_not",
        ),
        (
            "who waits is not told that it is closed",
            "            place.set_exception(fresh(why))",
            "            pass",
            "tests/ray/test_flight.py::test_closing_ends_the_waiting_and_nothing_begins_any_more",
        ),
    ),
    *faults_in(
        "shmring/integrations/ray/routing.py",
        (
            "a near engine gets requests however much it has to do",
            "if name in near and load.in_flight <= most}",
            "if name in near}",
            "tests/ray/test_cluster_routing.py::test_a_burst_goes_to_the_near_engine_until_it_has_so_much_more",
        ),
        (
            "an engine that does not respond is the least loaded",
            "for load in responding.values()), default=0)",
            "for load in loads.values()), default=0)",
            "tests/ray/test_cluster_routing.py::test_a_near_engine_is_chosen_unless_it_has_much_more_to_do",
        ),
    ),
    *faults_in(
        "shmring/integrations/reaching.py",
        (
            "pauses between attempts to reach a ring have no bound",
            "min(2 * self._pause_s, LONGEST_S)",
            "2 * self._pause_s",
            "tests/vllm/test_reaching.py::test_pauses_are_bounded_and_the_log_says_what_has_changed",
        ),
        (
            "each attempt that fails is a line of the log",
            "        if not was_inline:",
            "        if True:",
            "tests/vllm/test_reaching.py::test_pauses_are_bounded_and_the_log_says_what_has_changed",
        ),
        (
            "a ring that is lost a second time is not said to be",
            "        self._pause_s = FIRST_S\n        self._is_inline = False\n\n\nclass",
            "        self._pause_s = FIRST_S\n\n\nclass",
            "tests/vllm/test_reaching.py::test_pauses_are_bounded_and_the_log_says_what_has_changed",
        ),
        (
            "an engine that does not answer counts as connecting for ever",
            '        self.reason = "engine"\n        self.tried.set()\n        pause_s',
            "        self.tried.set()\n        pause_s",
            "tests/vllm/test_reaching.py::test_an_engine_core_that_does_not_say_how_it_is_is_asked_again",
        ),
        (
            "one attempt decides for ever",
            "            await asyncio.sleep(pause_s)\n",
            "            return\n",
            "tests/vllm/test_reaching.py::test_a_link_tries_again_by_itself",
        ),
        (
            "a connection that is lost is not made again",
            "        if self.is_connected or self._is_closed or (self._trying is not None and not self._trying.done()):",
            "        if self._trying is not None:",
            "tests/vllm/test_reaching.py::test_a_connection_that_is_lost_is_made_again",
        ),
        (
            "what is closed connects again",
            "        if self.is_connected or self._is_closed or (",
            "        if self.is_connected or (",
            "tests/vllm/test_reaching.py::test_what_is_closed_tries_no_more",
        ),
        (
            "each request begins another attempt to connect",
            "(self._trying is not None and not self._trying.done())",
            "False",
            "tests/vllm/test_reaching.py::test_requests_begin_one_attempt_together",
        ),
        (
            "a ring whose epoch is not known is left alone",
            "if expected not in (0, epoch):",
            "if expected != epoch:",
            "tests/vllm/test_reaching.py::test_a_ring_is_the_one_that_was_meant",
        ),
        (
            "a connection that was lost is not closed",
            "            await lost.close()\n",
            "",
            "tests/vllm/test_reaching.py::test_a_connection_that_is_lost_is_made_again",
        ),
        guard(
            "an API server of vLLM sends nothing to a ring that is not its engine core's",
            "if expected not in (0, epoch):",
            "if False:",
            "tests/vllm/test_reaching.py::test_a_ring_of_the_name_that_another_engine_has_by_then_is_left_alone",
        ),
    ),
    *faults_in(
        "shmring/integrations/vllm/link.py",
        (
            "an engine core that does not answer is asked again and again",
            "        if question is None:\n            question = self._question = asyncio",
            "        if True:\n            question = self._question = asyncio",
            "tests/vllm/test_reaching.py::test_a_question_that_is_not_answered_is_not_asked_twice",
        ),
        (
            "an engine core without a ring is not asked again by a caller without a loop",
            "            if self._closing.wait(pause_s) or (question.done() and not _has_ring(question)):",
            "            if self._closing.wait(pause_s):",
            "tests/vllm/test_reaching.py::test_without_a_loop_an_engine_core_that_gets_a_ring_later_is_asked_with_a_later_request",
        ),
        (
            "a caller without a loop is connected to whichever ring has the name",
            "            check_epoch(client.epoch, where.epoch, where.name)\n            on_gpu",
            "            on_gpu",
            "tests/vllm/test_reaching.py::test_without_a_loop_a_ring_of_the_name_that_another_engine_has_is_left_alone",
        ),
    ),
    *faults_in(
        "shmring/integrations/vllm/engine.py",
        (
            "an engine core does not wait for its name",
            "                self._why_not = str(error)\n                continue\n",
            "                self._why_not = str(error)\n",
            "tests/vllm/test_reaching.py::test_of_two_engine_cores_with_one_name_the_second_is_without_until_the_name_is_free",
        ),
        guard(
            "vLLM's workers get a tensor that an API server has put into a slot from that slot",
            "elif self._engine_ring.has_workers:",
            "elif False:",
            "tests/vllm/test_queues.py::test_what_an_api_server_has_sent_is_not_copied",
        ),
        guard(
            "vLLM's cache in an engine core does not keep the slab full",
            "lent_nbytes >= self._settings.keep_nbytes",
            "False",
            "tests/vllm/test_queues.py::test_vllms_cache_keeps_no_more_of_the_slab_than_it_may",
        ),
        guard(
            "vLLM's model reads a tensor in a device slab after it was written",
            "                    claim.use_on_gpu()\n",
            "                    pass\n",
            "tests/vllm/test_on_gpu.py::test_the_model_reads_it_after_it_was_written",
        ),
        guard(
            "an engine core of vLLM takes no tensor from another one's slab",
            "if epoch != self._ring.epoch:",
            "if False:",
            "tests/vllm/test_exchange.py::test_a_stale_reference_fails_its_request_and_no_other",
        ),
    ),
    *faults_in(
        "shmring/integrations/vllm/settings.py",
        (
            "two engine cores of one process make up one name",
            'f"{self.run}-{engine_index}-{secrets.token_hex(3)}"',
            'f"{self.run}-{engine_index}"',
            "tests/plug_ins/test_settings.py::test_a_name_of_vllm_leaves_room_for_its_number_and_one_that_is_made_up_is_one_engine_cores",
        ),
    ),
    *faults_in(
        "shmring/integrations/sglang/hooking.py",
        (
            "a request goes to the server that was asked last",
            "manager = self._sending.get(lambda: None)()",
            "manager = list(self._instances)[-1]",
            "tests/sglang/test_reaching.py::test_of_two_servers_in_a_process_each_request_goes_to_its_own",
        ),
    ),
    *faults_in(
        "shmring/integrations/vllm/workers.py",
        guard(
            "vLLM's workers view only what they read",
            'return bool(method == "execute_model")',
            "return True",
            "tests/vllm/test_queues.py::test_what_is_not_to_compute_with_may_be_written_to",
        ),
    ),
    *faults_in(
        "shmring/integrations/vllm/frontend.py",
        guard(
            "a tensor that finds no place in a device slab goes vLLM's own way",
            "return self._own(tensor) if reference is None and self._own is not None else reference",
            "return reference",
            "tests/vllm/test_on_gpu.py::test_what_finds_no_place_goes_vllms_own_way",
        ),
    ),
    *faults_in(
        "shmring/integrations/sglang/scheduler.py",
        guard(
            "a scheduler of SGLang takes no tensor from another one's slab",
            "if epoch != self._ring.epoch:",
            "if False:",
            "tests/sglang/test_exchange.py::test_a_request_that_came_to_the_wrong_scheduler_gets_no_tensor_of_another",
        ),
        guard(
            "a rank of SGLang's passes over what was shared for a broadcast that failed",
            "if message.beside == list(named):",
            "if True:",
            "tests/sglang/test_exchange.py::test_a_broadcast_that_failed_is_passed_over",
        ),
    ),
    *faults_in(
        "shmring/integrations/sglang/pointer.py",
        guard(
            "a tensor that SGLang does not send gives its slot back",
            "self._give_up = weakref.finalize(self, give_up)",
            "self._give_up = weakref.finalize(self, int)",
            "tests/sglang/test_exchange.py::test_what_is_not_sent_is_given_up",
        ),
        guard(
            "a rank of SGLang's that shares no memory gets tensors in the message",
            'state["tensor"] = self.tensor',
            "pass",
            "tests/sglang/test_exchange.py::test_a_rank_that_has_not_joined_gets_tensors_in_the_message",
        ),
    ),
)
