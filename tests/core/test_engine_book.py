"""The engine's book: requests and their slots, clients that go, replies, and what is kept.

One story a case (:class:`tests.core.stories.EngineTeller`). Who gets which lease is told in test_leases_as_stories.py; random
events are in test_engine_book_machine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shmring.core.compiled import EngineBook
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, Geometry, blocks_for, slot_blocks
from shmring.core.messages import SLOT_HEADER_NBYTES, LeaseRequest, SlotRef
from shmring.core.states import Lease
from shmring.errors import CapacityError, RemoteProtocolError
from tests.core.stories import EngineTeller, tell
from tests.model.state import plain
from tests.records import keep_of
from tests.simulation.books import COMPILED, MODELS, Books
from tests.tables import for_each

ONE_SLOT = BLOCK_NBYTES - SLOT_HEADER_NBYTES
FIRST, SECOND = 1 << GENERATION_BITS | 1, 1 << GENERATION_BITS | 2

STORIES = {
    "a submission publishes its slots": """
        1 connects 4 -> 1 gets 1 at 1+4
        1 submits 0 1@1 2@2+3 ->
        look -> 1 has 1 published, 1 has 2 published, 8 free, 4 for replies""",
    "a request may have no slot, and numbers may be left out": """
        1 connects 4 -> 1 gets 1 at 1+4
        1 submits 3 ->
        1 submits 9 5@1 1000@2 ->
        look -> 1 has 5 published, 1 has 1000 published, 8 free, 4 for replies""",
    "a slot that was released can be published again under a new generation": """
        clients=1; 1 submits 1 1@1 ->
        1 aborts 1 -> 1 aborted 1, 1 released 1
        1 submits 2 2@1 ->
        1 aborts 2 -> 1 aborted 2, 1 released 2
        1 submits 3 3@1 ->""",
    "who asks for nothing has a base lease of a block": "1 connects 0 -> 1 gets 1 at 1+1",
    "slots of one submission may not overlap or share a generation": """
        submitted; 1 submits 6 3@2 4@2 -> refused: overlaps a live slot
        1 submits 6 3@2 3@3 -> refused: is not a new one
        1 submits 6 4@3 3@2 -> refused: is not a new one""",
    "a request's number is never used twice": """
        submitted; 1 submits 0 -> refused: after request 5
        1 submits 4 -> refused: after request 5
        1 submits 5 -> refused: after request 5
        1 aborts 5 -> 1 aborted 5, 1 released 1 2
        1 submits 0 -> refused: after request 5
        1 submits 4 -> refused: after request 5
        1 submits 5 -> refused: after request 5
        1 submits 6 ->""",
    "requests in flight are bounded": """
        max_inflight=2 clients=1; 1 submits 0 ->
        1 submits 1 ->
        1 submits 2 -> refused: more than max_inflight
        1 runs 0 ->
        1 submits 2 -> refused: more than max_inflight
        1 ends 0 -> told
        1 submits 2 ->""",
    "a returned lease takes no slot": """
        submitted; 1 aborts 5 -> 1 aborted 5, 1 released 1 2
        1 returns 1 ->
        1 submits 6 3@1 -> refused: does not hold""",
    "a claimed request is released slot by slot": """
        running; look -> 1 has 1 claimed, 1 has 2 claimed, 4 free, 4 for replies
        1 releases 1 -> 1 released 1
        1 releases 2 -> 1 released 2
        1 ends 5 -> told""",
    "a request may end before its slots are released": """
        running; 1 fails 5 -> told
        look -> 1 has 1 claimed, 1 has 2 claimed, 4 free, 4 for replies
        1 releases 1 2 -> 1 released 1 2""",
    "a slot with live views drains before it is released": """
        running; 1 releases 1 2 viewed 2 -> 1 released 1
        look -> 1 has 2 draining, 4 free, 4 for replies
        1 unviews 2 -> 1 released 2
        look -> 4 free, 4 for replies""",
    "releasing nothing says nothing": """
        running; 1 releases ->
        1 releases 1 viewed 1 ->""",
    "a slot named twice is released once": "running; 1 releases 1 1 -> 1 released 1",
    "an abort of a waiting request releases its slots": """
        submitted; 1 aborts 5 -> 1 aborted 5, 1 released 1 2
        1 ends 5 ->""",
    "an abort of a running request releases nothing until its claim does": """
        running; 1 aborts 5 -> 1 aborted 5 running
        look -> 1 has 1 claimed, 1 has 2 claimed, 4 free, 4 for replies
        1 ends 5 ->
        1 releases 1 2 -> 1 released 1 2""",
    "an abort leaves alone what is released or drains already": """
        running; 1 releases 1 2 viewed 2 -> 1 released 1
        1 aborts 5 -> 1 aborted 5 running
        look -> 1 has 2 draining, 4 free, 4 for replies
        1 unviews 2 -> 1 released 2""",
    "an abort without slots says only that": """
        clients=1; 1 submits 0 ->
        1 aborts 0 -> 1 aborted 0""",
    "an abort that crossed the end is no offence": """
        running; 1 ends 5 -> told
        1 aborts 5 ->
        1 aborts 4611686018427387904 ->
        look -> 1 has 1 claimed, 1 has 2 claimed, 4 free, 4 for replies, 2 late aborts""",
    "a request that fails before it was claimed gives its slots back": """
        submitted; 1 fails 5 -> told
        1 releases 1 2 -> 1 released 1 2""",
    "a request that is late before it was claimed gives its slots back": """
        submitted; 1 expires 5 -> told
        1 releases 1 2 -> 1 released 1 2""",
    "what no table allows is refused": """
        submitted; 1 ends 5 -> refused: WAITING: FINISH is
        1 releases 1 -> refused: PUBLISHED: RELEASE is
        1 unviews 1 -> refused: PUBLISHED: LAST_VIEW_GONE is
        1 runs 5 ->
        1 runs 5 -> refused: RUNNING: SCHEDULE is
        1 unviews 1 -> refused: CLAIMED: LAST_VIEW_GONE is
        1 releases 2 viewed 2 ->
        1 releases 1 2 -> refused: DRAINING: RELEASE is
        1 releases 1 2 viewed 2 -> refused: DRAINING: RELEASE_VIEWED is""",
    "the end of a request whose client has gone owes no reply": """
        1 is bare ->
        1 submits 0 ->
        1 disconnects -> 1 aborted 0, 1 gone
        1 ends 0 ->""",
    "a disconnect aborts and quarantines, and frees nothing": """
        submitted; 1 disconnects -> 1 aborted 5
        look -> 4 free, 4 quarantined, 4 for replies""",
    "a death frees what was quarantined": """
        submitted; 1 disconnects -> 1 aborted 5
        1 dies -> 1 reclaimed 4, 1 gone
        look -> 8 free, 4 for replies""",
    "a death without a disconnect is both, and a second says nothing": """
        submitted; 1 dies -> 1 aborted 5, 1 reclaimed 4, 1 gone
        1 dies ->
        77 dies ->""",
    "a client without leases is gone with its connection": """
        1 is bare ->
        1 disconnects -> 1 gone""",
    "a dead client's lease waits for the claim that reads it": """
        submitted; 1 asks 2 -> 1 gets 3 at 9+2
        1 runs 5 ->
        1 dies -> 1 aborted 5 running, 1 reclaimed 2
        look -> 1 has 1 claimed, 1 has 2 claimed, 4 free, 4 quarantined, 4 for replies
        1 releases 1 2 viewed 2 ->
        1 unviews 2 -> 1 reclaimed 4, 1 gone""",
    "a claim released between disconnect and death frees nothing": """
        running; 1 disconnects -> 1 aborted 5 running
        1 releases 1 2 ->
        look -> 4 free, 4 quarantined, 4 for replies
        1 dies -> 1 reclaimed 4, 1 gone""",
    "a goodbye gives everything up at once": "submitted; 1 leaves -> 1 aborted 5, 1 reclaimed 4, 1 gone",
    "a goodbye keeps the leases that it names until death": """
        clients=1; 1 asks 2 -> 1 gets 2 at 2+2
        1 leaves but 2 99 replies 99 -> 1 reclaimed 1
        look -> 10 free, 2 quarantined, 4 for replies
        1 dies -> 1 reclaimed 2, 1 gone""",
    "a goodbye frees a lease only when no claim reads it": """
        running; 1 leaves -> 1 aborted 5 running
        1 releases 1 ->
        1 releases 2 -> 1 reclaimed 4, 1 gone""",
    "a reply comes from the reserve": """
        reply=8 clients=1; 1 replies 3 -> reply 1 at 13+3
        1 replies 1 -> reply 2 at 16+1
        look -> 11 free, 4 for replies""",
    "a reply waits for space": """
        clients=1; 1 replies 3 -> reply 1 at 13+3 to copy
        1 replies 2 as 7 -> waits
        1 frees 1 -> 7 gets reply 2 at 13+2""",
    "nobody overtakes the first who waits for space": """
        clients=2 reply=8 crowded; 1 frees 2 -> 7 gets reply 3 at 15+5 to copy, 8 gets reply 4 at 20+1 to copy""",
    "space that is too small for the first goes to nobody else": """
        reply=8 clients=2; 2 replies 1 -> reply 1 at 13+1
        2 replies 1 -> reply 2 at 14+1
        2 replies 1 -> reply 3 at 15+1
        2 replies 1 -> reply 4 at 16+1
        1 replies 6 as 7 -> waits
        2 replies 1 as 8 -> waits
        2 frees 4 ->
        2 frees 3 -> 7 gets reply 5 at 15+6 to copy""",
    "smaller ones pass a reply that finds no room, if they are let": """
        clients=2 reply=8 crowded; the first waits -> 8 gets reply 3 at 17+1
        2 writes 1 -> reply 4 at 18+1 to copy
        the first goes ->
        2 writes 1 -> waits
        1 frees 2 ->""",
    "who cancels a wait passes the turn on": """
        clients=2 reply=8 crowded; 7 cancels -> 8 gets reply 3 at 17+1
        7 cancels ->""",
    "a client may not release a reply that is not its own": """
        clients=2; 1 replies 1 -> reply 1 at 13+1
        2 replies 1 -> reply 2 at 14+1
        1 frees 2 -> refused: does not hold
        1 frees 1 2 -> refused: does not hold
        1 frees 1 99 -> refused: does not hold
        1 frees 0 -> refused: does not hold
        1 frees 18446744073709551615 -> refused: does not hold
        1 frees 1 1 ->
        1 frees 1 ->
        2 frees 1 ->
        look -> 10 free, 3 for replies, 3 stale releases""",
    "no more replies are released at once than there are blocks": """
        clients=1; 1 replies 1 -> reply 1 at 13+1
        1 frees 1 1 1 1 ->
        1 frees 1 1 1 1 1 -> refused: 5 reply slots were released at once""",
    "a client may not release a reply that is still being written": """
        clients=1; 1 writes 1 -> reply 1 at 13+1
        1 frees 1 -> refused: does not hold
        1 sends 1 ->
        1 frees 1 ->
        look -> 11 free, 4 for replies""",
    "a reply that is not sent after all is free again": """
        clients=1; 1 writes 4 -> reply 1 at 13+4 to copy
        1 replies 1 as 7 -> waits
        1 discards 1 -> 7 gets reply 2 at 13+1""",
    "one reply is always granted, however large": "clients=2; 1 replies 4 -> reply 1 at 13+4 to copy",
    "a client that has its share lets others pass": """
        reply=16 clients=2; 1 replies 8 -> reply 1 at 13+8
        1 replies 4 -> reply 2 at 21+4 to copy
        1 replies 1 as 7 -> waits
        2 replies 2 -> reply 3 at 25+2
        2 replies 4 as 8 -> waits
        2 frees 3 -> 8 gets reply 4 at 25+4 to copy""",
    "the replies of one client keep their order": """
        reply=16 clients=1; 1 replies 6 -> reply 1 at 13+6
        1 replies 3 -> reply 2 at 19+3 to copy
        1 replies 5 as 7 -> waits
        1 replies 1 as 8 -> waits
        1 frees 2 -> 7 gets reply 3 at 19+5 to copy
        1 replies 1 -> waits""",
    "two replies to a request are copied out before a caller reads one": """
        clients=1; 1 submits 1 ->
        1 submits 2 ->
        1 replies 4 for 1 -> reply 1 at 13+4 to copy for 1
        1 frees 1 ->
        1 replies 4 for 1 -> reply 2 at 13+4 to copy for 1
        1 frees 2 ->
        1 replies 4 for 1 as 7 -> waits
        1 replies 1 for 1 -> waits
        1 replies 4 for 2 -> reply 3 at 13+4 to copy for 2
        1 frees 3 ->
        1 reads 1 -> 7 gets reply 4 at 13+4 to copy for 1
        1 discards 4 ->
        1 replies 4 for 1 -> reply 5 at 13+4 to copy for 1""",
    "a reply that stays in its slot need not be read": """
        reply=8 clients=1; 1 submits 1 ->
        1 replies 1 for 1 -> reply 1 at 13+1 for 1
        1 replies 1 for 1 -> reply 2 at 14+1 for 1
        1 replies 1 for 1 -> reply 3 at 15+1 for 1
        1 replies 1 for 1 -> reply 4 at 16+1 for 1
        1 reads 1 -> refused: that was not sent""",
    "no more replies are read than were sent": """
        clients=1; 1 submits 1 ->
        1 runs 1 ->
        1 replies 4 for 1 -> reply 1 at 13+4 to copy for 1
        1 reads 1 1 -> refused: that was not sent
        1 reads 1 2 -> refused: that was not sent
        1 reads 2 -> refused: that was not sent
        1 reads 18446744073709551615 -> refused: that was not sent
        1 reads 1 ->
        1 ends 1 -> told
        1 reads 1 1 ->""",
    "what a dead client had goes to those that wait": """
        clients=1; 2 is bare ->
        2 replies 2 -> reply 1 at 13+2
        2 replies 1 -> reply 2 at 15+1 to copy
        1 replies 2 as 7 -> waits
        2 disconnects ->
        2 dies -> 7 gets reply 3 at 13+2, 2 gone""",
    "a disconnect takes its waits with it, and passes the turn on": """
        clients=3; 3 replies 3 -> reply 1 at 13+3 to copy
        1 replies 2 as 7 -> waits
        2 replies 1 as 8 -> waits
        1 disconnects -> 8 gets reply 2 at 16+1 to copy""",
    "a disconnected client's replies stay until its death": """
        1 is bare ->
        1 replies 3 -> reply 1 at 13+3 to copy
        1 disconnects ->
        look -> 12 free, 1 for replies
        1 dies -> 1 gone
        look -> 12 free, 4 for replies""",
    "a reply that is being written outlives its dead client": """
        1 is bare ->
        1 writes 1 -> reply 1 at 13+1
        1 dies ->
        look -> 12 free, 3 for replies
        1 discards 1 -> 1 gone
        look -> 12 free, 4 for replies""",
    "a goodbye gives replies back but those that it names": """
        1 is bare ->
        1 replies 1 -> reply 1 at 13+1
        1 replies 2 -> reply 2 at 14+2 to copy
        1 leaves but replies 1 99 ->
        look -> 12 free, 3 for replies
        1 dies -> 1 gone
        look -> 12 free, 4 for replies""",
    "a goodbye grants nothing to its client": """
        1 is bare ->
        1 replies 3 -> reply 1 at 13+3 to copy
        1 replies 2 as 7 -> waits
        1 leaves -> 1 gone
        look -> 12 free, 4 for replies""",
    "a submission that is refused pins nothing": """
        kept=8; 1 connects 4 -> 1 gets 1 at 1+4
        1 keeps 1@1 as a -> 1 has a at 1+1
        1 submits 1 a a 2@5 -> refused: is not inside lease""",
    "pins are taken back as often as they are named": """
        kept=8; 1 connects 4 -> 1 gets 1 at 1+4
        1 keeps 1@1 as a -> 1 has a at 1+1
        1 finds a -> 1 has a at 1+1
        1 finds a -> 1 has a at 1+1
        1 finds a -> 1 has a at 1+1
        1 finds a -> 1 has none: pins
        1 unpins a a ->
        1 unpins a a a -> refused: which it does not have
        1 unpins a a ->
        1 submits 1 a -> refused: which it has not pinned""",
    "a goodbye takes pins with it, but those that it names": """
        kept=8; 1 connects 4 -> 1 gets 1 at 1+4
        1 keeps 1@1 as a -> 1 has a at 1+1
        1 keeps 2@2 as b -> 1 has b at 2+1
        1 leaves but pins 2 99 -> 1 reclaimed 2
        look -> 10 free, 2 kept, 1 pinned, 4 for replies
        1 dies -> 1 gone
        look -> 10 free, 2 kept, 4 for replies""",
    "who waits for the memory of content has it when its last pin goes": """
        leasable=4 kept=4; 1 connects 4 -> 1 gets 1 at 1+4
        1 keeps 1@1+2 as a -> 1 has a at 1+2
        2 connects 1 ->
        2 asks 3 -> 1 recalled 1
        1 returns 1 ->
        1 unpins a -> 2 gets 2 at 1+3
        look -> 1 free, 4 for replies""",
    "as much of the oldest content goes as new content needs": """
        kept=3 max_lease=12; 1 connects 8 -> 1 gets 1 at 1+8
        1 keeps 1@2 as a -> 1 has a at 2+1
        1 unpins a ->
        1 keeps 2@3 as b -> 1 has b at 3+1
        1 unpins b ->
        1 keeps 3@4 as c -> 1 has c at 4+1
        1 unpins c ->
        1 keeps 4@5+2 as d -> 1 has d at 5+2
        1 finds a -> 1 has none: absent
        1 finds b -> 1 has none: absent
        1 finds c -> 1 has c at 4+1
        look -> 6 free, 3 kept, 3 pinned, 4 for replies""",
    "content that was used last goes last": """
        kept=2 max_lease=12; 1 connects 8 -> 1 gets 1 at 1+8
        1 keeps 1@2 as a -> 1 has a at 2+1
        1 keeps 2@3 as b -> 1 has b at 3+1
        1 unpins b ->
        1 unpins a ->
        1 keeps 3@4 as c -> 1 has c at 4+1
        1 finds b -> 1 has none: absent
        1 finds a -> 1 has a at 2+1""",
    "content that begins where a window ends is in nobody's way": """
        leasable=6 kept=6; 1 connects 2 -> 1 gets 1 at 1+2
        2 connects 4 -> 2 gets 2 at 3+4
        2 keeps 1@3 as a -> 2 has a at 3+1
        2 submits 1 2@4+3 ->
        3 connects 1 ->
        3 asks 2 -> 1 recalled 1
        2 unpins a ->
        look -> 2 has 2 published, 1 kept, 4 for replies, 1 waiting""",
    "where as many are pinned as may be kept another one is not kept, but in the place of one that is not pinned": """
        leasable=8 kept=8 max_lease=8 max_kept=3; 1 connects 8 -> 1 gets 1 at 1+8
        1 keeps 1@1 as a -> 1 has a at 1+1
        1 keeps 2@2 as b -> 1 has b at 2+1
        1 keeps 3@3 as c -> 1 has c at 3+1
        1 keeps 4@4 as d -> 1 released 4, 1 has none: full
        1 unpins b ->
        1 keeps 5@5 as e -> 1 has e at 5+1
        1 finds b -> 1 has none: absent
        look -> 1 free, 3 kept, 3 pinned, 4 for replies""",
    "who waits for content has it when it is kept, and nobody else has": """
        kept=8 clients=3; 2 awaits a ->
        3 awaits b ->
        3 awaits a ->
        1 keeps 1@1 as a -> 1 has a at 1+1, 2 has a at 1+1, 3 has a at 1+1
        1 unpins a ->
        2 unpins a ->
        look -> 9 free, 1 kept, 1 pinned, 4 for replies
        3 unpins a ->
        look -> 9 free, 1 kept, 4 for replies
        3 stops a b -> 3 has none: absent""",
    "who waits for content that is there has it at once": """
        kept=8 clients=2; 1 keeps 1@1 as a -> 1 has a at 1+1
        2 awaits a -> 2 has a at 1+1""",
    "who stops waiting is answered, and gets nothing more": """
        kept=8 clients=2; 2 awaits a ->
        2 stops a -> 2 has none: absent
        2 stops a ->
        1 keeps 1@1 as a -> 1 has a at 1+1
        look -> 10 free, 1 kept, 1 pinned, 4 for replies""",
    "who stops waiting for what has just come has it": """
        kept=8 clients=2; 2 awaits a ->
        1 keeps 1@1 as a -> 1 has a at 1+1, 2 has a at 1+1
        2 stops a ->""",
    "content that came is there for who waited, though somebody wants its memory": """
        leasable=3 kept=3; 2 is bare ->
        1 connects 3 -> 1 gets 2 at 1+3
        2 awaits a ->
        1 keeps 1@1 as a -> 1 has a at 1+1, 2 has a at 1+1
        1 unpins a ->
        3 connects 1 ->
        3 asks 3 -> 1 recalled 2
        1 returns 2 ->
        look -> 2 free, 1 kept, 1 pinned, 4 for replies, 1 waiting
        2 unpins a -> 3 gets 3 at 1+3""",
    "who has gone waits for nothing": """
        kept=8 clients=4; 2 awaits a ->
        3 awaits a ->
        4 awaits a ->
        2 disconnects ->
        3 dies -> 3 reclaimed 1, 3 gone
        4 leaves -> 4 reclaimed 1, 4 gone
        1 keeps 1@1 as a -> 1 has a at 1+1
        look -> 10 free, 1 quarantined, 1 kept, 1 pinned, 4 for replies""",
    "content that is not kept wakes nobody": """
        kept=1 clients=2; 1 asks 2 -> 1 gets 3 at 3+2
        2 awaits a ->
        1 keeps 1@3+2 as a -> 1 released 1, 1 has none: large
        1 keeps 2@1 as a -> 1 has a at 1+1, 2 has a at 1+1""",
    "nobody waits for a key twice, or for more keys than may be": """
        kept=8 clients=2 max_waits=2; 2 awaits a ->
        2 awaits a -> refused: waits for content twice
        1 awaits a ->
        2 awaits b ->
        2 awaits c -> refused: waits for more than 2 keys
        2 stops a -> 2 has none: absent
        2 awaits c ->""",
    "who waits and has pinned as much as it may is told so": """
        kept=8 clients=2 max_pins=1; 1 keeps 1@1 as a -> 1 has a at 1+1
        2 finds a -> 2 has a at 1+1
        2 awaits b ->
        1 unpins a ->
        1 returns 1 ->
        1 asks 1 -> 1 gets 3 at 3+1
        1 keeps 2@3 as b -> 1 has b at 3+1, 2 has none: pins""",
    "a client pins so many blocks at most, and any of them any number of times": """
        kept=8 pinned=3; 1 connects 4 -> 1 gets 1 at 1+4
        2 connects 4 -> 2 gets 2 at 5+4
        1 keeps 1@1+2 as a -> 1 has a at 1+2
        2 keeps 1@5+2 as b -> 2 has b at 5+2
        1 finds b -> 1 has none: pins
        1 keeps 2@3+2 as c -> 1 released 2, 1 has none: pins
        1 finds a -> 1 has a at 1+2
        1 keeps 3@3 as d -> 1 has d at 3+1
        1 unpins a a ->
        1 finds b -> 1 has b at 5+2""",
    "content that no client may pin is too large, and the same of less is not": """
        kept=8 pinned=2; 1 connects 4 -> 1 gets 1 at 1+4
        1 keeps 1@1+3 as a -> 1 released 1, 1 has none: large
        1 keeps 2@1 as b -> 1 has b at 1+1
        1 keeps 3@2+2 as c -> 1 released 3, 1 has none: pins
        1 unpins b ->
        1 keeps 4@2+2 as c -> 1 has c at 2+2
        2 connects 1 -> 2 gets 2 at 5+1
        2 finds c -> 2 has c at 2+2""",
    "a book that drains keeps nothing more, and what it keeps can be found and awaited": """
        kept=8 clients=2; 1 keeps 1@1 as a -> 1 has a at 1+1
        2 awaits b ->
        1 asks 2 -> 1 gets 3 at 3+2
        the end comes ->
        1 keeps 2@3 as b -> 1 released 2, 1 has none: ends
        1 keeps 3@3 as a -> 1 released 3, 1 has none: ends
        2 finds a -> 2 has a at 1+1
        2 stops b -> 2 has none: absent
        look -> 8 free, 1 kept, 1 pinned, 4 for replies""",
    "a delivery goes to one taker, and is gone when that has left it": """
        kept=8 clients=3; 1 delivers 1@1 as a -> 1 has a at 1+1
        look -> 9 free, 1 kept, 1 pinned, 4 for replies
        1 unpins a -> refused: which it does not have
        2 finds a -> 2 has none: absent
        2 takes a -> 2 has a at 1+1
        3 takes a -> 3 has none: absent
        look -> 9 free, 1 kept, 1 pinned, 4 for replies
        2 submits 1 a ->
        2 unpins a ->
        look -> 2 has 0 published, 9 free, 1 kept, 1 pinned, 4 for replies
        2 aborts 1 -> 2 aborted 1
        look -> 10 free, 4 for replies""",
    "who waits first for a delivery has it, and the others wait on": """
        kept=8 clients=3; 2 expects a ->
        3 expects a ->
        3 awaits a ->
        2 expects a -> refused: waits for content twice
        1 delivers 1@1 as a -> 1 has a at 1+1, 2 has a at 1+1
        1 asks 1 -> 1 gets 4 at 4+1
        1 keeps 2@4 as a -> 1 has a at 4+1, 3 has a at 4+1
        2 takes a -> 2 has none: absent""",
    "the later of two deliveries stands, and the earlier one gives its memory back": """
        kept=8; 1 connects 4 -> 1 gets 1 at 1+4
        2 connects 1 -> 2 gets 2 at 5+1
        1 delivers 1@1 as a -> 1 has a at 1+1
        2 delivers 1@5 as a -> 2 has a at 5+1
        look -> 8 free, 1 kept, 1 pinned, 4 for replies
        1 takes a -> 1 has a at 5+1""",
    "deliveries give way to no content, and where there is no room another one is not kept": """
        kept=2; 1 connects 4 -> 1 gets 1 at 1+4
        1 delivers 1@1 as a -> 1 has a at 1+1
        1 delivers 2@2 as b -> 1 has b at 2+1
        1 delivers 3@3 as c -> 1 released 3, 1 has none: full
        1 keeps 4@3 as c -> 1 released 4, 1 has none: full
        1 delivers 5@3 as b -> 1 has b at 3+1
        1 delivers 6@4+3 as a -> refused: is not inside lease
        1 takes a -> 1 has a at 1+1""",
    "a delivery that is refused leaves the one of its name": """
        kept=3 pinned=3; 1 connects 4 -> 1 gets 1 at 1+4
        2 connects 4 -> 2 gets 2 at 5+4
        1 delivers 1@1 as a -> 1 has a at 1+1
        2 delivers 1@5+4 as a -> 2 released 1, 2 has none: large
        1 delivers 2@2+2 as b -> 1 has b at 2+2
        2 delivers 2@5 as c -> 2 released 2, 2 has none: full
        2 delivers 3@5+2 as a -> 2 released 3, 2 has none: full
        the end comes ->
        1 delivers 3@4 as a -> 1 released 3, 1 has none: ends
        2 takes a -> 2 has a at 1+1""",
    "a delivery has the room of the one that it replaces": """
        kept=4 max_kept=2; 1 connects 4 -> 1 gets 1 at 1+4
        1 delivers 1@1+2 as a -> 1 has a at 1+2
        1 delivers 2@3 as b -> 1 has b at 3+1
        1 delivers 3@4 as c -> 1 released 3, 1 has none: full
        1 delivers 4@4 as b -> 1 has b at 4+1
        2 connects 3 -> 2 gets 2 at 5+3
        2 delivers 1@5+3 as a -> 2 has a at 5+3
        1 takes b -> 1 has b at 4+1
        1 takes a -> 1 has a at 5+3""",
    "who has pinned as much as it may delivers, and leaves a delivery to the next": """
        kept=8 clients=3 max_pins=1; 1 keeps 1@1 as b -> 1 has b at 1+1
        2 finds b -> 2 has b at 1+1
        2 expects a ->
        3 expects a ->
        1 asks 1 -> 1 gets 4 at 4+1
        1 delivers 2@4 as a -> 1 has a at 4+1, 2 has none: pins, 3 has a at 4+1
        2 takes a -> 2 has none: absent""",
    "what nobody has taken counts for its sender, which delivers as much as it may pin": """
        kept=12 pinned=3 max_pins=2; 1 connects 4 -> 1 gets 1 at 1+4
        1 delivers 1@1+2 as a -> 1 has a at 1+2
        1 delivers 2@3+2 as b -> 1 released 2, 1 has none: pins
        1 delivers 3@3+2 as a -> 1 has a at 3+2
        2 connects 4 -> 2 gets 2 at 5+4
        2 delivers 1@5 as b -> 2 has b at 5+1
        2 delivers 2@6 as a -> 2 has a at 6+1
        2 delivers 3@8 as c -> 2 released 3, 2 has none: pins
        2 delivers 4@8 as b -> 2 has b at 8+1
        1 takes a -> 1 has a at 6+1
        2 recalls ->
        1 asks 4 -> 1 gets 3 at 1+4
        1 delivers 4@1+3 as d -> 1 has d at 1+3
        d ages ->
        look -> 9 free, 1 kept, 1 pinned, 4 for replies""",
    "what a client has delivered counts for what it may hold, until it is taken": """
        kept=8 quota=4; 1 connects 3 -> 1 gets 1 at 1+3
        2 connects 1 -> 2 gets 2 at 4+1
        1 delivers 1@1+2 as a -> 1 has a at 1+2
        1 asks 2 ->
        2 takes a -> 2 has a at 1+2, 1 gets 3 at 5+2
        1 delivers 2@5+2 as b -> 1 has b at 5+2
        1 asks 2 ->
        b ages -> 1 gets 4 at 5+2""",
    "a delivery that no client may pin is too large": """
        kept=8 pinned=2; 1 connects 4 -> 1 gets 1 at 1+4
        1 delivers 1@1+3 as a -> 1 released 1, 1 has none: large
        1 delivers 2@1+2 as a -> 1 has a at 1+2""",
    "a delivery outlives its sender, and goes when it is taken back or too old": """
        kept=8; 1 connects 4 -> 1 gets 1 at 1+4
        2 connects 1 -> 2 gets 2 at 5+1
        1 delivers 1@1 as a -> 1 has a at 1+1
        1 delivers 2@2 as b -> 1 has b at 2+1
        1 delivers 3@3 as c -> 1 has c at 3+1
        2 recalls a ->
        2 recalls ->
        1 recalls a a d ->
        look -> 8 free, 2 kept, 2 pinned, 4 for replies
        1 dies -> 1 reclaimed 1, 1 gone
        2 takes b -> 2 has b at 2+1
        c ages ->
        b ages ->
        look -> 10 free, 1 kept, 1 pinned, 4 for replies""",
    "without names, all that nobody has taken is taken back": """
        kept=8; 1 connects 4 -> 1 gets 1 at 1+4
        1 delivers 1@1 as a -> 1 has a at 1+1
        1 delivers 2@2 as b -> 1 has b at 2+1
        1 keeps 3@3 as c -> 1 has c at 3+1
        1 takes a -> 1 has a at 1+1
        1 recalls ->
        look -> 9 free, 2 kept, 2 pinned, 4 for replies""",
    "who waits for the memory of a delivery has it when that goes": """
        leasable=4 kept=4; 1 connects 4 -> 1 gets 1 at 1+4
        1 delivers 1@1+2 as a -> 1 has a at 1+2
        2 connects 1 ->
        2 asks 3 -> 1 recalled 1
        1 returns 1 ->
        1 recalls a -> 2 gets 2 at 1+3""",
    "who has gone is given no delivery": """
        kept=8 clients=3; 2 expects a ->
        3 expects a ->
        2 disconnects ->
        1 delivers 1@1 as a -> 1 has a at 1+1, 3 has a at 1+1
        3 dies -> 3 reclaimed 1, 3 gone
        look -> 11 free, 1 quarantined, 4 for replies""",
    "a book that drains takes no deliveries, and hands out what it has": """
        kept=8 clients=2; 1 delivers 1@1 as a -> 1 has a at 1+1
        1 asks 1 -> 1 gets 3 at 3+1
        the end comes ->
        1 delivers 2@3 as b -> 1 released 2, 1 has none: ends
        2 takes a -> 2 has a at 1+1""",
    "content before a window stays": """
        leasable=3 kept=3; 3 is bare ->
        2 connects 2 -> 2 gets 2 at 1+2
        2 keeps 1@1 as a -> 2 has a at 1+1
        2 unpins a ->
        3 asks 2 -> 2 recalled 2
        look -> 1 free, 1 kept, 4 for replies, 1 waiting
        2 returns 2 -> 3 gets 3 at 2+2
        look -> 1 kept, 4 for replies""",
    "content behind a window stays": """
        leasable=3 kept=3; 3 is bare ->
        2 connects 1 -> 2 gets 2 at 1+1
        1 connects 2 -> 1 gets 3 at 2+2
        2 returns 2 ->
        1 keeps 1@3 as a -> 1 has a at 3+1
        1 unpins a ->
        3 asks 2 -> 1 recalled 3
        look -> 1 free, 1 kept, 4 for replies, 1 waiting
        1 returns 3 -> 3 gets 4 at 1+2
        look -> 1 kept, 4 for replies""",
}


@for_each("story", STORIES.values(), ids=STORIES)
def test_stories(story: str) -> None:
    tell(story, EngineTeller)


def test_the_last_contents_that_have_gone_are_known_and_no_more() -> None:
    """Each makes room for the next one, and the last of them for a lease."""
    teller = EngineTeller("leasable=3 kept=1")
    teller.say("1 is bare")
    book, kept = teller.book, teller.book.kept
    for number in range(1, 71):
        [granted] = book.request_lease(1, LeaseRequest(number, BLOCK_NBYTES))
        lease_id, generation = granted.grant.lease_id, 1 << GENERATION_BITS | number
        slot = SlotRef(lease_id, granted.grant.offset, ONE_SLOT, generation)
        book.keep(1, keep_of(number, bytes([number]) * 32, slot))
        book.find(1, 1000 + number, bytes([number]) * 32)
        book.unpin(1, [generation] * 2)
        book.return_leases(1, [lease_id])
    assert (kept.evictions, kept.evictions_for_content) == (69, 69)
    book.request_lease(1, LeaseRequest(71, 3 * BLOCK_NBYTES))
    assert (kept.evictions, kept.evictions_for_content, kept.evicted_nbytes) == (70, 69, 70 * ONE_SLOT)
    assert [key[0] for key, _, _, _ in kept.dropped] == [*range(7, 71)]
    assert kept.dropped[-2:] == [(bytes([69]) * 32, ONE_SLOT, 1, True), (bytes([70]) * 32, ONE_SLOT, 1, False)]


def refuses(error: type[Exception], match: str, book: EngineBook, event: Callable[[], object]) -> None:
    """The event is refused with this reason, and the book is as it was."""
    before = plain(book)
    with pytest.raises(error, match=match):
        event()
    assert plain(book) == before


# -- geometry ----------------------------------------------------------------------------------------------------------------


def test_a_slab_is_a_header_leases_and_a_sixteenth_for_replies() -> None:
    geometry = Geometry.of(64 * BLOCK_NBYTES, None)
    assert (geometry.leasable_blocks, geometry.reply_blocks, geometry.reply_start) == (59, 4, 60)
    assert geometry.slab_nbytes == 64 * BLOCK_NBYTES


def test_the_reply_reserve_is_at_least_a_block_and_rounded_up() -> None:
    assert Geometry.of(4 * BLOCK_NBYTES, None).reply_blocks == 1
    assert Geometry.of(64 * BLOCK_NBYTES, 0).reply_blocks == 1
    assert Geometry.of(64 * BLOCK_NBYTES, BLOCK_NBYTES + 1).reply_blocks == 2


def test_what_is_less_than_a_block_at_the_end_is_left_out() -> None:
    assert Geometry.of(5 * BLOCK_NBYTES - 1, BLOCK_NBYTES).slab_nbytes == 4 * BLOCK_NBYTES


@for_each(("blocks", "reply_nbytes"), [(0, None), (2, None), (5, 4 * BLOCK_NBYTES), (5, 1 << 40)])
def test_a_slab_without_room_for_leases_is_refused(blocks: int, reply_nbytes: int | None) -> None:
    with pytest.raises(ValueError, match="make slab_nbytes at least"):
        Geometry.of(blocks * BLOCK_NBYTES, reply_nbytes)


def test_the_smallest_slab_has_one_block_of_each() -> None:
    assert Geometry.of(3 * BLOCK_NBYTES, None) == Geometry(leasable_blocks=1, reply_blocks=1)


def test_with_larger_pages_the_reply_reserve_begins_where_a_page_does() -> None:
    page_nbytes = 16 * BLOCK_NBYTES
    geometry = Geometry.of(1000 * BLOCK_NBYTES, 10 * BLOCK_NBYTES, page_nbytes=page_nbytes)
    assert (geometry.reply_start, geometry.reply_blocks, geometry.device_start) == (976, 24, 1000)
    assert Geometry.of(1000 * BLOCK_NBYTES, 24 * BLOCK_NBYTES, page_nbytes=page_nbytes) == geometry
    assert Geometry.of(17 * BLOCK_NBYTES, 0, page_nbytes=page_nbytes) == Geometry(leasable_blocks=15, reply_blocks=1)
    with pytest.raises(ValueError, match=f"make slab_nbytes at least {17 * BLOCK_NBYTES}"):
        Geometry.of(16 * BLOCK_NBYTES, 0, page_nbytes=page_nbytes)


def test_a_slot_needs_room_for_its_header() -> None:
    assert [blocks_for(nbytes) for nbytes in (0, 1, BLOCK_NBYTES, BLOCK_NBYTES + 1)] == [1, 1, 1, 2]
    assert [slot_blocks(nbytes) for nbytes in (0, ONE_SLOT, ONE_SLOT + 1, ONE_SLOT + BLOCK_NBYTES)] == [1, 1, 2, 2]


# -- forgeries, and what is our own mistake --------------------------------------------------------------------------------


def forge(**changes: Any) -> Callable[[SlotRef], SlotRef]:
    return lambda slot: SlotRef(**{name: getattr(slot, name) for name in slot.__struct_fields__} | changes)


FORGED_SLOTS = {
    "an old generation": (forge(generation=FIRST), "not a new one"),
    "the generation before the last": (forge(generation=SECOND), "not a new one"),
    "another client's generation": (forge(generation=2 << GENERATION_BITS | 9), "not a new one of client 1"),
    "generation 0": (forge(generation=0), "not a new one"),
    "a reply's generation": (forge(generation=3), "not a new one"),
    "a huge generation": (forge(generation=2**64 - 1), "not a new one"),
    "another client's lease": (forge(lease_id=2), "does not hold"),
    "no lease": (forge(lease_id=0), "has not pinned"),
    "a lease that was never granted": (forge(lease_id=2**62), "does not hold"),
    "an offset inside a block": (forge(offset=2 * BLOCK_NBYTES + 64), "not inside lease"),
    "the slab's header": (forge(offset=0), "not inside lease"),
    "another client's blocks": (forge(offset=5 * BLOCK_NBYTES), "not inside lease"),
    "the reply reserve": (forge(offset=13 * BLOCK_NBYTES), "not inside lease"),
    "far outside": (forge(offset=2**62), "not inside lease"),
    "a block beyond the lease's end": (forge(offset=4 * BLOCK_NBYTES, nbytes=ONE_SLOT + 1), "not inside lease"),
    "a huge slot": (forge(nbytes=2**62), "not inside lease"),
    "a live slot's block": (forge(offset=1 * BLOCK_NBYTES), "overlaps a live slot"),
    "a live slot's block at its end": (
        forge(offset=2 * BLOCK_NBYTES, nbytes=ONE_SLOT + 2 * BLOCK_NBYTES),
        "overlaps a live slot",
    ),
}


@pytest.mark.parametrize("kind", FORGED_SLOTS)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "behind a good slot"])
def test_a_forged_slot_is_refused_and_nothing_is_changed(kind: str, beside: bool) -> None:
    teller = EngineTeller("submitted")
    forgery, reason = FORGED_SLOTS[kind]
    good = [teller.slot(1, "3@2")] if beside else []
    bad = forgery(teller.slot(1, "4@3"))
    refuses(RemoteProtocolError, reason, teller.book, lambda: teller.book.submit(1, 6, [*good, bad]))
    teller.say("1 submits 6 3@2 4@3")


def test_a_client_id_is_never_used_twice() -> None:
    with pytest.raises(AssertionError, match="never reused"):
        EngineTeller("submitted").say("1 connects 1")


def test_a_disconnected_client_can_do_nothing_more() -> None:
    book = EngineTeller("submitted").book
    book.disconnect(1)
    for event in (
        lambda: book.disconnect(1),
        lambda: book.goodbye(1, (), ()),
        lambda: book.submit(1, 9, []),
        lambda: book.abort(1, 5),
        lambda: book.request_lease(1, LeaseRequest(1, 1)),
        lambda: book.return_leases(1, [1]),
        lambda: book.queue_reply(1, 1, 1),
    ):
        refuses(AssertionError, "disconnected already", book, event)


def test_a_reply_larger_than_the_reserve_can_never_fit() -> None:
    book = EngineTeller("submitted").book
    capacity = 4 * BLOCK_NBYTES - SLOT_HEADER_NBYTES
    refuses(CapacityError, "raise reply_nbytes", book, lambda: book.queue_reply(1, 1, capacity + 1))
    with pytest.raises(CapacityError) as caught:
        book.acquire_reply(1, capacity + 1)
    assert (caught.value.needed, caught.value.capacity) == (capacity + 1, capacity)
    assert book.acquire_reply(1, capacity) is not None


def test_a_client_holds_as_much_as_it_leaves_free_and_copies_half_of_that_out() -> None:
    """So it never has all, also if it is alone: another one may come."""
    teller = EngineTeller("reply=16")
    for client, stays, copied in ((1, 8, 4), (2, 2, 1), (3, 0, 1)):
        teller.say(f"{client} connects 1")
        said = [teller.say(f"{client} replies 1") for _ in range(stays + copied)]
        assert ["waits" in reply for reply in said] == [False] * (stays + copied)
        assert ["to copy" in reply for reply in said] == [False] * stays + [True] * copied
        assert client == 3 or teller.say(f"{client} replies 1") == "waits"


# -- check -------------------------------------------------------------------------------------------------------------------


def lose_a_block(book: EngineBook) -> None:
    book.host._free.allocate(1)


def lose_a_reply_block(book: EngineBook) -> None:
    book._replies.allocate(1)


def overlap_leases(book: EngineBook) -> None:
    book.clients[2].leases[2].start = 2


def leave_the_leasable_part(book: EngineBook) -> None:
    book.clients[2].leases[2].start = 12


def keep_a_request(book: EngineBook) -> None:
    book.clients[1].connected = False


def forget_a_quarantine(book: EngineBook) -> None:
    book.clients[2].leases[2].state = Lease.QUARANTINED


def forget_a_slot(book: EngineBook) -> None:
    slots = book.clients[1].slots
    (slots.pop if isinstance(slots, dict) else slots.take)(FIRST)


def move_a_slot(book: EngineBook) -> None:
    book.clients[1].slots[FIRST].start = 4


def move_a_slot_out(book: EngineBook) -> None:
    book.clients[1].slots[SECOND].start = 5


@for_each("kind", [COMPILED, MODELS], ids=["compiled", "model"])
@for_each(
    "damage",
    [
        lose_a_block,
        lose_a_reply_block,
        overlap_leases,
        leave_the_leasable_part,
        keep_a_request,
        forget_a_quarantine,
        forget_a_slot,
        move_a_slot,
        move_a_slot_out,
    ],
)
def test_check_finds_a_damaged_book(kind: Books, damage: Callable[[EngineBook], None]) -> None:
    book = EngineTeller("submitted", kind.engine).book
    book.check()
    damage(book)
    with pytest.raises(AssertionError):
        book.check()
