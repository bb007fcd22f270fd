"""A page to try a served model in a browser: the inputs of a request as JSON, and the answer."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>exp.serve</title>
<h1>Try the model</h1>
<p id="run"></p>
<form><textarea id="inputs" rows="16" cols="80" spellcheck="false"></textarea>
<p><button>Predict</button></form>
<pre id="answer"></pre>
<script src="/page.js"></script>
</html>
"""

# Values of the model are text, never HTML.
SCRIPT = """
"use strict";
const byId = (id) => document.getElementById(id);
const zeros = ([size, ...rest], zero) =>
  Array.from({ length: typeof size === "number" ? size : 1 }, () => (rest.length ? zeros(rest, zero) : zero));
const sample = (input) =>
  input.dtype === "word" ? [input.words[0] ?? null]
    : input.dtype === "date" ? [null] : zeros(input.shape, input.dtype === "bool" ? false : 0);

async function predict() {
  const headers = { "content-type": "application/json" };
  const response = await fetch("/predict", { method: "POST", headers, body: byId("inputs").value });
  const { classes, predictions, ...rest } = await response.json();
  byId("answer").textContent = JSON.stringify({ classes, predictions, ...rest }, null, 1);
}

async function start() {
  const model = await (await fetch("/model")).json();
  byId("run").textContent = model.run;
  const inputs = Object.fromEntries(model.inputs.map((one) => [one.name, sample(one)]));
  byId("inputs").textContent = JSON.stringify({ inputs });
  document.forms[0].addEventListener("submit", (event) => { event.preventDefault(); predict(); });
  if (location.hash === "#predict") predict();
}
start();
"""
