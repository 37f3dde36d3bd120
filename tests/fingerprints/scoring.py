"""``python -m tests.fingerprints``: the tables of docs/fingerprints.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import click

from bench.command_line import SETTINGS
from tests.fingerprints.clips import score_clips
from tests.fingerprints.pictures import score_pictures
from tests.fingerprints.scores import Kind
from tests.fingerprints.sounds import score_sounds
from tests.fingerprints.texts import score_texts


@click.command("fingerprints", context_settings=SETTINGS)
def fingerprints_command() -> None:
    """What the fingerprints executor finds and what not, as Markdown: altered copies of the sample media and their scores."""
    for kind in measure():
        click.echo(f"{kind.markdown()}\n")


def measure() -> Iterator[Kind]:
    """Measures one kind of thing after the other."""
    return itertools.chain(score_pictures(), score_sounds(), score_clips(), score_texts())
