"""Variables of the environment whose names nobody reads: most of them are misspelt, and the option has its default value.

All commands have one environment (that of a container, of a unit of systemd), so a name is known if any command reads it. The
variables of plug-ins are theirs: each refuses names of its own that it does not know (:mod:`shmring.integrations.environment`).
Kubernetes makes further ones: for a service ``shmring``, it sets ``SHMRING_SERVICE_HOST`` and others in every container.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shmring.core.printable import printable
from shmring.service.far_engines import TOKEN_VARIABLE
from shmring.service.option_table import Option, advice_for

__all__ = ["known_variables", "unknown_variables"]

_PREFIX = "SHMRING_"
_OF_PLUG_INS = ("SHMRING_VLLM", "SHMRING_SGLANG")
_OF_SERVICES = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_MAX_LENGTH = 64  # of a name in a line


def known_variables() -> dict[str, str]:
    """Returns the variables of all commands: by the name of the option, without dashes before it."""
    from shmring.engine.options import ENGINE_OPTIONS
    from shmring.engine.store.__main__ import main as store
    from shmring.frontend.__main__ import main as frontend
    from shmring.frontend.callers.keys import ADMIN_KEYS_VARIABLE, KEYS_VARIABLE
    from shmring.frontend.commands.ray_options import DEPLOYMENT_OPTIONS
    from shmring.frontend.commands.serve import serve

    parameters = (*serve.params, *ENGINE_OPTIONS, *frontend.params, *store.params, *DEPLOYMENT_OPTIONS)
    options = (each for each in parameters if isinstance(each, Option))
    variables = {option.opts[0][2:]: option.envvar for option in options if isinstance(option.envvar, str)}
    return variables | {"api-key": KEYS_VARIABLE, "admin-key": ADMIN_KEYS_VARIABLE, "engine-token": TOKEN_VARIABLE}


def unknown_variables(environment: Mapping[str, str]) -> str:
    """Names the variables that no command reads, each with what it may be. Values are not shown: one may be a key.

    Returns:
        A text for :func:`~shmring.service.option_table.warn_of_variables`; empty: there are none.
    """
    names = [
        name
        for name, value in environment.items()
        if name.startswith(_PREFIX)
        and not name.startswith(_OF_PLUG_INS)
        and not value.startswith("tcp://")
        and not _OF_SERVICES.fullmatch(name)
    ]
    if not names:
        return ""  # most environments have none, and importing all commands takes a moment
    known = known_variables()
    unknown = sorted(set(names) - set(known.values()))
    return ", ".join(_described(name, known) for name in unknown)


def _described(name: str, known: Mapping[str, str]) -> str:
    advice = advice_for(name.removeprefix(_PREFIX).lower(), known, known.__getitem__)
    return printable(name[:_MAX_LENGTH]) + (f" ({advice})" if advice else "")
