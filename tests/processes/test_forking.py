"""A program that forks, as who starts it sees it: messages with descriptors, its death, another start, its end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shmring.processes.forking import ForkingProgram

# It forks nothing: it writes what comes, and its second argument, to the descriptor that comes with it.
PROGRAM = """
import os, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, fds, _, _ = socket.recv_fds(control, 100, 1)
    if not message:
        break
    os.write(fds[0], message + sys.argv[2].encode())
    os.close(fds[0])
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "forks.py").write_text(PROGRAM)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def answer(program: ForkingProgram) -> bytes:
    ours, theirs = os.pipe()
    try:
        program.send(b"ask", theirs)
    finally:
        os.close(theirs)
    with open(ours, "rb") as pipe:
        return pipe.read()


def test_it_gets_messages_and_can_be_started_again(environment: dict[str, str]) -> None:
    program = ForkingProgram("forks")
    assert not program.lives
    program.start("!", environment=environment)
    first = program.process
    assert first is not None
    assert answer(program) == b"ask!"
    assert program.lives
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not program.lives
    with pytest.raises(ConnectionError):
        answer(program)
    program.start("?", environment=environment)
    second = program.process
    assert second is not None
    assert answer(program) == b"ask?"
    program.start(".", environment=environment)
    assert not Path(f"/proc/{second.pid}").exists(), "there is one at a time"
    assert answer(program) == b"ask."
    third = program.process
    assert third is not None
    for _ in range(2):
        program.close()
        assert (program.lives, program.process) == (False, None)
    assert not Path(f"/proc/{third.pid}").exists()
