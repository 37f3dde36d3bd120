"""SGLang's multimodal tensors through shmring, unpatched: ``pip install shmring`` beside SGLang, and ``SHMRING_SGLANG=1``.

Theory of operation: SGLang loads the entry points of ``sglang.srt.plugins`` in its processes and calls :func:`register`. That
has SGLang's own ``HookRegistry`` replace the class ``ShmPointerMMData``, which makes a POSIX segment for each tensor
(:mod:`~shmring.integrations.sglang.hooking`; :mod:`~shmring.integrations.sglang.contract` says what is relied on). Each
scheduler has a ring (:mod:`~shmring.integrations.sglang.scheduler`). A tokenizer puts a tensor into its slab
(:mod:`~shmring.integrations.sglang.tokenizer`), SGLang's message names it, and decoding the message takes it
(:mod:`~shmring.integrations.sglang.pointer`). Other tensors are sent in SGLang's message, and no segment is made.

Nothing else is imported here: every process of every SGLang that has shmring beside it imports this file. See docs/sglang.md.
"""

import os

__all__ = ["register"]


def register() -> None:
    """For SGLang: switches the plug-in on in this process, if ``SHMRING_SGLANG`` says so. A second call does nothing.

    Raises:
        SystemExit: a variable of the environment has a value that can't be used. (SGLang would go on after an exception.)
    """
    if os.environ.get("SHMRING_SGLANG", "") in ("", "0"):
        return
    from shmring.integrations.sglang.hooking import switch_on

    switch_on()
