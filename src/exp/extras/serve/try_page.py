"""The page by which a person tries a served model in a browser: a form made from the model's inputs, and the answer."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>exp.serve</title>
<link rel="stylesheet" href="/page.css">
</head>
<body>
<main>
<h1>Try the model</h1>
<p id="run"></p>
<form id="form">
<div id="inputs"></div>
<button type="submit">Predict</button> <span id="state" role="status"></span>
</form>
<section id="answer" hidden>
<h2>Answer</h2>
<div id="classes"></div>
<div id="scores"></div>
<pre id="json"></pre>
</section>
</main>
<script src="/page.js"></script>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.4; }
main { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
fieldset { border: 1px solid #8888; border-radius: 6px; margin: 0 0 1rem; }
legend { font-weight: 600; }
.unit { color: #777; margin: 0 0 .5rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .5rem; }
label { display: block; font-size: .9rem; }
input { width: 100%; box-sizing: border-box; }
textarea { width: 100%; box-sizing: border-box; min-height: 7rem; font-family: ui-monospace, monospace; }
button { padding: .4rem 1.2rem; }
#classes { font-size: 1.3rem; font-weight: 600; }
.score { display: grid; grid-template-columns: 10rem 1fr 6rem; gap: .5rem; align-items: center; }
.score span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
meter { width: 100%; }
pre { overflow: auto; padding: .6rem; background: #8881; max-height: 24rem; }
.error { color: #c33; }
"""

# Nothing of the model's is put into the page as HTML: names are text.
SCRIPT = """
"use strict";
const byId = (id) => document.getElementById(id);
const element = (tag, text, kind) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const FEW = 64, UNKNOWN = 8;
const KINDS = ["number", "word", "date"]; // of a table's columns
const sizeOf = (axis) => (typeof axis === "number" ? axis : UNKNOWN);
const zeros = (shape, dtype) => {
  if (!shape.length) return dtype === "bool" ? false : 0;
  return Array.from({ length: sizeOf(shape[0]) }, () => zeros(shape.slice(1), dtype));
};
const readers = [];
let model = null;

function fieldsOf(input) {
  const [, ...shape] = input.shape;
  const box = element("fieldset");
  box.append(element("legend", `${input.name} [${input.shape.join(", ")}] ${input.dtype}`));
  if (input.unit) box.append(element("p", input.unit, "unit"));
  const isRow = shape.length === 1 && typeof shape[0] === "number" && shape[0] <= FEW && input.dtype !== "bool";
  if (isRow) {
    const grid = element("div", undefined, "columns");
    const boxes = Array.from({ length: shape[0] }, (_, place) => {
      const label = element("label", (input.columns || [])[place] || String(place));
      const field = element("input");
      field.type = "number"; field.step = "any"; field.value = "0"; field.name = `${input.name}.${place}`;
      label.append(field); grid.append(label);
      return field;
    });
    box.append(grid);
    const isFloat = input.dtype.startsWith("float");
    readers.push([input.name, () => [boxes.map((one) => (one.value === "" && isFloat ? null : Number(one.value)))]]);
  } else {
    const area = element("textarea");
    area.name = input.name; area.spellcheck = false;
    area.value = JSON.stringify([zeros(shape, input.dtype)]);
    box.append(element("p", "JSON, a list of samples", "unit"), area);
    readers.push([input.name, () => JSON.parse(area.value)]);
  }
  return box;
}

function columnOf(input) {
  const label = element("label", input.name), field = element("input");
  field.name = input.name; field.placeholder = input.unit || input.dtype;
  if (input.words) {
    const known = element("datalist");
    known.id = `words-${readers.length}`;
    known.append(...input.words.map((word) => element("option", word)));
    field.setAttribute("list", known.id); label.append(known);
  }
  label.append(field);
  readers.push([input.name, () => [field.value === "" ? null : field.value]]);
  return label;
}

function score(name, value, share) {
  const row = element("div", undefined, "score"), bar = element("meter");
  bar.min = 0; bar.max = 1; bar.value = share; bar.hidden = share === null;
  row.append(element("span", name), bar, element("span", typeof value === "number" ? value.toPrecision(4) : value));
  byId("scores").append(row);
}

function show(answer) {
  byId("answer").hidden = false;
  byId("json").textContent = JSON.stringify(answer, null, 1);
  const classes = Object.entries(answer.classes || {});
  byId("classes").textContent = classes.map(([, names]) => names.slice(0, 16).flat(9).join(", ")).join("; ");
  byId("scores").replaceChildren();
  const said = Object.entries((answer.predictions || [{}])[0]).filter(([, value]) => !Array.isArray(value));
  for (const [name, value] of said) score(name, value, name.includes("probability") ? value : null);
  for (const [name] of said.length ? [] : classes) {
    const first = answer.outputs[name][0];
    if (!first.every((one) => typeof one === "number")) continue;
    const most = Math.max(...first), least = Math.min(...first);
    first.slice(0, 30).forEach((value, place) => {
      score(model.classes[place], value, most > least ? (value - least) / (most - least) : 1);
    });
  }
}

async function predict(event) {
  event.preventDefault();
  const state = byId("state");
  state.className = ""; state.textContent = "...";
  try {
    const inputs = Object.fromEntries(readers.map(([name, read]) => [name, read()]));
    const start = performance.now();
    const response = await fetch("/predict", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ inputs }),
    });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    state.textContent = `${(performance.now() - start).toFixed(1)} ms`;
    show(answer);
  } catch (error) {
    state.className = "error"; state.textContent = error.message;
  }
}

async function start() {
  model = await (await fetch("/model")).json();
  byId("run").textContent = model.run;
  byId("inputs").append(...model.inputs.map((one) => (KINDS.includes(one.dtype) ? columnOf(one) : fieldsOf(one))));
  byId("form").addEventListener("submit", predict);
  if (location.hash === "#predict") byId("form").requestSubmit();
  document.body.dataset.ready = "true";
}
start();
"""
