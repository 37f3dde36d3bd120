"""``shmring demo``: tensors between two processes; then pictures, recordings and clips through HTTP, slab and engine.

First, the transport alone (:mod:`.transport`): beside a socket, and when a process is killed. Then, a large picture is sent
again, which costs neither decoding nor a copy: the engine has kept it, and any frontend finds it. Altered copies of media find
their originals by their embeddings. At last, an answer about a picture, a recording and a clip, streamed by the synthetic
executor. Everything is what a user would run: ``shmring serve`` with two frontends as a process of its own, and the official
``openai`` client. The tables show measured values: the similarity comes from the embeddings, bytes and copies from the
frontends' counters before and after each request, and the milliseconds from the clock of this process. They include encoding
and decoding of HTTP.

The demonstration fails, with exit code 1, unless every altered copy finds its original first, no tensor was copied, what was
sent again was not decoded again, the slab is empty at the end, and nothing is left: no process, nothing in ``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence

import uvloop
from rich.console import Console
from rich.table import Table

from shmring.frontend.commands.serve_process import ServerProcess
from shmring.frontend.demo.client import COPIES, DECODED, IN_PLACE, IN_USE, SLAB_BYTES, Answer, Client
from shmring.frontend.demo.media import Kind, Sample, clips, large_picture, pictures, recordings
from shmring.frontend.demo.transport import show_transport

__all__ = ["run_demo"]

_TITLES: dict[Kind, str] = {"picture": "Pictures", "recording": "Recordings", "video": "Clips"}
_ANSWER_TOKENS = 24
_STEP_S = 0.04  # of the synthetic executor, so that a person can see the answer stream


def run_demo() -> int:
    """Runs the demonstration.

    Returns:
        The exit code: 0 if there was no problem.
    """
    import openai  # which takes a second

    console = Console(width=None if sys.stdout.isatty() else 132)
    try:
        problems = uvloop.run(show_transport(console)) + _embed_all(console) + _chat(console)
    except (RuntimeError, openai.OpenAIError) as error:
        problems = [str(error)]
    for problem in problems:
        console.print(f"[bold red]FAILED[/] {problem}", highlight=False)
    if not problems:
        console.print("Everything was stopped; nothing is left in /dev/shm, and no process survives.")
    return 1 if problems else 0


def _arguments(*more: str) -> list[str]:
    return ["--port=0", "--api-server-count=2", f"--name=demo-{os.getpid()}", "--slab-nbytes=128MiB", *more]


@contextlib.contextmanager
def _serving(console: Console, arguments: list[str]) -> Iterator[tuple[ServerProcess, Client]]:
    """Runs a server, and says so."""
    console.print(f"Starting an engine and two frontends: [bold]shmring serve {shlex.join(arguments)}[/]", highlight=False)
    with ServerProcess.start(arguments) as server:
        server.wait_until_ready()  # its own limit, and it says itself what it is waiting for
        client = Client(server.url)
        console.print(f"Serving {client.model} on {server.url}\n", highlight=False)
        yield server, client


def _left_behind(server: ServerProcess) -> list[str]:
    """Returns a line for each process and each segment that a server left behind."""
    code = server.process.returncode
    problems = [f"the server ended with exit code {code}"] if code else []
    problems += [f"process {pid} did not end by itself" for pid in server.killed]
    mine = f"shmring-{os.getuid()}-demo-{os.getpid()}-"
    return problems + [f"/dev/shm/{name} is left" for name in os.listdir("/dev/shm") if name.startswith(mine)]


# -- embeddings -----------------------------------------------------------------------------------------------------------


def _embed_all(console: Console) -> list[str]:
    problems: list[str] = []
    with _serving(console, _arguments("--executor=fingerprints")) as (server, client):
        problems += _ask_again(console, client)
        for families in (pictures(), recordings(), clips()):
            table, wrong = _find_originals(client, list(families))
            console.print(table)
            problems += wrong
        problems += _account(console, client)
    return problems + _left_behind(server)


def _ask_again(console: Console, client: Client) -> list[str]:
    """Sends a large picture again and again: the first time it is decoded, and kept. Returns a list of problems."""
    sample = large_picture()
    table = Table(title="The same picture again: it is neither decoded nor copied")
    for heading in (sample.alteration, "size", "bytes in", "decoded", "copies", "ms"):
        table.add_column(heading, justify="left" if heading == sample.alteration else "right", no_wrap=True)
    problems = []
    for turn in ("new", "again", "again"):
        before = client.counters()[DECODED]
        answer = client.embed(sample)
        decoded = int(client.counters()[DECODED] - before)
        sizes = (sample.size, f"{len(sample.file):,}")
        table.add_row(turn, *sizes, str(decoded), str(answer.copies), f"{answer.milliseconds:.1f}")
        if answer.copies or decoded != (turn == "new"):
            problems.append(f"a picture that is {turn}: {decoded} decoded, {answer.copies} copies")
    console.print(table)
    return problems


def _find_originals(client: Client, families: Sequence[list[Sample]]) -> tuple[Table, list[str]]:
    """Embeds originals and copies of one kind of medium.

    Returns:
        A table of the nearest originals, and a list of problems.
    """
    originals = {family[0].name: client.embed(family[0]) for family in families}
    table, problems = _table(families[0][0].kind), []
    for original, *copies in families:
        _add_row(table, original, originals[original.name], *_nearest(originals[original.name], originals, but=original.name))
        for sample in copies:
            answer = client.embed(sample)
            nearest, similarity = _nearest(answer, originals)
            _add_row(table, sample, answer, nearest, similarity)
            if nearest != sample.name:
                problems.append(f"{sample.name}, {sample.alteration}: its nearest neighbour is {nearest}")
            if answer.copies or not answer.slab_nbytes:
                problems.append(
                    f"{sample.name}, {sample.alteration}: {answer.copies} copies, {answer.slab_nbytes} bytes through the slab"
                )
        table.add_section()
    return table, problems


def _nearest(answer: Answer, originals: dict[str, Answer], but: str | None = None) -> tuple[str, float]:
    similarities = {name: float(answer.embedding @ other.embedding) for name, other in originals.items() if name != but}
    name = max(similarities, key=lambda candidate: similarities[candidate])
    return name, similarities[name]


def _table(kind: Kind) -> Table:
    table = Table(
        title=f"{_TITLES[kind]}: altered copies find their originals", caption="similarity is the cosine of two embeddings"
    )
    for heading in (kind, "alteration"):
        table.add_column(heading, no_wrap=True)
    for heading in ("size", "bytes in", "bytes in the slab", "copies"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("nearest original", no_wrap=True)
    table.add_column("similarity", justify="right")
    table.add_column("ms", justify="right")
    return table


def _add_row(table: Table, sample: Sample, answer: Answer, nearest: str, similarity: float) -> None:
    if not sample.alteration:
        shown = f"[dim]other:[/] {nearest}"
    else:
        shown = f"{'[green]✓[/]' if nearest == sample.name else '[bold red]✗[/]'} {nearest}"
    table.add_row(
        sample.name,
        sample.alteration or "original",
        sample.size,
        f"{len(sample.file):,}",
        f"{answer.slab_nbytes:,}",
        str(answer.copies),
        shown,
        f"{similarity:.3f}",
        f"{answer.milliseconds:.1f}",
    )


def _account(console: Console, client: Client) -> list[str]:
    """Prints how many bytes crossed, and returns a list of problems."""
    counters = client.settled()
    console.print(
        f"{counters[SLAB_BYTES]:,.0f} bytes crossed through the slab, in {counters[IN_PLACE]:.0f} "
        f"tensors that lay there when they were sent; {counters[COPIES]:.0f} were copied for sending.\n",
        highlight=False,
    )
    return [f"{name} is {counters[name]:g} at the end, not 0" for name in (*IN_USE, COPIES) if counters[name]]


# -- a streamed answer ------------------------------------------------------------------------------------------------------


def _chat(console: Console) -> list[str]:
    arguments = _arguments("--executor=synthetic", f'--executor-options={{"step_s": {_STEP_S}}}')
    with _serving(console, arguments) as (server, client):
        samples = [next(family)[0] for family in (pictures(), recordings(), clips())]
        console.print("A question about a picture, a recording and a clip; its answer streams (made up, no model is loaded):")
        chat = client.chat(
            "What do these have in common?", samples, _ANSWER_TOKENS, lambda piece: console.print(piece, end="", markup=False)
        )
        console.print(
            f"\n{chat.slab_nbytes:,} bytes crossed through the slab, {chat.copies} copies; first token after "
            f"{chat.first_token_ms:.0f} ms, {chat.completion_tokens} tokens after {chat.total_ms:.0f} ms.\n",
            highlight=False,
        )
        problems = [] if chat.completion_tokens == _ANSWER_TOKENS else [f"the answer has {chat.completion_tokens} tokens"]
        if chat.copies or not chat.slab_nbytes:
            problems.append(f"the chat: {chat.copies} copies, {chat.slab_nbytes} bytes through the slab")
        problems += [f"{name} is {value:g} at the end, not 0" for name in IN_USE if (value := client.settled()[name])]
    return problems + _left_behind(server)
