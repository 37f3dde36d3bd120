"""An answer of the executor ``transformers`` that is being written: from its tokens to what its caller is sent."""

from __future__ import annotations

import torch

from shmring.engine.executors.checkpoint import Checkpoint
from shmring.engine.executors.detokenizer import Detokenizer, TokenBytes
from shmring.engine.executors.generation import Context
from shmring.engine.executors.grammars import Grammar
from shmring.engine.executors.sampling import Choice, Sampler, longest_answer
from shmring.engine.executors.stopping import StopTexts
from shmring.engine.executors.tool_calls import Parts, ResponseReader, read
from shmring.engine.protocol import FinishReason, GenerateReply, GenerateRequest, TokenLogprobs

__all__ = ["Answer"]

_DESCRIBED = 64  # tokens with logprobs that wait for their text: a call of a tool may be long, and a message has a bound


class Answer:
    """An answer that is being written.

    Args:
        request_id, request: whose it is; how it is to be written is checked here.
        index: which of the request's answers it is.
        prompt: its tokens, shape (tokens,).
        checkpoint: the model.
        contents: of its tokens.
        reader: tells tool calls from text; None: all of it is text.
        grammar: what it may be, or what each call in it may be behind its opening mark, if the reader looks for these; None:
            anything.

    Raises:
        ValueError: the sampling parameters make no sense.
        ContextLengthError: the model has no room for the answer.

    Attributes:
        request_id, index: as given.
        context: what the model knows of it; set when its prompt is ready.
        logits: of its next token, while it waits: for its grammar, or for room.
        sampler: chooses its tokens.
        grammar: what says which tokens may be next, if anything does.
        twins: the answers behind it, until they are begun: the prompt is read once for all of them.
        owner: of the request.
        repeatable: whether it must be the same again, bit for bit.
        turn: its last one, where not all answers are read in a step.
        choosing_s: what its last token took to choose.
        prompt_tokens: how many its prompt has.
    """

    context: Context

    def __init__(
        self,
        request_id: int,
        request: GenerateRequest,
        index: int,
        prompt: torch.Tensor,
        checkpoint: Checkpoint,
        contents: TokenBytes,
        reader: ResponseReader | None,
        grammar: Grammar | None,
    ) -> None:
        sampling = request.sampling
        self.repeatable = sampling.seed is not None
        self.request_id = request_id
        self.owner = request.owner
        self.turn = 0
        self.choosing_s = 0.0
        self.twins: list[Answer] = []
        self.index = index
        self._ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ends |= checkpoint.eos_token_ids
        self.sampler = Sampler(sampling, prompt, self._ends, index)
        self._of_calls = grammar if reader is not None and reader.opening else None
        self.grammar = None if self._of_calls is not None else grammar
        self._min_tokens = sampling.min_tokens
        self.logits: torch.Tensor | None = None
        self._stops = StopTexts(sampling.stop)
        self._reader = reader
        self._detokenizer = Detokenizer(checkpoint.tokenizer, skip_special_tokens=reader is None)
        self._contents = contents
        self._limit = longest_answer(sampling, len(prompt), checkpoint.max_model_len)
        self.prompt_tokens = len(prompt)
        self._completion_tokens = 0
        self._unsent: list[int] = []
        self._unsent_logprobs: list[TokenLogprobs] = []

    def is_ready(self) -> bool:
        """Whether it is known which tokens may be next."""
        return self.grammar is None or self.grammar.is_ready()

    def waits_for_form(self) -> bool:
        """Whether a step has found that this is not known. From any thread."""
        return self.logits is not None and self.grammar is not None and not self.grammar.job.done()

    def advance(self, choice: Choice) -> GenerateReply | None:
        """Goes on with a token that was chosen; returns what is new, if it can be let go yet.

        Raises:
            FormError: the grammar is too complex.
        """
        token = self.context.token = choice.token
        self._completion_tokens += 1
        self._unsent.append(token)
        if self.sampler.logprobs is not None:
            self._unsent_logprobs.append(self._contents.describe(token, choice.logprob, choice.likeliest))
        finish_reason: FinishReason | None = None
        if token in self._ends:
            text, stopped = self._push(self._detokenizer.flush())
            finish_reason = "stop"
        else:
            if self.grammar is not None:
                self.grammar.take(token)
            text, stopped = self._push(self._detokenizer.push(token))
            is_complete = self.grammar is not None and self.grammar.complete and self._of_calls is None
            if stopped:
                finish_reason = "stop"
            elif is_complete or self._completion_tokens >= self._limit:
                rest, stopped = self._push(self._detokenizer.flush())
                text += rest
                finish_reason = "stop" if stopped or is_complete else "length"
        if finish_reason is not None and not stopped:
            text += self._stops.flush()
        return self._reply(text, finish_reason)

    def _push(self, text: str) -> tuple[str, bool]:
        """Looks for stop texts, of which none ends the answer too early."""
        return (text, False) if self._completion_tokens <= self._min_tokens else self._stops.push(text)

    def _constrain_call(self, grammar: Grammar) -> None:
        """Has a grammar say what is next while the answer is within a call.

        A token may have the end of a call's opening mark and more. If the call can't go on with that, it is left as it is.
        """
        assert self._reader is not None, "it has found the call"
        if self.grammar is not None and grammar.complete:
            self.grammar = None
        if self.grammar is None and (begun := self._reader.begun_call()) is not None and grammar.begin(begun):
            self.grammar = grammar

    def _reply(self, text: str, finish_reason: FinishReason | None) -> GenerateReply | None:
        parts, finish_reason = read(self._reader, text, finish_reason, stopped=self._stops.found is not None)
        if self._of_calls is not None:
            self._constrain_call(self._of_calls)
        if parts == Parts() and finish_reason is None and len(self._unsent_logprobs) < _DESCRIBED:
            return None
        reply = GenerateReply(
            parts.text,
            self._unsent,
            self.prompt_tokens,
            self._completion_tokens,
            finish_reason,
            parts.tool_calls,
            parts.reasoning,
            self.index,
            self._unsent_logprobs,
            self._stops.found,
        )
        self._unsent, self._unsent_logprobs = [], []
        return reply
