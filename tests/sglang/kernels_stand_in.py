"""Stands in for ``sgl_kernel``, SGLang's compiled kernels, whose wheels need CUDA. ``install.py`` puts it in their place.

SGLang imports them wherever it runs. On a CPU without AMX, with the attention of torch, it calls none. So here every name can
be imported, by SGLang's own stand-in for Apple's processors, and nothing can be called.
"""

import importlib.util
import pathlib
import sys
import types

import torch

OTHERS = {"fused_linear_sigmoid_mul"}  # those for CPUs that are not called so


class Operators(types.SimpleNamespace):
    """``torch.ops.sgl_kernel``: the kernels for CPUs can be asked for, and none of them works."""

    def __getattr__(self, name):
        if not name.endswith("_cpu") and name not in OTHERS:
            raise AttributeError(name)

        def absent(*arguments, **named):
            raise NotImplementedError(f"{name} is a kernel of SGLang's, and these need CUDA or AMX")

        return absent


file = pathlib.Path(__file__).parent.parent / "sglang" / "_platform_stubs.py"
specification = importlib.util.spec_from_file_location("_sglang_platform_stubs", file)
stand_ins = importlib.util.module_from_spec(specification)
sys.modules[specification.name] = stand_ins
specification.loader.exec_module(stand_ins)
torch.ops.sgl_kernel = Operators()
sys.modules[__name__] = stand_ins._MockModule(__name__)
