// The selection, and the sections that depend on it.

const state = { text: 0, layer: 0, head: 0, side: 0, token: 0, measure: "first", difference: false, theme: "auto" };
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

// The selected head; a model with fewer heads has its last one.
function headOf(model) {
  return Math.min(state.head, opened[model].record.labels.length - 1);
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

// The selected token; in the other model, the token at the same position of the text.
function tokenOf(model) {
  if (model === state.side) return state.token;
  const place = textOf(state.side).starts[state.token];
  const starts = textOf(model).starts;
  let found = 0;
  while (found + 1 < starts.length && starts[found + 1] <= place) found += 1;
  return found;
}

function deepest() {
  return Math.max(...models.map((model) => model.layers));
}

function settle() {
  state.layer = Math.max(0, Math.min(state.layer, deepest() - 1));
  state.token = Math.max(0, Math.min(state.token, textOf(state.side).tokens.length - 1));
}

async function update(change) {
  for (const [name, value] of Object.entries(change)) {
    if (state[name] !== value) pending.add(name);
    state[name] = value;
  }
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
  return make("p", { class: "none" }, `${models[model].name} ends at layer ${models[model].layers - 1}.`);
}
