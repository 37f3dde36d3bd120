"""Python runs this first where ``PYTHONPATH`` names its directory: the plug-in in the engine core loses tensors on demand.

While the file that ``LOSE_WHILE`` names exists, each tensor that is taken is thrown away, and not found.
"""

import importlib.abc
import importlib.util
import os
import sys


class Sabotage(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "shmring.integrations.vllm.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            take = module.Receiver._take

            def lose(self, key):
                claim = take(self, key)
                if os.path.exists(os.environ["LOSE_WHILE"]):
                    claim.done()
                    raise TimeoutError("a test has lost it")
                return claim

            module.Receiver._take = lose

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Sabotage())
