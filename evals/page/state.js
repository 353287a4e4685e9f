// The selection, and the sections that depend on it.

// `token` is the selected query; in cross-attention `key` is the selected key, elsewhere the same token.
const state = {
  text: 0, part: 0, layer: 0, head: 0, side: 0, token: 0, key: 0, measure: "first", difference: false, theme: "auto",
};
const sections = [];
let opened = [];
let turn = 0;
const pending = new Set();

function section(needs, draw) {
  sections.push({ needs, draw });
}

function textOf(model) {
  return models[model].texts[state.text];
}

// The selected part of the model: its encoder, its decoder, or its cross-attention.
function partOf(model) {
  const { parts } = models[model];
  return parts[Math.min(state.part, parts.length - 1)];
}

function layersIn(model, text) {
  return text.layers.filter((layer) => layer.part === partOf(model).name);
}

function layersOf(model) {
  return layersIn(model, textOf(model));
}

// The tokens of the rows of a map, and of its columns.
function queriesOf(model) {
  return partOf(model).rows === "target" ? textOf(model).target : textOf(model);
}

function keysOf(model) {
  return partOf(model).columns === "target" ? textOf(model).target : textOf(model);
}

const PARTS = { encoder: "encoder", decoder: "decoder", cross: "cross-attention", last: "last-stage" };

function hasParts() {
  return models[0].parts.length > 1;
}

function isCross(model) {
  return partOf(model).rows !== partOf(model).columns;
}

// The selected layer in a title.
function layerName() {
  return hasParts() ? `${PARTS[partOf(0).name]} layer ${state.layer}` : `layer ${state.layer}`;
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

// The selected head; a model with fewer heads has its last one.
function headOf(model) {
  return Math.min(state.head, opened[model].record.labels.length - 1);
}

// The names of the maps of the selected layer, of the model with the most.
function mapLabels() {
  return opened.map((each) => (each ? each.record.labels : [])).sort((a, b) => b.length - a.length)[0];
}

// A map is that of a head, or of one softmax of several.
function mapName(label) {
  return /^\d+$/.test(label) ? `head ${label}` : label;
}

function headsOf(model) {
  return opened[model].record.output_similarity.length;
}

// The head output of the selected map.
function outputOf(model) {
  const [map, heads] = [headOf(model), headsOf(model)];
  const parts = opened[model].record.labels.length - heads;
  return map < heads ? map : Math.floor(((map - heads) * heads) / parts);
}

// The key/value head, or the pair, of a head output.
function groupOf(model) {
  return Math.floor((outputOf(model) * opened[model].values.rows) / headsOf(model));
}

// The patch of another model at the same place of the image; special tokens in their order, or the first patch.
function samePatch(token, from, to) {
  if (token < from.special) return Math.max(0, Math.min(token, to.special - 1));
  const place = token - from.special;
  const scaled = (at, size, other) => Math.floor(((at + 0.5) * other) / size);
  const row = scaled(Math.floor(place / from.columns), from.rows, to.rows);
  return to.special + row * to.columns + scaled(place % from.columns, from.columns, to.columns);
}

// The token of another model at the same position of the text or image.
function sameToken(token, from, to) {
  if (from === to) return token;
  if (from.image) return samePatch(token, from.image, to.image);
  const place = from.starts[token];
  let found = 0;
  while (found + 1 < to.starts.length && to.starts[found + 1] <= place) found += 1;
  return found;
}

function tokenOf(model) {
  return sameToken(state.token, queriesOf(state.side), queriesOf(model));
}

function keyOf(model) {
  return isCross(model) ? sameToken(state.key, keysOf(state.side), keysOf(model)) : tokenOf(model);
}

function deepest() {
  return Math.max(...models.map((_, model) => partOf(model).layers));
}

function settle() {
  state.layer = Math.max(0, Math.min(state.layer, deepest() - 1));
  state.token = Math.max(0, Math.min(state.token, queriesOf(state.side).tokens.length - 1));
  state.key = Math.max(0, Math.min(state.key, keysOf(state.side).tokens.length - 1));
  if (!offeredMeasures().includes(state.measure)) state.measure = "first";
}

async function update(change) {
  for (const [name, value] of Object.entries(change)) {
    if (state[name] !== value) pending.add(name);
    state[name] = value;
  }
  if (pending.has("part")) pending.add("text").add("layer");
  settle();
  turn += 1;
  const mine = turn;
  if (pending.has("layer") || pending.has("text") || !opened.length) {
    const found = await Promise.all(models.map((_, model) => openLayer(model, state.text, state.layer)));
    if (mine !== turn) return;
    opened = found;
    state.head = Math.min(state.head, Math.max(1, ...opened.map((each) => (each ? each.record.labels.length : 0))) - 1);
  }
  const changed = new Set(pending);
  pending.clear();
  for (const { needs, draw } of sections) if (needs.some((need) => changed.has(need))) draw(changed);
}

// One column for each model, with its name if there are two.
function columns(id, fill) {
  const boxes = document.querySelector(`#${id}.columns, #${id} > .columns`);
  boxes.replaceChildren(
    ...models.map((model, index) => {
      const name = models.length > 1 ? [make("p", { class: `model model-${index}` }, model.name)] : [];
      const box = make("div", { class: "column" }, name);
      fill(box, index);
      return box;
    }),
  );
}

function absent(model) {
  return make("p", { class: "none" }, `${models[model].name} ends at layer ${partOf(model).layers - 1}.`);
}
