"""A conversation: streams, thinking, tools, schemas, rates, stopping, editing and errors."""

from __future__ import annotations

import json
from typing import Any

from tests.browser.chat.conftest import Chat, chatting
from tests.browser.chat.replies import Replies, called, delta, spoken, usage

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LEFT = """() => {
  const log = document.getElementById("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight;
}"""
"""The pixels from what is shown to the end of the conversation."""
SCHEMA = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}


def test_an_answer_streams(chat: Chat) -> None:
    chat.replies.pause = 0.03
    chat.ask("Tell me", spoken("One two three four five six seven eight nine ten"))
    content = chat.page.locator("article.assistant .content")
    chat.page.wait_for_function("() => document.querySelector('.content').innerText.length > 5")
    assert len(content.inner_text()) < 40, "it is shown before it is complete"
    assert chat.page.locator("article.assistant").get_attribute("aria-busy") == "true"
    chat.done()
    assert content.inner_text() == "One two three four five six seven eight nine ten"
    assert chat.texts(".bubble") == ["Tell me"]


def test_events_that_are_cut_anywhere(chat: Chat) -> None:
    chat.replies.cut = 7
    assert chat.told("Hello", spoken("aé☃ 😀b", 1)) == "aé☃ 😀b"


def test_the_body_of_a_request(chat: Chat) -> None:
    chat.told("Hello", spoken("Hi"))
    chat.told("Again", spoken("Yes"))
    first, second = chat.replies.bodies
    assert first == {
        "model": "stub",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert second["messages"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Again"},
    ]


def test_settings_are_sent(chat: Chat) -> None:
    values = {"temperature": "0.5", "top_p": "0.9", "max_tokens": "32", "seed": "7"}
    for name, value in values.items():
        chat.set(name, value)
    chat.set("system", "Be brief.")
    chat.set("thinking", "off")
    chat.told("Hello", spoken("Hi"))
    [body] = chat.replies.bodies
    assert {name: body[name] for name in values} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 32,
        "seed": 7,
    }
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_settings_are_kept_and_reset(chat: Chat) -> None:
    chat.set("seed", "7")
    chat.set("key", "secret")
    chat.open(chat.page.url)
    assert chat.page.input_value("#seed") == "7"
    assert chat.page.input_value("#key") == "secret"
    stored = chat.page.evaluate("() => JSON.stringify(localStorage)")
    assert "secret" not in stored
    chat.click("#settings-button")
    chat.click("#defaults")
    assert chat.page.input_value("#seed") == ""


def test_thinking_is_folded(chat: Chat) -> None:
    thought = [delta(reasoning_content=word) for word in ("I ", "think", " so.")]
    assert chat.told("Hello", [*thought, *spoken("Yes.")]) == "Yes."
    assert chat.text("details.thinking summary").startswith("Thought for ")
    assert not chat.page.locator(".thoughts").is_visible()
    chat.click("details.thinking summary")
    assert chat.text(".thoughts") == "I think so."
    chat.told("Again", spoken("No."))
    assert "I think" not in json.dumps(chat.replies.bodies[1])


def test_tools_are_shown_and_answered(chat: Chat) -> None:
    chat.set("tools", json.dumps([TOOL]))
    assert chat.text("#tools-button") == "Tools"
    assert "on" in (chat.page.get_attribute("#tools-button", "class") or "").split()
    calls = called(("weather", '{"city": "Paris"}'), ("weather", '{"city": "Rome"}'), thought="Hm.")
    chat.ask("Which is warmer?", calls, spoken("Rome."))
    fields = chat.page.locator(".call textarea")
    fields.first.wait_for()
    assert chat.texts(".call b") == ["weather", "weather"]
    shown = [json.loads(text) for text in chat.texts(".call pre")]
    assert shown == [{"city": "Paris"}, {"city": "Rome"}]
    assert fields.first.evaluate("one => one === document.activeElement")
    fields.first.fill("21")
    fields.first.press("Enter")
    assert len(chat.replies.bodies) == 1, "the second result is missing"
    fields.nth(1).fill("24")
    fields.nth(1).press("Enter")
    chat.page.wait_for_selector("article.assistant:nth-of-type(3)")
    chat.done()
    assert chat.texts(".content")[-1] == "Rome."
    first, second = chat.replies.bodies
    assert first["tools"] == [TOOL]
    assistant, *results = second["messages"][1:]
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        '{"city": "Paris"}',
        '{"city": "Rome"}',
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "call_0_x", "content": "21"},
        {"role": "tool", "tool_call_id": "call_1_x", "content": "24"},
    ]


def test_a_message_waits_for_the_results_of_calls(chat: Chat) -> None:
    chat.set("tools", json.dumps(TOOL["function"]))
    chat.ask("Go", called(("weather", "{}")))
    chat.page.locator(".call textarea").wait_for()
    assert chat.replies.bodies[0]["tools"] == [TOOL]
    chat.page.fill("#prompt", "Another")
    chat.page.press("#prompt", "Enter")
    assert len(chat.replies.bodies) == 1
    assert chat.said == "Give the results of the calls first"
    assert chat.page.input_value("#prompt") == "Another"


def test_a_schema(chat: Chat) -> None:
    chat.set("schema", json.dumps(SCHEMA))
    shown = chat.told("When?", spoken('{"year": 1999}'))
    assert json.loads(shown.split("Copy")[1]) == {"year": 1999}
    assert chat.replies.bodies[0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
    }


def test_wrong_json_is_not_sent(chat: Chat) -> None:
    for name, text in (("tools", "["), ("schema", "[1]"), ("tools", '[{"function": 1}]')):
        chat.set(name, text)
        chat.ask("Hello")
        assert chat.page.locator(f"#{name}-error").inner_text().startswith("Not usable: ")
        assert chat.page.get_attribute(f"#{name}", "aria-invalid") == "true"
        assert chat.page.input_value("#prompt") == "Hello", "the message is not lost"
        chat.set(name, "")
    chat.set("temperature", "-1")
    chat.ask("Hello")
    assert chat.page.locator("#temperature").is_visible()
    assert chat.replies.bodies == [] and chat.texts(".bubble") == []


def test_rates(chat: Chat) -> None:
    chat.replies.pause = 0.02
    chat.told(
        "Hello", [*[delta(content="a") for _ in range(20)], delta("length"), usage(40, 20, 8)]
    )
    text = chat.text(".rates")
    words = text.split(" · ")
    assert 0 < float(words[0].removeprefix("first token after ").removesuffix(" s")) < 5
    rate = float(words[1].removesuffix(" tokens/s"))
    assert 5 < rate <= 50, "19 tokens take at least 0.38 s"
    assert words[2:] == [
        "20 new tokens",
        "40 of the prompt, 8 of them cached",
        "cut off at the limit of new tokens",
    ]


def test_rates_of_tokens_that_arrive_at_once(chat: Chat) -> None:
    """Tokens that all arrive at once have no rate."""
    pieces = [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}] * 20
    events = [{"choices": [piece]} for piece in pieces]
    blank = [{"choices": [{"index": 0, "delta": {}, "finish_reason": None}]}] * 5
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body="".join(
                f"data: {json.dumps(event)}\n\n" for event in [*blank, *events, usage(4, 25)]
            )
            + "data: [DONE]\n\n",
        ),
    )
    assert chat.told("Hello") == "a" * 20
    assert chat.text(".rates").split(" · ")[1:] == ["25 new tokens", "4 of the prompt"]


def _stops(chat: Chat, stop: Any) -> None:
    chat.replies.pause = 0.05
    chat.ask("Count", [delta(content=f"{n} ") for n in range(200)])
    chat.page.wait_for_function("() => document.querySelector('.content').innerText.includes('3')")
    stop()
    chat.done()
    assert chat.text(".rates").endswith("stopped")
    assert "199" not in chat.text(".content")
    assert chat.said == "Stopped"
    chat.page.wait_for_timeout(300)
    assert chat.replies.gone == 1, "the server knows"
    chat.replies.pause = 0
    chat.told("Go on", spoken("Well"))
    assert chat.replies.bodies[1]["messages"][1]["content"].startswith("0 1 2")


def test_the_button_stops(chat: Chat) -> None:
    _stops(chat, lambda: chat.click("#stop"))


def test_escape_stops(chat: Chat) -> None:
    _stops(chat, lambda: chat.page.keyboard.press("Escape"))


def test_a_call_that_is_stopped_is_not_sent(chat: Chat) -> None:
    chat.replies.pause = 0.1
    chat.ask("The weather?", called(("weather", '{"city": "' + "a" * 500 + '"}')))
    chat.page.wait_for_function("() => document.querySelector('.call pre')?.innerText.length > 8")
    chat.page.keyboard.press("Escape")
    chat.done()
    assert chat.page.locator(".call textarea").count() == 0
    chat.replies.pause = 0
    assert chat.told("Never mind", spoken("Well")) == "Well"
    assert [message["role"] for message in chat.replies.bodies[1]["messages"]] == ["user", "user"]


def test_a_new_chat_while_an_answer_comes(chat: Chat) -> None:
    chat.replies.pause = 0.05
    chat.ask("Count", [delta(content=f"{n} ") for n in range(200)])
    chat.page.wait_for_selector(".content p")
    chat.replies.pause = 0.02
    chat.replies.answers.append(spoken("Hi, and a few more words"))
    chat.page.evaluate(
        """() => {
          document.getElementById("new").click();
          document.getElementById("prompt").value = "Hello";
          document.getElementById("send").click();
        }"""
    )
    chat.page.wait_for_function("() => document.body.innerText.includes('Hi')")
    assert chat.page.locator("#stop").is_visible(), "the first request does not end the second"
    assert chat.said == "Waiting for the answer"
    chat.done()
    assert chat.texts("article .content") == ["Hi, and a few more words"]
    assert len(chat.replies.bodies[1]["messages"]) == 1
    chat.click("#new")
    assert chat.texts("article") == [] and chat.page.locator(".empty").is_visible()


def test_retry_and_edit(chat: Chat) -> None:
    chat.told("Hello", spoken("Hi"))
    chat.told("How?", spoken("So"))
    chat.replies.answers.append(spoken("Thus"))
    chat.click("article:last-child button", "Retry")
    chat.page.wait_for_function("() => document.body.innerText.includes('Thus')")
    chat.done()
    assert chat.texts(".content") == ["Hi", "Thus"]
    assert chat.replies.bodies[2] == chat.replies.bodies[1]
    chat.click("article.user:nth-last-child(2) button", "Edit")
    assert chat.texts(".bubble") == ["Hello"]
    assert chat.page.input_value("#prompt") == "How?"
    chat.click("#cancel")
    assert chat.texts(".content") == ["Hi", "Thus"] and chat.page.input_value("#prompt") == ""
    chat.click("article.user:nth-last-child(2) button", "Edit")
    assert chat.told("Why?", spoken("Because")) == "Because"
    assert chat.texts(".bubble") == ["Hello", "Why?"]
    assert not chat.page.locator("#editing").is_visible()
    last = [message["content"] for message in chat.replies.bodies[3]["messages"]]
    assert last == ["Hello", "Hi", "Why?"]


def test_copy(browser: Any, replies: Replies) -> None:
    allowed = ["clipboard-read", "clipboard-write"]
    with chatting(browser, replies.url, replies, permissions=allowed) as chat:
        chat.told("Hello", spoken("Look:\n\n```py\nx = 1\n```"))
        clipboard = "() => navigator.clipboard.readText()"
        chat.click("article.assistant .actions button", "Copy")
        chat.page.get_by_text("Copied").wait_for()
        assert chat.page.evaluate(clipboard) == "Look:\n\n```py\nx = 1\n```"
        chat.click("figure.code button")
        chat.page.wait_for_function(f"async () => await ({clipboard})() === 'x = 1'")


def test_errors_of_the_server(chat: Chat) -> None:
    chat.ask("Hello", (400, "temperature must be <b>0</b>"))
    chat.done()
    assert chat.text("article .error") == "temperature must be <b>0</b> (status 400)"
    assert chat.said == "Error: temperature must be <b>0</b>"
    chat.replies.answers.append(spoken("Hi"))
    chat.click("article:last-child button", "Retry")
    chat.page.wait_for_function("() => document.body.innerText.includes('Hi')")
    chat.done()
    assert chat.texts("article .error") == [""]


def test_a_stream_that_fails(chat: Chat) -> None:
    chat.ask("Hello", [delta(content="Wel"), {"error": {"message": "A rank died", "code": 500}}])
    chat.done()
    assert chat.text(".content") == "Wel"
    assert chat.text("article .error") == "A rank died (status 500)"
    chat.told("Again", spoken("Hi"))
    assert [message["content"] for message in chat.replies.bodies[1]["messages"]] == [
        "Hello",
        "Again",
    ], "half of an answer is not part of the conversation"


def test_a_stream_that_breaks_off(chat: Chat) -> None:
    chat.replies.ends = False
    chat.ask("Hello", [delta(content="Wel")])
    chat.done()
    assert chat.text(".content") == "Wel"
    assert chat.text("article .error") == "The connection ended before the answer was complete."


def test_a_server_that_is_gone(chat: Chat) -> None:
    chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    chat.ask("Hello")
    chat.done()
    assert chat.text("article .error") == "The server cannot be reached. Is it still running?"


def test_a_key_is_asked_for(browser: Any, replies: Replies) -> None:
    replies.models = (401, "The key is missing or wrong")
    with chatting(browser, replies.url, replies) as chat:
        assert chat.text(".empty .error") == "The key is missing or wrong"
        assert chat.page.locator("#key").evaluate("one => one === document.activeElement")
        chat.page.fill("#key", "secret")
        chat.page.press("#key", "Tab")
        chat.page.wait_for_function("() => document.querySelector('#model').innerText !== ''")
        assert replies.keys == ["", "Bearer secret"]
        assert chat.texts(".empty .error") == []


def test_keys_of_the_keyboard(chat: Chat) -> None:
    box = chat.page.locator("#prompt")
    box.fill("one")
    low = box.bounding_box()["height"]
    box.press("Shift+Enter")
    box.type("two")
    assert box.input_value() == "one\ntwo" and chat.replies.bodies == []
    assert box.bounding_box()["height"] > low, "the box grows with its text"
    box.evaluate("one => one.dispatchEvent(new KeyboardEvent('keydown', "
                 "{ key: 'Enter', isComposing: true, bubbles: true }))")  # fmt: skip
    assert chat.replies.bodies == [], "Enter ends the composition of a character"
    chat.replies.answers.append(spoken("Hi"))
    box.press("Enter")
    chat.page.wait_for_function("() => document.body.innerText.includes('Hi')")
    assert chat.replies.bodies[0]["messages"][0]["content"] == "one\ntwo"
    box.press("Enter")
    assert len(chat.replies.bodies) == 1, "an empty message is not sent"
    chat.click("#settings-button")
    chat.page.keyboard.press("Escape")
    assert not chat.page.locator("#settings").is_visible()
    assert box.evaluate("one => one === document.activeElement")


def test_what_is_read_aloud(chat: Chat) -> None:
    chat.page.evaluate(
        """() => {
          window.heard = [];
          new MutationObserver(() => window.heard.push(document.getElementById("status").innerText))
            .observe(document.getElementById("status"), { childList: true });
        }"""
    )
    chat.told("Hello", spoken("A long answer in many pieces"))
    heard = chat.page.evaluate("() => window.heard")
    assert heard == ["Waiting for the answer", "Answer: A long answer in many pieces"]
    assert chat.page.get_attribute("#log", "aria-live") == "off", "pieces are not read one by one"


def test_the_end_is_followed_unless_the_reader_looks_elsewhere(chat: Chat) -> None:
    chat.told("Hello", spoken("\n\n".join(["A line"] * 60), 50))
    assert chat.page.evaluate(LEFT) < 2
    chat.replies.pause = 0.02
    chat.ask("More", spoken("\n\n".join(["A line"] * 60), 20))
    chat.page.wait_for_selector("article:last-child .content p:nth-child(5)")
    chat.page.evaluate("() => { document.getElementById('log').scrollTop = 0; }")
    chat.done()
    assert chat.page.evaluate("() => document.getElementById('log').scrollTop") == 0


def test_a_model_without_a_chat_template(browser: Any, replies: Replies) -> None:
    replies.models = {"chat": False}
    with chatting(browser, replies.url, replies) as chat:
        assert chat.text("#send") == "Continue"
        assert not chat.page.locator("#tools-button").is_visible()
        piece = {"index": 0, "text": " a time", "finish_reason": None}
        replies.answers.append([{"choices": [piece]}, usage(3, 2)])
        chat.page.fill("#prompt", "Once upon")
        chat.click("#send")
        chat.page.wait_for_function("() => document.body.innerText.includes('a time')")
        chat.done()
        assert chat.text(".continued") == "Once upon a time"
        replies.answers.append([{"choices": [piece | {"text": " there"}]}, usage(5, 1)])
        chat.click("article:last-child button", "Continue further")
        chat.page.wait_for_function("() => document.body.innerText.includes('there')")
        chat.done()
        assert [body["prompt"] for body in replies.bodies] == ["Once upon", "Once upon a time"]
        assert replies.bodies[0]["max_tokens"] == 256
        chat.click("#settings-button")
        assert chat.page.locator("#mode-note").is_visible()
        assert chat.page.locator("#mode option").first.is_disabled()


def test_a_chat_model_can_continue_a_text(chat: Chat) -> None:
    chat.set("mode", "text")
    chat.ask("Once", [{"choices": [{"index": 0, "text": " more"}]}, usage(1, 1)])
    chat.page.wait_for_function("() => document.body.innerText.includes('more')")
    assert chat.replies.bodies[0]["prompt"] == "Once"
