// Requests of the server, and the events of its streams.

// An error that a reader shall see: a message of the server, or why there is none.
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// Send a request. Addresses are relative, so that a proxy may put the server below a path.
export async function send(path, key, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = body === undefined ? { headers, signal } : { method: "POST", headers, signal, body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw new ServerError(await messageOf(response), response.status);
  return response;
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 500) || response.statusText || "The server gave no reason.";
  }
}

// Yield the events of a stream, and the moment at which each arrived. Several may arrive at once.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      const moment = performance.now();
      const lines = (rest + (value || "")).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message, event.error.code);
        yield { event, moment };
      }
      if (done) throw new ServerError("The connection ended before the answer was complete.");
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError(`The connection broke: ${error.message}`);
  } finally {
    reader.cancel().catch(() => {});   // it is closed, or its request was aborted
  }
}
