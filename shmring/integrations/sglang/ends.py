"""The ends of rings that a process of SGLang has: which, the process finds out when it is needed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shmring.integrations.sglang.settings import Settings

if TYPE_CHECKING:
    from shmring.integrations.sglang.scheduler import Owner, Sharer
    from shmring.integrations.sglang.tokenizer import Sender

__all__ = ["Ends"]


@dataclasses.dataclass
class Ends:
    """One of them, or none.

    Attributes:
        settings: of the plug-in.
        sender: of the tokenizer whose request is being encoded: a process has one for each ``Engine`` that it has made.
        owner: of the rank that receives a scheduler's messages.
        sharer: of the ranks that this one sends them on to.
    """

    settings: Settings
    sender: Sender | None = None
    owner: Owner | None = None
    sharer: Sharer | None = None
