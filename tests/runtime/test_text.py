"""Tests of loading tokenizers and of timing generation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import preset_pair
from tests.remote_code import add_code, answer_yes
from tpcompile.demo.model import demo_tokenizer
from tpcompile.errors import CheckpointError, UnsupportedError, UsageError
from tpcompile.runtime.text import (
    TextWriter,
    check_template_options,
    encode_prompt,
    generate_timed,
    is_first_process,
    tokenizer_of,
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo_tokenizer()


def test_a_tokenizer_is_read_back(tokenizer: Any, tmp_path: Path) -> None:
    preset_pair("tiny-qwen3").eager.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        tokenizer_of(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    assert encode_prompt(tokenizer_of(str(tmp_path)), "Anna is") == encode_prompt(
        tokenizer, "Anna is"
    )


def test_code_of_a_tokenizer_is_neither_run_nor_asked_about(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = answer_yes(monkeypatch)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(file.read_text().replace('"TokenizersBackend"', '"EvilTokenizer"'))
    mark = add_code(tmp_path, file.name, AutoTokenizer=(None, "evil.Tokenizer"))
    with pytest.raises(UnsupportedError, match=r"which tpcompile does not run.*auto_map"):
        tokenizer_of(str(tmp_path))
    preset_pair("tiny-qwen3").eager.config.save_pretrained(tmp_path)  # a known model type
    assert tokenizer_of(str(tmp_path))("Anna is")["input_ids"]
    assert not mark.exists()
    assert answers.tell() == 0


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "[" * 300 + "]" * 300 + "}", "[]", "{"])
def test_broken_settings_of_a_tokenizer(text: str, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot be read.*JSON"):
        tokenizer_of(str(tmp_path))


def test_a_prompt_without_tokens_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="must encode to at least one token"):
        encode_prompt(tokenizer, "")


def test_a_prompt_that_utf_8_cannot_encode(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="half of a surrogate pair"):
        encode_prompt(tokenizer, b"\xff".decode(errors="surrogateescape"))


def test_a_prompt_longer_than_the_tokenizer_says_is_not_its_concern(
    tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(encode_prompt(tokenizer, "Anna is " * 300)) > tokenizer.model_max_length
    assert capfd.readouterr().err == ""


def test_what_was_generated_and_how_fast() -> None:
    eager = preset_pair("tiny-qwen3").eager
    generated = generate_timed(eager, [5, 6, 7], max_new_tokens=4, do_sample=False)
    expected = eager.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert generated.ids == expected[0].tolist()
    assert (generated.prompt_tokens, generated.new_tokens) == (3, 4)
    assert generated.prefill_s > 0
    assert generated.decode_tokens_per_s is not None


def test_the_clock_counts_the_tokens_behind_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token, which takes 2 s, is not counted; later tokens take 0.5 s each."""
    times = iter((10.0, 12.0, 12.5, 13.0, 13.5))
    monkeypatch.setattr("tpcompile.runtime.text.time.perf_counter", lambda: next(times))

    class Model:
        device = torch.device("cpu")

        def generate(
            self, ids: torch.Tensor, stopping_criteria: list[Callable[..., Any]], **options: Any
        ) -> torch.Tensor:
            for token in range(4):
                ids = torch.cat([ids, torch.tensor([[token]])], 1)
                assert not stopping_criteria[0](ids, None).any()
            return ids

    generated = generate_timed(Model(), [5, 6, 7])
    assert (generated.prefill_s, generated.decode_tokens_per_s) == (2.0, 2.0)


@pytest.mark.parametrize(("skip", "text"), [(False, "Anna is a baker\n"), (True, " a baker\n")])
def test_text_is_handed_on(tokenizer: Any, skip: bool, text: str) -> None:
    pieces: list[str] = []
    writer = TextWriter(tokenizer, pieces.append, skip)
    prompt, behind = (tokenizer(part)["input_ids"] for part in ("Anna is", " a baker"))
    writer.put(torch.tensor([prompt]))
    for token in behind:
        writer.put(torch.tensor([token]))
    writer.end()
    assert "".join(pieces) == text


def test_without_a_launcher_this_is_the_one_that_prints() -> None:
    assert is_first_process()


def test_variables_of_a_chat_template(tokenizer: Any) -> None:
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "{{ messages[0]['content'] }}{% if loud %} and Felix{% endif %}"
    plain = encode_prompt(chat, "Anna is", chat=True)
    assert chat.decode(plain) == "Anna is"
    assert chat.decode(encode_prompt(chat, "Anna is", chat=True, loud=True)) == "Anna is and Felix"


@pytest.mark.parametrize("name", ["tokenize", "return_dict", "chat_template", "messages", "self"])
def test_variables_that_clash_with_arguments(name: str) -> None:
    check_template_options("kwargs", {"enable_thinking": False, "date_string": "today"})
    with pytest.raises(UsageError, match=rf"^kwargs must be variables .* got '{name}'"):
        check_template_options("kwargs", {"enable_thinking": False, name: 1})


def test_a_template_that_refuses_the_messages(tokenizer: Any) -> None:
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(UsageError, match=r"refuses the messages.*TemplateError: no system"):
        encode_prompt(chat, "Anna is", chat=True)
