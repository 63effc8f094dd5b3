"""Thinking and tool calls of a server's model, and the options of requests that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpcompile.errors import UsageError
from tpcompile.serving.chats.assistant import Assistant
from tpcompile.serving.chats.forms import NONE, ToolForm, form_of
from tpcompile.serving.chats.grammars import quoted
from tpcompile.serving.chats.marks import END_OF_THINK, THINK
from tpcompile.serving.chats.thinking import Thinking
from tpcompile.serving.chats.tools import NONE as NO_CALLS
from tpcompile.serving.chats.tools import REQUIRED, ToolUse
from tpcompile.serving.params import SamplingParams
from tpcompile.serving.server.bodies import BadRequestError, CompletionRequest
from tpcompile.serving.structure import GRAMMAR, JSON_KINDS, Structure
from tpcompile.serving.thinking import ThinkingRules

BEGUN, OPEN, DONE = "begun", "open", "done"
"""Whether a prompt ends within the thinking, lets the model begin it, or ends after it."""
_SWITCH = "enable_thinking"
"""The variable of chat templates whose models think unless it is false."""
_TAIL = 32
"""The tokens at the end of a prompt that may belong to the marks of thinking."""
_CLOSING = f"\n{END_OF_THINK}\n\n"
"""The end of thinking in the templates of Qwen models."""


class Assistants:
    """The assistants of a server: the form of their calls, and whether they think.

    Both follow from the chat template, unless the parsers are named.
    """

    def __init__(self, tokenizer: Any, tool_parser: str, reasoning_parser: str) -> None:
        self._tokenizer, self._template = tokenizer, _template(tokenizer)
        self._form = form_of(tool_parser, self._template)
        begin, end = self._token(THINK), self._token(END_OF_THINK)
        self._tokens = None if begin is None or end is None else (begin, end)
        marked = self._tokens is not None or END_OF_THINK in self._template
        self._thinks = marked and reasoning_parser != NONE

    def prepare(
        self, request: CompletionRequest, prompt: Sequence[int]
    ) -> tuple[SamplingParams, list[Assistant]]:
        """Return the options of a chat's request for the engine, and the readers of its answers."""
        params, tools = request.params, request.tools
        form = self._form if tools is not None and tools.choice != NO_CALLS else None
        mode, structure = self._mode(prompt), self._structure(request)
        first = structure is not None and self._thinks_first(mode)
        if structure is not None and first:
            structure = replace(structure, after=END_OF_THINK)
        params = replace(
            params,
            structure=structure,
            thinking=self._rules(request.thinking_budget, mode, first),
            shown_tokens=self._shown_tokens(form),
        )
        assistants = [
            Assistant(
                Thinking(mode == BEGUN) if self._thinks else None,
                None if form is None or tools is None else form.parser(tools.functions),
                tools is None or tools.parallel,
            )
            for _ in range(params.n)
        ]
        return params, assistants

    def _mode(self, prompt: Sequence[int]) -> str:
        if not self._thinks:
            return DONE
        end = self._tokenizer.decode(prompt[-_TAIL:]).rstrip()
        return BEGUN if end.endswith(THINK) else DONE if end.endswith(END_OF_THINK) else OPEN

    def _thinks_first(self, mode: str) -> bool:
        """Return whether an answer begins with thinking, so that its form is that of the rest."""
        switched = self._tokens is not None and _SWITCH in self._template
        return mode == BEGUN or (mode == OPEN and switched)

    def _rules(self, budget: int | None, mode: str, first: bool) -> ThinkingRules | None:
        if budget is not None and not (self._thinks and self._tokens):
            raise BadRequestError(
                f"thinking_budget needs a model that thinks, with the tokens {THINK} and "
                f"{END_OF_THINK}",
                "thinking_budget",
            )
        if self._tokens is None or mode == DONE or (budget is None and not first):
            return None
        return ThinkingRules(
            *self._tokens,
            begun=mode == BEGUN,
            required=first,
            budget=budget,
            closing=tuple(self._encoded(_CLOSING)),
        )

    def _structure(self, request: CompletionRequest) -> Structure | None:
        """Return the form that an answer must have.

        It is that of calls if they are required, and calls or JSON if an answer that is JSON may
        have calls.
        """
        tools, structure = request.tools, request.params.structure
        is_json = structure is not None and structure.kind in JSON_KINDS
        if tools is None or tools.choice == NO_CALLS:
            return structure
        if tools.choice != REQUIRED:
            if structure is None or not is_json or not self._form or not self._form.grammar:
                return structure
            return replace(structure, alternative=self._calls(tools))
        if self._form is None or self._form.grammar is None:
            raise BadRequestError(
                "tool_choice must be auto or none, because the form of the model's calls is not "
                "known: start the server with --tool-parser NAME",
                "tool_choice",
            )
        if structure is not None and not is_json:
            raise BadRequestError(
                "tool_choice must be auto or none if the answer has another form", "tool_choice"
            )
        return Structure(GRAMMAR, self._calls(tools))

    def _calls(self, tools: ToolUse) -> str:
        """Return the grammar of calls; raise if the form cannot spell them."""
        assert self._form is not None and self._form.grammar is not None
        try:
            return self._form.grammar(tools.functions, self._literal, tools.parallel)
        except (UsageError, TypeError) as error:
            raise BadRequestError(str(error), "tools") from error

    def _shown_tokens(self, form: ToolForm | None) -> tuple[int, ...]:
        marks = (*((THINK, END_OF_THINK) if self._thinks else ()), *(form.marks if form else ()))
        tokens = [self._token(mark) for mark in marks]
        return tuple(token for token in tokens if token is not None and self._is_special(token))

    def _literal(self, mark: str) -> str:
        """Return a mark in a grammar: as a text, or as a special token."""
        token = self._token(mark)
        return mark if token is not None and self._is_special(token) else quoted(mark)

    def _token(self, mark: str) -> int | None:
        """Return the special token of a mark, if there is one."""
        tokens = self._encoded(mark)
        return tokens[0] if len(tokens) == 1 else None

    def _encoded(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return []
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _is_special(self, token: int) -> bool:
        entry = self._tokenizer.added_tokens_decoder.get(token)
        return entry is not None and bool(entry.special)


def _template(tokenizer: Any) -> str:
    """Return the chat template of a tokenizer; those that have names joined."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(template.values())
