"""``python -m tests.chaos``; ``make chaos`` runs it."""

from tests.chaos.command import chaos_command

if __name__ == "__main__":
    chaos_command(prog_name="python -m tests.chaos")
