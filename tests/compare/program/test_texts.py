"""Tests of sequences and their cache blocks."""

from __future__ import annotations

import torch

from tpcompile.compare.program.texts import random_texts

TEXTS = random_texts((5, 1), 3, 100, 2, seed=0)


def test_there_is_room_for_all_steps_in_blocks_of_their_own() -> None:
    assert TEXTS.lengths == (5, 1)
    assert TEXTS.tables.shape == (2, 4)
    assert sorted(TEXTS.tables.flatten().tolist()) == list(range(8))
    assert TEXTS.slots == 16


def test_a_window_hides_what_is_further_back() -> None:
    assert TEXTS.visible_counts(None) == (5, 1)
    assert TEXTS.visible_counts(4) == (4, 1)


def test_inputs_of_the_prompt_and_of_the_step() -> None:
    before, new = TEXTS.before(), TEXTS.new()
    assert before["positions"].tolist() == [0, 1, 2, 3]
    assert before["starts"].tolist() == [0, 4, 4]
    assert before["lengths"].tolist() == [4, 0]
    assert new["positions"].tolist() == [4, 0]
    assert new["starts"].tolist() == [0, 1, 2]
    assert new["lengths"].tolist() == [5, 1]
    for inputs in (before, new):
        assert inputs["read"].tolist() == inputs["write"].tolist() == [0, 1]
    assert new["logit_rows"].tolist() == [0, 1]
    assert torch.equal(torch.cat([before["input_ids"], new["input_ids"][:1]]), TEXTS.tokens[0])
    third = int(TEXTS.tables[0, 2])
    assert new["slots"].tolist() == [2 * third, 2 * int(TEXTS.tables[1, 0])]


def test_texts_go_on() -> None:
    longer = TEXTS.going_on(torch.tensor([[7], [8]]))
    assert longer.lengths == (6, 2)
    assert [int(text[-1]) for text in longer.tokens] == [7, 8]
    assert longer.tables is TEXTS.tables
