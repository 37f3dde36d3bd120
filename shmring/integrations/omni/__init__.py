"""What vLLM-Omni's stages pass to each other, through a store: ``pip install shmring`` beside vLLM-Omni, and the connector
``ShmringOmniConnector`` in its YAML.

Theory of operation: vLLM-Omni makes its connectors by name, with a factory at which others can be registered. It and vLLM load
the entry points of plug-ins in each of their processes, and call :func:`register`. What is registered is a function: the
connector is imported when one is made (:mod:`~shmring.integrations.omni.connector`). It has a client of a store
(:mod:`~shmring.integrations.omni.exchange`), and writes what a stage passes on into the store's memory as one frame
(:mod:`~shmring.integrations.omni.frames`). :mod:`~shmring.integrations.omni.contract` says what is relied on.

Nothing else is imported here: every process of every vLLM that has shmring beside it imports this file. See docs/stages.md.
"""

import sys
from typing import Any

__all__ = ["CONNECTOR", "register"]

#: What the connector is called in vLLM-Omni's YAML.
CONNECTOR = "ShmringOmniConnector"


def register() -> None:
    """For vLLM-Omni: makes the connector known to its factory in this process. A second call does nothing.

    In a process of vLLM alone, which calls this as well, nothing happens and nothing is imported.
    """
    if "vllm_omni" not in sys.modules:
        return
    from shmring.integrations.omni.settings import name_this_run

    try:
        from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    except ImportError:
        return  # this vLLM-Omni has no such factory, and says that it knows no such connector if its YAML names it
    name_this_run()
    if CONNECTOR not in OmniConnectorFactory.list_registered_connectors():
        OmniConnectorFactory.register_connector(CONNECTOR, _make)


def _make(extra: dict[str, Any]) -> Any:
    """Makes a connector from what the YAML says of it."""
    from shmring.integrations.omni.connector import ShmringOmniConnector

    return ShmringOmniConnector(extra)
