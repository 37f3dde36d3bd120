"""Tokens whose logits are on a GPU are chosen as those on the CPU, after one copy of all of them."""

from __future__ import annotations

import pytest
import torch

from shmring.engine.executors.sampling import Choice, Sampler, choose_together
from shmring.engine.protocol import SamplingParams

pytestmark = pytest.mark.gpu


def test_logits_of_a_step_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(seed=3, top_p=0.9, logprobs=5), SamplingParams(temperature=0), SamplingParams(seed=4, top_k=40)]
    logits = torch.randn((3, 20_000), generator=torch.Generator().manual_seed(1)) * 3
    copied: list[torch.Tensor] = []
    copy = torch.Tensor.cpu

    def note(self: torch.Tensor) -> torch.Tensor:
        copied.append(self)
        return copy(self)

    monkeypatch.setattr(torch.Tensor, "cpu", note)
    found = []
    for rows in (logits, logits.cuda()):
        choices = choose_together([(Sampler(of_one), row, None) for of_one, row in zip(params, rows, strict=True)])
        found.append([(choice.token, choice.logprob, choice.likeliest) for choice in choices if isinstance(choice, Choice)])
    assert len(found[0]) == 3
    assert found[0] == found[1]
    assert [rows.shape for rows in copied] == [(3, 20_000)]
