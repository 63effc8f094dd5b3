"""A small page to try the server by hand."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>tpcompile</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
textarea { width: 100%; min-height: 6rem; font: inherit; box-sizing: border-box; }
output { display: block; white-space: pre-wrap; min-height: 4rem; margin-top: 1rem; }
label { display: inline-block; margin: 0 1rem 0.5rem 0; }
input { width: 5rem; } input, button { font: inherit; }
</style>
</head>
<body>
<h1>tpcompile</h1>
<form>
<p><label for="prompt">Prompt</label></p>
<textarea id="prompt" required></textarea>
<p>
<label>New tokens <input id="tokens" type="number" value="64" min="1"></label>
<label>Temperature <input id="temperature" type="number" value="0" min="0" step="0.1"></label>
<label>Key <input id="key" type="password" autocomplete="off"></label>
<button>Continue</button> <button type="button" id="stop" disabled>Stop</button>
</p>
</form>
<output aria-live="polite"></output>
<script>
const get = id => document.getElementById(id), out = document.querySelector("output");
let ends;
get("stop").onclick = () => ends.abort();
document.querySelector("form").onsubmit = async event => {
  event.preventDefault();
  out.textContent = get("prompt").value;
  ends = new AbortController();
  get("stop").disabled = false;
  const headers = {"Content-Type": "application/json"};
  if (get("key").value) headers.Authorization = "Bearer " + get("key").value;
  try {
    const answer = await fetch("v1/completions", {method: "POST", headers, signal: ends.signal,
      body: JSON.stringify({prompt: get("prompt").value, stream: true,
        max_tokens: +get("tokens").value, temperature: +get("temperature").value})});
    if (!answer.ok) throw Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\\n\\n");
      rest = lines.pop();
      for (const line of lines) {
        const data = line.slice(6);
        if (data == "[DONE]") continue;
        const piece = JSON.parse(data);
        if (piece.error) throw Error(piece.error.message);
        for (const one of piece.choices) out.append(one.text);
      }
    }
  } catch (error) {
    if (error.name != "AbortError") out.append("\\n\\n" + error.message);
  }
  get("stop").disabled = true;
};
</script>
</body>
</html>
"""
