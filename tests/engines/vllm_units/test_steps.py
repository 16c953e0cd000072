"""What goes from the scheduler to the workers."""

from __future__ import annotations

import pickle

from kvxfer.engines.vllm.steps import Publication, Reading, Step
from kvxfer_client import attention_blocks

BLOCKS = (attention_blocks("0.attention", [1, 2]),)
PUBLICATION = Publication("n", "r", BLOCKS, 17, b"0123456789abcdef", 60.0, {0: "incarnation"})
READING = Reading("r", "a-ticket", BLOCKS, 16, 17, {}, {"0.attention": 2})


def test_a_step_with_nothing_in_it_is_false() -> None:
    assert not Step()
    assert Step(publish=(PUBLICATION,)) and Step(read=(READING,)) and Step(cancel=("r",))
    assert Step(give_back=("t",))


def test_steps_travel_between_processes() -> None:
    step = Step((PUBLICATION,), (READING,), ("other",), ("a-ticket",))
    assert repr(pickle.loads(pickle.dumps(step))) == repr(step)
    assert pickle.loads(pickle.dumps(step)).publish[0].lease_token == b"0123456789abcdef"


def test_secrets_are_not_shown() -> None:
    shown = repr(Step((PUBLICATION,), (READING,), (), ("a-ticket",)))
    assert "0123456789abcdef" not in shown and "a-ticket" not in shown
