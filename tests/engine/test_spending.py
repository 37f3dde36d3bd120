"""What steps of the last seconds were spent on, and the sentence that says it."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from shmring.engine.accounts import Caller
from shmring.engine.spending import Spending, whose


def test_shares_are_of_the_last_ten_seconds_and_the_greatest_comes_first() -> None:
    spending = Spending(1000.0)
    spent = {"prompts": 0.0, "choosing": 0.0}
    for tenth in range(100):  # reading prompts, all the time
        spent["prompts"] += 0.1
        spending.note(1000.1 + tenth / 10, {**spent, "steps": (tenth + 1) / 10})
    told = spending.describe(1010.05, [0.1])
    assert told["over_s"] == pytest.approx(9.1, abs=0.06)
    assert told["steps"] == pytest.approx(1.0)
    assert told["parts"] == [{"what": "reading prompts", "share": pytest.approx(1.0)}]
    for tenth in range(100):  # then choosing tokens, half of the time, and something else
        spent["choosing"] += 0.05
        spending.note(1010.1 + tenth / 10, {**spent, "steps": 10.0 + (tenth + 1) * 0.06})
    told = spending.describe(1020.0, [0.06])
    assert told["steps"] == pytest.approx(0.6, abs=0.01)
    assert [part["what"] for part in told["parts"]] == ["choosing tokens", "other work of steps"]
    assert [part["share"] for part in told["parts"]] == pytest.approx([0.5, 0.1], abs=0.01)
    assert told["cause"] == (
        "Steps ran 61% of the time; half of the last ones took 60 ms or more. Choosing tokens takes 51% of the time "
        "(top_p, top_k, penalties, logprobs)."
    )
    assert spending.describe(1031.9, [0.06])["cause"] == "The engine had nothing to do in the last 10 s."


def test_a_step_counts_while_it_runs_and_no_second_has_more_than_a_second() -> None:
    spending = Spending(0.0)
    spending.note(30.0, {"steps": 30.0, "alone": 29.0})  # one step, of which nothing was told before
    told = spending.describe(30.0, [30.0])
    assert (told["steps"], told["over_s"]) == (1.0, 30.0)
    spending.note(31.0, {"steps": 31.0, "alone": 30.0})
    spending.note(32.0, {"steps": 31.5, "alone": 30.5})
    told = spending.describe(42.0, [30.0])
    assert told["over_s"] == 9.0
    assert told["steps"] == 0.0


def test_an_engine_with_room_says_so_and_one_that_tells_no_parts_too() -> None:
    spending = Spending(0.0)
    assert spending.describe(0.0, []) == {
        "over_s": 0.001,
        "steps": 0.0,
        "parts": [],
        "cause": "The engine had nothing to do in the last 0 s.",
    }
    spending.note(5.0, {"steps": 1.0})
    assert spending.describe(10.0, [0.25] * 4)["cause"] == (
        "Steps ran 11% of the time, so the engine has room; half of the last ones took 250 ms or more."
    )
    spending.note(10.0, {"steps": 6.0, "drafting": 4.0})
    told = spending.describe(10.0, [0.25] * 4)
    assert [part["what"] for part in told["parts"]] == ["drafting", "other work of steps"]
    assert [part["share"] for part in told["parts"]] == pytest.approx([4 / 9, 2 / 9], abs=0.001)
    assert told["cause"].endswith(" or more. Drafting takes 44% of the time.")


def test_passes_of_the_model_are_as_usual_and_what_could_be_less_is_named_before_them() -> None:
    spending = Spending(0.0)
    spending.note(9.5, {"steps": 8.5, "answers": 4.3, "choosing": 4.0})
    told = spending.describe(9.5, [0.1])
    assert next(part["what"] for part in told["parts"]) == "passes of the model for answers", "they are the greatest part"
    assert told["cause"].endswith(
        " or more. Choosing tokens takes 42% of the time (top_p, top_k, penalties, logprobs); "
        "passes of the model for answers take 45%, as usual."
    )
    spending = Spending(0.0)
    spending.note(9.5, {"steps": 9.0, "answers": 7.6, "choosing": 1.0})
    assert spending.describe(9.5, [0.1])["cause"].endswith("Passes of the model for answers take 80% of the time, as usual.")


def test_who_waits_in_line_comes_first_and_then_there_is_no_room() -> None:
    spending = Spending(0.0)
    spending.note(9.5, {"steps": 3.0, "answers": 2.0})
    cause = spending.describe(9.5, [0.1], "All 16 seats are taken and 24 requests wait in line.")["cause"]
    assert cause == (
        "All 16 seats are taken and 24 requests wait in line. Steps ran 32% of the time; half of the last ones took "
        "100 ms or more."
    )
    spending.note(9.5, {"steps": 3.0, "answers": 2.0, "forms": 3.0})
    assert "has room" not in spending.describe(9.5, [0.1])["cause"], "forms are being prepared"


def test_time_in_which_the_engine_did_not_run_is_no_part_of_what_steps_did() -> None:
    spending = Spending(0.0)
    spending.note(9.5, {"steps": 9.0, "answers": 2.5, "choosing": 6.0, "late": 0.5, "stopped": 5.0})  # it stopped in "choosing"
    told = spending.describe(9.5, [0.1])
    assert {part["what"]: round(part["share"] * 9.5, 2) for part in told["parts"]} == {
        "not getting to run": 5.0,
        "passes of the model for answers": 2.5,
        "choosing tokens": 1.0,
        "waiting for the engine's loop": 0.5,
    }
    assert "Not getting to run takes 53% of the time (the engine's process was stopped, or others have" in told["cause"]
    spending = Spending(0.0)
    spending.note(9.5, {"steps": 9.0, "stopped": 5.0})  # an executor that tells of no parts
    assert [part["what"] for part in spending.describe(9.5, [0.1])["parts"]] == ["not getting to run", "other work of steps"]


def test_what_other_threads_do_is_told_beside_the_steps() -> None:
    spending = Spending(0.0)
    spending.note(9.5, {"steps": 9.0, "waiting": 9.0, "forms": 4.75, "preparing": 0.95})
    told = spending.describe(9.5, [0.01])
    assert [(part["what"], round(part["share"], 1)) for part in told["parts"]] == [
        ("waiting for prompts and forms of answers", 0.9),
        ("forms of answers (schemas, patterns), beside the steps", 0.5),
        ("laying prompts out, beside the steps", 0.1),
    ]
    assert told["steps"] == pytest.approx(9 / 9.5, abs=0.001)
    assert told["cause"].endswith(
        "Beside steps, forms of answers (schemas, patterns) took 50% of a processor: new ones are tried and compiled, or take "
        "long to look up. Waiting for prompts and forms of answers takes 95% of the time (all that runs is being prepared "
        "beside the steps)."
    )
    spending = Spending(0.0)
    spending.note(9.5, {"steps": 9.0, "answers": 8.0, "forms": 4.75})
    cause = spending.describe(9.5, [0.01])["cause"]
    assert cause.index("forms of answers") < cause.index("as usual"), "what is as it should be comes last"


def test_who_takes_most_is_named_if_it_is_one() -> None:
    callers = [Caller("bob", 6.0, 0.0, 0.0, 0.6, 9.0, 3, 0), Caller("carol", 4.0, 0.0, 0.0, 0.4, 30.0, 1, 0)]
    assert whose(callers) == "Of what requests took, 60% was for bob: 6.0 s of steps in 10 s."
    assert whose([dataclasses.replace(callers[0], share=0.49)]) == whose([]) == ""
    beside = [Caller("bob", 0.04, 14.5, 0.0, 0.9, 9.0, 3, 0)]
    assert whose(beside) == "Of what requests took, 90% was for bob: 14.5 s of preparation beside steps in 10 s."
    decoding = [Caller("bob", 0.5, 0.0, 9.0, 0.95, 9.0, 11, 11), Caller("carol", 0.5, 0.0, 0.0, 0.05, 30.0, 1, 1)]
    assert whose(decoding) == (
        "Of what requests took, 95% was for bob: 0.5 s of steps and 9.0 s of decoders in 10 s. 11 of those that are being "
        "prepared are of bob."
    )
    waiting = {"forms (schemas, patterns)": Counter({"alice": 8, "bob": 1})}
    assert whose([], waiting) == "8 of those that wait for forms (schemas, patterns) are of alice."


def test_what_other_threads_do_counts_while_they_do_it() -> None:
    spending = Spending(0.0)
    spending.note(9.5, {"steps": 1.0, "forms": 0.0})
    told = spending.describe(9.5, [0.1], "8 requests wait.", {"forms": {"alice": 30.0, "bob": 1.9}})
    assert told["parts"][0] == {"what": "forms of answers (schemas, patterns), beside the steps", "share": 1.2}
    assert "Beside steps, forms of answers (schemas, patterns) took 120% of a processor: " in told["cause"]
