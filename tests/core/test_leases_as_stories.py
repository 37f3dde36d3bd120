"""Who gets which lease: one story a case (:class:`tests.core.stories.EngineTeller`)."""

from __future__ import annotations

from tests.core.stories import EngineTeller, tell
from tests.tables import for_each

STORIES = {
    "a base lease answers no request, and is as large as asked": """
        1 connects 2 -> 1 gets 1 at 1+2
        2 connects 1 -> 2 gets 2 at 3+1""",
    "a base lease is capped": "max_lease=3; 1 connects 10 -> 1 gets 1 at 1+3",
    "a base lease is as large as what is left": """
        leasable=5; 1 connects 3 -> 1 gets 1 at 1+3
        2 connects 3 -> 2 gets 2 at 4+2
        3 connects 1 ->""",
    "no base lease ahead of those who wait": """
        leasable=5; 1 connects 3 -> 1 gets 1 at 1+3
        2 is bare ->
        2 asks 5 -> 1 recalled 1
        3 connects 1 ->""",
    "a lease that is free is granted at once": """
        1 connects 1 -> 1 gets 1 at 1+1
        1 asks 3 -> 1 gets 2 at 2+3""",
    "what is preferred is granted where it is free, and else what is needed": """
        leasable=6; 1 connects 1 -> 1 gets 1 at 1+1
        1 asks 2 or 4 -> 1 gets 2 at 2+4
        1 asks 1 or 6 -> 1 gets 3 at 6+1""",
    "less preferred than needed means what is needed; more than there is means all of it": """
        leasable=6; 1 is bare ->
        1 asks 3 or 1 -> 1 gets 2 at 1+3
        1 returns 2 ->
        1 asks 1 or 1000 -> 1 gets 3 at 1+6""",
    "more than the whole slab is refused": """
        leasable=6; 1 connects 1 -> 1 gets 1 at 1+1
        1 asks 7 -> refused: was requested of""",
    "beside max_leases a request waits for a return": """
        max_leases=2; 1 connects 1 -> 1 gets 1 at 1+1
        1 asks 1 -> 1 gets 2 at 2+1
        1 asks 1 ->
        1 returns 1 -> 1 gets 3 at 1+1""",
    "a request beside max_leases keeps no window from the rest": """
        leasable=4 max_leases=1; 1 connects 3 -> 1 gets 1 at 1+3
        2 is bare ->
        1 asks 1 ->
        2 asks 1 -> 2 gets 3 at 4+1""",
    "a returned lease can be lent again, and is returned once": """
        leasable=4; 1 connects 4 -> 1 gets 1 at 1+4
        1 returns 1 1 ->
        1 asks 4 -> 1 gets 2 at 1+4
        1 returns 1 -> refused: does not hold""",
    "a lease of somebody else can not be returned": """
        1 connects 1 -> 1 gets 1 at 1+1
        2 connects 1 -> 2 gets 2 at 2+1
        1 returns 2 -> refused: does not hold
        1 returns 1 99 -> refused: does not hold
        1 returns 1 2 -> refused: does not hold
        1 returns 0 -> refused: does not hold""",
    "no more leases are returned at once than can be held": """
        max_leases=2; 1 connects 1 -> 1 gets 1 at 1+1
        1 returns 1 1 1 1 1 -> refused: 5 leases were returned at once
        1 returns 1 1 1 1 ->""",
    "a lease with a slot in use can not be returned": """
        1 connects 1 -> 1 gets 1 at 1+1
        1 asks 1 -> 1 gets 2 at 2+1
        1 uses 1 ->
        1 returns 2 1 -> refused: slot in use
        1 aborts -> 1 aborted 1, 1 released 1
        1 returns 2 1 ->""",
    "alone a client may hold everything": """
        quota=4; 1 connects 4 -> 1 gets 1 at 1+4
        1 asks 8 -> 1 gets 2 at 5+8""",
    "beside others a client holds its quota and no more, what is preferred included": """
        quota=4; 2 is bare ->
        1 connects 2 -> 1 gets 2 at 1+2
        1 asks 1 or 10 -> 1 gets 3 at 3+1
        1 asks 1 -> 1 gets 4 at 4+1
        1 asks 1 ->
        1 returns 2 -> 1 gets 5 at 1+1""",
    "one lease is always granted, however large": """
        quota=4; 1 is bare ->
        2 is bare ->
        1 asks 11 -> 1 gets 3 at 1+11""",
    "a request over quota lets others pass": """
        quota=4; 1 connects 4 -> 1 gets 1 at 1+4
        2 is bare ->
        1 asks 3 ->
        2 asks 8 -> 2 gets 3 at 5+8""",
    "the quota ends when the others are gone": """
        quota=4; 1 connects 4 -> 1 gets 1 at 1+4
        2 is bare ->
        1 asks 3 ->
        2 disconnects -> 2 gone, 1 gets 3 at 5+3""",
    "the quota stays while a disconnected client holds leases": """
        quota=4; 1 connects 4 -> 1 gets 1 at 1+4
        2 connects 1 -> 2 gets 2 at 5+1
        1 asks 3 ->
        2 disconnects ->
        2 dies -> 2 reclaimed 1, 2 gone, 1 gets 3 at 5+3""",
    "a window whose owner comes over quota is opened to the rest": """
        leasable=10 max_lease=6 quota=7; 1 connects 6 -> 1 gets 1 at 1+6
        1 asks 5 ->
        2 connects 1 ->
        2 asks 4 -> 2 gets 2 at 7+4""",
    "requests are served in order of arrival": """
        full 2 2; 9 asks 1 -> 1 recalled 3
        8 asks 1 -> 2 recalled 4
        2 returns 4 -> 9 gets 5 at 3+1, 8 gets 6 at 4+1""",
    "whoever was served goes to the end of the line": """
        full 1 1 1; 8 asks 1 -> 1 recalled 3
        9 asks 1 -> 2 recalled 4
        1 returns 3 -> 8 gets 6 at 1+1, 3 recalled 5
        8 asks 1 ->
        2 returns 4 -> 9 gets 7 at 2+1
        3 returns 5 -> 8 gets 8 at 3+1""",
    "a window recalls the cheapest range": "full 3 1 1 3; 9 asks 2 -> 2 recalled 4, 3 recalled 5",
    "a window uses what is free already": """
        full 2 2 2; 3 returns 5 ->
        9 asks 4 -> 2 recalled 4""",
    "what is recalled for who is behind lies beside the window, where more is free": """
        full 2 2 2; 2 returns 4 ->
        9 asks 4 -> 1 recalled 3
        8 asks 2 -> 3 recalled 5""",
    "what is recalled for who is behind may begin where the window ends": """
        full 2 2 2; 2 returns 4 ->
        9 asks 3 -> 1 recalled 3
        8 asks 3 -> 3 recalled 5""",
    "a window stays where it is when somebody goes who has nothing in it": """
        full 2 2 1; 9 asks 2 -> 1 recalled 3
        1 uses 3 ->
        3 dies -> 3 reclaimed 1, 3 gone
        1 aborts -> 1 aborted 1, 1 released 1
        1 returns 3 -> 9 gets 6 at 1+2""",
    "a lease is recalled once": """
        full 2 2; 9 asks 2 -> 1 recalled 3
        9 asks 4 -> 2 recalled 4
        9 asks 2 ->""",
    "the window is granted when its leases have come back": """
        full 2 2 2; 9 asks 4 -> 1 recalled 3, 2 recalled 4
        1 returns 3 ->
        2 returns 4 -> 9 gets 6 at 1+4""",
    "a large request is not overtaken for ever": """
        full 2 2 2; 9 asks 4 -> 1 recalled 3, 2 recalled 4
        8 asks 2 -> 3 recalled 5
        1 returns 3 ->
        3 returns 5 -> 8 gets 6 at 5+2
        8 returns 6 ->
        8 asks 2 -> 8 gets 7 at 5+2
        2 returns 4 -> 9 gets 8 at 1+4""",
    "small requests are granted up to the edges of a window": """
        full 2 1 3 1 2; 1 disconnects ->
        5 disconnects ->
        9 asks 5 -> 2 recalled 4, 3 recalled 5, 4 recalled 6
        2 returns 4 ->
        4 returns 6 ->
        1 dies -> 1 reclaimed 2, 1 gone
        5 dies -> 5 reclaimed 2, 5 gone
        8 asks 3 ->
        8 asks 2 or 3 -> 8 gets 8 at 1+2
        8 asks 2 -> 8 gets 9 at 8+2
        3 returns 5 -> 9 gets 10 at 3+5""",
    "a withdrawn request opens its window to the rest": """
        full 2 2; 9 asks 4 -> 1 recalled 3, 2 recalled 4
        8 asks 2 ->
        1 returns 3 ->
        9 withdraws -> 8 gets 5 at 1+2
        9 withdraws ->""",
    "a replaced request keeps its turn": """
        full 2 2; 9 asks 3 -> 1 recalled 3, 2 recalled 4
        8 asks 1 ->
        9 asks 2 ->
        1 returns 3 -> 9 gets 5 at 1+2""",
    "a request replaced by one that fits is granted": """
        full 2 2; 1 returns 3 ->
        9 asks 3 -> 2 recalled 4
        9 asks 2 -> 9 gets 5 at 1+2""",
    "a request replaced by a larger one gets a larger window": """
        full 1 1 1 1; 9 asks 1 -> 1 recalled 3
        9 asks 2 -> 2 recalled 4, 3 recalled 5
        8 asks 1 -> 4 recalled 6
        2 returns 4 ->
        1 returns 3 -> 9 gets 7 at 1+2
        3 returns 5 -> 8 gets 8 at 3+1""",
    "the window avoids what may never come back": """
        full 1 3; 1 disconnects ->
        9 asks 1 -> 2 recalled 4""",
    "the window is chosen again when a holder in it disconnects": """
        full 1 3; 9 asks 1 -> 1 recalled 3
        1 disconnects -> 2 recalled 4
        2 returns 4 -> 9 gets 5 at 2+1""",
    "the window closes with its owner": """
        full 2 2; 9 asks 4 -> 1 recalled 3, 2 recalled 4
        8 asks 2 ->
        1 returns 3 ->
        9 disconnects -> 9 gone, 8 gets 5 at 1+2""",
    "with the grant that closes a window the first who waits gets one": """
        leasable=6 quota=6; 1 connects 1 -> 1 gets 1 at 1+1
        2 connects 1 -> 2 gets 2 at 2+1
        3 connects 1 -> 3 gets 3 at 3+1
        4 connects 1 -> 4 gets 4 at 4+1
        1 leaves -> 1 reclaimed 1, 1 gone
        2 leaves -> 2 reclaimed 1, 2 gone
        4 asks 6 ->
        3 asks 3 -> 4 recalled 4
        4 returns 4 -> 3 gets 5 at 4+3, 3 recalled 3 5""",
    "reclaimed memory goes to those who wait": """
        full 2; 9 asks 2 -> 1 recalled 3
        1 disconnects ->
        1 dies -> 1 reclaimed 2, 1 gone, 9 gets 4 at 1+2""",
    "a client's own leases are not recalled for it": """
        full 2 2; 1 dies -> 1 reclaimed 2, 1 gone
        9 asks 1 -> 9 gets 5 at 1+1
        9 asks 4 -> 2 recalled 4""",
    "a wish is granted when there is room": """
        full 2 2; 1 uses 3 ->
        2 uses 4 ->
        9 wishes 2 ->
        1 aborts -> 1 aborted 1, 1 released 1
        1 returns 3 -> 9 gets 5 at 1+2""",
    "a wish recalls leases that lie idle, once": """
        full 2 2 2; 1 uses 3 ->
        9 wishes 3 -> 2 recalled 4, 3 recalled 5
        9 wishes 4 ->
        2 returns 4 ->
        3 returns 5 -> 9 gets 6 at 3+4""",
    "a wish recalls its own client's lease only if that lies idle": """
        full 2 2; 1 uses 3 ->
        1 wishes 3 ->
        2 wishes 2 -> 2 recalled 4""",
    "a wish recalls nothing of one who may be writing still, and keeps no range from others": """
        full 1 1; 1 uses 3 ->
        9 wishes 2 ->
        2 returns 4 ->
        8 asks 1 -> 8 gets 5 at 2+1
        10 connects 1 ->""",
    "a wish does not keep a newcomer from its base lease": """
        full 1 1; 1 uses 3 ->
        2 returns 4 ->
        9 wishes 2 ->
        10 connects 1 -> 10 gets 5 at 2+1""",
    "while somebody waits a wish recalls nothing": """
        full 2 2; 1 uses 3 ->
        8 asks 2 -> 2 recalled 4
        9 wishes 1 ->""",
    "a wish over quota recalls nothing": """
        full 2 2 2 quota=3; 1 uses 3 ->
        1 wishes 2 ->
        1 wishes 1 -> 2 recalled 4""",
    "a wish that is waited for gets a window and loses it again": """
        full 2 2; 1 uses 3 ->
        2 uses 4 ->
        9 wishes 2 ->
        9 asks 2 -> 1 recalled 3
        8 asks 2 ->
        9 wishes 2 ->
        10 connects 1 ->
        8 withdraws ->""",
    "a window lies over leases that are idle, wherever they are": """
        full 2 2 2; 1 uses 3 ->
        9 asks 2 -> 2 recalled 4""",
    "over a lease in use rather than over one that was granted just now": """
        full 2 2; 1 returns 3 ->
        2 uses 4 ->
        9 asks 2 -> 9 gets 5 at 1+2
        8 asks 2 -> 2 recalled 4""",
    "a lease whose first slot has come is in use, and idle after that": """
        full 2 2; 2 returns 4 ->
        9 asks 2 -> 9 gets 5 at 3+2
        1 uses 3 ->
        9 uses 5 ->
        9 aborts -> 9 aborted 1, 9 released 1
        8 asks 2 -> 9 recalled 5""",
    "a lease that was granted just now is so for two moments": """
        full 2 2; 2 returns 4 ->
        9 asks 2 -> 9 gets 5 at 3+2
        1 uses 3 ->
        8 asks 2 -> 1 recalled 3
        the moment passes ->
        the moment passes -> 9 recalled 5""",
    "who was served in this event is not recalled while others lie idle": """
        full 1 1 1; 8 asks 1 -> 1 recalled 3
        9 asks 1 -> 2 recalled 4
        1 returns 3 -> 8 gets 6 at 1+1, 3 recalled 5
        2 returns 4 -> 9 gets 7 at 2+1""",
    "a silent holder is passed over after two moments, and not asked again": """
        full 2 2 2; 9 asks 2 -> 1 recalled 3
        the moment passes ->
        the moment passes -> 2 recalled 4
        the moment passes ->
        2 returns 4 -> 9 gets 6 at 3+2""",
    "if nobody answers, the window stays where it is": """
        full 2 2; 9 asks 4 -> 1 recalled 3, 2 recalled 4
        the moment passes ->
        the moment passes ->
        the moment passes ->
        1 returns 3 ->
        2 returns 4 -> 9 gets 5 at 1+4""",
    "a silent holder is passed over for a lease in use, if none is idle": """
        full 2 2; 2 uses 4 ->
        9 asks 2 -> 1 recalled 3
        the moment passes ->
        the moment passes -> 2 recalled 4
        2 aborts -> 2 aborted 1, 2 released 1
        2 returns 4 -> 9 gets 5 at 3+2""",
    "a holder whose slot the engine has is not silent, and gets its time after that": """
        full 2 2; 1 uses 3 ->
        2 uses 4 ->
        9 asks 2 -> 1 recalled 3
        the moment passes ->
        the moment passes ->
        1 aborts -> 1 aborted 1, 1 released 1
        the moment passes ->
        the moment passes -> 2 recalled 4""",
    "the window leaves a lease in use for one that has become idle": """
        full 2 2; 1 uses 3 ->
        2 uses 4 ->
        9 asks 2 -> 1 recalled 3
        2 aborts -> 2 aborted 1, 2 released 1
        the moment passes -> 2 recalled 4""",
    "the window leaves what may never come back for what can be had": """
        full 2 2; 1 disconnects ->
        2 disconnects ->
        9 asks 2 ->
        2 dies -> 2 reclaimed 2, 2 gone, 9 gets 5 at 3+2
        8 asks 2 -> 9 recalled 5
        9 uses 5 ->
        the moment passes ->
        1 dies -> 1 reclaimed 2, 1 gone, 8 gets 6 at 1+2""",
    "idle leases outside of the window are recalled for whoever is behind": """
        full 4 2 2; 1 uses 3 ->
        9 asks 8 -> 1 recalled 3, 2 recalled 4, 3 recalled 5
        2 returns 4 ->
        8 asks 2 ->
        9 asks 6 ->
        3 returns 5 -> 8 gets 6 at 7+2""",
    "whoever is behind gets what lies idle while the first waits for the silent": """
        full 4 2 2; 1 uses 3 ->
        9 asks 5 -> 1 recalled 3, 2 recalled 4
        8 asks 2 -> 3 recalled 5
        3 returns 5 -> 8 gets 6 at 7+2""",
    "each of those behind has leases of its own recalled": """
        full 4 1 1 1; 1 uses 3 ->
        9 asks 4 -> 1 recalled 3
        8 asks 1 -> 2 recalled 4
        7 connects 1 ->
        7 asks 1 -> 3 recalled 5
        2 returns 4 -> 8 gets 7 at 5+1
        3 returns 5 -> 7 gets 8 at 6+1""",
    "what has become idle is recalled for those behind when the moment has passed": """
        full 4 2; 1 uses 3 ->
        2 uses 4 ->
        9 asks 4 -> 1 recalled 3
        8 asks 2 ->
        the moment passes ->
        2 aborts -> 2 aborted 1, 2 released 1
        the moment passes -> 2 recalled 4
        2 returns 4 -> 8 gets 5 at 5+2""",
    "nothing is recalled for one behind who is over quota, or wants too much": """
        full 4 2 2 quota=3; 1 uses 3 ->
        9 asks 5 -> 1 recalled 3, 2 recalled 4
        3 asks 2 ->
        8 asks 3 ->
        the moment passes ->""",
    "what a silent holder keeps is not waited for by those behind": """
        full 4 2 2; 1 uses 3 ->
        9 asks 4 -> 2 recalled 4, 3 recalled 5
        8 asks 2 ->
        2 returns 4 ->
        the moment passes ->
        the moment passes -> 1 recalled 3, 8 gets 6 at 5+2""",
    "a window does not move to what was lent since it was opened": """
        full 2 2 2 2; 9 asks 4 -> 1 recalled 3, 2 recalled 4
        8 asks 2 -> 3 recalled 5
        10 connects 1 ->
        10 asks 2 -> 4 recalled 6
        3 returns 5 -> 8 gets 7 at 5+2
        4 returns 6 -> 10 gets 8 at 7+2
        the moment passes ->
        the moment passes ->
        8 uses 7 ->
        10 uses 8 ->
        the moment passes ->
        1 returns 3 ->
        2 returns 4 -> 9 gets 9 at 1+4""",
    "a window that moved still counts from when it was opened": """
        full 2 2 2; 9 asks 2 -> 1 recalled 3
        the moment passes ->
        the moment passes -> 2 recalled 4
        8 asks 2 -> 3 recalled 5
        1 returns 3 -> 9 gets 6 at 1+2""",
    "a window that waits in vain is given up, and the request has its turn again when it can be had": """
        full 2 2 2; 9 asks 6 -> 1 recalled 3, 2 recalled 4, 3 recalled 5
        2 returns 4 ->
        3 returns 5 ->
        8 asks 2 ->
        40 moments pass ->
        the moment passes -> 8 gets 6 at 3+2
        10 connects 2 ->
        10 asks 2 -> 10 gets 7 at 5+2
        the moment passes ->
        1 returns 3 ->
        the moment passes -> 8 recalled 6, 10 recalled 7
        8 returns 6 ->
        10 returns 7 -> 9 gets 8 at 1+6""",
    "a window over what stays in use is given up for as long as it has waited": """
        full 2 2 2; 1 uses 3 ->
        9 asks 6 -> 1 recalled 3, 2 recalled 4, 3 recalled 5
        2 returns 4 ->
        3 returns 5 ->
        8 asks 2 ->
        39 moments pass ->
        the moment passes -> 8 gets 6 at 3+2
        38 moments pass ->
        10 connects 2 ->
        10 asks 2 -> 10 gets 7 at 5+2
        the moment passes -> 8 recalled 6, 10 recalled 7
        8 returns 6 ->
        10 returns 7 ->
        8 asks 2 ->
        79 moments pass ->
        the moment passes -> 8 gets 8 at 3+2""",
    "several who wait in vain have their windows one after the other, and then who is behind them is served": """
        full 2 2 2; 2 disconnects ->
        9 asks 6 -> 1 recalled 3, 3 recalled 5
        1 returns 3 ->
        3 returns 5 ->
        8 asks 6 ->
        10 connects 1 ->
        10 asks 2 ->
        39 moments pass ->
        the moment passes ->
        39 moments pass ->
        the moment passes -> 10 gets 6 at 1+2
        10 returns 6 ->
        10 asks 2 -> 10 gets 7 at 1+2""",
    "a window over what its own client goes on using is given up as well": """
        full 2 2 2; 1 asks 6 -> 2 recalled 4, 3 recalled 5
        2 returns 4 ->
        3 returns 5 ->
        8 asks 2 ->
        39 moments pass ->
        the moment passes -> 8 gets 6 at 3+2
        1 returns 3 ->
        the moment passes ->
        the moment passes -> 8 recalled 6
        8 returns 6 -> 1 gets 7 at 1+6""",
    "a window is not in vain while its leases come back one after the other": """
        full 2 2 2; 1 uses 3 ->
        2 uses 4 ->
        9 asks 6 -> 1 recalled 3, 2 recalled 4, 3 recalled 5
        3 returns 5 ->
        8 asks 2 ->
        39 moments pass ->
        2 aborts -> 2 aborted 1, 2 released 1
        2 returns 4 ->
        39 moments pass ->
        1 aborts -> 1 aborted 1, 1 released 1
        1 returns 3 -> 9 gets 6 at 1+6, 9 recalled 6
        9 returns 6 -> 8 gets 7 at 1+2""",
    "a window does not close because somebody else has gone": """
        full 2 2 2; 9 asks 4 -> 1 recalled 3, 2 recalled 4
        1 returns 3 ->
        8 disconnects -> 8 gone
        3 disconnects ->
        3 dies -> 3 reclaimed 2, 3 gone
        2 returns 4 -> 9 gets 6 at 1+4""",
    "a wish recalls nothing that was granted just now, or is on its way": """
        full 2 2; 2 returns 4 ->
        9 asks 2 -> 9 gets 5 at 3+2
        8 wishes 2 -> 1 recalled 3
        10 connects 1 ->
        10 wishes 2 ->""",
}


@for_each("story", STORIES.values(), ids=STORIES)
def test_leases(story: str) -> None:
    tell(story, EngineTeller)
