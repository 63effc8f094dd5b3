"""Tests of messages that name options instead of Python arguments."""

from __future__ import annotations

import pytest

from tpcompile.cli.wording import with_options

ARGUMENTS = ("tp", "backend", "device", "random_weights", "max_seq_len", "simulate", "spans")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("or random_weights=SEED.", "or --random-weights SEED."),
        ('Choose backend="auto".', "Choose --backend auto."),
        ("device='cuda:1' needs a GPU", "--device cuda:1 needs a GPU"),
        ("tp=7 is more than", "--tp 7 is more than"),
        ("compile with tp=2.", "compile with --tp 2."),
        ("Pass simulate=True to", "Pass --simulate to"),
        ("device must be cpu or cuda, got 'x'", "--device must be cpu or cuda, got 'x'"),
        ("Raise max_seq_len, or", "Raise --max-seq-len, or"),
        ("max_seq_len must be", "--max-seq-len must be"),
        ("spans=3 exceeds", "--spans 3 exceeds"),
        ("plan-sharding{tp=4,spans=2}", "plan-sharding{tp=4,spans=2}"),
        ("graph x (tp=1)", "graph x (tp=1)"),
        ("%y = tpc.split(%x, spans=4)", "%y = tpc.split(%x, spans=4)"),
        ("Compile with max_batch=4", "Compile with max_batch=4"),
        ("The device must be there", "The device must be there"),
        ("http=tp=x", "http=tp=x"),
    ],
)
def test_arguments_become_options(message: str, shown: str) -> None:
    assert with_options(message, ARGUMENTS, ARGUMENTS) == shown


def test_a_number_that_is_not_from_the_command_line_stays() -> None:
    message = 'The target has tp=0. Choose backend="auto" or max_seq_len=9'
    shown = "The target has tp=0. Choose --backend auto or --max-seq-len 9"
    assert with_options(message, ARGUMENTS, ()) == shown


def test_ids_of_a_prompt_are_named_by_their_option() -> None:
    message = "Every token of input_ids must be in the vocabulary"
    shown = "Every token of --prompt-ids must be in the vocabulary"
    assert with_options(message, ("prompt_ids",), ()) == shown


def test_a_command_without_arguments() -> None:
    assert with_options("tp=2", (), ()) == "tp=2"
