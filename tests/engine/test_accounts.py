"""Accounts of owners: who comes first, newcomers, debts, and what is told to people."""

from __future__ import annotations

from collections import Counter

from shmring.engine import accounts as module
from shmring.engine.accounts import Accounts, Caller


def test_who_has_used_less_comes_first() -> None:
    accounts = Accounts()
    for owner in ("a", "b"):
        accounts.enter(owner)
    accounts.charge("a", 2.0, 0.0)
    accounts.charge("b", 1.0, 0.0)
    assert sorted(("a", "b"), key=accounts.used) == ["b", "a"]
    assert len(accounts) == 2


def test_a_newcomer_begins_a_little_below_the_least_and_saves_up_nothing() -> None:
    accounts = Accounts()
    accounts.enter("heavy")
    accounts.charge("heavy", 100.0, 0.0)
    accounts.enter("new")
    assert 0 < accounts.used("heavy") - accounts.used("new") < 1
    accounts.leave("new")
    accounts.charge("heavy", 100.0, 0.0)
    accounts.enter("new")
    assert 0 < accounts.used("heavy") - accounts.used("new") < 1


def test_who_leaves_in_debt_finds_it_again_as_long_as_others_have_less() -> None:
    accounts = Accounts()
    accounts.enter("a")
    accounts.enter("b")
    accounts.charge("a", 10.0, 0.0)
    accounts.leave("a")
    accounts.enter("a")
    assert accounts.used("a") == 10.0
    accounts.leave("a")
    accounts.charge("b", 50.0, 0.0)
    accounts.enter("a")
    assert 0 < accounts.used("b") - accounts.used("a") < 1


def test_when_nobody_is_there_all_begin_anew() -> None:
    accounts = Accounts()
    accounts.enter("a")
    accounts.charge("a", 10.0, 0.0)
    accounts.leave("a")
    assert accounts.used("a") == 0.0


def test_an_owner_has_an_account_as_long_as_a_request_of_it_is_there() -> None:
    accounts = Accounts()
    accounts.enter("a")
    accounts.enter("a")
    accounts.leave("a")
    assert len(accounts) == 1
    accounts.charge("a", 1.0, 0.0)
    accounts.leave("a")
    accounts.charge("a", 1.0, 0.0)  # a step that it was in ends later
    assert (len(accounts), accounts.used("a")) == (0, 0.0)


def test_debts_are_bounded_however_many_owners_come_and_go() -> None:
    accounts = Accounts()
    accounts.enter("stays")
    for number in range(5 * module._MAX_DEBTORS):
        accounts.enter(f"guest {number}")
        accounts.charge(f"guest {number}", 1.0, 0.0)
        accounts.leave(f"guest {number}")
    assert len(accounts._debts) <= module._MAX_DEBTORS + 2
    assert accounts.used("stays") == 0.0


def seconds_of(accounts: Accounts, now: float) -> dict[str, float]:
    return {caller.owner: caller.minute_s for caller in accounts.describe(now) if caller.minute_s}


def test_who_uses_most_now_comes_before_who_has_used_most_in_the_last_minute() -> None:
    accounts = Accounts()
    accounts.charge("before", 9.0, 20.0)
    accounts.charge("now", 3.0, 45.0)
    accounts.charge("others", 1.0, 45.0)
    told = [(caller.owner, caller.seconds, caller.share, caller.minute_s) for caller in accounts.describe(45.0)]
    assert told == [("now", 3.0, 0.75, 3.0), ("others", 1.0, 0.25, 1.0), ("before", 0.0, 0.0, 9.0)]
    assert accounts.describe(55.0)[0].seconds == 1.5


def test_the_last_minute_is_told_of_those_who_used_most() -> None:
    accounts = Accounts()
    for number in range(30):
        accounts.charge(f"owner {number}", float(number), 30.0)
    told = seconds_of(accounts, 30.0)
    assert list(told)[:2] == ["owner 29", "owner 28"]
    assert (len(told), told["owner 29"]) == (module._TOLD, 29.0)
    accounts.charge("owner 29", 4.0, 75.0)
    assert seconds_of(accounts, 75.0)["owner 29"] == 4.0 + 29.0 * 0.75
    assert seconds_of(accounts, 130.0) == {"owner 29": 4.0 * 50 / 60}
    assert seconds_of(accounts, 200.0) == {}
    accounts.charge("owner 1", 1.0, 500.0)
    assert seconds_of(accounts, 500.0) == {"owner 1": 1.0}
    accounts.charge("owner 2", 3.0, 500.0)
    assert [(caller.owner, caller.share) for caller in accounts.describe(500.0)] == [("owner 2", 0.75), ("owner 1", 0.25)]


def test_who_has_most_requests_is_told_of_too_with_what_it_used() -> None:
    accounts = Accounts()
    for number in range(30):
        accounts.charge(f"owner {number}", 1.0 + number, 30.0)
    for owner, requests in (("owner 0", 3), ("new", 2), ("owner 29", 1)):
        for _ in range(requests):
            accounts.enter(owner)
    told = {caller.owner: (caller.minute_s, caller.requests) for caller in accounts.describe(30.0)}
    assert (told["owner 0"], told["new"], told["owner 29"]) == ((1.0, 3), (0.0, 2), (30.0, 1))
    first, *others = told
    assert (first, others[-1], len(told)) == ("owner 29", "new", module._TOLD + 2)


def test_sums_are_of_all_time_and_of_so_many_owners() -> None:
    accounts = Accounts()
    for now in (0.0, 500.0):
        accounts.charge("gone", 1.0, now)
    accounts.turn(500.0)
    accounts.enter("here").charge(2.0)
    assert accounts.totals(500.0) == {"gone": 2.0, "here": 2.0}
    for number in range(2 * module._MAX_TOTALS):
        accounts.charge(f"owner {number}", 1.0, 500.0)
    assert len(accounts.totals(500.0)) == module._MAX_TOTALS


def test_what_is_told_is_bounded_too() -> None:
    accounts = Accounts()
    for number in range(2 * module._MAX_TOLD):
        accounts.charge(f"owner {number}", 1.0, 0.0)
    assert len(accounts._minute._used) == module._MAX_TOLD


def test_decoders_count_for_people_and_not_for_the_order_and_so_do_requests_that_are_being_prepared() -> None:
    accounts = Accounts()
    for owner, used_s in (("steps", 2.0), ("decoders", 1.0)):
        accounts.enter(owner)
        accounts.charge(owner, used_s, 30.0)
    used = accounts.used("decoders")
    accounts.note_decoding("decoders", 5.0, 30.0)
    assert accounts.used("decoders") == used
    told = accounts.describe(30.0, Counter({"decoders": 11, "new": 1}))
    assert told == [
        Caller("decoders", 1.0, 0.0, 5.0, 0.75, 6.0, 12, 11),
        Caller("steps", 2.0, 0.0, 0.0, 0.25, 2.0, 1, 0),
        Caller("new", 0.0, 0.0, 0.0, 0.0, 0.0, 1, 1),
    ]


def test_work_that_has_not_ended_counts_for_whom_it_is_done() -> None:
    accounts = Accounts()
    accounts.charge("steps", 4.0, 30.0)
    told = accounts.describe(30.0, working_s=[{"forms": 30.0}, {"forms": 2.0, "steps": 1.0}])
    assert [(each.owner, each.seconds, each.beside_s) for each in told] == [("forms", 0.0, 12.0), ("steps", 4.0, 1.0)]
    assert [each.share for each in told] == [12 / 17, 5 / 17]


def test_what_is_prepared_beside_steps_is_told_apart_and_paid_for_like_them() -> None:
    accounts = Accounts()
    accounts.turn(30.0)
    accounts.enter("forms").charge(0.5, 14.5)
    accounts.enter("steps").charge(5.0)
    told = accounts.describe(30.0)
    assert told == [Caller("forms", 0.5, 14.5, 0.0, 0.75, 15.0, 1, 0), Caller("steps", 5.0, 0.0, 0.0, 0.25, 5.0, 1, 0)]
    assert (accounts.used("forms"), accounts.totals(30.0)) == (15.0, {"forms": 15.0, "steps": 5.0})
    accounts.enter("forms").charge(0.0, 1.0)
    assert (accounts.totals(30.0)["forms"], accounts.describe(40.0)[0].beside_s) == (16.0, 15.5)
