"""The sessions of clients, for tests that look at what no public name shows."""

from __future__ import annotations

from typing import Any

from shmring.client.attachment import Attachment
from shmring.client.session import Session


def attachment_of(client: Any, engine: str | None = None) -> Attachment:
    """Returns a client's attachment to an engine: to that one, or to the only one."""
    attachment: Attachment = client._engines.attachments[engine or client.names[0]]
    return attachment


def session_of(client: Any, engine: str | None = None) -> Session:
    """Returns a client's session with an engine that is attached: with that one, or with the only one."""
    session = attachment_of(client, engine).session
    assert session is not None
    return session


def let_die(ring: Any) -> None:
    """Tells an engine that the processes of its frontends have died, where this one lives on: it takes their memory back."""
    for frontend in list(ring._shell._frontends.values()):
        frontend.died()
