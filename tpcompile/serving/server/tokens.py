"""The routes of tokens: from texts and messages to token ids, and back. The bodies are vLLM's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpcompile.serving.engine import Engine
from tpcompile.serving.server.answers import error_of
from tpcompile.serving.server.bodies import BadRequestError
from tpcompile.serving.server.options import Options
from tpcompile.serving.server.requests import chat_tokens, check_model, key_refusal, read_json
from tpcompile.serving.server.token_bodies import TokenizeRequest, read_detokenize, read_tokenize


class Tokens:
    """The handlers of requests for tokens or for their text."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine, self._options = engine, options

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/tokenize", self._handler(self._tokenize), methods=["POST"]),
            Route("/detokenize", self._handler(self._detokenize), methods=["POST"]),
        ]

    def _handler(
        self, answer: Callable[[Any, Any], Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            if (refusal := key_refusal(request, self._options.key)) is not None:
                return refusal
            try:
                body = await read_json(request)
                tokenizer = self._engine.tokenizer
                if tokenizer is None:
                    raise BadRequestError("The model has no tokenizer")
                return JSONResponse(answer(tokenizer, body))
            except BadRequestError as error:
                return error_of(error.status, error.message, error.param, error.code)

        return handle

    def _tokenize(self, tokenizer: Any, body: Any) -> Any:
        """Return the tokens of a text or of messages."""
        parsed = read_tokenize(body)
        check_model(parsed.model, self._options)
        tokens = self._encoded(tokenizer, parsed)
        texts = tokenizer.convert_ids_to_tokens(tokens) if parsed.texts else None
        return {
            "count": len(tokens),
            "max_model_len": self._engine.model.max_seq_len,
            "tokens": tokens,
            "token_strs": texts,
        }

    def _encoded(self, tokenizer: Any, parsed: TokenizeRequest) -> list[int]:
        if parsed.messages is None:
            ids = tokenizer(parsed.prompt, add_special_tokens=parsed.special, verbose=False)
            return [int(token) for token in ids["input_ids"]]
        return chat_tokens(
            tokenizer,
            self._options,
            parsed.messages,
            parsed.template_options,
            parsed.tools,
            add_generation_prompt=parsed.generation_prompt,
        )

    def _detokenize(self, tokenizer: Any, body: Any) -> Any:
        """Return the text of tokens."""
        model, tokens = read_detokenize(body)
        check_model(model, self._options)
        most = self._engine.model.config.vocab_size
        if not all(0 <= token < most for token in tokens):
            raise BadRequestError(f"tokens must be from 0 to {most - 1}", "tokens")
        return {"prompt": tokenizer.decode(tokens)}
