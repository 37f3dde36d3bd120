"""What the command ``shmring`` does (:mod:`shmring.frontend.cli`), and ``shmring serve`` as a process."""
