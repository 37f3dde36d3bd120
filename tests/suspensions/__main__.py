"""``python -m tests.suspensions``."""

from tests.suspensions.command import suspensions_command

if __name__ == "__main__":
    suspensions_command()
