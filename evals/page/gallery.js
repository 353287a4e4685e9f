// The attention maps of all heads of a layer.

const THUMBNAIL = 170;

// At most `largest` rows and columns: the maximum of neighbours, so that thin lines stay visible.
function paintMap(canvas, layer, map, largest = Infinity) {
  const [, queries, keys] = layer.maps.shape;
  const [down, across] = [queries, keys].map((size) => Math.ceil(size / largest) || 1);
  const outside = channels(SHADES[scheme()].outside);
  const whole = layer.maps.whole;
  const strongest = (row, column) => {
    let found = 0;
    for (let query = row * down; query < Math.min((row + 1) * down, queries); query += 1) {
      const line = (map * queries + query) * keys;
      for (let key = column * across; key < Math.min((column + 1) * across, keys); key += 1) {
        if (Math.abs(whole[line + key]) > Math.abs(found)) found = whole[line + key];
      }
    }
    return found;
  };
  paint(canvas, Math.ceil(queries / down), Math.ceil(keys / across), (row, column) =>
    layer.causal && column > row ? outside : rgb(strongest(row, column) / LEVELS));
}

const SHARES = { first: "first token", previous: "token before", next: "token after", own: "itself" };

// A short description of a map by its largest measure.
function character(model, map) {
  const { measures } = opened[model].record;
  const { image } = textOf(model);
  const names = image ? { ...SHARES, first: image.special ? "class token" : "first patch" } : SHARES;
  const shares = Object.entries(names).filter(([measure]) => measures[measure]).map(([measure, name]) => [name, measures[measure][map]]);
  const [name, share] = shares.sort((one, other) => other[1] - one[1])[0];
  if (share >= 0.2) return `${name} ${Math.round(share * 100)} %`;
  if (!measures.distance) return `${figures(measures.entropy[map], 2)} bits`;
  const unit = textOf(model).image ? "patches away" : opened[model].causal ? "tokens back" : "tokens away";
  return `${figures(measures.distance[map], 2)} ${unit}`;
}

// The order of the rows and columns of a map.
function mapOrder() {
  if (isCross(0)) return "Rows are queries, the tokens of the target. Columns are keys, the tokens of the text.";
  if (textOf(0).image) return "Rows are queries, columns are keys: special tokens first, then patches row by row.";
  return "Rows are queries, columns are keys, both in the order of the text.";
}

section(["text", "layer", "theme"], () => {
  document.getElementById("gallery-title").textContent = `Heads of ${layerName()}`;
  document.querySelector("#gallery .lead").textContent = mapOrder();
  columns("gallery", (box, model) => {
    const layer = opened[model];
    if (!layer) return box.append(absent(model));
    const list = make("div", { class: "gallery", role: "listbox", "aria-label": `Heads of ${layerName()}` });
    layer.record.labels.forEach((label, map) => {
      const canvas = make("canvas", { "aria-hidden": "true" });
      paintMap(canvas, layer, map, THUMBNAIL);
      const said = character(model, map);
      const title = capital(mapName(label));
      list.append(
        make(
          "div", { role: "option", tabindex: -1, "aria-selected": "false", "data-head": map, "aria-label": `${title}: ${said}` },
          canvas, make("b", {}, title), make("span", {}, said),
        ),
      );
    });
    listbox(list, (option) => update({ head: Number(option.dataset.head) }));
    return box.append(list);
  });
});

section(["text", "layer", "theme", "head"], () => {
  document.querySelectorAll("#gallery .gallery").forEach((list) => {
    mark(list, list.children[Math.min(state.head, list.children.length - 1)]);
  });
});
