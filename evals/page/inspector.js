// The weights of one head for each token.

const ROLES = { rows: "queries", columns: "keys" };

function tokenName(sequence, token) {
  const name = sequence.image ? [] : [make("sub", {}, token)];
  return make("span", { class: "token" }, spelled(sequence.tokens[token]), name);
}

// The selection of a token of the rows or columns; except in cross-attention, a token is both.
function select(model, side, token) {
  const name = side === "columns" && isCross(model) ? "key" : "token";
  update({ side: model, token: tokenOf(model), key: keyOf(model), [name]: token });
}

function tokenOption(label, token, attributes = {}) {
  return make("span", { role: "option", tabindex: -1, "aria-selected": "false", "data-token": token, ...attributes }, label);
}

// The tokens of an image: special tokens, and patches over the picture.
async function fillImage(box, { image, tokens }) {
  const { rows, columns: width, special } = image;
  box.style.gridTemplateColumns = `repeat(${width}, 1fr)`;
  const canvas = make("canvas", { "aria-hidden": "true", style: `grid-area: ${special + 1} / 1 / span ${rows} / span ${width}` });
  box.append(canvas);
  tokens.forEach((name, token) => {
    const patch = token - special;
    const place = patch < 0 ? `${token + 1} / 1 / auto / -1` : `${special + 1 + Math.floor(patch / width)} / ${1 + (patch % width)}`;
    const label = patch < 0 ? name : "";
    box.append(tokenOption(label, token, { "aria-label": name, title: name, style: `grid-area: ${place}` }));
  });
  const { whole, shape } = await unpack(image.picture);
  const [height, across, channels] = shape;
  paint(canvas, height, across, (row, column) => {
    const pixel = Array.from(whole.slice((row * across + column) * channels, (row * across + column + 1) * channels), (part) => part & 255);
    return channels === 1 ? [pixel[0], pixel[0], pixel[0]] : pixel;
  });
}

function buildText(model, side, label) {
  const sequence = side === "columns" ? keysOf(model) : queriesOf(model);
  const attributes = { role: "listbox", "aria-label": `${label} ${sequence.tokens.length} tokens`, "data-side": side };
  const box = make("div", { class: sequence.image ? "text image" : "text", ...attributes });
  if (sequence.image) fillImage(box, sequence);
  else sequence.tokens.forEach((piece, token) => box.append(tokenOption(flowing(piece), token)));
  listbox(box, (option) => select(model, side, Number(option.dataset.token)));
  return box;
}

// One text for a causal map, and else one for the queries and one for the keys.
function buildReader(model) {
  if (opened[model].causal) return make("div", { class: "reader" }, buildText(model, "rows", "The text in"));
  const named = { rows: queriesOf(model) === textOf(model) ? "" : " (target)", columns: "" };
  const boxes = ["columns", "rows"].map((side) =>
    make("div", {}, make("p", { class: "note" }, `${ROLES[side]}${named[side]}`), buildText(model, side, `${capital(ROLES[side])}:`)),
  );
  return make("div", { class: "reader whole" }, boxes);
}

// Shades tokens by levels, on an image relative to the largest.
function shade(box, levels, chosen) {
  const onImage = box.classList.contains("image");
  const largest = onImage ? Math.max(1, ...levels.map(({ level }) => Math.abs(level))) : LEVELS;
  const options = box.querySelectorAll("[role=option]");
  options.forEach((option, token) => {
    const { level, name } = levels[token];
    const root = level / largest;
    const part = onImage ? root * Math.abs(root) : root; // levels are roots of weights
    const [red, green, blue] = rgb(onImage ? Math.sign(part) * 0.8 : part, name);
    option.style.background = level ? `rgb(${red} ${green} ${blue} / ${onImage ? Math.abs(part) * 0.85 : 1})` : "";
    option.style.color = level && !onImage ? inkOn(part, name) : "";
  });
  mark(box, options[chosen]);
  reveal(box, options[chosen]);
}

// Scrolls the text, not the page.
function reveal(box, option) {
  const above = option.offsetTop - box.scrollTop;
  const slack = box.clientHeight / 6;
  if (above < slack) box.scrollTop -= slack - above;
  else if (above > box.clientHeight - slack) box.scrollTop += above - box.clientHeight + slack;
}

function shadeTexts(box, model, map, query, key) {
  const layer = opened[model];
  const keyLevel = (token) => ({ level: levelAt(layer, map, query, token), name: "key" });
  const queryLevel = (token) => ({ level: levelAt(layer, map, token, key), name: "query" });
  const rows = queriesOf(model).tokens.map((_, token) => (layer.causal && token <= query ? keyLevel(token) : queryLevel(token)));
  shade(box.querySelector('[data-side="rows"]'), rows, query);
  if (!layer.causal) shade(box.querySelector('[data-side="columns"]'), keysOf(model).tokens.map((_, token) => keyLevel(token)), key);
}

function weightList(model, kind, found, title) {
  const maximum = Math.max(...found.map((each) => Math.abs(each.weight)), 1e-9);
  const [side, sequence] = kind === "key" ? ["columns", keysOf(model)] : ["rows", queriesOf(model)];
  const rows = found.map(({ token, weight }) => {
    const bar = make("i", { class: "bar-fill", style: `width: ${(Math.abs(weight) / maximum) * 100}%; background: ${css(weight < 0 ? -0.6 : 0.6, kind)}` });
    const value = kind === "key" ? opened[model].values : null;
    return make(
      "tr", { "data-token": token },
      make("th", { scope: "row" }, make("button", { type: "button", onclick: () => select(model, side, token) }, tokenName(sequence, token))),
      make("td", { class: "bar-cell" }, bar), make("td", { class: "number" }, percent(weight)),
      value ? make("td", { class: "number" }, figures(value.at(groupOf(model), token))) : null,
    );
  });
  const head = make(
    "tr", {}, make("th", { scope: "col", colspan: 2 }, title), make("th", { scope: "col", class: "number" }, "weight"),
    kind === "key" ? make("th", { scope: "col", class: "number", title: "norm of the key’s value" }, "‖value‖") : null,
  );
  return make("table", { class: `weights ${kind}s` }, make("thead", {}, head), make("tbody", {}, rows));
}

function bigMap(model) {
  const canvas = make("canvas", { role: "img" });
  const lines = [make("i", { class: "across" }), make("i", { class: "down" })];
  const said = make("p", { class: "reading" }, BLANK);
  const name = ({ image, tokens }, token) => (image ? tokens[token] : `${spelled(tokens[token])} (${token})`);
  canvas.addEventListener("click", (event) => {
    const [token, key] = pointed(canvas, event);
    update({ side: model, token, key });
  });
  canvas.addEventListener("pointermove", (event) => {
    const [query, key] = pointed(canvas, event);
    said.textContent =
      opened[model].causal && key > query ? BLANK
      : `${name(queriesOf(model), query)} → ${name(keysOf(model), key)}: about ${percent(weightAt(opened[model], headOf(model), query, key))}`;
  });
  canvas.addEventListener("pointerleave", () => { said.textContent = BLANK; });
  return make("div", { class: "map" }, make("div", { class: "frame" }, canvas, lines), said);
}

function chosenText(model, query, key) {
  const said = (sequence, token) => [tokenName(sequence, token), ` token ${token} of 0–${sequence.tokens.length - 1}`];
  if (!isCross(model)) return said(queriesOf(model), query);
  return ["query ", ...said(queriesOf(model), query), "; key ", ...said(keysOf(model), key)];
}

function showToken(model, box) {
  const [query, key] = [tokenOf(model), keyOf(model)];
  const map = headOf(model);
  const layer = opened[model];
  shadeTexts(box, model, map, query, key);
  box.querySelector(".chosen").replaceChildren(...chosenText(model, query, key));
  const titles = isCross(model) ? ["query attends to", "key is attended to by"] : ["attends to", "is attended to by"];
  box.querySelector(".lists").replaceChildren(
    weightList(model, "key", greatest(layer.keys, map, query), titles[0]),
    weightList(model, "query", greatest(layer.queries, map, key), titles[1]),
  );
  const [across, down] = box.querySelectorAll(".frame i");
  const [top, left] = [[query, layer.maps.shape[1]], [key, layer.maps.shape[2]]].map(([at, size]) => `${((at + 0.5) / size) * 100}%`);
  Object.assign(across.style, { top, width: layer.causal ? top : "100%" });
  Object.assign(down.style, { left, top: layer.causal ? top : 0 });
}

section(["text", "layer"], (changed) => {
  if (!changed.has("text") && document.querySelectorAll("#inspector .inspector").length === opened.filter(Boolean).length) return;
  for (const kind of ["causal", "whole"]) {
    document.querySelector(`#inspector .lead.${kind}`).hidden = !models.some((_, model) => partOf(model).causal === (kind === "causal"));
  }
  columns("inspector", (box, model) => {
    if (!opened[model]) return box.append(absent(model));
    return box.append(
      make(
        "div", { class: "inspector" }, buildReader(model),
        make("div", { class: "detail" }, make("p", { class: "chosen", "aria-live": "polite" }), make("div", { class: "lists" })),
        bigMap(model),
      ),
    );
  });
});

section(["text", "layer", "head", "theme"], () => {
  document.getElementById("inspector-title").textContent = `${capital(layerName())}, ${mapName(mapLabels()[state.head])}, weights of each token`;
  document.querySelectorAll("#inspector .column").forEach((box, model) => {
    const canvas = box.querySelector(".frame canvas");
    if (!canvas) return;
    paintMap(canvas, opened[model], headOf(model));
    const label = opened[model].record.labels[headOf(model)];
    canvas.setAttribute("aria-label", `Weights of ${mapName(label)}: ${character(model, headOf(model))}`);
  });
});

section(["text", "layer", "head", "theme", "token", "key", "side"], () => {
  document.querySelectorAll("#inspector .column").forEach((box, model) => {
    if (opened[model]) showToken(model, box);
  });
});
