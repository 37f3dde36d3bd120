"""Checks of executors' answers, before a caller gets them.

An executor is a plug-in, and its answers are not trusted to be what :mod:`shmring.engine.executors.interface` asks for: a wrong
one fails its own request, with a text that tells the executor's author what is wrong.
"""

from __future__ import annotations

import msgspec
import torch

from shmring.engine.executors.interface import StepOutput
from shmring.engine.protocol import EncodeReply, EncodeRequest, EngineRequestPayload, GenerateReply, GenerateRequest

__all__ = ["checked", "without_frames"]


def checked(output: object, payload: EngineRequestPayload | None) -> StepOutput | Exception:
    """An executor's answer for one request, or the error that says what is wrong with it.

    Args:
        payload: of the request, in its first step.
    """
    if isinstance(output, Exception):
        return without_frames(output)
    if not isinstance(output, StepOutput):
        return TypeError(f"the executor answered {type(output).__name__} where StepOutput or an exception is expected")
    if output.others and not all(isinstance(reply, GenerateReply) for reply in (output.reply, *output.others)):
        return TypeError("the executor has other replies beside none, or beside embeddings")
    reply = output.reply
    if reply is None:
        return output
    if isinstance(reply, GenerateReply) and not isinstance(payload, EncodeRequest):
        if isinstance(reply.text, str) and isinstance(reply.token_ids, list):
            return output
        return TypeError("the executor replied without text or token_ids")
    if isinstance(reply, EncodeReply) and not isinstance(payload, GenerateRequest):
        return _checked_embeddings(output, reply)
    return TypeError(f"the executor replied {type(reply).__name__} to {type(payload).__name__}")


def _checked_embeddings(output: StepOutput, reply: EncodeReply) -> StepOutput | Exception:
    """Embeddings as the protocol has them: float32 of shape (inputs, size), each of them a number. A reply may be a part."""
    embeddings = reply.embeddings
    if not isinstance(embeddings, torch.Tensor) or not embeddings.is_floating_point():
        kind = embeddings.dtype if isinstance(embeddings, torch.Tensor) else type(embeddings).__name__
        return TypeError(f"the executor's embeddings are {kind}, where a floating point tensor is expected")
    if embeddings.ndim != 2:
        return RuntimeError(f"the executor's embeddings have shape {tuple(embeddings.shape)}, where (inputs, size) is expected")
    if not bool(torch.isfinite(embeddings).all()):
        return RuntimeError("the executor's embeddings are not all finite numbers")
    if not isinstance(reply.prompt_tokens, int) or reply.prompt_tokens < 0:
        return RuntimeError(f"the executor counted {reply.prompt_tokens} prompt tokens")
    if embeddings.dtype is torch.float32:
        return output
    return msgspec.structs.replace(output, reply=EncodeReply(embeddings.float(), reply.prompt_tokens))


def without_frames(error: Exception) -> Exception:
    """An error that keeps nothing alive: the frames of its traceback hold the views of a request's slots."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
