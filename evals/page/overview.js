// All heads of all layers, by one measure.

const MEASURES = {
  first: ["weight on the first token", "mean weight of the first token, in an image the class token or first patch"],
  previous: ["weight on the token before", "mean weight of the previous token"],
  next: ["weight on the token after", "mean weight of the next token"],
  own: ["weight on itself", "mean weight of a token on itself"],
  distance: ["mean distance", "between a query and its keys, in tokens, or in patches of an image"],
  entropy: ["entropy", "bits; 0 means all weight on one token"],
  output_norm: ["norm of outputs", "mean over tokens, as the output projection reads them"],
  value_norm: ["norm of values", "mean over tokens, for each key/value head"],
  load: ["head load", "part of the tokens for which the head is active"],
  mean_gate: ["mean gate", "mean factor of its output"],
  mean_score: ["mean routing score", "the router’s probability; shared heads have none"],
};
const ROUTED = ["load", "mean_gate", "mean_score"];

function measured(model, layer, measure) {
  const record = layersOf(model)[layer];
  if (!ROUTED.includes(measure)) return record.measures[measure] || [];
  return record.routing ? record.routing[measure] || [] : [];
}

function routes(model) {
  return layersOf(model).some((layer) => layer.routing);
}

// The measures that a model has for the selected part.
function offeredMeasures() {
  const has = (model, name) => (ROUTED.includes(name) ? routes(model) : name in layersOf(model)[0].measures);
  return Object.keys(MEASURES).filter((name) => models.some((_, model) => has(model, name)));
}

// The maximum and minimum over both models, so that colours are comparable.
function range(measure) {
  const all = models.flatMap((_, model) => layersOf(model).flatMap((_, layer) => measured(model, layer, measure)));
  const known = all.filter((value) => value !== null);
  return { low: Math.min(0, ...known), high: Math.max(...known, 1e-9) };
}

function headMap(model, measure) {
  const { layers } = partOf(model);
  const perLayer = Array.from({ length: layers }, (_, layer) => measured(model, layer, measure));
  const rows = Math.max(...perLayer.map((values) => values.length));
  const { low, high } = range(measure);
  const size = Math.max(-low, high);
  const { labels } = layersOf(model)[0];
  const label = (row) => (rows === labels.length ? labels[row] : row);
  const grid = make("div", {
    class: "heads", role: "listbox", "aria-label": `${MEASURES[measure][0]}: heads down, layers across`,
    style: `grid-template-columns: auto repeat(${layers}, minmax(7px, 34px))`,
  });
  const option = (row, layer, value) => {
    const { labels: maps, output_similarity: heads } = layersOf(model)[layer];
    const ofValues = measure === "value_norm";
    const first = ofValues ? (row * heads.length) / perLayer[layer].length : row;
    const last = ofValues ? ((row + 1) * heads.length) / perLayer[layer].length - 1 : row;
    const part = ofValues ? `key/value head ${row}` : mapName(maps[row]);
    const name = `layer ${layer}, ${part}: ${figures(value)}`;
    return make("span", {
      role: "option", tabindex: -1, "aria-selected": "false", "aria-label": name, title: name,
      "data-layer": layer, "data-head": first, "data-last": last, style: `background: ${css(value / size)}`,
    });
  };
  for (let row = 0; row < rows; row += 1) {
    grid.append(make("span", { class: "row", "aria-hidden": "true" }, label(row)));
    perLayer.forEach((values, layer) => {
      const value = values[row];
      grid.append(value === undefined || value === null ? make("i", { class: "gap" }) : option(row, layer, value));
    });
  }
  const ticks = perLayer.map((_, layer) => make("span", { class: "tick", "aria-hidden": "true" }, layer % 5 ? "" : layer));
  grid.append(make("span"), ...ticks);
  listbox(grid, (cell) => update({ layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) }));
  return make("div", { class: "scroll" }, grid);
}

function markHead(id) {
  document.querySelectorAll(`#${id} .heads`).forEach((grid) => {
    const ofLayer = [...grid.querySelectorAll(`[data-layer="${state.layer}"]`)];
    mark(grid, ofLayer.find(({ dataset: { head, last } }) => head <= state.head && state.head <= last));
    if (!grid.querySelector("[tabindex='0']")) (grid.querySelector("[role=option]") || grid).tabIndex = 0;
  });
}

section(["text", "measure", "theme"], () => {
  const offered = offeredMeasures();
  const { low, high } = range(state.measure);
  const titles = offered.map((name) => MEASURES[name][0]);
  const tools = document.querySelector("#overview .tools");
  if (tools.dataset.offered !== String(offered)) {
    tools.dataset.offered = offered;
    tools.replaceChildren(
      choice("Colour", titles, offered.indexOf(state.measure), (index) => update({ measure: offered[index] })), make("div"),
    );
  }
  tools.lastChild.replaceChildren(legend(low, high), make("span", { class: "note" }, MEASURES[state.measure][1]));
  tools.lastChild.className = "scale";
  columns("overview", (box, model) => box.append(headMap(model, state.measure)));
});

section(["text", "measure", "theme", "layer", "head"], () => markHead("overview"));
