"""A process goes on, and ends, whoever reads its log, and whether it can be written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

LIMIT_S = 60.0  # that only a hang reaches
CONFIGURED = """if True:
    import logging, os, signal, sys
    from shmring.service.logs import configure_logging, finish_logging, dropped_lines
    configure_logging("info", "engine")
    def answer(text):
        os.write(int(sys.argv[1]), f"{text}\\n".encode())
"""
MANY = """
    for number in range(40_000):
        logging.getLogger("any").error("line %d %s", number, 80 * "x")
    print("a line of the program", file=sys.stderr)
    print("a line of the program")
    answer(dropped_lines())
"""


class Program:
    """A program that says on a pipe of its own how it goes."""

    def __init__(self, process: subprocess.Popen[bytes], said: IO[str]) -> None:
        self.process = process
        self._said = said

    def said(self) -> str:
        """Returns its next line, or nothing if it has ended; fails if neither comes."""
        assert select.select([self._said], [], [], LIMIT_S)[0], "it stands still"
        return self._said.readline().strip()

    def tell(self) -> None:
        """Lets it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def running(text: str, stderr: int, stdout: int | None = None) -> Iterator[Program]:
    reading, writing = os.pipe()
    with os.fdopen(reading) as said:
        process = subprocess.Popen(
            [sys.executable, "-c", CONFIGURED + text, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if stdout is None else stdout,
            stderr=stderr,
            pass_fds=[writing],
        )
        os.close(writing)
        try:
            yield Program(process, said)
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def read_to_the_end(fd: int) -> list[str]:
    with os.fdopen(fd) as lines:
        return lines.read().splitlines()


def test_a_log_that_nobody_reads_stops_neither_the_program_nor_its_end(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    with running(MANY + "    raise SystemExit('the last message')", writing, writing) as program:
        assert int(program.said()) > 10_000
        assert program.process.wait(LIMIT_S) == 1


@pytest.mark.parametrize("end", ["finish_logging(); os._exit(3)", "raise ValueError(3)", "sys.exit(3)"])
def test_what_was_written_last_comes_out_however_a_program_ends(end: str, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    text = f"""
    for number in range(3):
        logging.getLogger("any").warning("number %d", number)
    print("the end", file=sys.stderr)
    {end}
    """
    with running(text, writing) as program:
        assert program.process.wait(LIMIT_S) in (1, 3)
        os.close(writing)
        lines = read_to_the_end(reading)
    assert lines[0].endswith("number 0")
    assert lines[1] == "the end"
    assert any("number 2 (2 more of this kind" in line for line in lines)
    assert ("ValueError: 3" in lines) is ("ValueError" in end)


def test_dropped_lines_are_told_as_soon_as_somebody_reads_again(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    text = """
    sys.stdin.readline()
    while not sys.stderr.finish(1):
        pass
    logging.getLogger("any").error("the last")
    """
    with running(MANY + text, writing) as program:
        dropped = int(program.said())
        os.close(writing)
        program.tell()
        lines = read_to_the_end(reading)
    written = [line for line in lines if " ERROR engine: line " in line]
    assert len(written) + lines.count("a line of the program") + dropped == 40_001
    assert [line.split()[5] for line in written] == [str(number) for number in range(len(written))], (
        "none is cut, or out of order"
    )
    told = [line for line in lines if "lines of this log were dropped since the process began" in line]
    assert len(told) == 1
    assert told[0].endswith(f"{dropped} lines of this log were dropped since the process began: nobody reads them")
    assert lines.index(told[0]) >= len(written)
    assert lines[-1].endswith("the last")


def test_a_full_disk_stops_nothing_and_is_counted() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with running(MANY + "    finish_logging()\n    answer(dropped_lines())\n    sys.exit(3)", full, full) as program:
            program.said()
            assert int(program.said()) >= 40_002
            assert program.process.wait(LIMIT_S) == 3
    finally:
        os.close(full)


def test_stacks_are_not_waited_for_where_nobody_reads(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    with running(MANY + "    sys.stdin.readline()\n    answer('it goes on')\n    sys.stdin.readline()", writing) as program:
        program.said()
        program.process.send_signal(signal.SIGUSR1)
        program.tell()
        assert program.said() == "it goes on"


def test_a_pipe_that_does_not_wait_is_waited_for(pipe: tuple[int, int]) -> None:
    """Another program that has it as well may have made it so."""
    reading, writing = pipe
    fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
    few = "\n    for number in range(4000):\n        print(100 * 'x', file=sys.stderr)\n    answer(dropped_lines())"
    with running(few, writing) as program:
        assert program.said() == "0"
        os.close(writing)
        lines = read_to_the_end(reading)
    assert lines == [100 * "x"] * 4000


def test_a_forked_child_writes_its_own_lines_and_none_of_its_parent(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    text = """
    print("parent", file=sys.stderr)
    if not os.fork():
        print("child", file=sys.stderr)
        sys.stderr.flush()
        os._exit(0)
    os.wait()
    """
    with running(text, writing) as program:
        program.process.wait(LIMIT_S)
        os.close(writing)
        assert sorted(read_to_the_end(reading)) == ["child", "parent"]


def test_lines_of_several_programs_are_not_mixed(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    text = "\n    for number in range(3000):\n        print(300 * sys.argv[1][-1], file=sys.stderr)"
    with running(text, writing), running(text, writing), running(text, writing):
        os.close(writing)
        lines = read_to_the_end(reading)
    assert len(lines) == 9000
    assert {(len(line), len(set(line))) for line in lines} == {(300, 1)}


def test_a_program_without_standard_error_writes_its_log_to_no_other_file() -> None:
    text = """
    import subprocess
    program = '''if True:
        import logging, os
        from shmring.service.logs import configure_logging, finish_logging
        configure_logging("info", "engine")
        pipe = os.pipe()
        logging.getLogger("any").error("a line")
        finish_logging()
        os.set_blocking(pipe[0], False)
        try:
            os.read(pipe[0], 100)
            os._exit(4)
        except BlockingIOError:
            os._exit(0)
    '''
    answer(subprocess.call(["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", program]))
    """
    with running(text, subprocess.DEVNULL) as program:
        assert program.said() == "0"
