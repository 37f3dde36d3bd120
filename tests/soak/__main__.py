"""``python -m tests.soak``; ``make soak`` runs it."""

from tests.soak.command import soak_command

if __name__ == "__main__":
    soak_command(prog_name="python -m tests.soak")
