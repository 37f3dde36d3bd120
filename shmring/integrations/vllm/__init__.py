"""vLLM's multimodal tensors through shmring, unpatched: ``pip install shmring`` beside vLLM, and ``SHMRING_VLLM=1``.

Theory of operation: vLLM loads the entry points of ``vllm.general_plugins`` in each of its processes and calls
:func:`register`, which wraps a few of its methods (:mod:`~shmring.integrations.vllm.wrapping`;
:mod:`~shmring.integrations.vllm.contract` says what is relied on). Which process it is in does not matter: an engine core
gets a ring when its input thread starts, an API server a client when its own client of the engine cores is made. Then a
request's large tensors are copied to the slab before vLLM encodes the request (:mod:`~shmring.integrations.vllm.frontend`),
its message carries references, and the engine core's input thread finds views of the slab for them
(:mod:`~shmring.integrations.vllm.engine`). Other tensors are sent as without the plug-in.

Nothing else is imported here: every process of every vLLM that has shmring beside it imports this file. See docs/vllm.md.
"""

import os

__all__ = ["register"]


def register() -> None:
    """For vLLM: switches the plug-in on in this process, if ``SHMRING_VLLM`` says so. A second call does nothing.

    Raises:
        SettingError: a variable of the environment has a value that can't be used.
    """
    if os.environ.get("SHMRING_VLLM", "") in ("", "0"):
        return
    from shmring.integrations.vllm.wrapping import switch_on

    switch_on()
