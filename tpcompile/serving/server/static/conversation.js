// A conversation as data: its messages, the bodies of requests, and answers that grow from streams.

import { eventsOf, send } from "./stream.js";

// Return an answer to which events of a stream are added.
export function newAnswer() {
  return {
    role: "assistant", content: "", thinking: "", calls: [], finish: null, error: null, stopped: false,
    usage: null, sent: performance.now(), first: null, last: null, thought: null, pieces: 0, firstPieces: 0,
  };
}

// Add an event of a stream, which arrived at a moment, to an answer. Each piece is a token, even if it
// has no text yet because the server cannot tell what it belongs to.
export function addEvent(answer, event, moment) {
  if (event.usage) answer.usage = event.usage;
  for (const choice of event.choices || []) {
    const delta = choice.delta || { content: choice.text };
    const thinking = delta.reasoning_content ?? delta.reasoning;
    answer.last = moment;
    answer.first ??= moment;
    answer.pieces += 1;
    if (moment === answer.first) answer.firstPieces += 1;
    if (thinking) answer.thinking += thinking;
    if (delta.content || delta.tool_calls?.length) answer.thought ??= moment;
    answer.content += delta.content || delta.refusal || "";
    for (const call of delta.tool_calls || []) addCall(answer.calls, call);
    if (choice.finish_reason) answer.finish = choice.finish_reason;
  }
}

// Add a piece of a tool call: the first has the id and the name, all have parts of the arguments.
function addCall(calls, { index = calls.length, id, function: called = {} }) {
  calls[index] ??= { id: null, name: "", arguments: "", result: null };
  if (id) calls[index].id = id;
  calls[index].name += called.name || "";
  calls[index].arguments += called.arguments || "";
}

// Return the rates of an answer: seconds to the first token, and tokens per second after it. Tokens that
// arrived with the first one took none of that time.
export function ratesOf({ sent, first, last, usage, pieces, firstPieces }) {
  if (first === null) return null;
  const tokens = usage?.completion_tokens ?? null;
  const later = tokens * (1 - firstPieces / pieces), seconds = (last - first) / 1000;
  return { first: (first - sent) / 1000, tokens, perSecond: later > 0 && seconds > 0 ? later / seconds : null };
}

// Return the calls of the last answer that have no result yet.
export function openCalls(messages) {
  const last = messages.at(-1);
  return last?.calls && !last.stopped && !last.error ? last.calls.filter((call) => call.result === null) : [];
}

// Return messages in OpenAI's form. Thinking is not sent, as templates leave it out of the past.
function wireMessages(messages, system) {
  const wire = system ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "user") wire.push({ role: "user", content: message.content });
    else if (message.role === "assistant" && !message.error) wire.push(...wireAnswer(message));
  }
  return wire;
}

// Return an answer with the results of its calls. Calls of an answer that was stopped may be cut off.
function wireAnswer({ content, calls, stopped }) {
  if (stopped || !calls.length) return content ? [{ role: "assistant", content }] : [];
  const named = calls.map((call, place) => ({ ...call, id: call.id || `call_${place}` }));
  return [
    { role: "assistant", content, tool_calls: named.map((call) => (
      { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) },
    ...named.filter((call) => call.result !== null).map((call) => (
      { role: "tool", tool_call_id: call.id, content: call.result })),
  ];
}

// Return the options of sampling that are set; the server has defaults for the others.
function sampling({ temperature, top_p, max_tokens, seed }) {
  return Object.fromEntries(Object.entries({ temperature, top_p, max_tokens, seed }).filter(([, value]) => value !== null));
}

const STREAM = { stream: true, stream_options: { include_usage: true } };
const CONTINUATION = 256;   // new tokens of a text if the settings do not say how many

export function chatBody(messages, model, settings) {
  const { thinking, tools, tool_choice, schema } = settings;
  return {
    model, messages: wireMessages(messages, settings.system), ...STREAM, ...sampling(settings),
    ...thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } },
    ...tools && { tools, ...tool_choice && { tool_choice } },
    ...schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } } },
  };
}

export function textBody(prompt, model, settings) {
  return { model, prompt, ...STREAM, max_tokens: CONTINUATION, ...sampling(settings) };
}

// Ask for an answer, and call `changed` after each event. What goes wrong is part of the answer.
export async function ask(answer, path, key, body, signal, changed) {
  try {
    const response = await send(path, key, body, signal);
    for await (const { event, moment } of eventsOf(response)) {
      addEvent(answer, event, moment);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.stopped = true;
    else answer.error = { message: error.message, status: error.status || 0 };
  }
}
