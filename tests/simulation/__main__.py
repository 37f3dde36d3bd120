"""``python -m tests.simulation``; ``make simulate`` runs it."""

from tests.simulation.command import simulate_command

if __name__ == "__main__":
    simulate_command(prog_name="python -m tests.simulation")
