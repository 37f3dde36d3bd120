"""``python -m tests.fingerprints``: the tables of docs/fingerprints.md."""

from tests.fingerprints.scoring import fingerprints_command

if __name__ == "__main__":
    fingerprints_command(prog_name="python -m tests.fingerprints")
